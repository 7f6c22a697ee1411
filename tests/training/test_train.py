"""N ranks train as one process of plain PyTorch over the same global batches."""

from __future__ import annotations

import copy
import gc
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import sparkhvd.torch as hvd
from sparkhvd import Callback
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InternalError, InvalidArgumentError, StoreError
from sparkhvd.training import program
from sparkhvd.training.checkpoints import saver
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.saver import Budget
from sparkhvd.training.early_stopping import Monitor, best_epoch
from sparkhvd.training.program import Program, dump_program
from tests.harness.ranks import RanksFailed
from tests.harness.soak import left_to_soak
from tests.training.ranks import RUN_DIR, Case, assert_close, linear

pytestmark = pytest.mark.ranks

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


SHAPES = [(1, 100, 32), (2, 128, 32), (2, 101, 16), (3, 100, 7), (2, 33, 32), (3, 2, 4), (2, 1, 1)]


@pytest.mark.parametrize(
    ("size", "rows", "batch_size", "dtype"),
    [
        *((*shape, torch.float64) for shape in SHAPES),
        *((*shape, torch.float32) for shape in SHAPES[2:4]),
        *left_to_soak(
            "in float64, here", *((*shape, torch.float32) for shape in [*SHAPES[:2], *SHAPES[4:]])
        ),
    ],
    ids=str,
)
def test_ranks_train_as_one_process(
    store: Store, dtype: torch.dtype, size: int, rows: int, batch_size: int
) -> None:
    model = linear(dtype)
    case = Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        rows=rows,
        dtype=str(dtype).removeprefix("torch."),
        options={"batch_size": batch_size, "epochs": 2, "seed": 5},
    )
    result = case.train(size)
    expected = case.reference(size, 2)
    assert_close(case.weights(2), expected[1], TOLERANCE[dtype])
    assert [r["loss"] for r in result.history] == pytest.approx(
        [e["loss"] for e in expected], rel=TOLERANCE[dtype]
    )
    assert [r["rows"] for r in result.history] == [rows, rows]


