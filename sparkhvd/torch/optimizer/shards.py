"""Division of parameters among the ranks of a sharded optimizer, and the gathering of all parts.

A **cut** parameter is divided as `reducescatter` divides rows: of its n elements, in the order of its memory, each of
N ranks has n // N elements, and each of the first n % N ranks an extra element. On a GPU several parameters are divided
together, see `DeviceShards`. This works for element-wise optimizers. Other optimizers (Muon uses a matrix, Adafactor
rows and columns) get **whole** parameters: one rank, the owner, steps all of a parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sparkhvd.engine.calls import Call, Reduction
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.cuda import DeviceWork, submit
from sparkhvd.torch.collectives.tensors import DTYPES, engine_dtype, lend, paired, written
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device, copy_each, opened
from sparkhvd.torch.gradients.layout import Slices, cut_range, flat, is_dense, same_places
from sparkhvd.torch.gradients.plan import plan_buckets
from sparkhvd.torch.optimizer.arguments import Configuration, group_numbers
from sparkhvd.torch.registered import over_buffer

# Optimizers whose step of an element depends only on its gradient, its state, and numbers common to all elements.
# Subclasses are not included, because their steps may depend on more.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def owners_of(sizes: Sequence[int], num_ranks: int, before: Sequence[int] = ()) -> list[int]:
    """Assign an owner to each whole parameter, so that ranks own similar numbers of elements.

    Args:
        sizes: number of elements of each parameter.
        num_ranks: number of ranks.
        before: number of elements that each rank owns already.
    """
    loads = list(before) or [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class Shard:
    """A parameter and this rank's part of it.

    Args:
        param: the parameter.
        name: name of the parameter, for messages.
        own: the range of this rank's elements, in the order of memory.
        owner: index of the rank that owns the whole parameter; -1 for a cut parameter.

    Attributes:
        param: the parameter.
        name: name of the parameter, for messages.
        is_cut: whether every rank has a part; otherwise a rank owns the whole parameter.
        first: index of this rank's first element, in the order of memory.
        last: index after this rank's last element.
        owner: index of the owner among the ranks; -1 for a cut parameter.
        part: this rank's part, a view of the parameter's memory that the optimizer steps; None without a part.
    """

    __slots__ = (
        "_address",
        "_shape",
        "_strides",
        "first",
        "is_cut",
        "last",
        "name",
        "owner",
        "param",
        "part",
    )

    def __init__(
        self,
        param: Tensor,
        name: str,
        own: tuple[int, int],
        *,
        owner: int = -1,
    ) -> None:
        self.param = param
        self.name = name
        self.is_cut = owner < 0
        self.owner = owner
        self.first, self.last = own
        self._address = param.data_ptr()
        self._shape = tuple(param.shape)
        self._strides = param.stride()
        self.part: Tensor | None = None
        if self.last > self.first:
            self.part = torch.nn.Parameter(self.of(param), requires_grad=param.requires_grad)

    def of(self, tensor: Tensor) -> Tensor:
        """View this rank's part of a tensor with the parameter's memory layout."""
        return flat(tensor)[self.first : self.last] if self.is_cut else tensor.detach()

    def follow(self) -> None:
        """Update `part` if the user has replaced the parameter's memory.

        Raises:
            InvalidArgumentError: the parameter's shape or memory layout has changed.
        """
        if self.param.shape != self._shape:
            raise InvalidArgumentError(
                f"DistributedOptimizer(sharded=True): {self.name!r} had shape {self._shape} when the optimizer divided it, "
                f"but has {tuple(self.param.shape)} now. Build DistributedOptimizer after the model has its final shapes."
            )
        if self.param.data_ptr() == self._address:
            return
        if self.is_cut and not same_places(self._strides, self.param):
            raise InvalidArgumentError(
                f"DistributedOptimizer(sharded=True): {self.name!r} of shape "
                f"{self._shape} had strides {self._strides} when the optimizer divided its memory, but has "
                f"{self.param.stride()} now. Call model.to(memory_format=...) before you build the optimizer."
            )
        if self.part is not None:
            self.part.data = self.of(self.param)
        self._address = self.param.data_ptr()

    def take_gradient(self) -> None:
        """Set `part.grad` to this rank's part of `param.grad`, for the user's optimizer."""
        if self.part is None:
            return
        grad = self.param.grad
        if grad is not None and self.is_cut:
            if grad.stride() != self.param.stride() and not same_places(grad.stride(), self.param):
                grad = torch.empty_like(self.param).copy_(grad)
            self.part.grad = flat(grad)[self.first : self.last]
        else:
            self.part.grad = grad

    def drop_gradient(self) -> None:
        """Forget the gradient of the part, because the step has ended."""
        if self.part is not None:
            self.part.grad = None

    def is_own(self, value: object) -> bool:
        """Whether a value of the optimizer's state has an element for each element of this rank's part."""
        return (
            self.part is not None and isinstance(value, Tensor) and value.shape == self.part.shape
        )


class Gatherer:
    """Gathers cut tensors in place: every rank sends its part of each tensor and receives the other parts.

    Args:
        context: context of the engine.
        name: name of the operations.
        like: examples of the tensors; number, sizes and dtypes must be the same on every rank.
        process_set: the engine's number of the ranks.
    """

    def __init__(
        self, context: Context, name: str, like: Iterable[Tensor], process_set: int
    ) -> None:
        self._engine = context.engine
        self._calls: list[tuple[str, Call, list[int], list[int]]] = []
        by_dtype: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(like):
            by_dtype.setdefault(tensor.dtype, []).append((index, tensor))
        for number, (kind, entries) in enumerate(by_dtype.items()):
            shapes = [paired((tensor.numel(),), kind)[0] for _, tensor in entries]
            dtype = engine_dtype(name, torch.empty(0, dtype=paired((), kind)[1]))
            call = Call(Collective.ALLGATHER_INTO, shapes, dtype, process_set=process_set)
            indices = [index for index, _ in entries]
            counts = [tensor.numel() for _, tensor in entries]
            self._calls.append((f"{name}.{number}", call, indices, counts))

    def start(self, tensors: Sequence[Tensor]) -> list[Work]:
        """Submit the operations. Every rank must call this."""
        works = []
        for name, call, indices, counts in self._calls:
            own = [tensors[index] for index in indices]
            for position, (tensor, count) in enumerate(zip(own, counts, strict=True)):
                if tensor.numel() != count:
                    raise InvalidArgumentError(
                        f"{name}: a tensor had {count} elements when the ranks agreed on its size, but has shape "
                        f"{tuple(tensor.shape)} now. Build DistributedOptimizer after the model has its final shapes."
                    )
                address = tensor.data_ptr()
                call.place(position, address, address)
            works.append(self._engine.start(call, name, lend(*own)))
        return works

    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Gather the tensors. Every rank must call this."""
        for work in self.start(tensors):
            work.wait()


