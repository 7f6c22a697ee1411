"""Changes of model and optimizer during a run that no state dict of torch holds: which parameters are trained, by which group, in which mode.

A checkpoint holds them as differences from the program, by name. A run that resumes builds what the program has, so that gradients are divided as in an
undisturbed run, and then makes the same changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.training.user_code.watch import Watch, is_plain

__all__ = ["Changes", "set_modes"]


class Changes:
    """Changes since the program was built, which the constructor takes as it is."""

    def __init__(self, model: nn.Module, optimizer: Distributed | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._flags = {name: p.requires_grad for name, p in self._parameters.items()}
        names = set(self._parameters.values())
        others = (p for group in self._param_groups for p in group["params"] if p not in names)
        self._parameters |= {f"optimizer.{i}": p for i, p in enumerate(others)}
        self._names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}
        self._groups = self._grouped()

    def state_dict(self, watch: Watch | None) -> dict[str, Any]:
        """Return the changes: plain values by name.

        Args:
            watch: of callbacks; None without any.

        Raises:
            InvalidArgumentError: an option of a group cannot be kept, or one of its parameters.
        """
        groups = self._grouped()
        for number, group in enumerate(self._param_groups):
            for name, value in group.items():
                if name != "params" and not _is_readable(value):
                    raise InvalidArgumentError(
                        f"optimizer.param_groups[{number}][{name!r}] is {value!r:.100}, which no checkpoint holds. Options of groups may "
                        "be numbers, texts, tensors, and lists, tuples and dicts of these."
                    )
        modules = dict(self._model.named_modules())
        attributes = [
            (owner, name, getattr(modules[owner], name, None))
            for owner, name in sorted(watch.attributes if watch is not None else ())
            if owner in modules
        ]
        return {
            "requires_grad": {
                name: self._parameters[name].requires_grad
                for name, flag in self._flags.items()
                if self._parameters[name].requires_grad != flag
            },
            "groups": None if groups == self._groups else groups,
            "before": {
                method: [[self._name(i, p) for p in of_group] for i, of_group in enumerate(before)]
                for method, (_, before) in (watch.regrouped.items() if watch is not None else ())
            },
            "attributes": [list(each) for each in attributes if is_plain(each[2])],
            "evaluating": [name for name, module in modules.items() if not module.training],
        }

    def load(self, state: dict[str, Any], watch: Watch | None) -> None:
        """Set flags and attributes as `state_dict` has found them."""
        flags = {**self._flags, **state["requires_grad"]}
        for name in self._flags:
            parameter = self._parameters[name]
            if parameter.requires_grad != flags[name]:
                parameter.requires_grad_(flags[name])
        modules = dict(self._model.named_modules())
        for owner, name, value in state["attributes"]:
            if owner in modules:
                setattr(modules[owner], name, value)
                if watch is not None:
                    watch.attributes.add((owner, name))

    @contextmanager
    def repeated(self, state: dict[str, Any], watch: Watch | None, method: str) -> Iterator[None]:
        """Let callbacks repeat a method inside: what the checkpoint has of it and of later changes counts. All ranks must enter it.

        Args:
            state: that is loaded; {} where nothing is repeated.
            watch: of the callbacks.
            method: "on_train_begin", or "on_epoch_begin" of an epoch that is continued.
        """
        if not state:
            yield
            return
        options = [{**group, "params": list(group["params"])} for group in self._param_groups]
        if state["before"].get(method) is not None:  # it adds parameters, which must not be there
            self.regroup(state["before"][method])
        yield
        self.load(state, watch)
        self.regroup(state["groups"])
        for group, before in zip(self._param_groups, options, strict=True):
            group.clear()  # in place, as others may hold it
            group.update(before)
        if method == "on_epoch_begin":
            set_modes(self._model, state["evaluating"])

    def regroup(self, groups: list[list[str]] | None) -> None:
        """Divide the parameters into groups by name, None for those of the program; all ranks must call it.

        State is not changed; options are to be loaded afterwards.
        """
        wanted = groups or self._groups
        if self._optimizer is None or wanted == self._grouped():
            return
        if unknown := {n for names in wanted for n in names} - self._parameters.keys():
            raise InvalidArgumentError(
                f"The checkpoint's optimizer has parameters that are not in this one: {sorted(unknown)}. Give the same model and "
                "optimizer, or another run_id."
            )
        known = {p for group in self._param_groups for p in group["params"]}
        for names in wanted:
            parameters = [self._parameters[name] for name in names]
            new = [p for p in parameters if p not in known]
            if new:  # whose gradients are reduced from now on
                self._optimizer.add_param_group({"params": new})
                known.update(new)
        param_groups = self._param_groups
        del param_groups[len(wanted) :]
        while len(param_groups) < len(wanted):
            param_groups.append({**self._optimizer.defaults})
        for group, names in zip(param_groups, wanted, strict=True):
            group["params"] = [self._parameters[name] for name in names]

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        # Of a distributed optimizer not the property, which would wait.
        groups: list[dict[str, Any]] = []
        return groups if self._optimizer is None else self._optimizer.__dict__["param_groups"]

    def _grouped(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [
            [self._name(number, p) for p in group["params"]]
            for number, group in enumerate(self._param_groups)
        ]

    def _name(self, number: int, parameter: Tensor) -> str:
        name = self._names.get(parameter)
        if name is None:
            raise InvalidArgumentError(
                f"optimizer.param_groups[{number}] has got a parameter of shape {tuple(parameter.shape)} that the model does not have, which "
                "no checkpoint holds. Build the model with all of its parameters before fit."
            )
        return name


def set_modes(model: nn.Module, evaluating: Iterable[str]) -> None:
    """Put the modules with these names in evaluation mode and all others in training mode, each by itself."""
    names = set(evaluating)
    for name, module in model.named_modules():
        module.training = name not in names


def _is_readable(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_readable(each) for each in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_readable, value))
    return isinstance(value, Tensor) or is_plain(value) or hasattr(value, "item")
