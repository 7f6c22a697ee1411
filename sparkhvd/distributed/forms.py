"""Forms of calls of torch's groups: with lists and options, which ours take, and the short ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._C import _distributed_c10d as c10d

__all__ = ["FORMS", "Form"]

# Attributes of options, by their names as arguments.
_OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
_TENSOR_NAMES = ("{}_tensors", "{}_tensor", "{}Tensor", "{}", "{}s", "{}_lists", "{}_list")


class Form(NamedTuple):
    """Parameters of a method.

    Attributes:
        title: torch's public name of the collective.
        depths: of the lists of each tensor argument; in the short form one less, or the same.
        options: makes the options; None where it has none.
        rest: names of the arguments that are in the options' place in the short form.
        more: how many arguments come between tensors and options.
    """

    title: str
    depths: tuple[int, ...]
    options: Callable[[], Any] | None
    rest: tuple[str, ...] = ()
    more: int = 0

    def full(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Return arguments of either form as those of the one with lists and options.

        Raises:
            TypeError: they are those of neither.
        """
        count = len(self.depths) + self.more
        named = dict(named)
        for names in self.tensor_names()[len(args) :]:
            given = [named.pop(name) for name in names if name in named]
            args = [*args, *given]
        if len(args) < count:
            raise TypeError(f"{self.title}: {len(args)} arguments; options come behind {count}.")
        tensors = [_nested(*each) for each in zip(args, self.depths, strict=False)]
        return [*tensors, *args[len(tensors) : count], *self._last(args[count:], named)]

    def tensor_names(self) -> list[tuple[str, ...]]:
        """Return the keywords of each argument in front of the options, as the versions of torch name them."""
        sides = ("output", "input") if len(self.depths) == 2 else ("",)
        names = [tuple([name.format(side).lstrip("_") for name in _TENSOR_NAMES]) for side in sides]
        more = [("output_split_sizes",), ("input_split_sizes",)]
        return [*names[: len(self.depths)], *more[: self.more]]

    def _last(self, rest: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        if self.options is None:
            return [*rest, *[named[name] for name in self.rest[len(rest) :]]]
        options = self.options()
        if rest and isinstance(rest[0], type(options)):
            return [*rest]
        if "opts" in named:
            return [named["opts"]]
        named |= zip(self.rest[: len(rest)], rest, strict=True)
        for name, value in named.items():
            if name not in self.rest:
                raise TypeError(
                    f"{self.title}: no argument {name!r}; there are opts{''.join(f', {each}' for each in self.rest)}."
                )
            if value is not None:
                setattr(options, _OPTIONS[name], value)
        return [options]


def _nested(given: Any, depth: int) -> Any:
    """Return tensors in lists of a depth; a rank that has none gives the same empty list in both forms."""
    item, found = given, 0
    while isinstance(item, (list, tuple)) and item:
        item, found = item[0], found + 1
    is_short = isinstance(item, Tensor) and found == depth - 1
    return [given] if is_short else given


_REDUCE = ("op", "timeout")
_GATHER, _SCATTER = c10d.AllgatherOptions, c10d.ReduceScatterOptions
_INTO = "all_gather_into_tensor"
_PARTS = "reduce_scatter_tensor"
_ALL_TO_ALL = Form("all_to_all_single", (0, 0), c10d.AllToAllOptions, ("timeout",), 2)

FORMS: dict[str, Form] = {
    "allreduce": Form("all_reduce", (1,), c10d.AllreduceOptions, _REDUCE),
    "allreduce_coalesced": Form("all_reduce_coalesced", (1,), c10d.AllreduceCoalescedOptions),
    "broadcast": Form("broadcast", (1,), c10d.BroadcastOptions, ("root", "timeout")),
    "reduce": Form("reduce", (1,), c10d.ReduceOptions, ("root", *_REDUCE)),
    "gather": Form("gather", (2, 1), c10d.GatherOptions, ("root", "timeout")),
    "gather_single": Form("gather_single", (0, 0), c10d.GatherOptions, ("root", "timeout")),
    "gather_into_tensor": Form("gather_single", (0, 0), c10d.GatherOptions, ("root", "timeout")),
    "scatter": Form("scatter", (1, 2), c10d.ScatterOptions, ("root", "timeout")),
    "allgather": Form("all_gather", (2, 1), _GATHER, ("timeout",)),
    "allgather_coalesced": Form("all_gather_coalesced", (2, 1), _GATHER),
    "all_gather_single": Form(_INTO, (0, 0), _GATHER),
    "_allgather_base": Form(_INTO, (0, 0), _GATHER),
    "all_gather_single_coalesced": Form(_INTO, (1, 1), _GATHER),
    "allgather_into_tensor_coalesced": Form(_INTO, (1, 1), _GATHER),
    "reduce_scatter": Form("reduce_scatter", (1, 2), _SCATTER, _REDUCE),
    "reduce_scatter_single": Form(_PARTS, (0, 0), _SCATTER),
    "_reduce_scatter_base": Form(_PARTS, (0, 0), _SCATTER),
    "reduce_scatter_single_coalesced": Form(_PARTS, (1, 1), _SCATTER),
    "reduce_scatter_tensor_coalesced": Form(_PARTS, (1, 1), _SCATTER),
    "alltoall": Form("all_to_all", (1, 1), c10d.AllToAllOptions),
    "all_to_all_single": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "send": Form("send", (1,), None, ("dstRank", "tag")),
    "recv": Form("recv", (1,), None, ("srcRank", "tag")),
    "recv_anysource": Form("recv", (1,), None, ("tag",)),
    "barrier": Form("barrier", (), c10d.BarrierOptions, ("timeout",)),
}
"""All that takes tensors, and the barrier, by the names of every version of torch."""
