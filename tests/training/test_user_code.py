"""train_step, train_fn, callbacks and transformations on ranks that are threads, against plain PyTorch."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import sparkhvd.torch as hvd
from sparkhvd.data.store.store import Store
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.estimator import Callback
from sparkhvd.estimator.params.groups import train_fn_effects
from sparkhvd.training.check_user_code import UserCode, check_user_code
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.early_stopping import Monitor
from sparkhvd.training.program import Program, dump_program
from tests.harness.ranks import RanksFailed
from tests.harness.soak import left_to_soak
from tests.harness.waiting import wait_until, wait_until_no_checkpoint_is_written
from tests.training.ranks import RUN_DIR, Case, assert_close, linear, without_times

pytestmark = pytest.mark.ranks

VALIDATION = {"has_validation": True, "validation": 0.25}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def case(store: Store, **fields: Any) -> Case:
    model = fields.pop("model", None) or linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"batch_size": 16, "epochs": 2, **fields.pop("options", {})}
    return Case(store, model, optimizer, rows=75, options=options, **fields)


def failures(case: Case, size: int = 2, **options: Any) -> dict[int, BaseException]:
    with pytest.raises(RanksFailed) as failed:
        case.train(size, **options)
    return failed.value.errors


def cause_of(errors: dict[int, BaseException]) -> BaseException:
    """Return the error that a rank raised itself, because the others may report an ended collective."""
    return next(e for e in errors.values() if not isinstance(e, CollectiveError))


# --- train_step and validation_step ----------------------------------------------------------------------


def mse_step(model: nn.Module, batch: dict[str, torch.Tensor], ctx: Any) -> torch.Tensor:
    assert 0 <= ctx.rank < ctx.size
    assert 1 <= ctx.epoch <= ctx.epochs
    assert ctx.num_rows == len(batch["x"]) == len(batch["y"])
    loss = F.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
    ctx.log("rmse2", loss.detach())
    ctx.log("step", float(ctx.step))
    return loss


def weighted_step(model: nn.Module, batch: dict[str, torch.Tensor], ctx: Any) -> Any:
    weights, squares = batch["w"], (model(batch["x"]).squeeze(1) - batch["y"]).square()
    return (squares * weights).sum() / weights.sum(), weights.sum()


@pytest.mark.parametrize("size", [1, 3, *left_to_soak("three ranks, here", 2)])
def test_train_step_equals_the_declarative_loop(store: Store, size: int) -> None:
    custom = case(store, user={"train_step": mse_step}, loss=None, options=VALIDATION)
    custom.user["validation_step"] = mse_step
    result = custom.train(size)
    expected = case(Store.create(Path(store.url.removeprefix("file://")) / "2"), options=VALIDATION)
    declared = expected.train(size)
    assert_close(custom.weights(2), expected.weights(2), 1e-6)
    for custom_record, other in zip(result.history, declared.history, strict=True):
        for name in ("loss", "val_loss"):
            assert custom_record[name] == pytest.approx(other[name], rel=1e-5)
        assert custom_record["rmse2"] == pytest.approx(custom_record["loss"], rel=1e-5)
        assert custom_record["val_rmse2"] == pytest.approx(custom_record["val_loss"], rel=1e-5)
    # 57 training rows in steps of at most 16 per rank; a step counts by its rows.
    assert 1 <= result.history[0]["step"] < result.history[1]["step"]


def test_train_step_that_returns_a_weight_uses_the_loop_params(store: Store) -> None:
    options = {"gradient_clip_norm": 0.05, "accumulate": 2, "epochs": 3}
    custom = case(store, user={"train_step": weighted_step}, weighted=True, options=options)
    custom.train(2)
    other = Store.create(Path(store.url.removeprefix("file://")) / "2")
    expected = case(other, weighted=True, options=options)
    expected.train(2)
    assert_close(custom.weights(3), expected.weights(3), 1e-6)


def test_batch_entries_are_named_by_the_keys_of_inputs(store: Store) -> None:
    def step(model: nn.Module, batch: dict[str, torch.Tensor], ctx: Any) -> torch.Tensor:
        assert list(batch) == ["input", "y", "w"]
        assert batch["input"].shape[1:] == (3,)
        return F.mse_loss(model(batch["input"]), batch["y"][:, None])

    custom = case(store, user={"train_step": step}, inputs={"input": ["x"]}, weighted=True)
    assert custom.train(2).epoch == 2


def broadcasting(model: nn.Module, batch: dict[str, torch.Tensor], ctx: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def backward(model: nn.Module, batch: dict[str, torch.Tensor], ctx: Any) -> torch.Tensor:
    loss = model(batch["x"]).mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda model, batch, ctx: None,
            "train_step returned None; it must return the loss: a tensor with one number",
        ),
        (
            lambda model, batch, ctx: model(batch["x"]),
            "train_step returned shape (16, 1); it must return the loss",
        ),
        (
            lambda model, batch, ctx: model(batch["x"]).mean().detach(),
            "train_step returned a number that does not depend on the model's trainable parameters",
        ),
        (
            lambda model, batch, ctx: model(batch["z"]),
            "train_step raised KeyError: 'z' (batch: x (16, 3) float32, y (16,) float32)",
        ),
        (backward, "train_step called backward(). Only return the loss"),
        (
            lambda model, batch, ctx: ctx.log("loss", 1.0),
            "ctx.log('loss', ...): the name is reserved or not a text.",
        ),
        (
            lambda model, batch, ctx: ctx.log("mine", batch["x"]),
            "ctx.log('mine', ...): the value is tensor(",
        ),
    ],
)
def test_an_invalid_loss_stops_all_ranks_at_the_first_batch(
    store: Store, step: Any, message: str
) -> None:
    errors = failures(case(store, user={"train_step": step}))
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error).startswith("The first batch, on rank 0: " + message)


def test_a_train_step_that_broadcasts_its_label_raises(store: Store) -> None:
    # One rank, because threads share Python's filters of warnings.
    errors = failures(case(store, user={"train_step": broadcasting}), size=1)
    assert str(errors[0]).startswith(
        "The first batch, on rank 0: train_step raised UserWarning: Using a target size (torch.Size([16]))"
    )


# --- callbacks -------------------------------------------------------------------------------------------


class Recorder(Callback):
    """Writes every call to the store, like user code."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_begin(self, ctx: Any) -> None:
        self.calls.append(["train_begin", ctx.epoch, ctx.step])

    def on_epoch_begin(self, ctx: Any) -> None:
        self.calls.append(["epoch_begin", ctx.epoch])

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        self.calls.append(["step_end", ctx.step])
        assert loss is None or loss > 0
        ctx.log("rank", ctx.rank)

    def on_validation_end(self, ctx: Any, record: dict[str, Any]) -> None:
        self.calls.append(["validation_end", "val_loss" in record])

    def on_epoch_end(self, ctx: Any, record: dict[str, Any]) -> None:
        self.calls.append(["epoch_end", record["epoch"]])
        record["own"] = np.float32(record["epoch"] * 2 + 10 * ctx.rank)
        record["note"] = "text"

    def on_checkpoint(self, ctx: Any, path: str) -> None:
        self.calls.append(["checkpoint", ctx.store.exists(path)])

    def on_train_end(self, ctx: Any, history: list[dict[str, Any]]) -> None:
        self.calls.append(["train_end", len(history)])
        text = json.dumps(self.calls).encode()
        ctx.store.write_bytes(f"{ctx.run_dir}/user/{type(self).__name__}-{ctx.rank}", text)


