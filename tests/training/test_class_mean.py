"""Cross-entropy with labels that exclude rows: N ranks equal one process, and no result is NaN."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.loss_functions import ClassMean, resolve_losses
from tests.harness.ranks import RanksFailed
from tests.training.ranks import Case, assert_close, linear

pytestmark = pytest.mark.ranks

CLASSES = 4
WEIGHTS = torch.tensor([1.0, 5.0, 0.5, 2.0], dtype=torch.float64)
# By name: the loss, and the label that it ignores.
LOSSES: dict[str, tuple[Any, int]] = {
    "torch's default": (nn.CrossEntropyLoss(), -100),
    "-1": (nn.CrossEntropyLoss(ignore_index=-1), -1),
    "a class": (nn.CrossEntropyLoss(ignore_index=2), 2),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), -100),
    "smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), -100),
    "a function": (F.cross_entropy, -100),
    "a partial": (functools.partial(F.cross_entropy, ignore_index=-7, weight=WEIGHTS), -7),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def data_seed() -> int:
    """Different data in every run. A failed test shows the seed."""
    seed = int(np.random.default_rng().integers(2**31))
    print(f"data_seed = {seed}")
    return seed


def class_labels(generator: np.random.Generator, shape: Any, ignored: int) -> Any:
    classes = np.array([c for c in range(CLASSES) if c != ignored])
    labels = generator.choice(classes, shape)
    labels[generator.random(shape) < 0.4] = ignored
    return labels


def class_case(store: Store, model: nn.Module, loss: Any, seed: int, **options: Any) -> Case:
    return Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5),
        rows=66,
        dtype="float64",
        label="class",
        loss=loss,
        data_seed=seed,
        options={"batch_size": 6, "epochs": 2, "seed": seed, **options},
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_with_ignored_rows_equal_one_process(
    tmp_path: Path, store: Store, data_seed: int, name: str, accumulate: int
) -> None:
    loss, ignored = LOSSES[name]
    model = linear(torch.float64, outputs=CLASSES)
    case = class_case(store, model, loss, data_seed, accumulate=accumulate)
    case.values["y"] = class_labels(np.random.default_rng(data_seed), 66, ignored)
    case.write()
    result = case.train(3)
    assert_close(case.weights(2), case.reference(3, 2)[1], 1e-10)
    alone = class_case(Store.create(tmp_path / "alone"), model, loss, data_seed)
    alone.values["y"] = case.values["y"]
    alone.write()
    expected = alone.train(1, batch_size=18 * accumulate)
    losses = [r["loss"] for r in expected.history]
    assert [r["loss"] for r in result.history] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_with_only_ignored_rows_contributes_nothing(store: Store, name: str) -> None:
    loss, ignored = LOSSES[name]
    model = linear(torch.float64, outputs=CLASSES)
    case = class_case(store, model, loss, 3, shuffle=False)
    case.values["y"] = np.random.default_rng(4).integers(0, CLASSES, 66)
    case.values["y"][:6] = ignored  # the first batch of rank 0
    case.values["y"][30:36] = ignored  # and the third of rank 1
    case.write()
    result = case.train(2, terminate_on_nan=True)
    assert_close(case.weights(2), case.reference(2, 2)[1], 1e-10)
    assert all(np.isfinite(r["loss"]) for r in result.history)


def test_a_step_with_only_ignored_rows_is_skipped(store: Store) -> None:
    model = linear(torch.float64, outputs=CLASSES)
    case = class_case(store, model, nn.CrossEntropyLoss(), 3)
    case.values["y"][:] = -100
    case.write()
    case.train(2)
    assert_close(case.weights(2), model.state_dict(), 0)


def test_gradients_are_not_rescaled_without_ignored_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiplied(self: Any, factor: Any) -> Any:
        raise AssertionError("a pass over the gradients")

    model = linear(torch.float64, outputs=CLASSES)
    case = class_case(store, model, nn.CrossEntropyLoss(), 5)
    case.optimizer = torch.optim.Adagrad(model.parameters())
    monkeypatch.setattr(torch.Tensor, "mul_", multiplied)
    case.train(3)


class Tokens(nn.Module):
    """Classes of 5 tokens per row, (rows, classes, 5), as cross-entropy takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(torch.float64, outputs=5 * CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).reshape(len(x), CLASSES, 5)


