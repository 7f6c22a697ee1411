"""`Engine`: the operations of one rank. Knows no torch and no Spark.

Threads: any number of Python threads may use one engine. Calls that cannot block keep the GIL
(`ctypes.PyDLL`), so they cost no switch of threads; only waits, create and shutdown release it
(`ctypes.CDLL`). A wait comes back to Python every 100 ms, so Ctrl-C works. Nothing here takes a lock (see
`state.py`).

Shutdown: `shutdown()` stops the native thread and closes its descriptors; memory is freed when the last
reference to the engine and its works is gone, or when the interpreter exits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sparkhvd.engine.calls import (
    NO_REDUCTION,
    Call,
    Reduction,
    Session,
    Submitter,
    TensorView,
)
from sparkhvd.engine.library import (
    DEVICE_CPU,
    Collective,
    DType,
    Knob,
    Loss,
)
from sparkhvd.engine.work import Buffer, Work
from sparkhvd.errors import CollectiveError, InvalidArgumentError


class Engine(Submitter):
    """The operations of one rank. A context manager: success shuts down, an exception aborts.

    Creating one is collective: every rank does it, and it returns once all have.

    Args:
        connections: an authenticated socket to every peer; the engine owns them from now on, also when this
            raises.
        settings: the same on every rank.

    Raises:
        EngineUnavailableError: the compiled library is missing or of another version.
        InvalidArgumentError: the settings ask for what this machine cannot do.
        CollectiveTimeoutError: a rank did not come within `settings.connect_timeout_s`.
        PeerLostError: a rank's process or connection is gone.
    """

    def allreduce(
        self,
        tensors: Sequence[TensorView],
        *,
        name: str,
        dtype: DType,
        reduction: Reduction,
        process_set: int = 0,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Start to combine `tensors` elementwise over all ranks; every rank gets the same values.

        Every rank of the process set submits the same name, shapes, dtype and operation, in any order among
        its operations. Never blocks. Inputs are read and outputs written until the work has finished.

        Args:
            tensors: one or more tensors that are reduced as one operation.
            name: matches the operation across ranks; unique among those in flight.
            dtype: element type of all tensors.
            reduction: operation and factors.
            process_set: 0 = all ranks.
            keep: kept alive until the operation has finished, even if the Work is dropped.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.

        Raises:
            InvalidArgumentError: this call is wrong; nothing was submitted.
            NotInitializedError: the engine was shut down, or made before a fork.
            CollectiveError: the engine has failed before.
        """
        call = self.prepare(Collective.ALLREDUCE, tensors, dtype, reduction, process_set)
        return self.start(call, name, keep, timeout_s)

    def allgather(
        self,
        tensor: TensorView,
        *,
        name: str,
        dtype: DType,
        process_set: int = 0,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Start to join one tensor of every rank; the result is `Work.output()`. Otherwise as `allreduce`."""
        call = self.prepare(Collective.ALLGATHER, (tensor,), dtype, NO_REDUCTION, process_set)
        return self.start(call, name, keep, timeout_s)

    def broadcast(
        self,
        tensor: TensorView,
        *,
        root_rank: int,
        name: str,
        dtype: DType,
        process_set: int = 0,
        keep: object = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Start to copy the input of `root_rank` to every rank's output. Otherwise as `allreduce`."""
        call = self.prepare(
            Collective.BROADCAST, (tensor,), dtype, NO_REDUCTION, process_set, root_rank
        )
        return self.start(call, name, keep, timeout_s)

    def barrier(
        self, *, name: str | None = None, process_set: int = 0, timeout_s: float | None = None
    ) -> Work:
        """Start to wait for every rank of the process set. Otherwise as `allreduce`.

        Args:
            name: None numbers the barriers of the process set; every rank then calls as many.
            process_set: 0 = all ranks.
            timeout_s: longest wait for the slowest rank; None means `Settings.stall_shutdown_s`.
        """
        name = name or self._number("barrier", process_set)
        return self.start(Call(Collective.BARRIER, process_set=process_set), name, None, timeout_s)

    def join(self, *, process_set: int = 0, timeout_s: float | None = None) -> Work:
        """Start to announce that this rank has no more work; finishes when every rank has announced it.

        Meanwhile the others' allreduces (Sum, Average) go on without this rank's tensors; their Average still
        divides by the number of all. Their other operations fail with a `MismatchError`. When all have joined,
        `Work.output().rows[0]` is the rank that joined last.

        Args:
            process_set: the ranks that join; 0 = all.
            timeout_s: how long a rank may neither join nor submit anything; 0 = for ever, None = the setting.
        """
        call = Call(Collective.JOIN, process_set=process_set)
        return self.start(call, "join", timeout_s=timeout_s)

    def add_process_set(self, ranks: Sequence[int], *, name: str | None = None) -> Work:
        """Start to make a process set; every rank must call this with the same ranks, members or not.

        Its number is `Work.output().rows[0]`: the same on every rank, never 0, never used again.

        Args:
            ranks: ascending, each once.
            name: None numbers these calls.
        """
        call = Call(Collective.ADD_PROCESS_SET, numbers=ranks)
        return self.start(call, name or self._number("add_process_set"))

    def remove_process_set(self, process_set: int, *, name: str | None = None) -> Work:
        """Start to remove a process set; every rank must call this. Operations that its ranks have agreed on still run."""
        call = Call(Collective.REMOVE_PROCESS_SET, numbers=(process_set,))
        return self.start(call, name or self._number("remove_process_set"))

    def allocate(
        self,
        num_bytes: int,
        *,
        name: str | None = None,
        process_set: int = 0,
        one_piece: bool = False,
        device: int = DEVICE_CPU,
    ) -> Buffer:
        """Make registered memory and wait for it; every rank of the process set must call this, with equal sizes.

        An allreduce whose tensors lie in one buffer, in place and one after the other on every rank, runs
        without copies. The memory is zero at first and outlives the engine.

        Args:
            num_bytes: 1 or more.
            name: None numbers these calls.
            process_set: the ranks that share it.
            one_piece: the ranks of a host get the same piece instead of one each. They must order their writes
                themselves (`barrier`).
            device: the opened device, to make memory there, each rank its own, which NCCL knows.

        Raises:
            InvalidArgumentError: there is not enough memory on this rank (or, of one piece, on any rank); or as
                for `allreduce`.
            MismatchError, CollectiveTimeoutError, PeerLostError: as for any operation.
        """
        numbers = (num_bytes, 1) if one_piece else (num_bytes,)
        call = Call(Collective.REGISTER, process_set=process_set, numbers=numbers, device=device)
        work = self.start(call, name or self._number("allocate", process_set))
        work.wait()
        return work.buffer()

    def adopt(
        self,
        buffer: Buffer,
        former: Session,
        former_ranks: Sequence[int],
        *,
        name: str | None = None,
    ) -> Buffer:
        """Register memory of an engine that has ended, with its contents; every rank calls this, with its piece of the same memory.

        No page is made and nothing is copied: tensors in it stay where they are.

        Args:
            buffer: of `former`, made by `allocate` with a piece per rank.
            former: the engine that made it; shut down.
            former_ranks: by rank of this engine, its rank there.
            name: None numbers these calls.

        Raises:
            InvalidArgumentError: `former` still works; a rank of `former` that is not here may still write into the memory, because it is neither
                dead nor has left; the memory is no such; or this rank was another one there.
            MismatchError, CollectiveTimeoutError, PeerLostError: as for any operation.
        """
        with contextlib.suppress(CollectiveError):
            former.check()
            raise InvalidArgumentError(
                "adopt(): the former engine still works, and may write into the memory. Shut it down on every rank first."
            )
        losses = former.losses()
        here = set(former_ranks)
        others = [rank for rank in range(former.size) if rank not in here]
        if alive := [rank for rank in others if losses.get(rank, Loss.SILENT) == Loss.SILENT]:
            raise InvalidArgumentError(
                f"adopt(): rank {alive[0]} of the former engine is not here, and is not known to have ended: it may still write "
                "into the memory. Allocate new memory."
            )
        numbers = (buffer.num_bytes, 0, *former_ranks)
        call = Call(Collective.REGISTER, numbers=numbers)
        call.request.adopted = buffer.handle
        work = self.start(call, name or self._number("adopt"), keep=buffer)
        work.wait()
        return work.buffer()

    def configure(
        self,
        *,
        chunk_bytes: int = 0,
        streams: int = 0,
        process_set: int = 0,
    ) -> Work:
        """Start to change the algorithms of later operations, from the same one on, on every rank; 0 changes nothing.

        Args:
            chunk_bytes: of a pipeline step in shared memory, at most `Settings.slot_bytes`.
            streams: connections per pair of ranks that are used.
            process_set: the one that is changed.
        """
        numbers = [0] * len(Knob)
        numbers[Knob.CHUNK_BYTES] = chunk_bytes
        numbers[Knob.STREAMS] = streams
        call = Call(Collective.CONFIGURE, process_set=process_set, numbers=numbers)
        return self.start(call, self._number("configure", process_set))