class OnlyFirst(Recorder):
    ranks = 0


def test_callbacks_are_called_in_order_on_their_ranks(store: Store) -> None:
    custom = case(store, user={"callbacks": [Recorder(), OnlyFirst()]}, options=VALIDATION)
    result = custom.train(2)
    steps = 2  # 56 rows in steps of 2 * 16

    def epoch(number: int) -> list[list[Any]]:
        first = (number - 1) * steps
        return [
            ["epoch_begin", number],
            *[["step_end", first + i + 1] for i in range(steps)],
            ["validation_end", True],
            ["epoch_end", number],
            ["checkpoint", True],
        ]

    expected = [["train_begin", 0, 0], *epoch(1), *epoch(2), ["train_end", 2]]
    written = {
        p.rpartition("/")[2]: json.loads(store.read_bytes(p)) for p in store.list(f"{RUN_DIR}/user")
    }
    assert written == {"Recorder-0": expected, "Recorder-1": expected, "OnlyFirst-0": expected}
    for record in result.history:
        # Rank 0's record counts. Logged numbers are means over calls and ranks: 0, 0 and 1 per step.
        assert record["own"] == record["epoch"] * 2
        assert record["note"] == "text"
        assert record["rank"] == pytest.approx(1 / 3)
    assert Checkpoints(store, RUN_DIR).history() == result.history


