"""Detection of callbacks' model changes that a checkpoint cannot keep.

A relaunched or resumed run builds the program's model and optimizer, loads the checkpoint and calls `on_train_begin`, then
`on_epoch_begin`. These two methods may make any change except new parameters, because a resumed run repeats them. In
other methods, checkpoints keep changes of module attributes with plain values; other changes raise an error.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.modules.attributes import GENERATORS, can_be_kept, is_record
from sparkhvd.training.modules.weights import checksum

if TYPE_CHECKING:  # an import at run time would be circular
    from sparkhvd.training.loss_state import LossState


_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_ABSENT = object()
# Kinds of differences.
_PARAMETER, _BUFFER, _LAYER, _ATTRIBUTE, _HOOK = "parameter", "buffer", "layer", "attribute", "hook"
_FUNCTION = "function"

# For each name of a module or parameter, and for the optimizer: its contents of each kind.
_Seen = dict[str, dict[str, Mapping[Any, object]]]


@dataclass(frozen=True)
class _Difference:
    """Difference between two inspections of the model, in the content `name` of an owner."""

    kind: str
    owner: str
    name: object
    before: object
    after: object

    def __str__(self) -> str:
        full = f"{self.owner}.{self.name}".strip(".")
        verb = "is another one"
        if self.before is _ABSENT or self.after is _ABSENT:
            verb = "is new" if self.before is _ABSENT else "is gone"
        if self.kind == _HOOK:
            return f"a hook of {self.owner or 'the model'!r} {verb}"
        if self.kind == _LAYER:
            return f"the layer {self.owner!r} {verb}"
        return f"the {self.kind} {full!r} {verb}"


@dataclass(frozen=True)
class _Made:
    """Change of a callback outside of the checkpoint."""

    what: str
    callback: str
    method: str
    epoch: int
    before: object


class Watch:
    """Records changes by the callbacks of this rank.

    Attributes:
        attributes: (module, attribute) pairs of values that callbacks have set and a checkpoint holds.
        regrouped: for each repeated method that changed the parameters of the optimizer's groups: the epoch, and the
            groups before the change.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: LRScheduler | None,
        others: LossState,
    ) -> None:
        """Watch a model and its losses, hooks of the optimizer, and functions of the scheduler."""
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._others = others
        self._made: dict[tuple[str, str, object], _Made] = {}
        self.attributes: set[tuple[str, str]] = set()
        self.regrouped: dict[str, tuple[int, list[list[Tensor]]]] = {}

    @contextmanager
    def during(self, callback: object, method: str, epoch: int) -> Iterator[None]:
        """Record the changes by a callback's method in the block.

        Raises:
            InvalidArgumentError: the method added, removed or replaced a parameter, added or removed a saved buffer, or
                changed the training state after a checkpoint.
        """
        before, groups = self._inspect(), self._groups()
        written = self._written() if method == "on_checkpoint" else []
        yield
        if method == "on_train_end":  # the last checkpoint gets the supported changes separately
            for each in _differences(before, self._inspect()):
                if each.kind == _ATTRIBUTE and _is_kept(each.before, each.after):
                    self.attributes.add((each.owner, str(each.name)))
            return
        if method == "on_checkpoint" and (changed := _changed(written, self._written())):
            raise InvalidArgumentError(
                f"The callback {type(callback).__name__} changed {changed} in on_checkpoint of epoch {epoch}, after the checkpoint, so a run "
                "that resumes from the checkpoint would differ. Make this change in on_epoch_end."
            )
        if self.regrouped.get(method, (epoch,))[0] != epoch:  # the record is from an earlier epoch
            del self.regrouped[method]
        if method in ("on_train_begin", "on_epoch_begin") and not _is_same(groups, self._groups()):
            self.regrouped.setdefault(method, (epoch, groups))
        for each in _differences(before, self._inspect()):
            self._record(each, callback, method, epoch)

    def check(self, epoch: int) -> None:
        """Raise an error for changes missing from a run resumed in this epoch.

        Raises:
            InvalidArgumentError: there is such a change; the message names the callback.
        """
        for made in self._made.values():
            if made.method == "on_train_begin":
                continue
            if made.method == "on_epoch_begin" and made.epoch == epoch:
                continue
            raise InvalidArgumentError(
                f"The callback {made.callback} changed the model in {made.method} of epoch {made.epoch}: {made.what}. A checkpoint cannot "
                "hold this change, so a resumed run would differ. Make the change in on_train_begin, which a resumed run calls too."
            )

    def _record(self, each: _Difference, callback: object, method: str, epoch: int) -> None:
        name = type(callback).__name__
        if each.kind in (_PARAMETER, _BUFFER):
            raise InvalidArgumentError(
                f"The callback {name} changed the model in {method}: {each}. A resumed run could not load such checkpoints. Build the "
                "model with all of its parameters and buffers before fit, and freeze unused parameters with requires_grad_(False)."
            )
        if each.kind == _ATTRIBUTE and _is_kept(each.before, each.after):
            self.attributes.add((each.owner, str(each.name)))
            return
        if each.kind == _ATTRIBUTE and not _is_lost(each.before, each.after):
            return
        # The callback's `load_state_dict` may repeat the change.
        if hasattr(callback, "load_state_dict"):
            return
        key = (each.kind, each.owner, each.name)
        made = self._made.get(key)
        before = each.before if made is None else made.before
        if each.after is before and (made is None or made.method != "on_train_begin"):
            self._made.pop(key, None)  # the change was undone
        else:
            self._made[key] = _Made(str(each), name, method, epoch, before)

    def _groups(self) -> list[list[Tensor]]:
        if self._optimizer is None:
            return []
        # Bypass the property of a distributed optimizer, which would wait.
        groups = self._optimizer.__dict__["param_groups"]
        return [list(group["params"]) for group in groups]

    def _written(self) -> list[tuple[str, Any]]:
        """Return (kind, marker) pairs for weights, their flags, and the optimizer's options and state.

        A marker differs after a change of its value.
        """
        of_losses = [*self._others.parameters.values(), *self._others.buffers().values()]
        tensors = [*self._model.parameters(), *self._model.buffers(), *of_losses]
        weights = [(_mark(each), each.requires_grad) for each in tensors]
        if self._optimizer is None:
            return [("the model", weights)]
        groups = [
            {k: _mark(v) for k, v in group.items() if k != "params"}
            for group in self._optimizer.__dict__["param_groups"]
        ]
        states = [{k: _mark(v) for k, v in part.items()} for part in self._optimizer.state.values()]
        divided = [list(map(id, group)) for group in self._groups()]
        return [("the model", weights), ("the optimizer", (groups, divided, states))]

    def _inspect(self) -> _Seen:
        seen: _Seen = {}
        modules = itertools.chain(
            self._model.named_modules(),
            ((f".{name}", module) for name, module in self._others.modules()),
        )
        for name, module in modules:
            own = vars(module)
            hooks = [own.get(kind) for kind in _HOOKS]
            seen[name] = {
                _LAYER: {"": module},
                _ATTRIBUTE: own.copy(),
                # Build a dict, because the parameters of TorchScript modules have no copy().
                _PARAMETER: dict(module._parameters.items()),
                _BUFFER: dict(module._buffers.items()),
                _HOOK: _joined(hooks) if any(hooks) else {},
            }
        parameters = itertools.chain(
            self._model.named_parameters(),
            ((f".{name}", p) for name, p in self._others.parameters.items()),
        )
        for name, parameter in parameters:
            hooks = [getattr(parameter, kind, None) for kind in _OF_TENSORS]
            if any(hooks):
                seen.setdefault(name, {})[_HOOK] = _joined(hooks)
        if self._optimizer is not None:
            hooks = [getattr(self._optimizer, kind, None) for kind in _OF_OPTIMIZERS]
            if any(hooks):
                seen["the optimizer"] = {_HOOK: _joined(hooks)}
        if self._scheduler is not None:
            seen["the scheduler"] = {_FUNCTION: _functions(self._scheduler)}
        return seen


