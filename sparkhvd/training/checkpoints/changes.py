"""Changes of model, losses and optimizer during a run, outside torch's state dicts.

Examples: which parameters require a gradient, their groups, modes of modules, and values of attributes. A checkpoint
holds the differences from the program, by name. A resumed run first builds the program's objects, so that it buckets
gradients as an uninterrupted run does, and then repeats the changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.training.loss_state import LossState
from sparkhvd.training.modules.attributes import Attributes, Entry, is_plain, set_attributes
from sparkhvd.training.user_code.watch import Watch


class Changes:
    """Changes of the objects of a program since this object was created.

    Attributes:
        attributes: changed attributes of modules, parameters, losses and the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Distributed | None, others: LossState) -> None:
        self._model = model
        self._optimizer = optimizer
        self._others = others
        self._parameters: dict[str, Tensor] = _parameters(model, others)
        self._flags = {name: p.requires_grad for name, p in self._parameters.items()}
        names = set(self._parameters.values())
        unknown = (p for group in self._param_groups for p in group["params"] if p not in names)
        self._parameters |= {f"optimizer.{i}": p for i, p in enumerate(unknown)}
        self._names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}
        self._groups = self._grouped()
        self.attributes = Attributes(self._owners)

    def _owners(self) -> dict[str, object]:
        owners = _owners(self._model, self._others)
        if self._optimizer is not None:
            owners["the optimizer"] = self._optimizer
        return owners

    def state_dict(self, watch: Watch | None, attributes: Sequence[list[Entry]]) -> dict[str, Any]:
        """Encode the changes as plain values by name.

        Args:
            watch: watch of the callbacks, or None.
            attributes: changes of attributes, of each rank or only of this rank.

        Raises:
            InvalidArgumentError: an option or a parameter of a group cannot be saved.
        """
        groups = self._grouped()
        for number, group in enumerate(self._param_groups):
            for name, value in group.items():
                if name != "params" and not _is_readable(value):
                    raise InvalidArgumentError(
                        f"optimizer.param_groups[{number}][{name!r}] is {value!r:.100}, which a checkpoint cannot hold. Options of groups "
                        "may be numbers, texts, tensors, and lists, tuples and dicts of them."
                    )
        return {
            "requires_grad": self._changed_flags(),
            "groups": None if groups == self._groups else groups,
            "before": {
                method: [[self._name(i, p) for p in of_group] for i, of_group in enumerate(before)]
                for method, (_, before) in (watch.regrouped.items() if watch is not None else ())
            },
            "attributes": list(attributes),
            "replaced": self.attributes.replaced(),
            "evaluating": [
                name
                for name, module in _modules(self._model, self._others).items()
                if not module.training
            ],
        }

    def for_result(self, watch: Watch | None) -> dict[str, Any]:
        """Collect this rank's changes for the model returned by `fit`."""
        return {
            "requires_grad": self._changed_flags(),
            "attributes": [self.own_attributes(watch)],
            "replaced": self.attributes.replaced(),
        }

    def _changed_flags(self) -> dict[str, bool]:
        return {
            name: self._parameters[name].requires_grad
            for name, flag in self._flags.items()
            if self._parameters[name].requires_grad != flag
        }

    def own_attributes(self, watch: Watch | None) -> list[Entry]:
        """The changes of attributes on this rank."""
        return self.attributes.changes(watch.attributes if watch is not None else ())

    def load_flags(self, state: Mapping[str, Any]) -> None:
        """Set `requires_grad` of the parameters from the result of `state_dict`."""
        flags = {**self._flags, **state["requires_grad"]}
        for name in self._flags:
            parameter = self._parameters[name]
            if parameter.requires_grad != flags[name]:
                parameter.requires_grad_(flags[name])

    def load_attributes(self, state: Mapping[str, Any], watch: Watch | None) -> None:
        """Set this rank's attributes from `state_dict`, or rank 0's attributes without an entry for this rank."""
        of_ranks, rank = state["attributes"], hvd.rank()
        own = rank == 0 or len(of_ranks) == hvd.size()
        entries = of_ranks[rank if own else 0]
        self.attributes.load(entries, own=own)
        if watch is not None:
            watch.attributes |= {(entry[0], entry[1][0][1]) for entry in entries if entry[1]}

    def set_modes(self, state: Mapping[str, Any], *, all_of: bool) -> None:
        """Set the train or eval mode of each module from `state_dict`.

        Args:
            state: result of `state_dict`.
            all_of: also set the modes of the model's modules, and not only of the losses'.
        """
        names = set(state["evaluating"])
        for name, module in _modules(self._model, self._others).items():
            if all_of or name.startswith("."):
                module.training = name not in names

    def regroup(self, groups: list[list[str]] | None) -> None:
        """Divide the parameters into groups. All ranks must call it.

        `groups` are the names of each group's parameters; None means the program's groups. The optimizer's state does
        not change. Load the options of the groups afterwards.
        """
        wanted = groups or self._groups
        if self._optimizer is None or wanted == self._grouped():
            return
        if unknown := {n for names in wanted for n in names} - self._parameters.keys():
            raise InvalidArgumentError(
                f"The checkpoint's optimizer has parameters that this optimizer does not have: {sorted(unknown)}. Give the same model "
                "and optimizer, or another run_id."
            )
        known = {p for group in self._param_groups for p in group["params"]}
        for names in wanted:
            parameters = [self._parameters[name] for name in names]
            new = [p for p in parameters if p not in known]
            if new:  # their gradients are reduced from now on
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
        # Bypass the property of a distributed optimizer, which would wait.
        groups: list[dict[str, Any]] = []
        return groups if self._optimizer is None else self._optimizer.__dict__["param_groups"]

    def _grouped(self) -> list[list[str]]:
        """Name the parameters of each group."""
        return [
            [self._name(number, p) for p in group["params"]]
            for number, group in enumerate(self._param_groups)
        ]

    def _name(self, number: int, parameter: Tensor) -> str:
        name = self._names.get(parameter)
        if name is None:
            raise InvalidArgumentError(
                f"optimizer.param_groups[{number}] has a parameter of shape {tuple(parameter.shape)} that the model does not have, so a "
                "checkpoint cannot hold it. Build the model with all of its parameters before fit."
            )
        return name