class StopAt(Callback):
    """Stops on one rank only, and counts epochs over interruptions."""

    def __init__(self, epoch: int, rank: int) -> None:
        self.at, self.rank, self.seen = epoch, rank, 0

    def on_epoch_end(self, ctx: Any, record: dict[str, Any]) -> None:
        self.seen += 1
        record["seen"] = self.seen
        if ctx.rank == self.rank and ctx.epoch == self.at:
            ctx.stop_training("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_stop_request_of_one_rank_stops_all_and_keeps_states(store: Store) -> None:
    custom = case(store, user={"callbacks": [StopAt(3, rank=1)]}, options={"epochs": 9})
    first = custom.train(2, epochs=2)
    assert first.stopped == ""
    result = custom.train(2)
    assert result.stopped == "enough"
    assert [r["seen"] for r in result.history] == [1, 2, 3]
    assert result.epoch == 3


class StopThenFail(Callback):
    """Requests a stop in the first epoch on rank 1. Fails at a step or after an epoch has been saved."""

    fails_at: Any = None
    saved: Checkpoints

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        if ctx.rank == 1 and ctx.step == 1:
            ctx.stop_training("enough")
        if ctx.step == StopThenFail.fails_at:
            # The first one is written beside the training.
            latest = StopThenFail.saved.latest_position
            wait_until(lambda: latest() > (0, 1), "the first checkpoint is written")
            raise ValueError("a loss")

    def on_checkpoint(self, ctx: Any, path: str) -> None:
        if StopThenFail.fails_at == "checkpoint":
            raise ValueError("a loss")


@pytest.mark.parametrize("fails_at", [9, "checkpoint"])
def test_a_stop_request_survives_a_resume(store: Store, fails_at: Any) -> None:
    options = {"epochs": 3, "checkpoint_interval_s": 1e-6, "batch_size": 4}
    custom = case(store, user={"callbacks": [StopThenFail()]}, options=options)
    StopThenFail.fails_at, StopThenFail.saved = fails_at, Checkpoints(store, RUN_DIR)
    try:
        failures(custom)
    finally:
        StopThenFail.fails_at = None
    assert (0, 1) < StopThenFail.saved.latest_position() <= (1, 0)
    result = custom.train(2)
    assert (len(result.history), result.stopped) == (1, "enough")


class Holds(Callback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"best": [self.state]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["best"][0]


def test_a_callback_state_that_cannot_be_reloaded_is_refused(store: Store) -> None:
    custom = case(store, user={"callbacks": [Holds(np.zeros(2))]})
    assert str(failures(custom, 1)[0]) == (
        "The callback Holds has a ndarray in its state_dict(), so a checkpoint with it could not be "
        "read. A state may hold numbers, texts, lists, dicts and tensors."
    )
    custom.user["callbacks"] = [Holds(np.float64(0.25))]
    custom.train(2)
    assert custom.checkpoint(2).callbacks["0:Holds"] == {"best": [0.25]}


class Broken(Callback):
    ranks = 0

    def on_epoch_end(self, ctx: Any, record: dict[str, Any]) -> None:
        raise KeyError("nothing")


def test_error_names_a_callback_that_raises(store: Store) -> None:
    errors = failures(case(store, user={"callbacks": [Broken()]}))
    message = "The callback Broken raised KeyError in on_epoch_end: 'nothing'"
    error = cause_of(errors)
    assert str(error) == message
    assert isinstance(error.__cause__, KeyError)
    assert set(errors) == {0, 1}  # the other one does not wait


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("on_train_begin", "no epoch has begun. Log in on_epoch_begin."),
        (
            "on_checkpoint",
            "the record of the epoch is written already. Log in on_epoch_end, or write to ctx.store.",
        ),
        (
            "on_train_end",
            "all records are written already. Log in on_epoch_end, or write to ctx.store.",
        ),
    ],
)
def test_logging_a_value_outside_of_an_epoch_record_is_refused(
    store: Store, method: str, message: str
) -> None:
    def log(self: Any, ctx: Any, *_: Any) -> None:
        ctx.log("mine", 1.0)

    callback = type("Logs", (Callback,), {method: log})()
    errors = failures(case(store, user={"callbacks": [callback]}))
    assert str(cause_of(errors)) == (
        f"The callback Logs raised InvalidArgumentError in {method}: ctx.log('mine', ...) in {method}: {message}"
    )


