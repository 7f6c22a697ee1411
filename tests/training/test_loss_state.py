"""Losses and metrics with parameters, buffers and states: trained, shared, kept and returned."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import Callback, TorchModel
from sparkhvd.estimator.saving.encoding import Archive
from sparkhvd.estimator.saving.persistence import decode_fitted, encode_model
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.loss_functions import resolve_losses
from sparkhvd.training.loss_state import LossState, returned_loss
from sparkhvd.training.metrics import resolve_metrics
from sparkhvd.training.modules.attributes import Attributes
from sparkhvd.training.optimizer import check_optimizer
from tests.harness.plans import batch_rows
from tests.harness.ranks import RanksFailed
from tests.training.ranks import RUN_DIR, Case, linear, without_times

pytestmark = pytest.mark.ranks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


class Uncertain(nn.Module):
    """A loss with a learned weight per task."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(1))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        error = ((output - label) ** 2).mean()
        return (error * torch.exp(-self.log_var) + self.log_var).squeeze()


class Centred(nn.Module):
    """A loss with a buffer that follows the rows of a rank, and a count outside state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * label.detach().mean()
        self.calls += 1
        return ((output - label - self.centre) ** 2).mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def case(store: Store, loss: Any, optimizer: Any = adam, **fields: Any) -> Case:
    options = {"batch_size": 16, "epochs": 2, **fields.pop("options", {})}
    return Case(
        store,
        fields.pop("model", None) or linear(),
        optimizer,
        loss=loss,
        options=options,
        **fields,
    )


class Holder:
    """A loss that is a plain object and keeps a module deep inside."""

    def __init__(self, loss: nn.Module) -> None:
        self.parts = {"first": [loss]}

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        result: Tensor = self.parts["first"][0](output, label)
        return result


@pytest.mark.parametrize(
    "kind", ["function", "instance", "closure", "method", "holder", "train_step"]
)
@pytest.mark.parametrize("size", [1, 2])
def test_loss_parameters_are_trained_as_in_one_process(store: Store, kind: str, size: int) -> None:
    model, loss = linear(), Uncertain()
    optimizer: Any = adam
    if kind not in ("function", "holder"):
        optimizer = adam([*model.parameters(), loss.log_var])
    kinds = {
        "closure": lambda o, t: loss(o, t),
        "method": loss.forward,
        "holder": Holder(loss),
    }
    given: Any = kinds.get(kind, loss)
    used = case(store, given, optimizer, model=model)
    if kind == "train_step":

        def step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
            result: Tensor = loss(model(batch["x"]), batch["y"][:, None])
            return result

        used.loss, used.user = None, {"train_step": step}
    losses = [] if kind == "train_step" else [given]
    steps = used.user
    assert check_optimizer(optimizer, model, model, LossState(losses, (), model, steps))
    used.train(size)

    # Plain PyTorch, in one process, on batches of all ranks.
    expected, criterion = copy.deepcopy((model, loss))
    plain = adam([*expected.parameters(), criterion.log_var])
    for rows in batches(used, size, 2):
        plain.zero_grad()
        x, y = (torch.from_numpy(used.values[name][rows]) for name in "xy")
        criterion(expected(x), y[:, None]).backward()
        plain.step()
    assert criterion.log_var.abs() > 0.05
    found = used.checkpoint(2)
    names = {
        "closure": "loss0.loss.log_var",
        "holder": "loss0.parts.first.0.log_var",
        "train_step": "train_step.loss.log_var",
    }
    name = names.get(kind, "loss0.log_var")
    assert set(found.others["parameters"]) == {name}  # and none that stays unchanged
    torch.testing.assert_close(found.others["parameters"][name], criterion.log_var.detach())
    torch.testing.assert_close(found.model, dict(expected.state_dict()))
    assert loss.log_var == 0  # the given object is not changed
    if kind == "train_step":
        return
    made: Any = returned_loss([given], model, model, found.others)
    back = (
        made.__closure__[0].cell_contents if kind == "closure" else getattr(made, "__self__", made)
    )
    back = back.parts["first"][0] if kind == "holder" else back
    assert torch.equal(back.log_var, found.others["parameters"][name])
    assert torch.equal(back.fixed, torch.ones(3))


def batches(used: Case, size: int, epochs: int) -> list[Any]:
    """Return the rows of each step over all ranks."""
    with Reader(
        used.store,
        Manifest.load(used.store, "data/k/app"),
        rank=0,
        size=1,
        batch_size=size * used.options["batch_size"],
        seed=0,
        shuffle=True,
        drop_last=False,
    ) as reader:
        plans = [reader.plan(epoch) for epoch in range(epochs)]
    return [batch_rows(plan, 0, step) for plan in plans for step in range(plan.num_steps)]


class OfTensors:
    """A loss with a tensor that requires a gradient, and one whose gradient is never computed."""

    def __init__(self) -> None:
        self.shift = torch.zeros(1, requires_grad=True)
        self.unused = torch.ones(2, requires_grad=True)

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        return ((output - label - self.shift) ** 2).mean()


def test_loss_tensors_that_require_a_gradient_are_trained(store: Store) -> None:
    def decays(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)

    model, loss = linear(), OfTensors()
    used = case(store, loss, decays, model=model)
    used.train(2)
    expected = copy.deepcopy(model)
    plain = decays([*expected.parameters(), loss.shift, loss.unused])
    for rows in batches(used, 2, 2):
        plain.zero_grad()
        x, y = (torch.from_numpy(used.values[name][rows]) for name in "xy")
        loss(expected(x), y[:, None]).backward()
        plain.step()
    found = used.checkpoint(2).others["parameters"]
    torch.testing.assert_close(found["loss0.shift"], loss.shift.detach())
    assert torch.equal(found["loss0.unused"], torch.ones(2))


def test_warning_names_parameters_missing_from_the_optimizer() -> None:
    model, loss = linear(), Uncertain()

    def closure(output: Tensor, label: Tensor) -> Tensor:
        result: Tensor = loss(output, label)
        return result

    def said(optimizer: Any, others: LossState) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_optimizer(optimizer, model, model, others)
        return [str(each.message) for each in caught]

    text = "in the optimizer: {}. They are not trained. Give an optimizer with"
    named, steps = (
        LossState([closure], (), model),
        LossState((), (), model, {"train_step": closure}),
    )
    assert text.format("loss0.loss.log_var") in said(adam, named)[0]
    assert text.format("train_step.loss.log_var") in said(adam(model.parameters()), steps)[0]
    assert (
        text.format("loss0.log_var")
        in said(adam(model.parameters()), LossState([loss], (), model))[0]
    )
    # Trained parameters, parameters of a validation loss and of a metric, and fixed ones, as of a teacher.
    both = [*model.parameters(), loss.log_var]
    for optimizer, others in (
        (adam(both), named),
        (lambda _: adam(both), named),
        (adam, LossState([loss], (), model)),
        (adam, LossState([closure], (), model, trains=False)),
        (adam, LossState((), resolve_metrics([closure], ["y"], ["value"]), model)),
        (adam, LossState((), (), model, {"validation_step": closure})),
    ):
        assert said(optimizer, others) == []
    loss.eval()
    assert said(adam, named) == []
    loss.train().requires_grad_(False)
    assert said(adam, named) == []


class Beta:
    """A training step that increases a weight, and has own objects."""

    def __init__(self) -> None:
        self.beta, self.inner, self.counts = 0.0, Counting(), Plain()

    def __call__(self, *args: Any) -> Tensor:
        return torch.zeros(())


class Plain:
    calls = 0


class InSlots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, *args: Any) -> Tensor:
        return torch.zeros(())


def counted(output: Tensor, label: Tensor, counts: Any = {"calls": 0}) -> Tensor:  # noqa: B006
    return torch.zeros(())


counted.calls = 0  # type: ignore[attr-defined]


def test_changes_in_loss_dicts_functions_and_slots_are_recorded() -> None:
    others = LossState([InSlots(), counted])
    attributes = Attributes(lambda: dict(others.holders()))
    held = dict(others.holders())
    held["loss0"].weight = 0.5  # type: ignore[attr-defined]
    held["loss1"].calls += 1  # type: ignore[attr-defined]
    held["loss1.counts"]["calls"] += 2  # type: ignore[index]
    entries = attributes.changes()
    assert [entry[:2] for entry in entries] == [
        ["loss0", [[".", "weight"]]],
        ["loss1", [[".", "calls"]]],
        ["loss1.counts", []],
    ]
    attributes.reset()
    assert attributes.changes() == []
    attributes.load(entries, own=True)
    assert attributes.changes() == entries


def test_loss_objects_whose_attributes_may_change_are_listed() -> None:
    step, net, plain = Beta(), linear(), Plain()
    metrics = resolve_metrics([lambda o, t: plain.calls], ["y"], ["value"])
    others = LossState([nn.MSELoss(), Holder(net)], metrics, net, {"train_step": step})
    assert [name for name, _ in others.holders()] == [
        "loss1",
        "loss1.parts",
        "loss1.parts.first",
        "metric <lambda>.plain",
        "train_step",
        "train_step.counts",
    ]
    assert dict(others.holders())["train_step"] is step
    assert list(others.state_dict()["objects"]) == ["train_step.inner"]  # has a state of its own


class Fails(Callback):
    """Ends a run in a step after its first checkpoint inside an epoch."""

    behind: Checkpoints | None = None

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        if Fails.behind and ctx.epoch > 1:
            time.sleep(0.02)  # checkpoints are written in parallel to the training
            if Fails.behind.latest_position() > (1, 0):
                raise ValueError("a loss")


class Counting:
    """A metric object with a state: it counts its calls in all epochs."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, label: Tensor) -> float:
        self.calls += 1
        return float(self.calls)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Both(nn.Module):
    """A loss with parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.uncertain, self.centred = Uncertain(), Centred()

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        result: Tensor = self.uncertain(output, label) + self.centred(output, label)
        return result


class Annealed(Holder):
    """A loss object that increases its weight."""

    beta = 1.0

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        self.beta += 0.1
        return self.beta * super().__call__(output, label)


@pytest.mark.parametrize("ended", ["inside an epoch", "between epochs"])
def test_resumed_run_with_loss_state_equals_an_uninterrupted_run(store: Store, ended: str) -> None:
    options = {"epochs": 3, "batch_size": 8, "has_validation": True, "validation": 0.25}
    fields: dict[str, Any] = {"metrics": {"count": Counting()}, "user": {"callbacks": [Fails()]}}
    other = Store.create(Path(store.url.removeprefix("file://")) / "2")
    undisturbed = case(other, Annealed(Both()), options=options, **fields)
    expected = undisturbed.train(2)
    interrupted = case(store, Annealed(Both()), options=options, **fields)
    if ended == "inside an epoch":
        Fails.behind = Checkpoints(store, RUN_DIR)
        try:
            with pytest.raises(RanksFailed):
                interrupted.train(2, checkpoint_interval_s=1e-6)
        finally:
            Fails.behind = None
        assert Checkpoints(store, RUN_DIR).latest_position() > (1, 0)
    else:
        interrupted.train(2, epochs=1)
    assert repr(without_times(interrupted.train(2))) == repr(without_times(expected))
    found, wanted = interrupted.checkpoint(3), undisturbed.checkpoint(3)
    for part in ("parameters", "buffers"):
        assert found.others[part].keys() == wanted.others[part].keys()
        for name, value in found.others[part].items():
            assert torch.equal(value, wanted.others[part][name]), name
    names = {"loss0.parts.first.0.centred.centre", "loss0.parts.first.0.centred.calls"}
    assert found.others["buffers"].keys() == names
    assert found.others["objects"] == wanted.others["objects"]
    assert found.others["objects"]["metric count"]["calls"] > 6


def test_the_returned_loss_excludes_the_state_of_train_step() -> None:
    model, loss, other = linear(), Uncertain(), Uncertain()
    others = LossState([loss], (), model, {"train_step": lambda *_: other})
    with torch.no_grad():
        loss.log_var.fill_(3.0)
    state = copy.deepcopy(others.state_dict())
    assert "train_step.other.log_var" in state["parameters"]
    back: Any = returned_loss([Uncertain()], model, model, state)
    assert back.log_var == 3.0


def test_run_can_start_with_the_loss_state_of_another(store: Store) -> None:
    case(store, Uncertain()).train(1)
    path = Checkpoints(store, RUN_DIR).path(2)
    trained = case(store, Uncertain()).checkpoint(2).others["parameters"]["loss0.log_var"]
    further = case(store, Uncertain(), lambda p: torch.optim.SGD(p, lr=0.0))
    store.write_bytes("kept.pt", store.read_bytes(path))
    store.delete(RUN_DIR)
    further.train(1, start_from="kept.pt")
    assert torch.equal(further.checkpoint(2).others["parameters"]["loss0.log_var"], trained)


class Scaled(nn.Module):
    """A loss with a buffer that training does not change, such as weights of classes."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return self.alpha * ((output - label) ** 2).mean()


