"""A checkpoint holds the changes of callbacks besides the weights: an interrupted run equals an undisturbed one bit by bit."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.data.store.store import Store
from sparkhvd.estimator import Callback
from sparkhvd.torch.context import use_engine
from sparkhvd.training.checkpoints import checkpoint
from sparkhvd.training.checkpoints.checkpoint import Checkpoint, write_checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import finish
from sparkhvd.training.checkpoints.saver import Cadence
from sparkhvd.training.train import train
from tests.harness.ranks import RanksFailed, run_ranks
from tests.harness.soak import left_to_soak
from tests.training.ranks import RUN_DIR, Case, without_times

pytestmark = pytest.mark.ranks

EPOCHS = 5


class Interrupted(Exception):
    """Raised by a rank that ends in the middle."""


class Changing(Callback):
    """Ends a run at `at`: at the beginning of an epoch, or after a step of it."""

    at: ClassVar[tuple[int, int] | None] = None

    def on_epoch_begin(self, ctx: Any) -> None:
        self.begin(ctx)
        self.end(ctx, 0)

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        step = (ctx.step - 1) % 4 + 1
        self.step(ctx, step)
        # The checkpoint of this step is not taken yet.
        self.end(ctx, step)

    def end(self, ctx: Any, step: int) -> None:
        if (ctx.epoch, step) == Changing.at:
            hvd.barrier()  # otherwise another rank may still need this one for the previous checkpoint
            raise Interrupted

    def begin(self, ctx: Any) -> None: ...

    def step(self, ctx: Any, step: int) -> None: ...


class Thaws(Changing):
    """Freezes layers at first, unfreezes them in turn, one of them inside an epoch, and freezes the last."""

    def on_train_begin(self, ctx: Any) -> None:
        ctx.model[0].requires_grad_(False)
        ctx.model[3].bias.requires_grad_(False)

    def begin(self, ctx: Any) -> None:
        if ctx.epoch == 2:
            ctx.model[0].weight.requires_grad_(True)
        if ctx.epoch == 4:
            ctx.model[5].requires_grad_(False)

    def step(self, ctx: Any, step: int) -> None:
        if (ctx.epoch, step) == (3, 2):
            ctx.model[0].bias.requires_grad_(True)
            ctx.model[3].bias.requires_grad_(True)


class Options(Changing):
    """Changes options of the group at the beginning, in an epoch and at a step, and adds some."""

    def on_train_begin(self, ctx: Any) -> None:
        for group in ctx.optimizer.param_groups:
            group.update(lr=0.02, weight_decay=0.1, tag=["first", (1, 2.5)])

    def begin(self, ctx: Any) -> None:
        (group,) = ctx.optimizer.param_groups
        if ctx.epoch == 3:
            group.update(
                lr=0.007, betas=(0.5, 0.9), tag="later", limits={"low": torch.tensor(0.001)}
            )
        if ctx.epoch > 3:
            group["lr"] += float(group["limits"]["low"])

    def step(self, ctx: Any, step: int) -> None:
        (group,) = ctx.optimizer.param_groups
        if step == 2 and group["tag"] == "later":
            group["weight_decay"] /= 2


class Groups(Changing):
    """Begins with a part of the parameters, adds the others, and regroups them."""

    def begin(self, ctx: Any) -> None:
        layers, optimizer = ctx.model, ctx.optimizer
        if ctx.epoch == 2:
            optimizer.add_param_group({"params": list(layers[0].parameters()), "lr": 0.003})
        if ctx.epoch == 4:
            first, _ = optimizer.param_groups
            first["params"], taken = first["params"][1:], first["params"][0]
            rest = {k: v for k, v in first.items() if k != "params"}
            optimizer.param_groups.append({**rest, "params": [taken], "lr": 0.0007})

    def step(self, ctx: Any, step: int) -> None:
        if (ctx.epoch, step) == (3, 2):
            ctx.optimizer.add_param_group({"params": list(ctx.model[1].parameters()), "lr": 0.02})
            ctx.optimizer.param_groups[0]["params"] += ctx.optimizer.param_groups.pop(1)["params"]


class GroupsAtBegin(Groups):
    """The same, after another group that each beginning adds."""

    def on_train_begin(self, ctx: Any) -> None:
        ctx.optimizer.add_param_group({"params": list(ctx.model[5].parameters()), "lr": 0.05})

    def begin(self, ctx: Any) -> None:
        if ctx.epoch == 2:
            ctx.optimizer.add_param_group({"params": list(ctx.model[0].parameters()), "lr": 0.003})

    def step(self, ctx: Any, step: int) -> None: ...


class Modes(Changing):
    """Sets BatchNorm's mode, and plain attributes of layers, at any time."""

    def begin(self, ctx: Any) -> None:
        if ctx.epoch >= 2:
            ctx.model[2].p = 0.1 * ctx.epoch
        if ctx.epoch == 3:
            ctx.model[1].momentum = 0.4

    def step(self, ctx: Any, step: int) -> None:
        if step == 1:
            ctx.model[1].eval()
        if (ctx.epoch, step) == (2, 2):
            ctx.model[4].scale = 1.5


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.scale)


