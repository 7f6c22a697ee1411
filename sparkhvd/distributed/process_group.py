"""`Group`: the process group for torch.distributed.

A Python class replaces torch's whole `ProcessGroup`, so it also has the methods that torch calls on a group and on its backend.
Methods have torch's names. docs/torch_distributed.md has the table of their callers, from Python and from C++.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._autograd import _profiler_enabled as is_profiled
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, Store
from torch.autograd.profiler import record_function

from sparkhvd.distributed.engines import EngineGroups, monitored_barrier, own
from sparkhvd.distributed.inner import OURS, NestedBackends, NestedBackendSpec, device_of
from sparkhvd.distributed.launch import (
    SIMPLE_BY_HASH,
    CollectivePlan,
    EngineGroup,
    Flat,
    Launcher,
    by_dtype,
    bytes_of,
    check_count,
    check_kinds,
    check_parts,
    check_received,
    check_rows,
    check_same,
    is_plain,
    joined,
    moved,
    only,
    owners,
    reading,
    reading_into,
    received_numbers,
    reduced,
    reduction_of,
    restore,
    restoring,
    room_for,
    split_flat,
    width,
    write,
)
from sparkhvd.distributed.reconfigure import Reconfiguration, UnconnectedGroup
from sparkhvd.distributed.work import (
    FINISHED,
    NUMBER_BITS,
    TAG_BITS,
    Future,
    OperationNames,
    Work,
    as_torch,
)
from sparkhvd.engine.calls import TensorView
from sparkhvd.engine.library import Collective, DType
from sparkhvd.engine.work import Work as Operation
from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
)
from sparkhvd.torch.arguments import leave_untraced
from sparkhvd.torch.collectives.tensors import DTYPES, lend

if TYPE_CHECKING:

    class _ProcessGroup:  # torch's type stub does not have the methods to override
        def __init__(self, rank: int, size: int) -> None: ...

        def _register_backend(
            self, device: torch.device, kind: object, backend: object
        ) -> None: ...

        def _set_default_backend(self, kind: object) -> None: ...

else:
    _ProcessGroup = dist.ProcessGroup


# ----------------------------------------------------------------------------------------------------
# Call signatures of the methods of torch's groups: the full form has lists and options, as our methods, and there is a
# short form.

# For each argument of the short form the attribute of torch's options that holds its value.
_OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
_TENSOR_NAMES = ("{}_tensors", "{}_tensor", "{}Tensor", "{}", "{}s", "{}_lists", "{}_list")


class CallSignature(NamedTuple):
    """Parameters of a method.

    Attributes:
        title: torch's public name of the collective.
        depths: depth of the nested lists of each tensor argument; the short form has the same depth or one less.
        options: creates the options; None without options.
        rest: names of the arguments that replace the options in the short form.
        more: number of arguments between tensors and options.
    """

    title: str
    depths: tuple[int, ...]
    options: Callable[[], Any] | None
    rest: tuple[str, ...] = ()
    more: int = 0

    def full(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Convert arguments of either form to the full form with lists and options.

        Raises:
            TypeError: the arguments match neither form.
        """
        count = len(self.depths) + self.more
        named = dict(named)
        for names in self.tensor_names()[len(args) :]:
            given = [named.pop(name) for name in names if name in named]
            args = [*args, *given]
        if len(args) < count:
            raise TypeError(
                f"{self.title}: got {len(args)} arguments, but {count} must come before the options."
            )
        tensors = [_nested(*each) for each in zip(args, self.depths, strict=False)]
        return [*tensors, *args[len(tensors) : count], *self._last(args[count:], named)]

    def tensor_names(self) -> list[tuple[str, ...]]:
        """The keywords of each argument before the options, in all versions of torch."""
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
                    f"{self.title}: there is no argument {name!r}. Arguments are opts{''.join(f', {each}' for each in self.rest)}."
                )
            if value is not None:
                setattr(options, _OPTIONS[name], value)
        return [options]


def _nested(given: Any, depth: int) -> Any:
    """Nest tensors in lists of this depth. An empty list is the same in both forms."""
    item, found = given, 0
    while isinstance(item, (list, tuple)) and item:
        item, found = item[0], found + 1
    is_short = isinstance(item, Tensor) and found == depth - 1
    return [given] if is_short else given


_REDUCE = ("op", "timeout")
_GATHER, _SCATTER = c10d.AllgatherOptions, c10d.ReduceScatterOptions
_INTO = "all_gather_into_tensor"
_PARTS = "reduce_scatter_tensor"
_ALL_TO_ALL = CallSignature("all_to_all_single", (0, 0), c10d.AllToAllOptions, ("timeout",), 2)