def test_run_started_from_another_run_keeps_its_own_loss_buffers(store: Store) -> None:
    case(store, Scaled(1.0), lambda p: torch.optim.SGD(p, lr=0.0)).train(1)
    store.write_bytes("kept.pt", store.read_bytes(Checkpoints(store, RUN_DIR).path(2)))
    losses = {}
    for alpha in (1.0, 1000.0):
        store.delete(RUN_DIR)
        further = case(store, Scaled(alpha), lambda p: torch.optim.SGD(p, lr=0.0))
        further.train(1, start_from="kept.pt")
        losses[alpha] = further.checkpoint(2).history[-1]["loss"]
    assert losses[1000.0] == pytest.approx(1000 * losses[1.0])


def test_checkpoint_without_loss_state_loads_and_other_shapes_raise(store: Store) -> None:
    used = case(store, Uncertain(), options={"epochs": 1})
    used.train(1)
    checkpoints = Checkpoints(store, RUN_DIR)
    whole = checkpoints.load(1)
    checkpoints.save(replace(whole, others={}))
    used.train(1, epochs=2)
    assert used.checkpoint(2).others["parameters"]["loss0.log_var"] != 0

    others = {**whole.others, "parameters": {"loss0.log_var": torch.zeros(2)}}
    Checkpoints(store, RUN_DIR).save(replace(whole, others=others))
    store.delete(checkpoints.path(2))
    with pytest.raises(RanksFailed) as failed:
        used.train(2, epochs=2)
    for error in failed.value.errors.values():
        assert "parameter 'loss0.log_var' has shape (2,) there, but (1,) in this loss" in str(error)