class Weakened(nn.Module):
    """Does the mean of dropout, because ranks that are threads share random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 - self.p) if self.training else x


def layers() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(3, 8),
        nn.BatchNorm1d(8),
        Weakened(),
        nn.Linear(8, 4),
        Scaled(),
        nn.Linear(4, 1),
    )


def adam(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def of_the_last(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.Adam([*model[3].parameters(), *model[5].parameters()], lr=0.01)


def of_one(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(model[3].parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)


def case(
    folder: Path,
    size: int,
    callbacks: Sequence[Callback] = (),
    optimizer: Callable[[nn.Sequential], torch.optim.Optimizer] = adam,
    **user: Any,
) -> Case:
    model = layers()
    return Case(
        Store.create(folder),
        model,
        optimizer(model),
        rows=4 * 4 * size,
        options={"epochs": EPOCHS, "batch_size": 4, "checkpoint_interval_s": 1e-6},
        user={"callbacks": list(callbacks), **user},
    )


def outcome(one: Case, size: int) -> tuple[Any, Checkpoint]:
    return without_times(one.train(size)), Checkpoints(one.store, RUN_DIR).load(EPOCHS)


def exact(value: Any) -> Any:
    """Return a value whose tensors compare by their bits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: exact(each) for key, each in value.items()}
    return [exact(each) for each in value] if isinstance(value, (list, tuple)) else value


def interrupted(one: Case, size: int) -> str:
    spec = replace(one.spec(), **one.options)
    with pytest.raises(RanksFailed) as e:
        run_ranks(size, lambda engine: train(spec), using=use_engine, deadline_s=60)
    return str(e.value)


@pytest.fixture(autouse=True)
def undisturbed_afterwards() -> Iterator[None]:
    yield
    Changing.at = None


@pytest.fixture(autouse=True)
def checkpoints_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cadence, "ask", lambda self, now, *, is_writing: (True, 1))


@pytest.mark.parametrize(
    ("callbacks", "optimizer", "size"),
    [
        ([Thaws(), Options(), Modes()], adam, 3),
        *left_to_soak("other callbacks, here", ([Groups()], of_the_last, 2)),
        ([GroupsAtBegin()], of_one, 1),
    ],
)
def test_run_interrupted_twice_equals_an_undisturbed_run(
    tmp_path: Path, callbacks: list[Callback], optimizer: Any, size: int
) -> None:
    """Runs are interrupted at the beginning of an epoch, and after steps before and after a change."""
    expected, whole = outcome(case(tmp_path / "a", size, callbacks, optimizer), size)
    for number, places in enumerate([[(3, 0), (4, 3)], [(2, 2), (3, 4)]]):
        one = case(tmp_path / f"b{number}", size, callbacks, optimizer)
        for epoch, step in places:
            Changing.at = (epoch, step)
            assert "Interrupted" in interrupted(one, size)
            position = Checkpoints(one.store, RUN_DIR).latest_position()
            assert position == (epoch - 1, max(0, step - 1))
        Changing.at = None
        found, last = outcome(one, size)
        assert found == expected
        for name in ("model", "optimizer", "changes"):
            assert exact(getattr(last, name)) == exact(getattr(whole, name)), name


class Settings:
    def __init__(self) -> None:
        self.factors = {"scale": 1.0}
        self.name = Path("a name")