def set_changes(model: nn.Module, others: LossState, state: Mapping[str, Any]) -> None:
    """Apply rank 0's changes of flags and attributes to copies of a run's model and losses.

    Args:
        model: copy of the program's model.
        others: state of the copied losses; unknown names are skipped.
        state: result of `Changes.state_dict`; {} for a checkpoint without changes.
    """
    parameters = _parameters(model, others)
    for name, requires_grad in state.get("requires_grad", {}).items():
        if name in parameters:
            parameters[name].requires_grad_(requires_grad)
    of_ranks = state.get("attributes", [])
    # Skip layers that a callback replaced, because the copy still has the program's layer.
    replaced = set(state.get("replaced", []))
    entries = [entry for of_0 in of_ranks[:1] for entry in of_0 if entry[0] not in replaced]
    set_attributes(_owners(model, others), entries)


def of_rank_0(state: Mapping[str, Any]) -> dict[str, Any]:
    """Take the part of `Changes.state_dict` for `set_changes`."""
    return {
        "requires_grad": state.get("requires_grad", {}),
        "attributes": state.get("attributes", [])[:1],
        "replaced": state.get("replaced", []),
    }


def has_losses(state: Mapping[str, Any]) -> bool:
    """Whether a result of `of_rank_0` has flags or attributes of losses."""
    part = of_rank_0(state)
    names = [*part["requires_grad"], *(entry[0] for each in part["attributes"] for entry in each)]
    return any(name.removeprefix("parameter ").startswith(".") for name in names)


def _modules(model: nn.Module, others: LossState) -> dict[str, nn.Module]:
    of_losses = {f".{name}": module for name, module in others.modules()}
    return {**dict(model.named_modules()), **of_losses}


def _parameters(model: nn.Module, others: LossState) -> dict[str, Tensor]:
    of_losses = {f".{name}": parameter for name, parameter in others.parameters.items()}
    return {**dict(model.named_parameters()), **of_losses}


def _owners(model: nn.Module, others: LossState) -> dict[str, object]:
    """All objects with watched attributes, by name."""
    holders = {f".{name}": holder for name, holder in others.holders()}
    parameters = {f"parameter {n}": p for n, p in _parameters(model, others).items()}
    return {**_modules(model, others), **holders, **parameters}


def _is_readable(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_readable(each) for each in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_readable, value))
    return isinstance(value, Tensor) or is_plain(value) or hasattr(value, "item")