def _mark(value: object) -> object:
    """Make a marker of a value, to detect changes of the value."""
    if not isinstance(value, Tensor):
        return repr(value)
    is_plain = type(value) in (Tensor, nn.Parameter) and not value.is_quantized
    return checksum(value) if is_plain else (id(value), value._version)


def _changed(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> str:
    pairs = zip(before, after, strict=True)
    return next((what for (what, old), (_, new) in pairs if old != new), "")


def _is_same(before: list[list[Tensor]], after: list[list[Tensor]]) -> bool:
    return [list(map(id, group)) for group in before] == [list(map(id, group)) for group in after]


def _is_kept(before: object, after: object) -> bool:
    # The name of a member or the state of a generator applies only to the same class.
    is_same = not isinstance(after, (Enum, *GENERATORS)) or type(before) is type(after)
    return can_be_kept(after) and is_same


def _is_lost(before: object, after: object) -> bool:
    """Whether a change is lost: a checkpoint cannot hold the value, and it is no output that `forward` stored."""
    if after is _ABSENT:
        return callable(before)
    if callable(before) or callable(after):
        return True
    if is_record(after):
        # The values of a record are saved, but not its class.
        return type(after) is not type(before)
    return not _is_of_graph(after)


def _is_of_graph(value: object, depth: int = 4) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and depth:
        return any(_is_of_graph(each, depth - 1) for each in value)
    return isinstance(value, Tensor) and value.requires_grad


def _functions(scheduler: object) -> dict[object, object]:
    """Find a scheduler's functions outside its state dict, by attribute and number."""
    found: dict[object, object] = {}
    for name, value in vars(scheduler).items():
        entries = value if isinstance(value, list) else [value]
        found.update({f"{name}[{i}]": each for i, each in enumerate(entries) if callable(each)})
        for i, each in enumerate(entries):
            if isinstance(each, LRScheduler) and each is not scheduler:
                found.update({f"{name}[{i}].{k}": v for k, v in _functions(each).items()})
    return found


def _joined(hooks: list[Any]) -> dict[object, object]:
    """Return hooks by kind and number, without our own hooks on parameters of an added group."""
    return {
        (kind, number): function
        for kind, of_kind in enumerate(hooks)
        for number, function in (of_kind or {}).items()
        if not str(getattr(function, "__module__", "")).startswith("sparkhvd.torch.")
    }


def _differences(before: _Seen, after: _Seen) -> Iterator[_Difference]:
    for owner in before.keys() | after.keys():
        old, new = before.get(owner, {}), after.get(owner, {})
        for kind in old.keys() | new.keys():
            yield from _of_kind(kind, owner, old.get(kind, {}), new.get(kind, {}))


def _of_kind(
    kind: str, owner: str, old: Mapping[Any, object], new: Mapping[Any, object]
) -> Iterator[_Difference]:
    if len(old) == len(new) and all(map(operator.is_, old.values(), new.values())):
        return
    for name in old.keys() | new.keys():
        was, is_now = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if was is is_now or (kind == _ATTRIBUTE and name in _OF_TORCH):
            continue
        # Replacing a buffer by another tensor is allowed.
        if kind != _BUFFER or was is _ABSENT or is_now is _ABSENT:
            yield _Difference(kind, owner, name, was, is_now)