def weighted_mean(output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy with class weights. It is no mean over rows, so it returns the count of its mean."""
    weights = torch.tensor([1.0, 5.0])
    return F.cross_entropy(output, label, weight=weights), weights[label].sum()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sample weights", {"weighted": True}),
        ("loss with its weight", {"loss": weighted_mean, "label": "class"}),
        ("classes", {"loss": nn.CrossEntropyLoss(), "label": "class"}),
        (
            "class weights",
            {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])), "label": "class"},
        ),
        ("ignored rows", {"loss": nn.CrossEntropyLoss(ignore_index=1), "label": "class"}),
        ("sum", {"loss": nn.MSELoss(reduction="sum"), "options": {"epochs": 2}}),
        ("clip", {"options": {"epochs": 2, "gradient_clip_norm": 0.05}}),
        ("drop_last", {"options": {"epochs": 2, "drop_last": True}}),
        ("file order", {"options": {"epochs": 2, "shuffle": False}}),
        ("scheduler", {"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.1)}),
    ],
)
def test_fits_of_many_kinds_equal_one_process(
    store: Store, name: str, fields: dict[str, Any]
) -> None:
    options = {"batch_size": 16, **fields.pop("options", {"epochs": 2})}
    model = linear(outputs=2 if fields.get("label") == "class" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    case = Case(store, model, optimizer, rows=75, options=options, **fields)
    result = case.train(2)
    expected = case.reference(2, 2)
    assert_close(case.weights(2), expected[1], 1e-5)
    # The reference counts these losses as if they were means over rows.
    if name not in ("sum", "class weights", "ignored rows"):
        losses = [e["loss"] for e in expected]
        assert [r["loss"] for r in result.history] == pytest.approx(losses, rel=1e-5)


def test_given_optimizer_keeps_its_groups_and_state(store: Store) -> None:
    model = linear()
    groups = [
        {"params": [model[2].weight, model[2].bias], "lr": 0.5},
        {"params": list(model[0].parameters()), "weight_decay": 0.1},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()  # it has a state when the fit begins
    before = {n: t.clone() for n, t in model.state_dict().items()}
    case = Case(store, model, optimizer, options={"epochs": 1})
    case.train(2)
    assert_close(case.weights(1), case.reference(2, 1)[0], 1e-5)
    assert_close(model.state_dict(), before, 0)  # the caller's model is as it was


@pytest.mark.parametrize(("weighted", "clip"), [(False, None), (True, None), (False, 0.5)])
def test_lbfgs_on_ranks_equals_one_process(
    store: Store, weighted: bool, clip: float | None
) -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")

    model = linear(torch.float64)
    options = {"batch_size": 15, "epochs": 2, "shuffle": False, "gradient_clip_norm": clip}
    case = Case(
        store,
        model,
        lbfgs,
        rows=50,
        dtype="float64",
        loss=nn.MSELoss(),
        weighted=weighted,
        options=options,
    )
    result = case.train(2)
    plain = copy.deepcopy(model)
    optimizer = lbfgs(plain.parameters())
    x, y, w = (torch.from_numpy(case.values[name]) for name in ("x", "y", "w"))
    for _ in range(2):
        before = 0.0
        for rows in (slice(0, 30), slice(30, 50)):
            losses = []

            def closure(rows: slice = rows, losses: list[float] = losses) -> torch.Tensor:
                optimizer.zero_grad()
                errors = (plain(x[rows]) - y[rows, None]).square().squeeze(1)
                weights = w[rows] if weighted else torch.ones_like(w[rows])
                loss = (errors * weights).sum() / weights.sum()
                loss.backward()
                losses.append(float(loss.detach()) * float(weights.sum()))
                if clip is not None:
                    nn.utils.clip_grad_norm_(plain.parameters(), clip)
                return loss

            optimizer.step(closure)
            before += losses[0]
    assert_close(case.weights(2), plain.state_dict(), 1e-8)
    total = float(w.sum()) if weighted else 50
    assert result.history[-1]["loss"] == pytest.approx(before / total, rel=1e-8)


class Centred(nn.Module):
    """Subtracts its own moving average, and has a buffer that it never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 1), nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
        result: torch.Tensor = self.layer((x - self.mean) * self.scale)
        return result + 0.1 * self.norm(x).sum(1, keepdim=True)


def test_every_step_starts_with_the_buffers_of_rank_0(store: Store) -> None:
    """The reference is two replicas with averaged gradients, as with DistributedDataParallel."""
    torch.manual_seed(0)
    model = Centred()
    options = {"batch_size": 8, "epochs": 2, "shuffle": False}
    case = Case(store, model, lambda p: torch.optim.SGD(p, lr=0.1), rows=48, options=options)
    case.train(2)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in replicas]
    x, y = (torch.from_numpy(case.values[name]) for name in ("x", "y"))
    for _ in range(2):
        for start in range(0, 48, 16):
            replicas[1].mean = replicas[0].mean.clone()
            for rank, (each, step) in enumerate(zip(replicas, steps, strict=True)):
                rows = slice(start + 8 * rank, start + 8 * rank + 8)
                step.zero_grad()
                F.mse_loss(each(x[rows]), y[rows, None]).backward()
            for a, b in zip(*(each.parameters() for each in replicas), strict=True):
                mean = (a.grad + b.grad) / 2  # type: ignore[operator]
                a.grad, b.grad = mean, mean.clone()
            for step in steps:
                step.step()
        replicas[1].load_state_dict(replicas[0].state_dict())
    assert_close(case.weights(2), replicas[0].state_dict(), 1e-6)


def test_optimizer_may_be_a_function(store: Store) -> None:
    case = Case(store, linear(), lambda p: torch.optim.Adagrad(p, lr=0.1), options={"epochs": 2})
    case.train(2)
    assert_close(case.weights(2), case.reference(2, 2)[1], 1e-5)