class Configured(nn.Module):
    """Computes with attributes of every kind, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.offset = torch.zeros(1)
        self.shifts: Any = np.zeros(2, np.float32)
        self.dtype: torch.dtype = torch.bfloat16
        self.is_scaled = True
        self.seen: set[int] = set()
        self.num_calls, self.of_rank = 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_calls += 1
        self.last = x  # of a graph
        if hasattr(self, "is_scaled"):
            x = x * self.settings.factors["scale"]
        x = x.to(self.dtype).to(x.dtype) + self.offset + float(self.shifts.sum()) + self.of_rank
        return x * (1 + 0.01 * self.num_calls) * (1 + len(self.seen))


class Configures(Changing):
    """Sets attributes, weights and states in methods that a resumed run repeats, and elsewhere."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def on_train_begin(self, ctx: Any) -> None:
        ctx.model[4].offset = ctx.model[4].offset + 0.5
        ctx.model[4].settings.factors["scale"] *= 2
        # Each rank has its own values.
        ctx.model[4].of_rank = 0.1 * ctx.rank
        with torch.no_grad():
            ctx.model[5].weight.mul_(0.5)

    def begin(self, ctx: Any) -> None:
        ctx.model[1].reset_running_stats()
        ctx.optimizer.state.clear()
        with torch.no_grad():
            ctx.model[3].bias.mul_(0.9)
        if ctx.epoch == 2:
            layer = ctx.model[4]
            layer.settings.factors["scale"] = 0.3
            layer.shifts = layer.shifts + np.float32(0.1)
            layer.dtype = torch.float32
            layer.seen.add(3)
            ctx.model[0].weight.rate = torch.tensor(0.1)
            ctx.optimizer.damping = np.float64(0.5)
            self.loss.factor = 0.3
            self.loss.layer.eval()
            self.loss.bias.requires_grad_(True)

    def step(self, ctx: Any, step: int) -> None:
        if (ctx.epoch, step) == (3, 1):
            del ctx.model[4].is_scaled
            ctx.model[4].of_rank += 0.2 * ctx.rank


class DampedSGD(torch.optim.SGD):
    damping = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(getattr(p, "rate", 1.0) * float(self.damping))
        return super().step(closure)


class TrainedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(1)
        self.bias = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.factor = 1.0

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.factor * ((self.layer(output) + self.bias - label) ** 2).mean()


@pytest.mark.parametrize("place", [(3, 0), (3, 3)])
def test_resumed_run_keeps_attributes_changed_by_methods(
    tmp_path: Path, place: tuple[int, int]
) -> None:
    def new(folder: str) -> Case:
        model, loss = layers(), TrainedLoss()
        model[4] = Configured()
        both = [*model.parameters(), *loss.parameters()]
        optimizer = DampedSGD(both, lr=0.02, momentum=0.9)
        options = {"epochs": EPOCHS, "batch_size": 4, "checkpoint_interval_s": 1e-6}
        user = {"callbacks": [Configures(loss)]}
        return Case(
            Store.create(tmp_path / folder),
            model,
            optimizer,
            rows=4 * 4 * 2,
            loss=loss,
            options=options,
            user=user,
        )

    expected, whole = outcome(new("a"), 2)
    one = new("b")
    Changing.at = place
    assert "Interrupted" in interrupted(one, 2)
    Changing.at = None
    found, last = outcome(one, 2)
    assert found == expected
    for name in ("model", "optimizer", "others", "changes"):
        assert exact(getattr(last, name)) == exact(getattr(whole, name)), name

    module = layers()
    module[4] = Configured()
    finish(module, last.result)
    layer = module[4]
    assert (layer.offset, layer.dtype, layer.seen) == (torch.tensor([0.5]), torch.float32, {3})
    assert (layer.settings.factors, layer.num_calls) == ({"scale": 0.3}, 4 * EPOCHS)
    assert not hasattr(layer, "is_scaled")
    assert module[0].weight.rate == torch.tensor(0.1)


def noop(*_: Any) -> None: ...


