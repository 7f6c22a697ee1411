"""State of the user's losses and metrics: parameters, buffers, and states of objects.

A loss may be a module, hold a module, or be a function whose code refers to a module. All objects that `references`
finds belong to the state, except parts of the model.
"""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metrics import AnyMetric, Metric
from sparkhvd.training.modules.architecture import dump_shell, load_shell, tensors_of
from sparkhvd.training.modules.attributes import unreadable_type
from sparkhvd.training.references import is_of_users_class, references
from sparkhvd.training.to_device import to_cpu
from sparkhvd.training.types import State, Stateful


class LossState:
    """Parameters, buffers and states of a fit's losses and metrics.

    The names are equal in every process.

    Attributes:
        parameters: parameters by name, except the model's; includes tensors that require a gradient.
        trained: parameters to pass to a function that makes an optimizer: parameters of the losses themselves, but not
            parameters that only the code of a function refers to.
    """

    def __init__(
        self,
        losses: Sequence[object] = (),
        metrics: Sequence[AnyMetric] = (),
        model: nn.Module | None = None,
        steps: Mapping[str, object] = MappingProxyType({}),
        *,
        trains: bool = True,
    ) -> None:
        """Find the state.

        Args:
            losses: one loss per label.
            metrics: metrics; only functions are searched, because torchmetrics are reset in each pass.
            model: model of the fit.
            steps: the user's functions that compute losses, by name.
            trains: whether the losses train the model.
        """
        functions = {f"loss{i}": loss for i, loss in enumerate(losses)}
        functions |= {f"metric {m.name}": m.function for m in metrics if isinstance(m, Metric)}
        functions.update({name: step for name, step in steps.items() if step is not None})
        self._functions = tuple(functions)
        self._of_model = _ids(model)
        self._roots: list[tuple[str, nn.Module]] = []
        self._objects: dict[str, Stateful] = {}
        self._holders: dict[str, object] = {}
        self.parameters: dict[str, Tensor] = {}
        self.trained: list[Tensor] = []
        # Names of functions that compute training losses.
        self._of_training = tuple(
            name
            for name in functions
            if name == "train_step" or (trains and name.startswith("loss"))
        )
        for name, function in functions.items():
            self._add(name, function, trains=trains and name.startswith("loss"))
        # Versions of frozen parameters. Checkpoints omit unchanged frozen parameters, because the program has their
        # values.
        self._versions: dict[str, int] = {}
        # Initial buffers. Checkpoints omit buffers, such as class weights, that training has not changed.
        self._first_buffers: dict[str, Tensor] = {}
        self._loaded: set[str] = set()

    def _add(self, name: str, function: object, *, trains: bool) -> None:
        for path, found, is_own in references(function, self._of_model):
            full = f"{name}.{path}" if path else name
            if isinstance(found, nn.Module):
                if not _is_constant(found):
                    named = self._add_module(full, found)
                    self._add_parameters(named, trains=trains and is_own)
            elif isinstance(found, Tensor):
                if _is_parameter(found):
                    self._add_parameters({full: found}, trains=trains and is_own)
            elif _has_state(found):
                if not any(found is each for each in self._objects.values()):
                    self._objects[full] = cast("Stateful", found)
            elif _may_change(found) and not any(found is each for each in self._holders.values()):
                self._holders[full] = found

    def _add_module(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        """Add a module, and return its parameters by name."""
        if all(part is not module for _, root in self._roots for part in root.modules()):
            self._roots.append((name, module))
        return {f"{name}.{n}": p for n, p in module.named_parameters()}

    def _add_parameters(self, named: Mapping[str, Tensor], *, trains: bool) -> None:
        taken = self._of_model | set(map(id, self.parameters.values()))
        self.parameters.update({n: p for n, p in named.items() if id(p) not in taken})
        if trains:
            taken = self._of_model | set(map(id, self.trained))
            new = (p for p in named.values() if p.requires_grad and id(p) not in taken)
            self.trained += new

    def __bool__(self) -> bool:
        return bool(self.parameters or self._roots or self._objects)

    def holders(self) -> Iterator[tuple[str, object]]:
        """Yield by name the mutable objects referenced by losses, metrics and steps.

        These are the user's objects, functions with attributes, dicts, lists and sets. Modules, parameters, classes,
        objects with their own state, and objects of libraries are excluded.
        """
        yield from self._holders.items()

    def untrained(self, held: Collection[int]) -> list[str]:
        """Find the names of trainable parameters of training losses missing from the optimizer.

        Modules in evaluation mode are skipped.

        Args:
            held: ids of the parameters of the optimizer.
        """
        modules = (part for _, part in self.modules() if not part.training)
        fixed = {id(p) for part in modules for p in part.parameters(recurse=False)}
        return [
            name
            for name, p in self.parameters.items()
            if p.requires_grad
            and id(p) not in fixed | set(held)
            and name.split(".")[0] in self._of_training
        ]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each module by name once, without modules of the model."""
        seen = set(self._of_model)
        for root, module in self._roots:
            for path, part in module.named_modules():
                if id(part) not in seen:
                    seen.add(id(part))
                    yield f"{root}.{path}" if path else root, part

    def buffers(self) -> dict[str, Tensor]:
        """Collect the current buffers by name, including non-persistent buffers."""
        return {
            f"{name}.{leaf}": value
            for name, part in self.modules()
            for leaf, value in part._buffers.items()
            if value is not None
        }

    def load_buffers(self, values: Mapping[str, Tensor | None]) -> None:
        """Set buffers to these values. None removes a buffer's value."""
        parts = dict(self.modules())
        with torch.no_grad():
            for name, value in values.items():
                path, _, leaf = name.rpartition(".")
                old = parts[path]._buffers.get(leaf) if path in parts else None
                if old is not None and value is not None and old.shape == value.shape:
                    old.copy_(value)
                elif path in parts:
                    parts[path]._buffers[leaf] = None if value is None else value.to(self._device())

    def _device(self) -> torch.device:
        tensors = itertools.chain(self.parameters.values(), self.buffers().values())
        return next((each.device for each in tensors), torch.device("cpu"))

    def extra_states(self) -> State:
        """Collect the modules' extra states (`get_extra_state`) by name, on the CPU."""
        return {
            name: to_cpu(part.get_extra_state())
            for name, part in self.modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }

    def load_extra_states(self, states: Mapping[str, object]) -> None:
        """Load the states of `extra_states`."""
        parts = dict(self.modules())
        for name in parts.keys() & states.keys():
            parts[name].set_extra_state(states[name])

    def to(self, device: torch.device) -> None:
        """Move modules and parameters to a device in place, because an optimizer refers to them."""
        for _, module in self._roots:
            module.to(device)
        for parameter in self.parameters.values():
            if parameter.device != device:
                parameter.data = parameter.data.to(device)

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Collect the state for a checkpoint, or {} if losses and metrics have no state.

        Raises:
            InvalidArgumentError: the state of an object cannot be read back.
        """
        if not self:
            return {}
        unchanged = {
            name
            for name, version in self._versions.items()
            if self.parameters[name]._version == version and name not in self._loaded
        }
        return {
            "parameters": {n: p.detach() for n, p in self.parameters.items() if n not in unchanged},
            "buffers": {n: b for n, b in self.buffers().items() if self._is_changed(n, b)},
            "extra": self.extra_states(),
            "objects": {
                name: _readable(name, each.state_dict()) for name, each in self._objects.items()
            },
        }

    def _is_changed(self, name: str, buffer: Tensor) -> bool:
        first = self._first_buffers.get(name)
        return (
            first is None
            or name in self._loaded
            or first.shape != buffer.shape
            or not torch.equal(first, buffer.cpu())
        )

    def load_state_dict(self, state: Mapping[str, Any], what: str) -> None:
        """Load the state of a checkpoint.

        Entries of unknown functions are ignored, and values without an entry stay.

        Raises:
            InvalidArgumentError: a parameter has another shape, or does not exist.
        """
        own_names = tuple(f"{name}." for name in self._functions)
        parameters = {
            n: value
            for n, value in state.get("parameters", {}).items()
            if f"{n}.".startswith(own_names)
        }
        for name, value in parameters.items():
            own = self.parameters.get(name)
            if own is None or own.shape != value.shape:
                found = "none" if own is None else f"{tuple(own.shape)}"
                raise InvalidArgumentError(
                    f"{what} not fit this loss: parameter {name!r} has shape {tuple(value.shape)} there, but {found} in this loss. Give the "
                    "same loss, or another run_id."
                )
        with torch.no_grad():
            for name, value in parameters.items():
                self.parameters[name].copy_(value)
                self._loaded.add(name)
        self.load_buffers(state.get("buffers", {}))
        self._loaded |= state.get("buffers", {}).keys()
        self.load_extra_states(state.get("extra", {}))
        for name in self._objects.keys() & state.get("objects", {}).keys():
            self._objects[name].load_state_dict(state["objects"][name])

    def rank_state(self) -> State:
        """Collect the state with possible differences between ranks inside an epoch.

        Tensors are on the CPU. The result is {} if nothing can differ.
        """
        state = {
            "buffers": to_cpu(self.buffers()),
            "extra": self.extra_states(),
            "objects": {name: to_cpu(each.state_dict()) for name, each in self._objects.items()},
        }
        return state if any(state.values()) else {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Restore a rank's own state."""
        self.load_state_dict(state, "")

    # -- ranks ---------------------------------------------------------------------------------------

    def begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Send rank 0's state to all ranks. All ranks must call it before the first step.

        Checkpoints will omit parameters that are not in the optimizer and do not change after this, because the program
        has their values.
        """
        if not self:
            return
        if self.parameters:
            hvd.broadcast_parameters(self.parameters, 0)
        self.share()
        self._first_buffers = {n: b.detach().cpu().clone() for n, b in self.buffers().items()}
        stepped = _stepped(optimizer)
        self._versions = {
            name: p._version
            for name, p in self.parameters.items()
            if id(p) not in stepped and (optimizer is not None or not p.requires_grad)
        }

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
        """List an optimizer's parameters of losses, under names different from the model's."""
        stepped = _stepped(optimizer)
        return [(f".{name}", p) for name, p in self.parameters.items() if id(p) in stepped]

    def share(self) -> None:
        """Broadcast rank 0's buffers and states. All ranks must call it.

        The states differ between ranks, because each rank's batches changed them.
        """
        if not (self._roots or self._objects):
            return
        state = self.rank_state() if hvd.rank() == 0 else None
        state = hvd.broadcast_object(state, 0, name="others")
        if hvd.rank():
            gone = self.buffers().keys() - state.get("buffers", {}).keys()
            self.load_buffers(dict.fromkeys(gone))
            self.load_rank_state(state)


def _readable(name: str, state: State) -> State:
    if kind := unreadable_type(state):
        raise InvalidArgumentError(
            f"The {name} has a {kind} in its state_dict(), so a checkpoint with it could not be read. A state may hold numbers, "
            "texts, lists, dicts and tensors."
        )
    return state


def returned_loss(
    losses: Sequence[object],
    model: nn.Module,
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    is_changed: bool = False,
) -> object:
    """Copy the losses of a fit and load their trained state.

    The result is one loss, or a list with one per label. Losses without state are not copied.

    Args:
        losses: the losses that the user gave.
        model: the user's model.
        module: the trained module; copies of losses refer to it instead of the model.
        state: state of losses and metrics in a checkpoint.
        is_changed: whether the losses' attributes have changed too; then they are copied even without state.
    """
    made = losses
    if (state and LossState(losses, (), model)) or is_changed:
        made = load_shell(dump_shell(model, tuple(losses)), tensors_of(module))
        LossState(made).load_state_dict(state, "The state of the checkpoint does")
    if not made:
        return None
    return made[0] if all(each is made[0] for each in made) else list(made)


def _stepped(optimizer: torch.optim.Optimizer | None) -> set[int]:
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(p) for group in groups for p in group["params"]}


def _ids(model: nn.Module | None) -> set[int]:
    if model is None:
        return set()
    return {id(part) for part in itertools.chain(model.modules(), model.parameters())}


def _has_state(value: object) -> bool:
    """Whether an object other than a module has a state."""
    if isinstance(value, (nn.Module, type)):
        return False
    return all(callable(getattr(type(value), n, None)) for n in ("state_dict", "load_state_dict"))


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


def _may_change(value: object) -> bool:
    if isinstance(value, types.FunctionType):
        return bool(vars(value))
    return isinstance(value, (dict, list, set, collections.deque)) or is_of_users_class(value)


def _is_constant(module: nn.Module) -> bool:
    """Check whether a module is a torch loss. Its buffers (class weights) are constant options."""
    return type(module).__module__ == "torch.nn.modules.loss"