def test_batch_norm_on_all_ranks_keeps_the_statistics_of_rank_0(store: Store) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"batch_size": 8, "epochs": 2, "has_validation": True, "validation": 0.25}
    case = Case(store, model, optimizer, rows=67, options=options)
    result = case.train(3)
    assert int(case.weights(2)["1.num_batches_tracked"]) > 0
    # The validation loss of every rank was taken with the state that the checkpoint holds.
    model.load_state_dict(case.weights(2))
    assert len(result.history) == 2
    assert all("val_loss" in r for r in result.history)


class WithDropout(nn.Module):
    """Random numbers and running statistics, which a resumed run could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_resumed_run_equals_an_uninterrupted_run_bit_by_bit(tmp_path: Path) -> None:
    def case(name: str) -> Case:
        model = WithDropout()
        return Case(
            Store.create(tmp_path / name),
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            rows=50,
            lr_scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
            options={"batch_size": 8, "epochs": 4, "seed": 9},
        )

    # One rank, because ranks that are threads share torch's random numbers.
    whole, parts = case("whole"), case("parts")
    expected = whole.train(1)
    parts.train(1, epochs=2)
    resumed = parts.train(1)
    for name, value in whole.weights(4).items():
        assert torch.equal(value, parts.weights(4)[name]), name
    assert [r["loss"] for r in resumed.history] == [r["loss"] for r in expected.history]
    assert [r["lr"] for r in resumed.history] == [r["lr"] for r in expected.history]


def test_checkpoint_of_another_run_is_refused_with_its_differences(store: Store) -> None:
    model = linear()
    case = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1))
    case.train(1)
    with pytest.raises(RanksFailed) as failed:
        case.train(2, epochs=2, fingerprint='{"rows": 7}')
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error) == (
            "runs/r holds a checkpoint of another run: rows was 100 and is 7. Give another run_id, or the same "
            "model, data and params."
        )


def test_resuming_a_run_with_fewer_epochs_is_refused(store: Store) -> None:
    model = linear()
    case = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1))
    case.train(1, epochs=2)
    with pytest.raises(RanksFailed) as failed:
        case.train(1, epochs=1)
    assert "it has 2 epochs, but epochs is 1." in str(failed.value.errors[0])


def test_checkpoints_load_without_unpickling_and_old_checkpoints_are_deleted(store: Store) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = Monitor("val_loss")
    options = {
        "epochs": 5,
        "has_validation": True,
        "validation": 0.2,
        "return_best": True,
        "monitor": monitor,
    }
    case = Case(store, model, optimizer, options=options)
    result = case.train(2)
    kept = {int(p.split("-")[-1][:-3]) for p in store.list(f"{RUN_DIR}/checkpoints") if ".pt" in p}
    assert kept == {4, 5, best_epoch(result.history, monitor)}
    assert result.epoch == best_epoch(result.history, monitor)
    saved = torch.load(store.local_path(f"{RUN_DIR}/checkpoints/epoch-5.pt"), weights_only=True)
    assert saved["epoch"] == 5
    assert Checkpoints(store, RUN_DIR).history() == result.history


@pytest.mark.parametrize("stops_after", [None, 6])
def test_short_epochs_write_fewer_checkpoints_but_keep_the_best(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_after: int | None
) -> None:
    """Only the first epoch has its own checkpoint. The run, failed or not, equals a run with all checkpoints.

    A failed run has also saved its best epoch.
    """

    class Stops(Callback):
        def on_epoch_begin(self, ctx: Any) -> None:
            if ctx.epoch == stops_after and not (tmp_path / "stopped").exists():
                (tmp_path / "stopped").touch()
                raise ValueError("a loss")

    def case(store: Store, user: dict[str, Any]) -> Case:
        model = linear()
        options = {
            **{"epochs": 9, "batch_size": 8, "has_validation": True, "validation": 0.2},
            **{"return_best": True, "monitor": Monitor("val_loss")},
        }
        # The rate is too large, so the best epoch is not among the last ones.
        return Case(
            store,
            model,
            torch.optim.SGD(model.parameters(), lr=0.55),
            60,
            options=options,
            user=user,
        )

    every = case(Store.create(tmp_path / "every"), {})
    expected = every.train(2)
    monkeypatch.setattr(Budget, "BURST", 1)
    few = case(store, {"callbacks": [Stops()]})
    first = 1  # epoch of the process
    if stops_after is not None:
        with pytest.raises(RanksFailed):
            few.train(2)
        found = Checkpoints(store, RUN_DIR)
        best = best_epoch(expected.history[: stops_after - 1], Monitor("val_loss"))
        assert best > 1
        assert found.saved_epochs() == {1, best}
        assert found.latest_position() == (best, 0)
        assert len(found.history()) == stops_after - 1
        first = best + 1
    result = few.train(2)
    assert result.epoch == expected.epoch == best_epoch(expected.history, Monitor("val_loss"))
    assert 1 < result.epoch < 9
    for record, other in zip(result.history, expected.history, strict=True):
        assert (record["loss"], record["val_loss"]) == (other["loss"], other["val_loss"])
    for epoch in (result.epoch, 9):
        for name, value in few.weights(epoch).items():
            assert torch.equal(value, every.weights(epoch)[name])
    assert Checkpoints(store, RUN_DIR).saved_epochs() <= {first, result.epoch, 9}
    assert Checkpoints(store, RUN_DIR).history() == result.history


@pytest.mark.parametrize("problem", ["fails", "hangs"])
def test_failed_write_of_the_best_epoch_hides_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(Budget, "BURST", 1)
    monkeypatch.setattr(saver, "_BEST_LIMIT_S", 0.5)
    writes, tried, goes_on = Checkpoints.save, [], threading.Event()

    def save(self: Checkpoints, checkpoint: Checkpoint, **options: Any) -> None:
        tried.append(checkpoint.epoch)
        if checkpoint.epoch > 1:
            if problem == "fails":
                raise StoreError("the disk is full")
            goes_on.wait(60)
        writes(self, checkpoint, **options)

    class Stops(Callback):
        def on_epoch_begin(self, ctx: Any) -> None:
            if ctx.epoch == 4:
                raise ValueError("a loss")

    monkeypatch.setattr(Checkpoints, "save", save)
    model = linear()
    options = {"epochs": 9, "return_best": True, "monitor": Monitor("loss")}
    case = Case(
        store, model, torch.optim.SGD(model.parameters(), lr=0.01), options=options,
        user={"callbacks": [Stops()]},
    )  # fmt: skip
    began = time.monotonic()
    try:
        with pytest.raises(RanksFailed, match="a loss") as failed:
            case.train(1)
    finally:
        goes_on.set()
    assert time.monotonic() - began < 30
    assert "disk is full" not in str(failed.value)
    assert tried == [1, 3]


def test_slow_store_needs_at_most_two_weight_copies(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy is being written. The other is the best epoch or the next checkpoint."""
    monkeypatch.setattr(Budget, "BURST", 1)
    monkeypatch.setattr(Budget, "_SECONDS", 0.05)
    shape, counts = (37, 3), tmp_path / "counts"
    writes = Checkpoints.save

    def slowly(self: Checkpoints, *args: Any, **options: Any) -> None:
        time.sleep(0.1)
        writes(self, *args, **options)

    class Counts(Callback):
        def on_epoch_begin(self, ctx: Any) -> None:
            gc.collect()
            found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
            with counts.open("a") as file:
                file.write(f"{sum(o.shape == shape for o in found)}\n")

    monkeypatch.setattr(Checkpoints, "save", slowly)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 37), nn.Linear(37, 1))
    options = {"epochs": 30, "return_best": True, "monitor": Monitor("loss"), "batch_size": 25}
    case = Case(
        store, model, torch.optim.SGD(model.parameters(), lr=0.01), options=options,
        user={"callbacks": [Counts()]},
    )  # fmt: skip
    case.train(1)
    found = [int(line) for line in counts.read_text().split()]
    assert len(found) == 30
    assert max(found) - min(found) <= 2, found