class Begins(Callback):
    """Draws and logs at the beginning of an epoch. May fail when the second epoch has a checkpoint."""

    fails_behind: Checkpoints | None = None

    def on_epoch_begin(self, ctx: Any) -> None:
        assert ctx.model.training
        ctx.model.eval()
        self.drawn = torch.rand(())
        ctx.log("began", self.drawn)

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        assert not ctx.model.training
        ctx.log("drawn", self.drawn)
        if Begins.fails_behind and ctx.epoch > 1:
            time.sleep(0.02)  # checkpoints are written in parallel to the training
            if Begins.fails_behind.latest_position() > (1, 0):
                raise ValueError("a loss")


def test_on_epoch_begin_repeats_exactly_in_a_run_resumed_mid_epoch(store: Store) -> None:
    options = {"epochs": 3, "checkpoint_interval_s": 1e-6, "batch_size": 4}
    custom = case(store, user={"callbacks": [Begins()]}, options=options)
    other = Store.create(Path(store.url.removeprefix("file://")) / "2")
    expected = case(other, user={"callbacks": [Begins()]}, options=options).train(1)
    for record in expected.history:
        assert record["began"] == pytest.approx(record["drawn"])
    Begins.fails_behind = Checkpoints(store, RUN_DIR)
    try:
        assert "a loss" in str(failures(custom, 1)[0])
    finally:
        Begins.fails_behind = None
    assert Checkpoints(store, RUN_DIR).latest_position() > (1, 0)
    assert without_times(custom.train(1)) == without_times(expected)


class Misspelt(Callback):
    def on_epoch_ended(self, ctx: Any) -> None: ...


class TooFew(Callback):
    def on_epoch_end(self, ctx: Any) -> None: ...