def test_ranks_with_ignored_tokens_equal_one_process(store: Store, data_seed: int) -> None:
    model = Tokens()
    case = class_case(store, model, nn.CrossEntropyLoss(), data_seed)
    labels = class_labels(np.random.default_rng(data_seed), (66, 5), -100)
    feature = case.schema.columns[0]
    case.values["y"] = labels
    case.schema = DataSchema(
        (feature,), (Column("y", "array", "int64", (5,), "array<bigint>", "int64"),), None
    )
    case.write()
    case.train(3)
    assert_close(case.weights(2), case.reference(3, 2)[1], 1e-10)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = linear(torch.float64, outputs=6)
        self.first, self.second = (linear(torch.float64, CLASSES, seed) for seed in (1, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.first(hidden[:, :3]), self.second(hidden[:, 3:])


def two_labels(store: Store, losses: Any, ignored: tuple[int, int], **options: Any) -> Case:
    seed = options["seed"]
    case = class_case(store, TwoHeads(), losses, **options)
    generator = np.random.default_rng(seed + 1)
    for name, label in zip("yz", ignored, strict=True):
        case.values[name] = class_labels(generator, 66, label)
    columns = [Column(n, "scalar", "int64", (), "bigint", "int64") for n in "yz"]
    case.schema = DataSchema(case.schema.features, tuple(columns), None)
    return case


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("losses", "ignored"),
    [
        ([nn.CrossEntropyLoss(), nn.CrossEntropyLoss()], (-100, -100)),
        ([F.cross_entropy, nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=-1)], (-100, -1)),
    ],
    ids=["defaults", "different"],
)
def test_labels_that_ignore_different_rows_equal_one_process(
    tmp_path: Path,
    store: Store,
    data_seed: int,
    losses: Any,
    ignored: tuple[int, int],
    accumulate: int,
) -> None:
    options = {
        "seed": data_seed,
        "loss_weights": (0.25, 3.0),
        "has_validation": True,
        "validation": 0.3,
        "shuffle": False,
    }
    case = two_labels(store, losses, ignored, accumulate=accumulate, **options)
    case.values["y"][:20] = ignored[0]  # no row of the first batches counts
    case.write()
    result = case.train(3, terminate_on_nan=True)
    alone = two_labels(Store.create(tmp_path / "alone"), losses, ignored, **options)
    alone.values = case.values
    alone.write()
    expected = alone.train(1, batch_size=18 * accumulate, val_batch_size=100)
    assert_close(case.weights(2), alone.weights(2), 1e-10)
    for key in ("loss", "val_loss"):
        values = [r[key] for r in expected.history]
        assert [r[key] for r in result.history] == pytest.approx(values, rel=1e-10)


def test_labels_that_ignore_different_rows_equal_plain_torch(store: Store, data_seed: int) -> None:
    losses = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=-1)]
    case = two_labels(
        store, losses, (-100, -1), seed=data_seed, shuffle=False, loss_weights=(1.0, 1.0)
    )
    for name in "yz":  # torch's mean of a step without a row that counts is NaN
        case.values[name][::12] = 0
    case.write()
    model, optimizer = copy.deepcopy((case.model, case.optimizer))
    case.train(2)
    for _ in range(2):
        for start in range(0, 66, 12):
            x, y, z = (torch.from_numpy(case.values[n][start : start + 12]) for n in "xyz")
            first, second = model(x)
            optimizer.zero_grad()
            (losses[0](first, y) + losses[1](second, z)).backward()
            optimizer.step()
    assert_close(case.weights(2), model.state_dict(), 1e-10)


def test_class_mean_accepts_only_losses_with_a_known_denominator() -> None:
    counting = [
        nn.NLLLoss(),
        F.nll_loss,
        functools.partial(F.cross_entropy, label_smoothing=0.1),
    ]
    assert all(ClassMean.of(loss) is not None for loss in counting)
    others = [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MSELoss(),
        functools.partial(F.cross_entropy, reduction="sum"),
        F.mse_loss,
        lambda output, label: output.mean(),
    ]
    assert all(ClassMean.of(loss) is None for loss in others)
    (resolved,), _ = resolve_losses(nn.CrossEntropyLoss(), 1, per_row=True)
    assert not isinstance(resolved, ClassMean)


def test_probability_labels_are_counted_as_rows() -> None:
    found = ClassMean.of(nn.CrossEntropyLoss())
    assert found is not None
    assert found.count(torch.rand(3, CLASSES)) is None


def test_invalid_first_batch_of_several_labels_stops_all_ranks(store: Store) -> None:
    losses = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=WEIGHTS)]
    case = two_labels(store, losses, (-100, -100), seed=1, loss_weights=(1.0, 1.0))
    case.values["z"][:] = CLASSES  # a class that the model does not have
    case.write()
    with pytest.raises(RanksFailed) as failed:
        case.train(2)
    assert {type(e) for e in failed.value.errors.values()} == {InvalidArgumentError}
    assert "Target 4 is out of bounds" in str(failed.value)


@pytest.mark.parametrize("label", [3, -1])
def test_error_names_a_class_beyond_the_model_output(label: int) -> None:
    loss = ClassMean.of(nn.CrossEntropyLoss())
    assert loss is not None
    with pytest.raises(InvalidArgumentError) as wrong:
        loss(torch.zeros(2, 3), torch.tensor([0, label]))
    assert str(wrong.value).startswith(
        f"loss: Target {label} is out of bounds. The model's output has 3 classes per row, so labels must be whole numbers "
        "from 0 to 2."
    )
