"""Weights that a callback or loop sets at the end of the training: averages of weights, and running statistics for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sparkhvd.data.store.store import Store
from sparkhvd.estimator import Callback
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import finish
from tests.training.ranks import RUN_DIR, Case

pytestmark = pytest.mark.ranks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def case(store: Store, callback: Callback | None, **fields: Any) -> Case:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    user = {"callbacks": [callback]} if callback is not None else {}
    options = {"epochs": 3, "batch_size": 16, **fields.pop("options", {})}
    return Case(store, model, optimizer, options=options, user={**user, **fields.pop("user", {})})


def result(store: Store, epoch: int) -> dict[str, Any]:
    """Load the state from which the driver makes the model."""
    checkpoints = Checkpoints(store, RUN_DIR)
    return checkpoints.load_weights(checkpoints.path(epoch))


class Averages(Callback):
    """Mean of the weights after each epoch, and statistics of some rows for it, as `update_bn` computes them."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.ended: list[float] = []

    def on_epoch_end(self, ctx: Any, record: dict[str, Any]) -> None:
        for name, value in ctx.model.named_parameters():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach() / ctx.epochs

    def on_train_end(self, ctx: Any, history: list[dict[str, Any]]) -> None:
        ctx.store.write_bytes(
            f"{ctx.run_dir}/user/found", str(ctx.model[0].bias.sum().item()).encode()
        )
        with torch.no_grad():
            for name, value in ctx.model.named_parameters():
                value.copy_(self.sums[name])
        rows = torch.linspace(-1, 1, 60).reshape(20, 3)
        torch.optim.swa_utils.update_bn([rows], ctx.model)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"]


@pytest.mark.parametrize("ranks", ["all", 0])
def test_the_returned_model_has_the_averaged_weights(store: Store, ranks: Any) -> None:
    callback = Averages()
    callback.ranks = ranks
    average = case(store, callback)
    # A checkpoint more than epochs would show that only the model's part has changed.
    average.train(2, num_checkpoints=3)
    states = [average.checkpoint(epoch).model for epoch in (1, 2, 3)]
    found = result(store, 3)
    for name, _ in average.model.named_parameters():
        expected = sum(state[name] for state in states) / 3
        torch.testing.assert_close(found[name], expected)
        assert not torch.equal(found[name], states[2][name])
    # Statistics of only these rows.
    module = net()
    module.load_state_dict(found)
    rows = torch.linspace(-1, 1, 60).reshape(20, 3)
    torch.testing.assert_close(found["1.running_mean"], module[0](rows).mean(0).detach())
    assert not torch.equal(found["1.running_mean"], states[2]["1.running_mean"])

    # A relaunch after the last epoch gives them again, because `on_train_end` finds the same weights.
    before = store.read_bytes(f"{RUN_DIR}/user/found")
    average.train(2, num_checkpoints=3)
    assert store.read_bytes(f"{RUN_DIR}/user/found") == before
    again = result(store, 3)
    assert found.keys() == again.keys()
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_best_epoch_has_the_validated_weights(store: Store) -> None:
    best = case(store, Averages(), options={"has_validation": True, "validation": 0.25})
    trained = best.train(1, return_best=True)
    assert trained.warning.startswith("A callback changed the model's weights in on_train_end")
    kept, found = best.checkpoint(trained.epoch), result(store, trained.epoch)
    assert not kept.final
    assert all(torch.equal(found[name], kept.model[name]) for name in found)


class Removes(Callback):
    """Changes the structure for a user's export."""

    def on_train_end(self, ctx: Any, history: list[dict[str, Any]]) -> None:
        ctx.model[1] = nn.Identity()


def test_structure_change_at_the_end_keeps_last_epoch_weights(store: Store) -> None:
    removes = case(store, Removes())
    assert "changed the names or shapes" in removes.train(1).warning
    module = net()
    module.load_state_dict(result(store, 3))
    checkpoints = Checkpoints(store, RUN_DIR)
    finish(module, checkpoints.load_start(checkpoints.path(3)).result)
    assert vars(module[1]).keys() == vars(net()[1]).keys()  # the program's layer keeps its own
    module.eval()(torch.zeros(2, 3))


class Reads(Callback):
    def on_train_end(self, ctx: Any, history: list[dict[str, Any]]) -> None:
        ctx.model.eval()(torch.zeros(2, 3))


class Freezes(Callback):
    def on_train_end(self, ctx: Any, history: list[dict[str, Any]]) -> None:
        ctx.model[0].requires_grad_(False)
        ctx.model[1].momentum = 0.3
        ctx.model[1].large = torch.arange(1 << 18)

    def on_epoch_end(self, ctx: Any, record: dict[str, Any]) -> None:
        ctx.model[0].large = torch.ones(1 << 19)


def test_final_state_is_written_only_after_changes(store: Store) -> None:
    reads = case(store, Reads())
    assert reads.train(1).warning == ""
    assert reads.checkpoint(3).final == {}


def test_the_returned_model_has_changed_flags_and_attributes(store: Store) -> None:
    case(store, Freezes()).train(1)
    checkpoints = Checkpoints(store, RUN_DIR)
    module = net()
    finish(module, checkpoints.load_start(checkpoints.path(3)).result)
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True, True, True]
    assert module[1].momentum == 0.3
    assert torch.equal(module[0].large, torch.ones(1 << 19))
    assert torch.equal(module[1].large, torch.arange(1 << 18))


def averaging_loop(ctx: Any) -> None:
    for _ in range(ctx.start_epoch, ctx.epochs):
        for batch in ctx.train_loader:
            ctx.optimizer.zero_grad()
            ctx.backward(F.mse_loss(ctx.model(batch["x"]).squeeze(1), batch["y"]))
            ctx.optimizer.step()
        ctx.log({"loss": 0.0})
        ctx.save_checkpoint()
    with torch.no_grad():
        for value in ctx.model.parameters():
            value.fill_(0.25)


def test_weights_changed_after_the_last_checkpoint_are_returned(store: Store) -> None:
    loop = case(store, None, user={"train_fn": averaging_loop})
    loop.loss = None
    loop.train(2)
    found = result(store, 3)
    assert all(bool((found[n] == 0.25).all()) for n, _ in loop.model.named_parameters())