def test_metrics_are_means_over_the_rows_of_all_ranks(store: Store) -> None:
    model = linear(outputs=2)

    def per_row(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == label).float()

    case = Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        rows=77,
        loss=nn.CrossEntropyLoss(),
        label="class",
        metrics={"accuracy": "accuracy", "mine": per_row},
        options={"batch_size": 8},
    )
    record = case.train(3).history[0]
    output = model(torch.from_numpy(case.values["x"]))
    expected = float((output.argmax(1) == torch.from_numpy(case.values["y"])).double().mean())
    assert record["accuracy"] == pytest.approx(expected, rel=1e-9)
    assert record["mine"] == pytest.approx(expected, rel=1e-9)


class TwoColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (
            TwoColumns(),
            nn.MSELoss(),
            "The first batch, on rank 0: ",
        ),
        (
            linear(),
            lambda output, label: (output - label).square(),
            "The first batch, on rank 0: loss returned shape (32, 1) for an output of shape (32, "
            "1) and a label of shape (32, 1); it must return one number, the mean over the rows.",
        ),
        (
            linear(),
            lambda output, label: 1.0,
            "The first batch, on rank 0: loss returned float for an output of shape (32, 1) and a label of shape "
            "(32, 1); it must return one number, the mean over the rows.",
        ),
        (
            linear(),
            lambda output, label: (output - label).square().mean().detach(),
            "The first batch, on rank 0: loss returned a number that does not depend on the model's trainable "
            "parameters, so there is no gradient.",
        ),
        (
            linear(),
            lambda output, label: output.nothing(),
            "The first batch, on rank 0: model or loss raised AttributeError: 'Tensor' object has no attribute "
            "'nothing' (columns: x (32, ",
        ),
        (
            linear(),
            nn.BCEWithLogitsLoss(),
            "The first batch, on rank 0: Label 'y' is from -",
        ),
        (
            linear(outputs=32),  # as many outputs as rows: (32,) would broadcast over (32, 32)
            lambda output, label: (output - label).square().mean(),
            "The first batch, on rank 0: Label 'y' has shape (32,), but the model's output has shape "
            "(32, 32), and the loss broadcasts them.",
        ),
    ],
)
def test_invalid_first_batch_stops_all_ranks(
    store: Store, model: nn.Module, loss: Any, message: str
) -> None:
    case = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    with pytest.raises(RanksFailed) as failed:
        case.train(2)
    assert set(failed.value.errors) == {0, 1}
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error).startswith(message)
    if isinstance(model, TwoColumns):
        assert "(32, 2)" in str(error)
        assert "(32,)" in str(error)
    assert Checkpoints(store, RUN_DIR).latest_epoch() == 0