FORMS: dict[str, CallSignature] = {
    "allreduce": CallSignature("all_reduce", (1,), c10d.AllreduceOptions, _REDUCE),
    "allreduce_coalesced": CallSignature(
        "all_reduce_coalesced", (1,), c10d.AllreduceCoalescedOptions
    ),
    "broadcast": CallSignature("broadcast", (1,), c10d.BroadcastOptions, ("root", "timeout")),
    "reduce": CallSignature("reduce", (1,), c10d.ReduceOptions, ("root", *_REDUCE)),
    "gather": CallSignature("gather", (2, 1), c10d.GatherOptions, ("root", "timeout")),
    "gather_single": CallSignature(
        "gather_single", (0, 0), c10d.GatherOptions, ("root", "timeout")
    ),
    "gather_into_tensor": CallSignature(
        "gather_single", (0, 0), c10d.GatherOptions, ("root", "timeout")
    ),
    "scatter": CallSignature("scatter", (1, 2), c10d.ScatterOptions, ("root", "timeout")),
    "allgather": CallSignature("all_gather", (2, 1), _GATHER, ("timeout",)),
    "allgather_coalesced": CallSignature("all_gather_coalesced", (2, 1), _GATHER),
    "all_gather_single": CallSignature(_INTO, (0, 0), _GATHER),
    "_allgather_base": CallSignature(_INTO, (0, 0), _GATHER),
    "all_gather_single_coalesced": CallSignature(_INTO, (1, 1), _GATHER),
    "allgather_into_tensor_coalesced": CallSignature(_INTO, (1, 1), _GATHER),
    "reduce_scatter": CallSignature("reduce_scatter", (1, 2), _SCATTER, _REDUCE),
    "reduce_scatter_single": CallSignature(_PARTS, (0, 0), _SCATTER),
    "_reduce_scatter_base": CallSignature(_PARTS, (0, 0), _SCATTER),
    "reduce_scatter_single_coalesced": CallSignature(_PARTS, (1, 1), _SCATTER),
    "reduce_scatter_tensor_coalesced": CallSignature(_PARTS, (1, 1), _SCATTER),
    "alltoall": CallSignature("all_to_all", (1, 1), c10d.AllToAllOptions),
    "all_to_all_single": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "send": CallSignature("send", (1,), None, ("dstRank", "tag")),
    "recv": CallSignature("recv", (1,), None, ("srcRank", "tag")),
    "recv_anysource": CallSignature("recv", (1,), None, ("tag",)),
    "barrier": CallSignature("barrier", (), c10d.BarrierOptions, ("timeout",)),
}
"""Signatures of all methods with tensors, and of the barrier, by their names in all versions of torch."""