class Alters(Callback):
    """Calls a function in a method, of one epoch or of all."""

    def __init__(self, method: str, change: Callable[[Any], Any], epoch: int | None = None) -> None:
        self.method, self.change, self.epoch = method, change, epoch

    def on_train_begin(self, ctx: Any) -> None:
        self.alter(ctx, "on_train_begin")

    def on_epoch_begin(self, ctx: Any) -> None:
        self.alter(ctx, "on_epoch_begin")

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        if ctx.step % 4 == 2:
            self.alter(ctx, "on_step_end")

    def on_epoch_end(self, ctx: Any, record: Any) -> None:
        self.alter(ctx, "on_epoch_end")

    def on_checkpoint(self, ctx: Any, path: str) -> None:
        self.alter(ctx, "on_checkpoint")

    def alter(self, ctx: Any, method: str) -> None:
        if method == self.method and self.epoch in (None, ctx.epoch):
            self.change(ctx)


class Remembers(Alters):
    """States that it keeps its changes."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def hook_layer(ctx: Any) -> None:
    ctx.model[0].register_forward_hook(noop)


def hook_parameter(ctx: Any) -> None:
    ctx.model[5].bias.register_hook(noop)


def hook_optimizer(ctx: Any) -> None:
    ctx.optimizer.register_step_pre_hook(noop)


def replace_layer(ctx: Any) -> None:
    ctx.model[2] = nn.Dropout(0.5)


def replace_forward(ctx: Any) -> None:
    ctx.model[2].forward = torch.relu


def add_layer(ctx: Any) -> None:
    ctx.model.append(nn.Linear(1, 1))


def add_buffer(ctx: Any) -> None:
    ctx.model[2].register_buffer("mean", torch.zeros(1))


def replace_parameter(ctx: Any) -> None:
    ctx.model[5].bias = nn.Parameter(torch.zeros(1))


def add_foreign_group(ctx: Any) -> None:
    ctx.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def slow_down(ctx: Any) -> None:
    ctx.optimizer.param_groups[0]["lr"] *= 0.1


def freeze(ctx: Any) -> None:
    ctx.model[0].requires_grad_(False)


def replace_rate(ctx: Any) -> None:
    ctx.scheduler.lr_lambdas[0] = constant


def constant(epoch: int) -> float:
    return 0.1


def add_function(ctx: Any) -> None:
    ctx.optimizer.param_groups[0]["function"] = noop


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            Alters("on_epoch_begin", hook_layer, 2),
            "The callback Alters changed the model in on_epoch_begin of epoch 2: a hook of '0' is"
            " new. A checkpoint cannot hold this change, so a resumed run would differ. Make the "
            "change in on_train_begin, which a resumed run calls too.",
        ),
        (
            Alters("on_epoch_end", hook_parameter, 2),
            "in on_epoch_end of epoch 2: a hook of '5.bias' is new.",
        ),
        (Alters("on_epoch_end", hook_optimizer), "a hook of 'the optimizer' is new"),
        (Alters("on_epoch_end", replace_forward), "the attribute '2.forward' is new"),
        (
            Alters("on_step_end", replace_layer),
            "in on_step_end of epoch 1: the layer '2' is another one",
        ),
        (
            Remembers("on_train_begin", add_layer),
            "The callback Remembers changed the model in on_train_begin: the parameter '6.",
        ),
        (Alters("on_step_end", add_buffer), "in on_step_end: the buffer '2.mean' is new"),
        (
            Alters("on_epoch_end", replace_parameter),
            "in on_epoch_end: the parameter '5.bias' is another one",
        ),
        (
            Alters("on_epoch_end", add_foreign_group),
            "optimizer.param_groups[1] has a parameter of shape (2,) that the model does not have, so a checkpoint",
        ),
        (
            Alters("on_epoch_begin", add_function, 1),
            "optimizer.param_groups[0]['function'] is <function noop",
        ),
        (
            Alters("on_checkpoint", slow_down, 2),
            "The callback Alters changed the optimizer in on_checkpoint of epoch 2, after the "
            "checkpoint, so a run that resumes from the checkpoint would differ. Make this change in "
            "on_epoch_end.",
        ),
        (Alters("on_checkpoint", freeze, 2), "changed the model in on_checkpoint of epoch 2"),
        (
            Alters("on_epoch_begin", replace_rate, 1),
            "the function 'the scheduler.lr_lambdas[0]' is another one",
        ),
    ],
)
def test_changes_that_checkpoints_cannot_store_raise_immediately(
    tmp_path: Path, callback: Callback, message: str
) -> None:
    one = case(tmp_path / "store", 1, [callback])
    if "scheduler" in message:
        one.lr_scheduler = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1.0)
    assert message in interrupted(one, 1)
    assert Checkpoints(one.store, RUN_DIR).latest_position() < (3, 0)


class MakesItsState(Callback):
    """Has no state before `on_train_begin`, and swaps weights during `on_checkpoint`."""

    found: dict[str, Any] | None = None

    def on_train_begin(self, ctx: Any) -> None:
        self.averages = torch.optim.swa_utils.AveragedModel(ctx.model)
        if self.found is not None:
            self.averages.load_state_dict(self.found)

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        self.averages.update_parameters(ctx.model)

    def on_checkpoint(self, ctx: Any, path: str) -> None:
        kept = {n: v.clone() for n, v in ctx.model.state_dict().items()}
        ctx.model.load_state_dict(self.averages.module.state_dict())
        ctx.model.load_state_dict(kept)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.averages.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state


def test_callback_may_create_its_state_when_training_begins(tmp_path: Path) -> None:
    expected, whole = outcome(case(tmp_path / "a", 1, [MakesItsState()]), 1)
    one = case(tmp_path / "b", 1, [MakesItsState(), Changing()])
    Changing.at = (3, 3)
    assert "Interrupted" in interrupted(one, 1)
    Changing.at = None
    found, last = outcome(one, 1)
    assert found == expected
    key = next(iter(whole.callbacks or {}))
    assert exact((last.callbacks or {})[key]) == exact((whole.callbacks or {})[key])


class Briefly(Callback):
    """Has a hook during an epoch."""

    def on_epoch_begin(self, ctx: Any) -> None:
        self.handle = ctx.model[0].register_forward_hook(noop)

    def on_epoch_end(self, ctx: Any, record: Any) -> None:
        self.handle.remove()


def test_repeatable_and_reverted_changes_are_allowed(tmp_path: Path) -> None:
    callbacks = [
        Alters("on_train_begin", hook_layer),
        Alters("on_train_begin", replace_layer),
        Alters("on_train_begin", replace_forward),
        Remembers("on_epoch_end", hook_optimizer, 2),
        Alters("on_step_end", lambda ctx: ctx.model(torch.zeros(2, 3))),
        Briefly(),
    ]
    one = case(tmp_path / "store", 1, callbacks)
    assert one.train(1).epoch == EPOCHS


def test_resumed_train_fn_gets_flags_modes_and_groups_back(tmp_path: Path) -> None:
    def train_fn(ctx: Any) -> None:
        for epoch in range(ctx.start_epoch, ctx.epochs):
            for batch in ctx.train_loader:
                ctx.optimizer.zero_grad()
                ctx.backward(((ctx.model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean())
                ctx.optimizer.step()
            if epoch == 1:
                ctx.model[1].eval()
                ctx.model[3].requires_grad_(False)
                ctx.optimizer.add_param_group({"params": list(ctx.model[0].parameters())})
            ctx.log({"loss": 0.0})
            ctx.save_checkpoint()
            if (epoch + 1, 0) == Changing.at:
                raise Interrupted

    options: dict[str, Any] = {"train_fn": train_fn}
    expected = outcome(case(tmp_path / "a", 2, (), of_the_last, **options), 2)[1]
    one = case(tmp_path / "b", 2, (), of_the_last, **options)
    Changing.at = (3, 0)
    assert "Interrupted" in interrupted(one, 2)
    Changing.at = None
    found = outcome(one, 2)[1]
    assert exact(found.model) == exact(expected.model)
    assert exact(found.optimizer) == exact(expected.optimizer)
    assert found.changes == expected.changes
    assert found.changes["evaluating"] == ["1"]


def test_checkpoint_of_an_older_format_is_resumed(tmp_path: Path) -> None:
    """The test removes the entries that older checkpoints do not have."""
    one = case(tmp_path / "store", 1, [Options()])
    Changing.at = (3, 0)
    assert "Interrupted" in interrupted(one, 1)
    Changing.at = None
    path = one.store.local_path(Checkpoints(one.store, RUN_DIR).path(2))
    assert path is not None
    content = torch.load(path, weights_only=True)
    assert content.pop("changes")
    with open(path, "wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT_VERSION", 4)
        del content["format_version"]
        older = types.SimpleNamespace(**content)
        write_checkpoint(cast("Checkpoint", older), file)
    assert one.train(1).epoch == EPOCHS
