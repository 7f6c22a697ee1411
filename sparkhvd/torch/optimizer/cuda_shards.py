"""Parameters of a sharded optimizer on the rank's GPU: how they are divided, and how parts become whole.

**Cut** parameters are divided together: those of a bucket lie in `Slices`, and a rank steps what is in its slice. So
gradients are reduced by one reducescatter for a bucket, and stepped parameters given by one allgather.

**A gather** copies this rank's parts into its slice of flat memory, has the other slices filled, and copies the whole
out: the parameters stay where the user has them, whatever else may know of their memory (a captured graph, flattened
weights). Two pieces of memory take turns; streams keep them in order, and the host waits only for the other ranks'
submissions. Of S bytes of parameters this moves 2 S more inside the GPU than memory that belonged to us would need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparkhvd.engine.engine import Call, Collective
from sparkhvd.torch.collectives.cuda_reductions import DeviceWork, submit
from sparkhvd.torch.collectives.tensors import DTYPES
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device, copy_each
from sparkhvd.torch.gradients.layout import Slices, flat
from sparkhvd.torch.optimizer.shards import Shard

__all__ = ["DeviceShards", "Gathering"]

# Pieces of memory that take turns: while one is on its way, another is copied.
_TURNS = 2
_PIECE_ALIGNMENT = 256


class Gathering(NamedTuple):
    """Tensors that become whole by one operation.

    Attributes:
        slices: how they are divided.
        tensors: in the order of the slices; what has none at a place is left out. A cut one has one dimension.
    """

    slices: Slices
    tensors: Sequence[Tensor | None]

    @property
    def dtype(self) -> torch.dtype:
        """Type of all tensors."""
        return next(tensor.dtype for tensor in self.tensors if tensor is not None)

    @property
    def num_bytes(self) -> int:
        """Length of the flat memory."""
        return self.slices.total * self.dtype.itemsize


class DeviceShards:
    """The parameters on the GPU of one sharded optimizer.

    Args:
        context: whose engine gathers.
        device: the GPU.
        label: of the optimizer.
        process_set: the engine's number of the ranks.
        ranks: their global ranks, ascending.
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
        # Cut parameters as they are divided together.
        self._buckets: list[tuple[Slices, list[Tensor]]] = []
        self._memory: list[Tensor] = []  # of parameters on their way
        self._num_allocations = 0

    def cut(self, bucket: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Divide parameters of one type together; return this rank's elements of each, as `Slices.part`."""
        counts = [p.numel() for p in bucket]
        slices = Slices.cut(counts, bucket[0].dtype.itemsize, self._num_ranks)
        self._buckets.append((slices, list(bucket)))
        return [slices.part(number, self._place) for number in range(len(counts))]

    def together(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return those of these that were divided together: the buckets of their gradients."""
        among = set(map(id, parameters))
        return [bucket for _, bucket in self._buckets if id(bucket[0]) in among]

    def gather_parameters(self, shards: Sequence[Shard]) -> None:
        """Let the current stream wait until every rank's stepped parts are in these parameters; every rank must."""
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
        """Gather tensors that lie in memory as cut parameters do, by the identity of these; every rank must."""
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
            # The piece was copied out of on this stream, if another gathering had it before.
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
        # To the engine a name means a shape and a type.
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