def test_loss_parameters_train_with_bf16_clipping_and_accumulation(store: Store) -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_norm": 0.1, "accumulate": 2, "epochs": 1}
    used = case(store, Both(), options=options)
    used.train(2)
    assert used.checkpoint(1).others["parameters"]["loss0.uncertain.log_var"] != 0


def test_per_row_losses_of_several_labels_share_loss_parameters() -> None:
    class PerRow(Uncertain):
        reduction = "mean"

    loss = PerRow()
    given = (loss, loss)
    used, _ = resolve_losses([loss, loss], 2, per_row=True)
    assert list(LossState(used).parameters) == list(LossState(given).parameters)
    assert [id(p) for p in LossState(used).trained] == [id(loss.log_var)]


def test_loss_state_excludes_model_parameters_and_torch_loss_options() -> None:
    model = linear()

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.first = model, model[0].weight

        def forward(self, output: Tensor, label: Tensor) -> Tensor:
            return ((output - label) ** 2).mean() + self.first.norm()

    own = LossState([Penalty()], (), model)
    assert (own.parameters, own.trained, own.buffers()) == ({}, [], {})
    assert not LossState([lambda o, t: model(o)], (), model).parameters
    assert not LossState([nn.CrossEntropyLoss(weight=torch.ones(3))])
    assert returned_loss([nn.MSELoss], model, model, {}) is nn.MSELoss