class Looking(nn.Module):
    """Looks up twice the first number of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"main": nn.Embedding(40, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tables["main"]((2 * x[:, 0].abs()).long())
        return found


def looking_step(model: nn.Module, batch: Any, ctx: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"][:, None])


@pytest.mark.parametrize(("row", "user"), [(3, {}), (95, {}), (3, {"train_step": looking_step})])
def test_error_names_an_index_beyond_an_embedding_in_any_batch(
    store: Store, row: int, user: dict[str, Any]
) -> None:
    model = Looking()
    options = {"shuffle": False, "batch_size": 10}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    case = Case(store, model, optimizer, options=options, user=user)
    case.values["x"][row, 0] = 50
    case.write()
    with pytest.raises(RanksFailed) as failed:
        case.train(1)
    assert str(failed.value.errors[0]).endswith(
        "model or loss raised IndexError: index out of range in self. Embedding 'tables.main' has 40 "
        "rows, and the model looks up index 100. No column of the batch contains this index, so the "
        "model computes it."
    )


def test_class_index_loss_may_have_as_many_classes_as_rows(store: Store) -> None:
    model = linear(outputs=32)
    loss = lambda output, label: nn.functional.cross_entropy(output, label.abs().long())  # noqa: E731
    result = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss).train(2)
    assert result.epoch == 1


def test_a_program_not_written_by_the_driver_is_not_unpickled(store: Store) -> None:
    model = linear()
    case = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1))
    spec = replace(case.spec(), program_sha256="0" * 64)
    with pytest.raises(RanksFailed) as failed:
        case.train(1, program_sha256=spec.program_sha256)
    assert isinstance(failed.value.errors[0], StoreError)
    assert "runs/r/program.pkl is not what the driver wrote" in str(failed.value.errors[0])


def test_weights_of_a_large_model_are_stored_outside_the_program(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind_of(optimizer: Any) -> Any:
        (weight, *_) = optimizer.param_groups[0]["params"]
        assert weight.kind == "mine"  # what the user wrote on a parameter
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)

    model = linear()
    model[0].weight.kind = "mine"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    case = Case(store, model, optimizer, lr_scheduler=kind_of)
    small = len(dump_program(Program(model, optimizer, (), (), ()))[0])
    monkeypatch.setattr(program, "CLOSURE_BYTES", 0)
    assert len(dump_program(Program(model, optimizer, (), (), ()))[0]) < small
    case.train(2)
    case.lr_scheduler = None
    assert_close(case.weights(1), case.reference(2, 1)[0], 1e-5)
    spec = case.spec()
    assert spec.program_weights is not None
    assert spec.program_weights.load().keys() == model.state_dict().keys()
    store.write_bytes(spec.program_weights.path, b"")
    with pytest.raises(
        InternalError,
        match="program-weights.pt has other content than was written: its SHA-256 differs",
    ):
        spec.program_weights.load()


def test_error_names_a_split_without_validation_rows(store: Store) -> None:
    model = linear()
    case = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1), rows=10)
    with pytest.raises(RanksFailed) as failed:
        case.train(1, drop_last=True, batch_size=32)
    assert str(failed.value.errors[0]) == (
        "There are no training steps, because 10 of 10 rows are training rows, and drop_last leaves out a step that is not full."
    )


@pytest.mark.parametrize("rows", [2, 3])
def test_ranks_without_rows_neither_hang_nor_fail(store: Store, rows: int) -> None:
    # One of two rows trains and one validates, so two of three ranks have no rows in either.
    case = Case(store, linear(), torch.optim.SGD, rows=rows, metrics=["mae"])
    options = {"epochs": 2, "batch_size": 4, "has_validation": True, "validation": 1 / rows}
    history = case.train(3, **options).history
    assert [record["rows"] for record in history] == [rows - 1, rows - 1]
    assert all(math.isfinite(r[key]) for r in history for key in ("loss", "val_loss", "val_mae"))


def test_separate_validation_data_without_rows_raise_a_clear_error(store: Store) -> None:
    case = Case(store, linear(), torch.optim.SGD, rows=50)
    Manifest((), case.schema, 0).save(store, "held_out")
    with pytest.raises(RanksFailed) as failed:
        case.train(1, epochs=1, has_validation=True, validation_dir="held_out")
    assert "no validation steps, because 0 of 0 rows" in str(failed.value.errors[0])


def test_separate_validation_data_may_have_fewer_rows_than_ranks(store: Store) -> None:
    case = Case(store, linear(), torch.optim.SGD, rows=50)
    held_out = {name: case.values[name][:2] + 1 for name in ("x", "y")}
    file = write_packed(store, "held_out/part-0.parquet", list(case.schema.columns), held_out)
    Manifest((file,), case.schema, 2).save(store, "held_out")
    history = case.train(3, epochs=1, has_validation=True, validation_dir="held_out").history
    model = copy.deepcopy(case.model)
    model.load_state_dict(case.weights(1))
    x, y = (torch.from_numpy(held_out[name]) for name in ("x", "y"))
    with torch.no_grad():
        expected = nn.functional.mse_loss(model(x).flatten(), y).item()
    assert history[0]["val_loss"] == pytest.approx(expected, rel=1e-5)


class LateOnRank1(nn.Module):
    """A linear model that is slow on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hvd.rank() == 1:
            time.sleep(0.02)
        return self.layers(x)


def test_epoch_record_names_the_rank_that_others_waited_for(store: Store) -> None:
    model = LateOnRank1()
    case = Case(store, model, torch.optim.SGD(model.parameters(), lr=0.1), options={"epochs": 1})
    record = case.train(3).history[0]
    assert record["slowest_rank"] == 1
    assert record["rank_wait_s"] > 0.01
    assert record["rank_wait_s"] + record["comm_wait_s"] <= record["seconds"]