def _routed(own: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Create a method for both forms of arguments, run on the backend of its tensors' device.

    Args:
        own: runs it on the engine, for tensors on the CPU, in the full form.
        name: the method's name in torch's own groups, if it differs.
    """
    name, own = name or own.__name__, inspect.unwrap(own)
    form = FORMS[name]
    count = len(form.depths) + form.more + (1 if form.options else len(form.rest))
    last = type(form.options()) if form.options else int
    title = f"sparkhvd:{form.title}"
    find = _device_of_barrier if name == "barrier" else _device_of_tensors

    @functools.wraps(own)
    def routed(self: Group, *args: Any, **named: Any) -> Any:
        if named or len(args) != count or type(args[-1]) is not last:
            args = tuple(form.full(args, named))
        inner = self.inner
        device = find(inner, args)
        group = None if device == "cpu" and inner.cpu_is_ours else inner.of(device)
        if group is not None:
            _ = self.launcher.team.engine  # raises an error before the first reconfigure
            return getattr(group, name)(*args)
        if not is_profiled():
            return own(self, *args)
        with record_function(title):
            return own(self, *args)

    return routed


_ANY_RANK = -1  # the engine's number for any sender


def _device_of_tensors(_: NestedBackends, args: Sequence[Any]) -> str:
    return device_of(args) or "cpu"


def _device_of_barrier(inner: NestedBackends, args: Sequence[Any]) -> str:
    device, types = args[0].device, inner.devices()
    if isinstance(device, torch.device) and device.type in types:
        return device.type
    return "cpu" if "cpu" in types else types[0]


# Torch before 2.14 does not support backends in Python.
_DefaultBackend: Any = None
if hasattr(c10d.Backend, "supports_reconfigure"):

    class _DefaultBackend(c10d.Backend):  # type: ignore[no-redef]
        """Backend object required by torch's C++. The group itself runs the collectives."""

        def getBackendName(self) -> str:  # noqa: N802 - torch's
            return OURS


class Group(_ProcessGroup):
    """Process group for CPU tensors on the engine. Other tensors go to torch's own backends.

    Args:
        teams: creates engine groups; shared by the default group and its subgroups.
        team: this group's engine group.
        name: torch's name of the group.
        store: torch's store for this group only.
        timeout: timeout of operations that have none.
        options: the user's `pg_options`, for torch's backends inside the group.
        reconfiguration: changes the ranks; None if the group keeps its ranks.
    """

    # Attributes that torch reads from a group and its backend; each version reads some of them.
    supports_coalescing = False
    supports_completion_hooks = False
    supports_shrinking = False
    supports_splitting = True
    supports_time_estimate = False
    _supports_time_estimate = False
    supports_window = False
    use_pg_for_symm_mem_rendezvous = False

    def __init__(
        self,
        teams: EngineGroups,
        team: EngineGroup,
        rank: int,
        name: str,
        store: Store,
        timeout: timedelta,
        options: object = None,
        reconfiguration: Reconfiguration | None = None,
    ) -> None:
        size = len(team.ranks)
        super().__init__(rank, size)  # the form that lets C++ find the methods of this class
        self._rank, self._size = rank, size
        self.launcher = Launcher(team, name, timeout)
        spec = NestedBackendSpec(store, rank, size, timeout, name, options)
        self.inner = NestedBackends(self, spec)
        self._messages = OperationNames(f"{name}.message")
        self._teams = teams
        self._store = store
        self._store_of_ranks = store  # each reconfigure sets another store
        self._reconfiguration = reconfiguration
        self._is_aborted = False
        self._abort_hooks: dict[int, Callable[[], object]] = {}
        self._name = name
        self._description = "undefined"
        if _DefaultBackend is not None:
            # Functions of torch's C++ raise an error if a group has no default backend.
            self._default_backend = _DefaultBackend(rank, size)
            kind = c10d.ProcessGroup.BackendType.CUSTOM
            self._register_backend(torch.device("cpu"), kind, self._default_backend)
            self._set_default_backend(kind)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - C++'s names

    # Names, which C++ reads through the names of its own methods

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return self.inner.backend()

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802 - torch's
        """Torch's name of this group, for compiled code."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's
        """Set torch's name of this group."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's
        """Set torch's description of this group."""
        self._description = description

    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        """Torch's name of this group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Torch's description of this group."""
        return self._description

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> Any:
        """Reduce one tensor in place, dense or sparse."""
        # A fast path for the most frequent call in training.
        if (
            type(opts) is AllreduceOptions
            and type(tensors) is list
            and self.inner.cpu_is_ours
            and tensors[0].is_cpu
            and not is_profiled()
        ):
            return self._allreduce_on_engine(tensors, opts)
        given = (tensors,) if opts is None else (tensors, opts, *rest)
        return self._allreduce(*given, **named)

    allreduce_sparse = allreduce

    def _allreduce_on_engine(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        tensor = tensors[0]
        kind, dtype = SIMPLE_BY_HASH.get(hash(opts.reduceOp)), DTYPES.get(tensor.dtype)
        if kind is None or dtype is None or len(tensors) > 1 or not is_plain(tensor):
            if only("all_reduce", tensors).is_sparse:
                return self._allreduce_sparse(tensor, opts)
            return self._allreduce_each("all_reduce", tensors, opts)
        address = tensor.data_ptr()
        view = tuple.__new__(TensorView, (address, address, tensor.shape))
        if not getattr(opts, "asyncOp", True):
            self.launcher.reduce_now(view, dtype, kind, tensor.untyped_storage(), opts)
            return FINISHED
        plan = CollectivePlan(Collective.ALLREDUCE, (view,), dtype, tensor.untyped_storage(), kind)
        return self.launcher.launch_one(plan, opts, tensors)

    _allreduce = _routed(_allreduce_on_engine, "allreduce")

    @_routed
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce tensors in place, with one operation per type."""
        return self._allreduce_each("all_reduce_coalesced", tensors, opts)

    def _allreduce_each(self, what: str, tensors: Sequence[Tensor], opts: Any) -> Work:
        if not tensors:
            return Work(())
        flats = [reduced(what, tensor) for tensor in tensors]
        reduction = reduction_of(what, opts.reduceOp, tensors[0])
        plans = [
            CollectivePlan(
                Collective.ALLREDUCE, [each.shaped for each in part], dtype, owners(part), reduction
            )
            for dtype, part in by_dtype(flats)
        ]
        return self.launcher.launch(plans, opts, tensors, restoring(flats))

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Work:
        if opts.reduceOp.op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise InvalidArgumentError(
                f"all_reduce of a sparse tensor: op={opts.reduceOp.op.name} is not possible, because entries of the same index add "
                "up. Use SUM or AVG, or .to_dense()."
            )
        own = tensor.detach().coalesce()
        dims, size = own.sparse_dim(), self._size
        # Send everything in one operation, so that a rank with a dense tensor gets its error at once.
        kind = torch.tensor(list(f"{tuple(own.shape)} {own.dtype}".encode()), dtype=torch.uint8)
        parts = [kind, bytes_of(own.indices().t()), bytes_of(own.values())]

        def finish(works: Sequence[Operation]) -> None:
            received = received_numbers(works[0], torch.uint8)
            pieces = received.split(list(works[0].output().rows))
            kinds = [bytes(piece.tolist()).decode() for piece in pieces[:size]]
            # Check the shapes, because an index of a larger tensor would be out of range here.
            check_kinds("all_reduce of a sparse tensor", kinds, self._rank)
            indices = torch.cat(pieces[size : 2 * size]).view(torch.int64).view(-1, dims).t()
            values = torch.cat(pieces[2 * size :]).view(own.dtype)
            values = values.view(-1, *own.values().shape[1:])
            if opts.reduceOp.op == dist.ReduceOp.AVG:
                values = values / size
            whole = torch.sparse_coo_tensor(indices, values, own.size(), check_invariants=False)
            with torch.no_grad():
                tensor.copy_(whole.coalesce())

        views = [reading(part) for part in parts]
        plan = CollectivePlan(Collective.ALLGATHER, views, DType.UINT8, lend(*parts))
        return self.launcher.launch([plan], opts, [tensor], finish, needs_rows=True)

    @_routed
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Reduce a tensor in place on the root. Other ranks' tensors do not change."""
        tensor = only("reduce", tensors)
        flat, is_root = reduced("reduce", tensor), self._rank == opts.rootRank
        view = flat.shaped if is_root else flat.shaped._replace(output=0)
        reduction = reduction_of("reduce", opts.reduceOp, tensor)
        plan = CollectivePlan(
            Collective.REDUCE, [view], flat.dtype, owners([flat]), reduction, opts.rootRank
        )
        return self.launcher.launch([plan], opts, tensors, restoring([flat] if is_root else []))

    @_routed
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Reduce tensors. Every rank gets its equal part of each tensor."""
        return self._reduce_scatter_each(outputs, inputs, opts)

    def _reduce_scatter_each(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        what = "reduce_scatter_tensor"
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts(what, output, tensor, self._size)
        if not inputs:
            return Work(())
        sources = [reduced(what, tensor) for tensor in inputs]
        targets = [reduced(what, tensor) for tensor in outputs]
        reduction = reduction_of(what, opts.reduceOp, inputs[0])
        parts: dict[DType, list[tuple[Tensor, Tensor]]] = {}
        for source, target in zip(sources, targets, strict=True):
            parts.setdefault(source.dtype, []).append((source.numbers, target.numbers))
        plans = [
            CollectivePlan(
                Collective.REDUCESCATTER,
                [reading_into(*pair) for pair in pairs],
                dtype,
                [lend(*pair) for pair in pairs],
                reduction,
            )
            for dtype, pairs in parts.items()
        ]
        return self.launcher.launch(plans, opts, outputs, restoring(targets))

    reduce_scatter_tensor_coalesced = _routed(
        reduce_scatter_single_coalesced, "reduce_scatter_tensor_coalesced"
    )  # before torch 2.13

    @_routed
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002 - torch's
        """Reduce a tensor. Every rank gets its equal part."""
        return self._reduce_scatter_each([output], [input], opts)

    _reduce_scatter_base = _routed(reduce_scatter_single, "_reduce_scatter_base")

    @_routed
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Reduce a list with one tensor per rank, of any sizes. Every rank gets its own tensor."""
        what = "reduce_scatter"
        output, tensors = only(what, outputs), only(what, inputs)
        check_count(what, tensors, self._size)
        if (
            all([tensor.numel() == output.numel() for tensor in tensors])
            and len({tensor.numel() for tensor in tensors}) == 1
        ):
            whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            return self._reduce_scatter_each(outputs, [whole], opts)
        copies = [tensor.detach().clone() for tensor in tensors]
        flats = [reduced(what, copy) for copy in copies]
        own, target = flats[self._rank], moved(output)
        check_same(what, output, tensors[self._rank])
        flats[self._rank] = Flat(own.numbers, lambda: write(target, own.numbers))
        reduction = reduction_of(what, opts.reduceOp, output)
        views = [each.view for each in flats]
        plan = CollectivePlan(Collective.ALLREDUCE, views, own.dtype, owners(flats), reduction)
        return self.launcher.launch([plan], opts, outputs, restoring(flats))

    # Collectives

    @_routed
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Copy the root's tensor to every rank."""
        tensor = only("broadcast", tensors)
        flat = moved(tensor)
        plan = CollectivePlan(
            Collective.BROADCAST, [flat.shaped], flat.dtype, owners([flat]), root=opts.rootRank
        )
        return self.launcher.launch([plan], opts, tensors, restoring([flat]))

    @_routed
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Concatenate equal tensors of all ranks."""
        return self._gather_each(outputs, inputs, opts)

    def _gather_each(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts("all_gather_into_tensor", tensor, output, self._size)
        if not inputs:
            return Work(())
        targets = [moved(tensor) for tensor in outputs]
        for target, tensor in zip(targets, inputs, strict=True):
            own, source = target.numbers.view(self._size, -1)[self._rank], moved(tensor).numbers
            if own.data_ptr() != source.data_ptr():
                own.copy_(source)
        plans = [
            CollectivePlan(
                Collective.ALLGATHER_INTO, [each.view for each in part], dtype, owners(part)
            )
            for dtype, part in by_dtype(targets)
        ]
        return self.launcher.launch(plans, opts, outputs, restoring(targets))

    allgather_into_tensor_coalesced = _routed(
        all_gather_single_coalesced, "allgather_into_tensor_coalesced"
    )  # before torch 2.13

    @_routed
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002 - torch's
        """Concatenate equal tensors of all ranks in one tensor."""
        return self._gather_each([output], [input], opts)

    _allgather_base = _routed(all_gather_single, "_allgather_base")

    @_routed
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Copy every rank's tensor to its entry of a list. Sizes may differ."""
        targets, tensor = only("all_gather", outputs), only("all_gather", inputs)
        return self._gather_lists("all_gather", [[each] for each in targets], [tensor], opts)

    @_routed
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Copy every rank's tensors to the entries of its lists on all ranks."""
        return self._gather_lists("all_gather_coalesced", outputs, inputs, opts)

    def _gather_lists(
        self,
        what: str,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any,
    ) -> Work:
        check_count(what, outputs, self._size)
        columns = [
            [outputs[rank][index] for rank in range(self._size)] for index in range(len(inputs))
        ]
        for tensor, column in zip(inputs, columns, strict=True):
            check_same(what, column[self._rank], tensor)
        flats = [moved(tensor) for tensor in inputs]
        wholes = [
            room_for(flat.numbers, column) for flat, column in zip(flats, columns, strict=True)
        ]
        plans = [
            CollectivePlan(
                Collective.ALLGATHER,
                [reading_into(flat.numbers, whole)],
                flat.dtype,
                lend(flat.numbers, whole),
            )
            for flat, whole in zip(flats, wholes, strict=True)
        ]

        def finish(works: Sequence[Operation]) -> None:
            for work, whole, column in zip(works, wholes, columns, strict=True):
                check_rows(what, work, column)
                split_flat(whole, column)

        flat_outputs = [tensor for column in columns for tensor in column]
        return self.launcher.launch(plans, opts, flat_outputs, finish, needs_rows=True)

    @_routed
    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Copy every rank's tensor to a list of the root. Sizes may differ."""
        tensor, is_root = only("gather", inputs), self._rank == opts.rootRank
        targets = only("gather", outputs) if is_root else []
        if is_root:
            check_count("gather", targets, self._size)
        flat = moved(tensor)
        whole = room_for(flat.numbers, targets)
        view = reading_into(flat.numbers, whole) if is_root else reading(flat.numbers)
        keep = lend(flat.numbers, whole)
        plan = CollectivePlan(Collective.GATHER, [view], flat.dtype, keep, root=opts.rootRank)

        def finish(works: Sequence[Operation]) -> None:
            check_rows("gather", works[0], targets)
            split_flat(whole, targets)

        return self.launcher.launch(
            [plan], opts, targets, finish if is_root else None, needs_rows=is_root
        )

    @_routed
    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:  # noqa: A002 - torch's
        """Concatenate equal tensors of all ranks in one tensor of the root."""
        is_root = self._rank == opts.rootRank
        if is_root:
            check_parts("gather_single", input, output, self._size)
        flat, target = moved(input), moved(output)
        view = reading_into(flat.numbers, target.numbers) if is_root else reading(flat.numbers)
        keep = lend(flat.numbers, target.numbers)
        plan = CollectivePlan(Collective.GATHER, [view], flat.dtype, keep, root=opts.rootRank)

        def finish(works: Sequence[Operation]) -> None:
            check_received("gather_single", works[0], (flat.numbers.numel(),) * self._size)
            restore(target)

        return self.launcher.launch(
            [plan], opts, [output], finish if is_root else None, needs_rows=is_root
        )

    gather_into_tensor = _routed(gather_single, "gather_into_tensor")

    @_routed
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Copy each tensor of the root's list to its rank."""
        output, is_root = only("scatter", outputs), self._rank == opts.rootRank
        tensors = only("scatter", inputs) if is_root else []
        if is_root:
            check_count("scatter", tensors, self._size)
            check_same("scatter", output, tensors[self._rank])
        target = moved(output)
        whole = joined(tensors) if is_root else target.numbers.new_empty(0)
        counts = tuple([tensor.numel() * width(tensor) for tensor in tensors])
        plan = CollectivePlan(
            Collective.SCATTER,
            [reading_into(whole, target.numbers)],
            target.dtype,
            lend(whole, target.numbers),
            root=opts.rootRank,
            numbers=counts,
        )

        def finish(works: Sequence[Operation]) -> None:
            check_received("scatter", works[0], (target.numbers.numel(),))
            restore(target)

        return self.launcher.launch([plan], opts, outputs, finish, needs_rows=True)

    @_routed
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> Work:
        """Send rows to every rank and concatenate the received rows.

        Without splits the parts are equal.
        """
        target, source = moved(output), moved(input)
        sent = self._counts(input, input_splits)
        received = self._counts(output, output_splits)
        plan = CollectivePlan(
            Collective.ALLTOALL,
            [reading_into(source.numbers, target.numbers)],
            source.dtype,
            lend(source.numbers, target.numbers),
            numbers=sent,
        )

        def finish(works: Sequence[Operation]) -> None:
            check_received("all_to_all_single", works[0], received)
            restore(target)

        return self.launcher.launch([plan], opts, [output], finish, needs_rows=True)

    alltoall_base = _routed(all_to_all_single, "alltoall_base")

    def _counts(self, tensor: Tensor, splits: Sequence[int]) -> tuple[int, ...]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise InvalidArgumentError(
                    f"all_to_all_single: {rows} rows cannot be divided into {self._size} equal parts. Give the split sizes."
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise InvalidArgumentError(
                f"all_to_all_single: the split sizes are {list(splits)} for {rows} rows and {self._size} ranks. Give one size per "
                "rank; the sizes must add up to the number of rows."
            )
        row = width(tensor) * (tensor.numel() // rows if rows else 0)
        return tuple([split * row for split in splits])

    @_routed
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Work:
        """Send a tensor to every rank. Sizes may differ."""
        check_count("all_to_all", inputs, self._size)
        check_count("all_to_all", outputs, self._size)
        source = joined(inputs)
        whole = room_for(source, outputs)
        sent = tuple([tensor.numel() * width(tensor) for tensor in inputs])
        received = tuple([tensor.numel() * width(tensor) for tensor in outputs])
        view, keep = reading_into(source, whole), lend(source, whole)
        plan = CollectivePlan(Collective.ALLTOALL, [view], DTYPES[source.dtype], keep, numbers=sent)

        def finish(works: Sequence[Operation]) -> None:
            check_received("all_to_all", works[0], received)
            split_flat(whole, outputs)

        return self.launcher.launch([plan], opts, outputs, finish, needs_rows=True)

    @_routed
    def barrier(self, opts: Any = None) -> Work:
        """Wait for every rank."""
        return self.launcher.launch(
            [CollectivePlan(Collective.BARRIER, (), DType.UINT8, None)], opts, ()
        )

    # Messages

    @_routed
    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        tensor = moved(only("send", tensors))
        return self.launcher.recorded(
            Work([self._start(Collective.SEND, tensor, self._global(to), tag)], tensors)
        )

    @_routed
    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, self._global(source), tag)

    @_routed
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Receive the next tensor from any rank. `source_rank()` of the work returns the sender."""
        return self._receive(tensors, _ANY_RANK, tag)

    def _receive(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        target = moved(only("recv", tensors))
        operation = self._start(Collective.RECEIVE, target, source, tag)

        def finish() -> None:
            restore(target)
            work.source = self.launcher.team.ranks.index(operation.output().rows[0])

        work = self.launcher.recorded(Work([operation], tensors, finish))
        return work

    def _global(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise InvalidArgumentError(
                f"send/recv: rank {rank} is not in the group of {self._size} ranks. Give a rank from 0 to {self._size - 1}."
            )
        return self.launcher.team.ranks[rank]

    def _start(self, collective: Collective, flat: Flat, peer: int, tag: int) -> Operation:
        if not 0 <= tag < 1 << TAG_BITS:
            raise InvalidArgumentError(
                f"send/recv: the tag is {tag}. Give a tag from 0 to {(1 << TAG_BITS) - 1}."
            )
        team = self.launcher.team
        numbers = ((team.generation << NUMBER_BITS | team.number) << TAG_BITS | tag,)
        engine, views = team.engine, [flat.view]
        call = engine.prepare(
            collective,
            views,
            flat.dtype,
            process_set=team.process_set,
            root_rank=peer,
            numbers=numbers,
        )
        timeout_s = self.launcher.timeout_s
        try:
            return engine.start(call, self._messages.name(), lend(flat.numbers), timeout_s)
        except (CollectiveError, MismatchError) as error:
            raise as_torch(error) from None

    # Coalesced operations

    def _start_coalescing(self, device_type: torch.device) -> None:
        group = self.inner.of(torch.device(device_type).type)
        if group is None:
            self.launcher.start_coalescing()
        else:
            group._start_coalescing(device_type)

    def _end_coalescing(self, device_type: torch.device) -> Any:
        group = self.inner.of(torch.device(device_type).type)
        if group is None:
            return self.launcher.end_coalescing()
        return group._end_coalescing(device_type)

    # C++ code of torch 2.14 and newer (functional collectives) calls these names.
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # Queries of torch to a group and its backend
    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in self.inner.devices()]

    def _get_backend(self, device: torch.device | str) -> Any:
        place = torch.device(device)
        if place.type not in self.inner.devices():
            raise RuntimeError(f"backend 'sparkhvd' does not support tensors on {device}.")
        group = self.inner.of(place.type)
        return self if group is None else group._get_backend(place)

    get_backend = _get_backend  # since torch 2.14

    @property
    def options(self) -> Any:
        """Torch's options of a backend: its name and the timeout of operations."""
        return c10d.Backend.Options(OURS, timedelta(seconds=self.launcher.timeout_s))

    def get_error(self) -> Any:
        """Report the engine's state as torch's error type.

        A group that can reconfigure does not report its own abort.
        """
        if self._reconfiguration and (self._is_aborted or not self._is_connected()):
            return c10d.ErrorType.SUCCESS
        try:
            self.launcher.team.engine.check()
        except CollectiveTimeoutError:
            return c10d.ErrorType.TIMEOUT
        except PeerLostError:
            return c10d.ErrorType.REMOTE_ERROR
        except CollectiveError:
            return c10d.ErrorType.COMM_ERROR
        return c10d.ErrorType.SUCCESS

    def _enable_collectives_timing(self) -> None:
        """Do nothing, like torch's Gloo. `hvd.start_timeline` times collectives."""

    def register_pre_hook(self, hook_id: int, hook: object) -> None:
        """Raise an error, because torch's C++ would never call the hook."""
        raise NotImplementedError(
            f"backend 'sparkhvd': hook {hook_id} ({hook!r}) would never be called, because torch calls such hooks only for its own "
            "backends. Wrap the calls of torch.distributed, or trace them with torch.profiler or hvd.start_timeline()."
        )

    register_post_hook = register_pre_hook

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        """Always False: torch allocates tensors itself."""
        return False

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for every rank. On rank 0 the error names the missing ranks.

        The group stays usable after a failure.

        Args:
            timeout: None = the group's.
            wait_all_ranks: name all missing ranks instead of the first.

        Raises:
            CollectiveTimeoutError: ranks were too late.
        """
        if timeout is None:
            timeout = timedelta(seconds=self.launcher.timeout_s)
        group = self.inner.of("cpu")
        if group is not None:
            group.monitored_barrier(timeout, wait_all_ranks)
            return
        store = PrefixStore("monitored_barrier/", self._store_of_ranks)
        try:
            monitored_barrier(store, self._rank, self._size, timeout, wait_all_ranks)
        except CollectiveTimeoutError as error:
            raise as_torch(error) from None

    def get_group_store(self) -> Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because the group numbers collectives from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self.launcher.scope.count

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self.launcher.timeout_s = timeout.total_seconds()
        self.inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def new_group(
        self,
        ranks: Sequence[int],
        *,
        timeout: timedelta,
        pg_options: object = None,
        group_name: str,
        group_desc: str | None = None,
        **_: object,
    ) -> Group | None:
        """Create a group of some of this group's ranks.

        torch (2.13 on) calls it on every rank, in the same order. Keywords of newer versions are ignored: `backend`
        (2.14 on) is read from torch's configuration of the new group.

        Returns:
            The group; None on other ranks.
        """
        name = self._teams.name(group_name)
        store = PrefixStore(f"{name}/", self._store_of_ranks)
        team = self._teams.subset(tuple(ranks), self.rank(), name, store, timeout)
        if team is None:
            return None
        rank = ranks.index(self.rank())
        changes = Reconfiguration(rank, name, store) if self._reconfiguration else None
        made = Group(self._teams, team, rank, name, store, timeout, pg_options, changes)
        made.setGroupName(group_name)
        made._description = group_desc or made._description
        return made

    def split_group(
        self,
        ranks: Sequence[int],
        *,
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: object,
    ) -> Group | None:
        """Create a group with its own engine.

        `torch.distributed.split_group` (2.14 on) calls it on every rank.

        Args:
            ranks: ranks of the new group, as ranks of this group; other groups may be created at the same time.
            timeout: timeout of the new group; None means this group's timeout.
            opts: the user's `pg_options`.
            group_name: torch's name of the new group, the same on all members.
            group_desc: torch's description of the new group.

        Returns:
            The group; None on other ranks.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._name}.split"
        timeout = timeout or timedelta(seconds=self.launcher.timeout_s)
        store = PrefixStore(f"{name}/", self._store_of_ranks)
        rank, size = ranks.index(self.rank()), len(ranks)
        team = own(store, name, rank, size, timeout)
        changes = Reconfiguration(rank, name, store) if self._reconfiguration else None
        made = Group(self._teams, team, rank, name, store, timeout, opts, changes)
        made._description = group_desc or made._description
        return made

    # Changes of the ranks, and ends

    @property
    def supports_reconfigure(self) -> bool:
        """True in a default group of `init_process_group(enable_reconfigure=True)`, and in its subgroups."""
        return self._reconfiguration is not None

    def get_reconfigure_handle(self) -> str:
        """Return this rank's identifier for `reconfigure`. It never changes.

        Raises:
            InvalidArgumentError: the group does not reconfigure.
        """
        return self._changes("get_reconfigure_handle").handle

    def reconfigure(self, opts: Any) -> Work:
        """Replace this group's ranks. Every new rank must call this.

        Pending operations of the former ranks fail. No other thread may call collectives of this group at the same
        time. The group's subgroups keep their ranks. Groups of torch's own backends inside the group, such as NCCL, are
        created again at their next use.

        Args:
            opts: torch's `ReconfigureOptions`. `uuid` is the same number on all ranks, and a new number in each call.
                `handles` are the handles of the new ranks: a list in their order, or a set. `timeout` None means the
                group's timeout. `hints` are ignored.

        Returns:
            A finished work.

        Raises:
            InvalidArgumentError: the group does not reconfigure, or handles are wrong.
            CollectiveError: the uuid has been used before, ranks were too late, or a rank was lost. The group then
                keeps its former ranks; try again with a new uuid.
        """
        former = self.launcher
        timeout = timedelta(seconds=former.timeout_s) if opts.timeout is None else opts.timeout
        found = self._changes("reconfigure").meet(opts.uuid, opts.handles, timeout)
        own_timeout = timedelta(seconds=former.timeout_s)
        self._teams = EngineGroups()
        self._store_of_ranks = found.store
        self._rank, self._size = found.rank, len(found.team.ranks)
        self.launcher = Launcher(found.team, found.name, own_timeout)
        self._messages = OperationNames(f"{found.name}.message")
        self._is_aborted = False
        try:
            self.inner.restart(found.store, self._rank, self._size, found.name)
        finally:
            if not isinstance(former.team, UnconnectedGroup):
                former.team.engine.shutdown()
        return FINISHED

    def _changes(self, what: str) -> Reconfiguration:
        if self._reconfiguration is None:
            raise InvalidArgumentError(
                f"{what}: group {self._name} cannot change its ranks. Call init_process_group('sparkhvd', enable_reconfigure=True), "
                "with torch 2.14 or newer."
            )
        return self._reconfiguration

    def _is_connected(self) -> bool:
        return not isinstance(self.launcher.team, UnconnectedGroup)

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Register a function to call at `abort` of this group, before its operations fail."""
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a function that `register_abort_hook` registered."""
        self._abort_hooks.pop(hook_id, None)

    def abort(self) -> None:
        """Abort all operations on all ranks, also operations of `hvd` if the engine is shared."""
        self._is_aborted = True
        with contextlib.ExitStack() as ends:  # calls all of them, also if one raises an error
            if self._is_connected():
                text = f"torch group {self._name} was aborted"
                ends.callback(self.launcher.team.engine.abort, text)
            ends.callback(self.inner.each, lambda group: group.abort())
            for hook in reversed(self._abort_hooks.values()):
                ends.callback(hook)

    def shutdown(self) -> None:
        """End the group. A shared engine stays, for `hvd` and other groups."""
        self.inner.each(lambda group: group.shutdown())
        if self.launcher.team.is_own and self._is_connected():
            self.launcher.team.engine.shutdown()


leave_untraced(Group, Work, Future)