class HalfState(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Elsewhere(Callback):
    ranks = 1


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            [Recorder],
            "callbacks[0] is <class 'tests.training.test_user_code.Recorder'>; it must be an object of a "
            "subclass of sparkhvd.estimator.Callback. Give an object: Recorder().",
        ),
        (
            [Broken(), Misspelt()],
            "callbacks[1] (Misspelt) has a method 'on_epoch_ended', which is never called. Did you mean 'on_epoch_end'? "
            "The methods are: on_train_begin, on_epoch_begin, on_step_end, on_validation_end, on_epoch_end, "
            "on_checkpoint, on_train_end.",
        ),
        (
            TooFew(),
            "callbacks[0] (TooFew): on_epoch_end must take (ctx, record): too many positional arguments.",
        ),
        (
            HalfState(),
            "callbacks[0] (HalfState) has only one of state_dict and load_state_dict. Define both or neither.",
        ),
        (Elsewhere(), "callbacks[0] (Elsewhere): ranks is 1; it must be 'all' or 0."),
    ],
)
def test_wrong_callbacks_are_refused_on_the_driver(callbacks: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
        check_user_code({"callbacks": callbacks})


# --- train_fn --------------------------------------------------------------------------------------------


def own_loop(ctx: Any) -> None:
    assert (ctx.train_loader.num_rows, ctx.val_loader.num_rows) == (56, 19)
    for epoch in range(ctx.start_epoch, ctx.epochs):
        ctx.model.train()
        rows = torch.zeros(1)
        for batch in ctx.train_loader:
            assert ctx.epoch == epoch + 1
            rows += len(batch["x"])
            loss = F.mse_loss(ctx.model(batch["x"]).squeeze(1), batch["y"])
            ctx.optimizer.zero_grad()
            ctx.backward(loss)
            ctx.optimizer.step()
        ctx.model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in ctx.val_loader:
                errors = ctx.model(batch["x"]).squeeze(1) - batch["y"]
                total += torch.tensor([errors.square().sum(), len(errors)])
        total = hvd.allreduce(total, op=hvd.Sum)
        rows = hvd.allreduce(rows, op=hvd.Sum)
        ctx.log({"val_loss": total[0] / total[1], "rows": rows, "step": ctx.step})
        ctx.save_checkpoint()


@pytest.mark.parametrize("size", [1, 3, *left_to_soak("three ranks, here", 2)])
def test_train_fn_equals_the_declarative_loop(store: Store, size: int) -> None:
    custom = case(store, user={"train_fn": own_loop}, options={**VALIDATION, "epochs": 3})
    custom.train(size, epochs=1)
    result = custom.train(size)  # resumes after the first epoch
    other = Store.create(Path(store.url.removeprefix("file://")) / "2")
    expected = case(other, options={**VALIDATION, "epochs": 3})
    declared = expected.train(size)
    assert_close(custom.weights(3), expected.weights(3), 1e-6)
    assert [r["rows"] for r in result.history] == [56.0] * 3
    assert [r["epoch"] for r in result.history] == [1, 2, 3]
    steps = -(-56 // (16 * size))
    assert [r["step"] for r in result.history] == [steps, 2 * steps, 3 * steps]
    for custom_record, other in zip(result.history, declared.history, strict=True):
        assert custom_record["val_loss"] == pytest.approx(other["val_loss"], rel=1e-5)


@pytest.mark.parametrize("stops_after", [None, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_the_best_epoch_of_train_fn_is_a_saved_epoch(
    store: Store, size: int, stops_after: int | None
) -> None:
    values = [1.0, 3.0, 2.0, 2.5, 0.5, 4.0]  # of the saved ones the second is the best: 3, 2.5, 4
    stop = [stops_after]

    def loop(ctx: Any) -> None:
        for epoch in range(ctx.start_epoch, ctx.epochs):
            for batch in ctx.train_loader:
                loss = F.mse_loss(ctx.model(batch["x"]).squeeze(1), batch["y"])
                ctx.optimizer.zero_grad()
                ctx.backward(loss)
                ctx.optimizer.step()
            ctx.log({"val_loss": values[epoch], "weight": float(ctx.model[0].weight[0, 0])})
            assert len(ctx.history) == epoch + 1
            with pytest.raises(TypeError):  # the checkpoint would not have it
                ctx.history[-1]["mine"] = 1.0
            if epoch % 2:
                ctx.save_checkpoint()
            if stop[0] is not None and epoch + 1 > stop[0]:
                raise ValueError("a loss")

    options = {"epochs": 6, "return_best": True, "monitor": Monitor("val_loss")}
    custom = case(store, user={"train_fn": loop}, options=options)
    if stops_after is not None:
        with pytest.raises(RanksFailed):
            custom.train(size)
        stop[0] = None
    result = custom.train(size)
    assert result.epoch == 4
    assert float(custom.weights(4)["0.weight"][0, 0]) == result.history[3]["weight"]


@pytest.mark.parametrize("size", [1, 2])
def test_train_fn_resumes_mid_epoch_with_its_kept_states(
    store: Store, tmp_path: Path, size: int
) -> None:
    stops_at = [0]

    def loop(ctx: Any) -> None:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(ctx.model.parameters(), lr=0.01), ctx.model.named_parameters()
        )
        ctx.keep("adam", optimizer)
        for _ in range(ctx.start_epoch, ctx.epochs):
            for batch in ctx.train_loader:
                # Ranks that are threads draw from one generator.
                noise = torch.rand(len(batch["y"])) if size == 1 else 0.0
                loss = F.mse_loss(ctx.model(batch["x"]).squeeze(1) + noise, batch["y"])
                optimizer.zero_grad()
                ctx.backward(loss)
                optimizer.step()
                ctx.after_step()
                if ctx.step == stops_at[0] - 3:
                    wait_until_no_checkpoint_is_written()
                if ctx.step == stops_at[0]:
                    raise ValueError("a loss")
            ctx.log({"began": f"{ctx.start_epoch}, {ctx.start_step > 0}"})
            ctx.save_checkpoint()

    options = {"epochs": 3, "batch_size": 4, "checkpoint_interval_s": 1e-6}
    whole = case(store, user={"train_fn": loop}, options=options)
    whole.optimizer = None
    whole.train(size)
    other = Store.create(tmp_path / "stopped")
    stopped = case(other, user={"train_fn": loop}, options=options)
    stopped.optimizer = None
    steps = -(-75 // (4 * size))
    stops_at[0] = steps + 5  # of the second epoch
    with pytest.raises(RanksFailed):
        stopped.train(size)
    stops_at[0] = 0
    result = stopped.train(size)
    assert [r["began"] for r in result.history] == ["0, False", "1, True", "1, True"]
    for name, weights in whole.weights(3).items():
        assert torch.equal(weights, stopped.weights(3)[name])


def test_train_fn_without_records_returns_its_model(store: Store) -> None:
    def loop(ctx: Any) -> None:
        assert ctx.optimizer is None
        assert ctx.val_loader is None
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(ctx.model.parameters(), lr=0.01), ctx.model.named_parameters()
        )
        seen = []
        for epoch in (4, 0):
            ctx.train_loader.set_epoch(epoch)
            seen.append([batch["y"].clone() for batch in ctx.train_loader])
            assert len(seen[-1]) == len(ctx.train_loader)
        assert not torch.equal(seen[0][0], seen[1][0])  # another epoch, another order
        ctx.model(seen[0][0].reshape(-1, 1).expand(-1, 3)).mean().backward()
        optimizer.step()

    custom = case(store, user={"train_fn": loop})
    custom.optimizer = None
    result = custom.train(2)
    assert result.history == []
    assert result.epoch == 0
    before = dict(custom.model.state_dict())
    assert any(not torch.equal(v, before[n]) for n, v in custom.weights(0).items())


@pytest.mark.parametrize(
    ("loop", "kind", "message"),
    [
        (
            lambda ctx: ctx.log([1]),
            InvalidArgumentError,
            "ctx.log: the record is list; it must be a dict of numbers and texts.",
        ),
        (
            lambda ctx: ctx.log({"a": [1]}),
            InvalidArgumentError,
            "ctx.log: 'a' is [1]; names must be texts, values numbers or texts.",
        ),
        (
            lambda ctx: ctx.train_loader.set_epoch(-1),
            InvalidArgumentError,
            "set_epoch: epoch is -1; it must be a whole number of at least 0.",
        ),
        (lambda ctx: {}["a"], RuntimeError, "train_fn raised KeyError: 'a'"),
    ],
)
def test_train_fn_failure_is_explained(store: Store, loop: Any, kind: Any, message: str) -> None:
    errors = failures(case(store, user={"train_fn": loop}))
    assert set(errors) == {0, 1}
    causes = [error for error in errors.values() if not isinstance(error, CollectiveError)]
    assert causes  # a rank may see first that the other one has gone
    for error in causes:
        assert isinstance(error, kind)
        assert str(error) == message


# --- transformations -------------------------------------------------------------------------------------


def reversed_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"flipped": row["x"][::-1] * 2, "y": -row["y"]}


def noisy(batch: dict[str, Any], training: bool) -> dict[str, Any]:
    noise = np.random.standard_normal(batch["flipped"].shape) if training else 0.0
    return {**batch, "flipped": batch["flipped"] + noise}


@pytest.mark.parametrize("level", ["declarative", "train_step", "train_fn"])
def test_every_api_level_uses_transformed_rows(store: Store, level: str) -> None:
    def step(model: nn.Module, batch: dict[str, torch.Tensor], ctx: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["input"]).squeeze(1), batch["y"])

    def loop(ctx: Any) -> None:
        for _ in range(2):
            for batch in ctx.train_loader:
                ctx.optimizer.zero_grad()
                ctx.backward(step(ctx.model, batch, ctx))
                ctx.optimizer.step()

    user: dict[str, Any] = {"transformation_fn": reversed_row}
    user |= {"train_step": {"train_step": step}, "train_fn": {"train_fn": loop}}.get(level, {})
    custom = case(store, user=user, inputs={"input": ["flipped"]})
    result = custom.train(2)
    expected = case(Store.create(Path(store.url.removeprefix("file://")) / "2"))
    expected.values["x"] = expected.values["x"][:, ::-1] * 2
    expected.values["y"] = -expected.values["y"]
    reference = expected.reference(2, 2)[1]
    reference.pop("loss")
    assert_close(custom.weights(result.epoch), reference, 1e-5)


def test_random_transformations_repeat_in_a_resumed_run(tmp_path: Path) -> None:
    def custom(name: str) -> Case:
        user = {"transformation_fn": reversed_row, "batch_transform_fn": noisy}
        store = Store.create(tmp_path / name)
        return case(store, user=user, inputs={"input": ["flipped"]}, options=VALIDATION)

    # One rank, because ranks that are threads share numpy's random numbers.
    whole, parts = custom("whole"), custom("parts")
    expected = whole.train(1)
    parts.train(1, epochs=1)
    resumed = parts.train(1)
    for name, value in whole.weights(2).items():
        assert torch.equal(value, parts.weights(2)[name]), name
    assert [r["val_loss"] for r in resumed.history] == [r["val_loss"] for r in expected.history]
    quiet = custom("quiet")
    quiet.user.pop("batch_transform_fn")
    assert quiet.train(1).history[0]["loss"] != expected.history[0]["loss"]


def changing(batch: dict[str, Any]) -> dict[str, Any]:
    width = 3 if len(batch["y"]) < 5 else 2  # the driver looks at four rows
    return {**batch, "x": batch["x"][:, :width]}


def test_transformation_with_changing_shapes_stops_all_ranks(store: Store) -> None:
    errors = failures(case(store, user={"batch_transform_fn": changing}))
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert str(error) == (
            "The first batch, on rank 0: batch_transform_fn returned 'x' with rows of shape [2], but "
            "the first rows of the data had the shape [3]; every row must have the same shape."
        )


# --- refusals of the driver -------------------------------------------------------------------------------


def one(ctx: Any) -> None: ...


def three(model: Any, batch: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"train_step": 3}, "train_step is 3; it must be a function."),
        (
            {"train_step": one},
            "train_step must take (model, batch, ctx): too many positional arguments.",
        ),
        ({"train_fn": three}, "train_fn must take (ctx): missing a required argument: 'batch'."),
        (
            {"train_fn": one, "callbacks": [Broken()], "metrics": ["mse"], "epochs": 3},
            "train_fn is the whole training loop, so these params would have no effect: metrics, callbacks. Leave them "
            "out and do it in train_fn, or use train_step.",
        ),
        (
            {"train_fn": one, "learning_rate": 0.1, "lr_scheduler": one},
            "train_fn is given without optimizer, so these params would have no effect: learning_rate, lr_scheduler. Give "
            "optimizer and step ctx.optimizer, or leave them out and do it in train_fn.",
        ),
        (
            {"validation_step": three},
            "validation_step is given, but there are no validation rows. Set validation, for example 0.1.",
        ),
        (
            {"train_step": three, "validation": 0.1},
            "validation is given with train_step, but there is neither validation_step nor loss to "
            "validate with. Give validation_step or loss.",
        ),
        (
            {"train_step": three, "metrics": ["mse"]},
            "metrics would have no effect: with train_step they are computed only for validation "
            "rows, and only without validation_step. Report them with ctx.log(name, value).",
        ),
    ],
)
def test_invalid_user_code_params_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
        check_user_code(params, train_fn_effects())


def test_error_names_the_param_of_a_value_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    user = UserCode(batch_transform_fn=lambda batch: lock.locked())
    with pytest.raises(InvalidArgumentError) as raised:
        dump_program(Program(linear(), torch.optim.SGD, (), (), (), user=user))
    assert str(raised.value).startswith(
        "batch_transform_fn cannot be sent to the ranks: pickling failed at batch_transform_fn: variable 'lock': TypeError: "
        "cannot pickle '_thread.lock' object. Build it from"
    )
