"""Steps of several batches, clipping and errors: N ranks equal one process, on new data in each run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sparkhvd.data.reading.sampler import split_validation
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.context import use_engine
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.train import train
from tests.harness.ranks import RanksFailed, run_ranks
from tests.training.ranks import (
    REMEMBERED,
    RUN_DIR,
    Case,
    assert_close,
    linear,
    remember,
)

pytestmark = pytest.mark.ranks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@pytest.fixture
def data_seed() -> int:
    seed = secrets.randbits(32)
    print(f"data_seed={seed}")  # shown where the test fails
    return seed


@pytest.mark.parametrize(
    ("size", "rows", "batch_size", "accumulate", "others"),
    [
        (1, 100, 8, 3, {}),
        (2, 101, 8, 3, {}),  # an incomplete group, whose last batch has 5 rows for 2 ranks
        (2, 97, 8, 2, {}),  # one row over: the batch before takes it
        (3, 97, 5, 4, {}),
        (3, 4, 2, 8, {}),  # one group, in which a rank has no rows
        (2, 101, 8, 3, {"drop_last": True}),
        (2, 101, 8, 2, {"shuffle": False}),
        (2, 101, 8, 2, {"train_steps_per_epoch": 2}),
        (3, 50, 4, 2, {"gradient_clip_value": 0.01}),
        (3, 50, 4, 2, {"gradient_clip_norm": 0.01}),
        (2, 50, 4, 1, {"gradient_clip_value": 0.05, "gradient_clip_norm": 0.06}),
    ],
)
def test_accumulated_steps_equal_one_process_with_larger_batches(
    store: Store,
    data_seed: int,
    size: int,
    rows: int,
    batch_size: int,
    accumulate: int,
    others: dict[str, Any],
) -> None:
    model = linear(torch.float64)
    case = Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        rows=rows,
        dtype="float64",
        data_seed=data_seed,
        options={
            "batch_size": batch_size,
            "accumulate": accumulate,
            "epochs": 2,
            "seed": data_seed,
            **others,
        },
    )
    result = case.train(size)
    expected = case.reference(size, 2)
    assert_close(case.weights(2), expected[1], 1e-10)
    assert [r["loss"] for r in result.history] == pytest.approx(
        [e["loss"] for e in expected], rel=1e-10
    )
    width = size * batch_size * accumulate
    trained = rows
    if others.get("drop_last"):
        trained = rows // width * width
    if steps := others.get("train_steps_per_epoch"):
        trained = min(rows, steps * width)
    assert [r["rows"] for r in result.history] == [trained, trained]


def weighted_mean(output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.tensor([1.0, 5.0], dtype=output.dtype)
    return F.cross_entropy(output, label, weight=weights), weights[label].sum()


CLASS_WEIGHTS = torch.tensor([1.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {"weighted": True},
        {"loss": weighted_mean, "label": "class"},
        {"loss": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), "label": "class"},
        {"loss": nn.CrossEntropyLoss(ignore_index=1), "label": "class"},
        {"loss": nn.MSELoss(reduction="sum")},
    ],
    ids=["sample weights", "loss with its weight", "class weights", "ignored rows", "sum"],
)
def test_loss_weights_are_summed_over_the_whole_step(
    store: Store, data_seed: int, fields: dict[str, Any], accumulate: int
) -> None:
    model = linear(torch.float64, outputs=2 if fields.get("label") == "class" else 1)
    case = Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        rows=75,
        dtype="float64",
        data_seed=data_seed,
        options={"batch_size": 7, "accumulate": accumulate, "epochs": 2, "seed": data_seed},
        lr_scheduler=remember,
        **fields,
    )
    case.train(3)
    REMEMBERED.assert_alike(3)
    assert_close(case.weights(2), case.reference(3, 2)[1], 1e-10)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(torch.float64), linear(torch.float64, seed=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_several_losses_are_added_with_their_weights(
    store: Store, data_seed: int, weighted: bool, accumulate: int
) -> None:
    model = TwoHeads()
    case = Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        rows=76,
        dtype="float64",
        second_label=True,
        weighted=weighted,
        data_seed=data_seed,
        metrics="mse",
        options={
            "batch_size": 7,
            "accumulate": accumulate,
            "epochs": 2,
            "seed": data_seed,
            "loss_weights": (0.25, 3.0),
        },
    )
    result = case.train(3)
    expected = case.reference(3, 2)
    assert_close(case.weights(2), expected[1], 1e-10)
    assert [r["loss"] for r in result.history] == pytest.approx(
        [e["loss"] for e in expected], rel=1e-10
    )
    assert {"y_mse", "z_mse"} <= set(result.history[0])


def test_step_with_only_zero_weight_rows_is_skipped(store: Store) -> None:
    model = linear(outputs=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.5)
    case = Case(store, model, optimizer, loss=nothing_counts, label="class")
    case.train(2)
    assert_close(case.weights(1), model.state_dict(), 0)


@pytest.mark.parametrize("part", ["training", "validation"])
def test_zero_sample_weights_in_all_rows_raise_a_clear_error(store: Store, part: str) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"has_validation": True, "validation": 0.25, "seed": 3}
    case = Case(store, model, optimizer, weighted=True, options=options)
    held_out = split_validation(case.rows, 0.25, 3)[1]
    weightless = np.isin(np.arange(case.rows), held_out) == (part == "validation")
    case.values["w"][weightless] = 0
    case.write()
    with pytest.raises(RanksFailed) as failed:
        case.train(2)
    rows = {"training": 75, "validation": 25}[part]
    assert [str(e) for e in failed.value.errors.values()] == [
        f"sample_weight_col: column 'w' is 0 in all {rows} {part} rows, so there is no mean loss. Give weights above 0, "
        "or leave such rows out of the DataFrame."
    ] * 2


def nothing_counts(output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, float]:
    return F.cross_entropy(output, label), 0.0


def test_gradients_of_a_step_are_reduced_once(tmp_path: Path) -> None:
    def operations(accumulate: int) -> int:
        model = linear()
        options = {"batch_size": 4, "accumulate": accumulate, "epochs": 1}
        run = Store.create(tmp_path / str(accumulate))
        spec = Case(
            run, model, torch.optim.SGD(model.parameters(), lr=0.1), rows=64, options=options
        ).spec()

        def rank(engine: Any) -> int:
            train(spec)
            counted = engine.counters()["collectives"]
            return sum(e["operations"] for e in counted if e["collective"] == "allreduce")

        return run_ranks(2, rank, using=use_engine)[0]

    # 8 batches: 8 steps or 2. All other reductions are per epoch.
    assert operations(1) - operations(4) == 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_terminate_on_nan_ends_all_ranks_with_one_message(tmp_path: Path, accumulate: int) -> None:
    def case(name: str, **options: Any) -> Case:
        model = linear()
        return Case(
            Store.create(tmp_path / name),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            rows=64,
            nan_row=2 * 16 + 9,  # of the third global batch of 16 rows, among those of rank 1
            options={"batch_size": 8, "shuffle": False, "accumulate": accumulate, **options},
        )

    loss = case("off").train(2).history[0]["loss"]
    assert loss != loss  # terminate_on_nan is off
    ending = case("on", terminate_on_nan=True)
    with pytest.raises(RanksFailed) as failed:
        ending.train(2)
    assert set(failed.value.errors) == {0, 1}
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error) == (
            f"terminate_on_nan: the loss is nan on rank 1, epoch 1, step {3 if accumulate == 1 else 2}. Look for NaN "
            "in the data and for division by zero in the model, scale features and labels with large values "
            "(StandardScaler), lower the learning rate or set gradient_clip_norm."
        )
    assert Checkpoints(ending.store, RUN_DIR).latest() is None


def test_terminate_on_nan_does_not_change_the_weights(store: Store) -> None:
    model = linear()
    case = Case(
        store, model, torch.optim.SGD(model.parameters(), lr=0.1), options={"epochs": 2}, rows=70
    )
    case.train(2, terminate_on_nan=True)
    assert_close(case.weights(2), case.reference(2, 2)[1], 1e-5)


def squeezed(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output.squeeze() - label) ** 2).mean()


def squeezed_rows(output: torch.Tensor, label: torch.Tensor, reduction: str) -> torch.Tensor:
    assert reduction == "none"
    return (output.squeeze() - label) ** 2


@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_detect_a_pairwise_loss_that_the_driver_cannot_check(
    store: Store, weighted: bool
) -> None:
    model = linear()
    loss: Any = squeezed_rows if weighted else squeezed
    case = Case(store, model, torch.optim.Adam(model.parameters()), loss=loss, weighted=weighted)
    case.metrics = {"mine": squeezed}
    assert case.train(1).warning == ""
    store.delete(RUN_DIR)
    said = case.train(2, checks_pairs=True).warning
    assert said.startswith("loss returns the same number when the labels")
    assert "metric 'mine' returns the same number" in said


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("loss", "The first batch, on rank 0: loss broadcasts: Using a target size"),
        ("metrics", "metric 'broadcasting' broadcasts: Using a target size"),
    ],
)
def test_broadcast_warnings_of_losses_and_metrics_raise_in_ranks(
    store: Store, where: str, says: str
) -> None:
    def broadcasting(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output.squeeze(1), label)

    model = linear()
    case = Case(store, model, torch.optim.Adam(model.parameters()))
    setattr(case, where, broadcasting)
    # One rank, because threads share Python's filters of warnings.
    with pytest.raises(RanksFailed) as failed:
        case.train(1)
    assert str(failed.value.errors[0]).startswith(says)