# ----------------------------------------------------------------------------------------------------
# Parameters of a sharded optimizer on the rank's GPU: their division, and the gathering of parts.
# **Cut** parameters of a bucket are divided together: they are laid out in `Slices`, and a rank steps its slice. So a
# bucket's gradients need one reducescatter, and its stepped parameters one allgather.
#
# **A gather** copies this rank's parts into its slice of flat memory, receives the other slices, and copies all slices
# into the parameters. The parameters stay in the user's memory, because a captured graph or flattened weights may use
# it. Gathers use two pieces of memory in turn. Streams order the copies, and the host waits only for the other ranks'
# submissions. For S bytes of parameters this copies 2 S bytes that parameters in the engine's memory would not need.

# Number of pieces of memory used in turn: while a piece is in flight, another is copied.
_TURNS = 2
_PIECE_ALIGNMENT = 256


class Gathering(NamedTuple):
    """Tensors of one gather operation.

    Attributes:
        slices: division of the tensors.
        tensors: the tensors in the order of `slices`; None for a missing tensor. A cut tensor has one dimension.
    """

    slices: Slices
    tensors: Sequence[Tensor | None]

    @property
    def dtype(self) -> torch.dtype:
        """Type of all tensors."""
        return next(tensor.dtype for tensor in self.tensors if tensor is not None)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the flat memory."""
        return self.slices.total * self.dtype.itemsize


class DeviceShards:
    """The parameters of a sharded optimizer on this rank's GPU.

    Args:
        context: context whose engine gathers.
        device: the GPU.
        label: name of the optimizer.
        process_set: the engine's number of the process set.
        ranks: global ranks of the process set, ascending.
    """

    def __init__(
        self, context: Context, device: Device, label: str, process_set: int, ranks: Sequence[int]
    ) -> None:
        self._context = context
        self._device = device
        self._label = f"{label}.gpu"
        self._process_set = process_set
        self._num_ranks = len(ranks)
        self._place = ranks.index(context.engine.topology.rank)
        # For each bucket of cut parameters: their common division, and the parameters.
        self._buckets: list[tuple[Slices, list[Tensor]]] = []
        self._memory: list[Tensor] = []  # pieces of flat memory for gathers of parameters
        self._num_allocations = 0

    def cut(self, bucket: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Shard parameters of one dtype as one flat buffer. Return this rank's range in each parameter."""
        counts = [p.numel() for p in bucket]
        slices = Slices.cut(counts, bucket[0].dtype.itemsize, self._num_ranks)
        self._buckets.append((slices, list(bucket)))
        return [slices.part(number, self._place) for number in range(len(counts))]

    def together(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Group parameters by the bucket of their division."""
        among = set(map(id, parameters))
        return [bucket for _, bucket in self._buckets if id(bucket[0]) in among]

    def gather_parameters(self, shards: Sequence[Shard]) -> None:
        """Gather every rank's stepped parts into these parameters. Every rank must call this.

        The current stream waits for the result.
        """
        work = self._cut_ones({id(s.param): flat(s.param) for s in shards if s.is_cut})
        whole = [s for s in shards if not s.is_cut]
        for dtype in dict.fromkeys(s.param.dtype for s in whole):
            alike = [s for s in whole if s.param.dtype == dtype]
            counts, owners = [s.param.numel() for s in alike], [s.owner for s in alike]
            slices = Slices.owned(counts, owners, dtype.itemsize, self._num_ranks)
            work.append(Gathering(slices, [s.param.detach() for s in alike]))
        most = max((each.num_bytes for each in work), default=0)
        if most > (len(self._memory[0]) if self._memory else 0):
            self._memory = self._allocate(most)
        self._gather(work, self._memory)

    def gather_cut(self, tensors: dict[int, Tensor]) -> None:
        """Gather tensors, such as gradients, that are laid out as cut parameters. Every rank must call this.

        The keys are the `id`s of the parameters.
        """
        work = self._cut_ones({key: flat(tensor) for key, tensor in tensors.items()})
        if not work:
            return
        most = max(each.num_bytes for each in work)
        like = next(t for t in work[0].tensors if t is not None)
        self._gather(work, [like.new_empty(most, dtype=torch.uint8) for _ in range(_TURNS)])

    def _cut_ones(self, tensors: dict[int, Tensor]) -> list[Gathering]:
        gatherings = [
            Gathering(slices, [tensors.get(id(p)) for p in bucket])
            for slices, bucket in self._buckets
        ]
        return [each for each in gatherings if any([t is not None for t in each.tensors])]

    def _allocate(self, num_bytes: int) -> list[Tensor]:
        self._num_allocations += 1
        length = -(-num_bytes // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT
        buffer = self._context.engine.allocate(
            length * _TURNS,
            name=f"{self._label}.memory.{self._num_allocations}",
            process_set=self._process_set,
            device=self._device.ordinal,
        )
        return list(self._device.over_buffer(buffer).split(length))

    @torch.no_grad()
    def _gather(self, work: Sequence[Gathering], memory: Sequence[Tensor]) -> None:
        flying: deque[tuple[DeviceWork, Gathering, Tensor]] = deque()
        for turn, each in enumerate(work):
            if len(flying) == len(memory):
                self._finish(*flying.popleft())
            # The piece is free: the copies of the gathering that used it last are earlier on this stream.
            piece = memory[turn % len(memory)][: each.num_bytes].view(each.dtype)
            flying.append((self._start(each, piece, turn), each, piece))
        while flying:
            self._finish(*flying.popleft())

    def _start(self, gathering: Gathering, piece: Tensor, turn: int) -> DeviceWork:
        slices = gathering.slices
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for number, tensor in enumerate(gathering.tensors):
            first, last = slices.part(number, self._place)
            if tensor is None or first == last:
                continue
            begin = slices.offsets[number]
            is_all = last - first == slices.counts[number]
            own = piece[begin + first : begin + last]
            targets.append(own.view(tensor.shape) if is_all else own)
            sources.append(tensor if is_all else tensor[first:last])
        if targets:
            copy_each(targets, sources)
        call = Call(
            Collective.ALLGATHER_INTO,
            [(slices.total,)],
            DTYPES[piece.dtype],
            process_set=self._process_set,
            device=self._device.ordinal,
        )
        call.place(0, piece.data_ptr(), piece.data_ptr())
        # Put length and type into the name, because the engine expects the same shape and type whenever a name is used.
        name = f"{self._label}.{turn}.{slices.total}.{piece.dtype}"
        stream = self._device.stream()
        return submit(
            self._context, self._device, call, name, stream, piece.untyped_storage(), (piece,)
        )

    def _finish(self, work: DeviceWork, gathering: Gathering, piece: Tensor) -> None:
        work.wait()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for number, tensor in enumerate(gathering.tensors):
            if tensor is not None:
                begin = gathering.slices.offsets[number]
                targets.append(tensor)
                sources.append(piece[begin : begin + tensor.numel()].view(tensor.shape))
        copy_each(targets, sources)


# ----------------------------------------------------------------------------------------------------
# Parameters in one copy for all ranks of a host: `DistributedOptimizer(sharded=True, share_parameters=True)`.
# **Order of writes.** Parameters are written in `step()` only, each element by its owner. A rank may write when every rank
# has reached its `step()` (`begin`), and continues when every rank has written (`end`). So no rank computes with
# changing parameters. A write outside of `step()` would change the parameters of all ranks of the host. The tensors'
# version counters detect it in the next step, and every rank raises an error.

# Every parameter begins at a multiple of a cache line.
_ALIGNMENT = 64

# Address of each parameter that is in shared memory, also after its optimizer was freed.
_addresses: MutableMapping[Any, int] = WeakIdKeyDictionary()


class SharedParameters:
    """Memory with one copy of the parameters for all ranks of a host.

    Every rank of the process set must create this object with the same parameters. They get the first rank's values.
    The constructor waits for all ranks.

    Args:
        context: context of the engine.
        label: name of the optimizer.
        named: the parameters; their memory is replaced.
        process_set: the engine's number of the process set.
        ranks: global ranks of the process set, ascending.

    Raises:
        InvalidArgumentError: the ranks are on several hosts, or a rank cannot map the memory.
        MismatchError: ranks have parameters of different sizes.
    """

    def __init__(
        self,
        context: Context,
        label: str,
        named: Sequence[tuple[str, Tensor]],
        process_set: int,
        ranks: Sequence[int],
    ) -> None:
        topology = context.engine.topology
        hosts = {topology.hosts[rank] for rank in ranks}
        if len(hosts) > 1:
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): the {len(ranks)} ranks are on {len(hosts)} hosts, "
                "but only the ranks of one host can share memory. Leave share_parameters out, or give process_set=."
            )
        self._engine = context.engine
        self._label = label
        self._process_set = process_set
        self._named = list(named)
        # 0 if no parameter was written outside of step(), else the number of the first such parameter plus 1.
        self._written = torch.zeros(1, dtype=torch.int64)
        self._exchange = Call(
            Collective.ALLREDUCE, [(1,)], DType.INT64, Reduction(ReduceOp.MAX), process_set
        )
        self._exchange.place(0, self._written.data_ptr(), self._written.data_ptr())
        self._move(is_first=topology.rank == ranks[0])
        self._record_versions()

    def _move(self, *, is_first: bool) -> None:
        sizes = [
            -(-p.numel() * p.element_size() // _ALIGNMENT) * _ALIGNMENT for _, p in self._named
        ]
        buffer = self._engine.allocate(
            sum(sizes),
            name=f"{self._label}.memory",
            process_set=self._process_set,
            one_piece=True,
        )
        views = []
        begin = 0
        for (_, p), size in zip(self._named, sizes, strict=True):
            strides = torch.empty_like(p, device="meta").stride()
            # Give each parameter its own storage: torch.save and deepcopy copy whole storages, and do not support a
            # storage with several types.
            piece = over_buffer(buffer, p.dtype, p.numel(), begin)
            views.append(piece.as_strided(p.shape, strides))
            if is_first:
                views[-1].copy_(p.detach())
            begin += size
        self._barrier("copied")
        for (_, p), view in zip(self._named, views, strict=True):
            p.data = view
        self._addresses = [view.data_ptr() for view in views]
        for (_, p), address in zip(self._named, self._addresses, strict=True):
            _addresses[p] = address

    def _record_versions(self) -> None:
        self._versions = [p._version for _, p in self._named]

    def _barrier(self, where: str) -> None:
        name = f"{self._label}.{where}"
        self._engine.barrier(name=name, process_set=self._process_set).wait()

    def begin(self) -> None:
        """Wait until every rank has reached its step.

        Raises:
            InvalidArgumentError: a rank wrote parameters outside of `step()`; raised on every rank.
        """
        changed = [
            number
            for number, ((_, p), version) in enumerate(
                zip(self._named, self._versions, strict=True), start=1
            )
            if p._version != version
        ]
        moved = [
            number
            for number, ((_, p), address) in enumerate(
                zip(self._named, self._addresses, strict=True), start=1
            )
            if p.data_ptr() != address
        ]
        # Parameters with replaced memory get higher numbers than written parameters, because the maximum over the ranks
        # is reported and replaced memory is the worse error.
        count = len(self._named)
        self._written.fill_(count + moved[0] if moved else changed[0] if changed else 0)
        self._engine.run(self._exchange, f"{self._label}.begin", self._written)
        first = int(self._written)
        if first > count:
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): {self._named[first - count - 1][0]!r} was moved to other "
                "memory (model.to(), p.data = ...) on this rank or another rank, so the ranks no longer share it. Build the "
                "optimizer after moving the model, or leave share_parameters out."
            )
        if first:
            self._record_versions()
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): {self._named[first - 1][0]!r} was written outside of "
                "step(), on this rank or another rank, but all ranks of the host share it. Write it inside `with "
                "optimizer.writing_parameters():`, on every rank, or leave share_parameters out."
            )

    def end(self) -> None:
        """Wait until every rank has written its part."""
        self._barrier("end")
        # Other ranks have written them too.
        written([p for _, p in self._named if p.grad is not None])
        self._record_versions()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Allow writes to parameters in the block. No rank computes with them meanwhile."""
        self.begin()  # raises an error for earlier writes
        try:
            yield
        finally:
            self._barrier("written")
            self._record_versions()


def unshare(parameters: Iterable[Tensor]) -> None:
    """Copy parameters to private memory if an earlier optimizer put them into shared memory."""
    for p in parameters:
        if p in _addresses and _addresses.pop(p) == p.data_ptr():
            p.data = p.detach().clone(memory_format=torch.preserve_format)


# ----------------------------------------------------------------------------------------------------
# Division of a sharded optimizer's parameters among the ranks.

# Named parameters, and the argument `groups` for them.
NamedGroup = tuple[list[tuple[str, Tensor]], int | Sequence[Sequence[Tensor]] | None]


class ShardLayout:
    """The parameters of a sharded optimizer, each with this rank's part.

    Args:
        context: context of the ranks.
        configuration: arguments of the optimizer.
        kind: class of the user's optimizer.

    Attributes:
        context: context of the ranks.
        configuration: arguments of the optimizer.
        label: name of the optimizer, for the names of operations.
        shards: this rank's part of each parameter.
        gpu: the parameters on this rank's GPU, if any.
        shared: memory that the ranks of this host share; None without `share_parameters`.
    """

    def __init__(
        self, context: Context, configuration: Configuration, kind: type[torch.optim.Optimizer]
    ) -> None:
        number = context.number("sharded", configuration.number)
        self.context = context
        self.configuration = configuration
        self.label = f"DistributedOptimizer.sharded.{number}"
        self.shards: dict[Tensor, Shard] = {}
        self.gpu: DeviceShards | None = None
        self.shared: SharedParameters | None = None
        self._is_elementwise = kind in ELEMENTWISE

    def add(
        self,
        named: Mapping[Tensor, str],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        """Divide further parameters. Every rank must pass the same parameters in the same order."""
        parameters = [p for p in named if p.numel() > 0]
        for p in parameters:
            if not p.is_cpu:
                self._open_gpu(named[p], p)
        configuration = self.configuration
        if configuration.share_parameters and parameters:
            self.shared = SharedParameters(
                self.context,
                self.label,
                [(named[p], p) for p in parameters],
                configuration.number,
                configuration.ranks,
            )
        self._divide(named, parameters, groups)

    def reduced_apart(
        self,
        named: Sequence[tuple[str, Tensor]],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> Iterator[tuple[NamedGroup, bool]]:
        """Yield the parameters of each reducer, and whether each rank gets only its part of the gradients."""
        cut = [(name, p) for name, p in named if self._is_cut(p)]
        on_gpu = [(name, p) for name, p in cut if not p.is_cpu]
        if on_gpu and self.gpu is not None:
            # Use the buckets of the division, also if a compression would give other bucket sizes.
            yield (on_gpu, self.gpu.together(p for _, p in on_gpu)), True
        on_cpu = [(name, p) for name, p in cut if p.is_cpu]
        if on_cpu:
            yield (on_cpu, groups), True
        whole = [(name, p) for name, p in named if not self._is_cut(p)]
        if whole:
            yield (whole, groups), False

    def _open_gpu(self, name: str, parameter: Tensor) -> None:
        configuration = self.configuration
        if configuration.share_parameters:
            raise InvalidArgumentError(
                f"DistributedOptimizer(share_parameters=True): {name!r} is on {parameter.device}, but ranks can share only CPU "
                "memory. Leave share_parameters out."
            )
        device = opened(self.context, f"DistributedOptimizer, {name!r}", parameter)
        if self.gpu is None:
            self.gpu = DeviceShards(
                self.context, device, self.label, configuration.number, configuration.ranks
            )

    def _is_cut(self, parameter: Tensor) -> bool:
        # State of a 0-dimensional parameter cannot be distinguished from numbers such as the step.
        return self._is_elementwise and parameter.dim() > 0 and is_dense(parameter)

    def _divide(
        self,
        named: Mapping[Tensor, str],
        parameters: list[Tensor],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        ranks = self.configuration.ranks
        place = ranks.index(self.context.engine.topology.rank)
        whole = [p for p in parameters if not self._is_cut(p)]
        loads = [0] * len(ranks)
        for shard in self.shards.values():
            if not shard.is_cut:
                loads[shard.owner] += shard.param.numel()
        numbers = owners_of([p.numel() for p in whole], len(ranks), loads)
        owners = dict(zip(map(id, whole), numbers, strict=True))
        cut = [p for p in parameters if id(p) not in owners]
        ranges = {id(p): cut_range(p.numel(), len(ranks), place) for p in cut if p.is_cpu}
        ranges.update(self._divide_on_gpu([p for p in cut if not p.is_cpu], groups))
        for p in parameters:
            owner = owners.get(id(p), -1)
            part = ranges.get(id(p), (0, p.numel() if owner == place else 0))
            self.shards[p] = Shard(p, named[p], part, owner=owner)

    def _divide_on_gpu(
        self, parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None
    ) -> dict[int, tuple[int, int]]:
        """Divide the parameters by the buckets of their gradients and return this rank's range of each, by `id`.

        Frozen parameters are divided separately, because each may become trainable alone.
        """
        gpu = self.gpu
        if gpu is None:
            return {}
        trained = [p for p in parameters if p.requires_grad]
        plan = plan_buckets(
            [p.nbytes for p in trained],
            [p.dtype for p in trained],
            list(reversed(range(len(trained)))),
            self.context.engine.settings.device_bucket_bytes,
            group_numbers(groups, trained),
        )
        buckets = [[trained[index] for index in indices] for indices in plan]
        buckets += [[p] for p in parameters if not p.requires_grad]
        ranges: dict[int, tuple[int, int]] = {}
        for bucket in buckets:
            ranges.update(zip(map(id, bucket), gpu.cut(bucket), strict=True))
        return ranges