def test_optimizer_of_another_model_is_refused() -> None:
    model = linear()
    loss = Uncertain()
    with pytest.raises(
        InvalidArgumentError,
        match="the model does not have, .* parameters\\(\\) and the loss's parameters",
    ):
        check_optimizer(adam(linear().parameters()), model, model, LossState([loss], (), model))


def test_error_names_a_metric_whose_state_cannot_be_reloaded(store: Store) -> None:
    class Odd(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"store": store}

    with pytest.raises(RanksFailed) as failed:
        case(store, nn.MSELoss(), metrics={"odd": Odd()}).train(1)
    assert str(failed.value.errors[0]).startswith("The metric odd has a Store in its state_dict()")


def test_saved_model_contains_its_loss() -> None:
    net, loss = linear(), Uncertain()
    with torch.no_grad():
        loss.log_var.fill_(0.5)
    model = TorchModel.from_module(net, loss=loss, feature_cols=["x"], label_cols=["y"])
    got = model.getLoss()
    assert got is not loss
    assert got.log_var == 0.5
    archive = Archive()
    content = encode_model(model, archive)
    assert content["loss"] == {"code": "loss", "what": f"{__name__}.Uncertain"}
    assert not any(
        "log_var" in name for name in archive.tensors
    )  # the file of weights is the model's

    class Reading:
        prefixes: dict[str, str] = {}

        def decode(self, name: str, value: object) -> object:
            return net if name == "model" else loss

    assert decode_fitted(content, Reading()).loss is loss  # type: ignore[arg-type]
    content.pop("loss")  # as those that were saved before
    assert decode_fitted(content, Reading()).loss is None  # type: ignore[arg-type]
    plain = TorchModel.from_module(net, loss=nn.MSELoss(), feature_cols=["x"], label_cols=["y"])
    assert "loss" not in encode_model(plain, Archive())
