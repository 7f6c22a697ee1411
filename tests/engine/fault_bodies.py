"""Functions of ranks during a fault. Each is called as fn(engine, talk)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparkhvd import launchers, rendezvous
from sparkhvd.engine.calls import Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, ReduceOp
from sparkhvd.errors import CollectiveError, PeerLostError, ResultMemoryError
from sparkhvd.rendezvous import rendezvous as sockets
from tests.engine.arrays import (
    allgather,
    allreduce,
    broadcast,
    dtype_of,
    start_receive,
    start_send,
    view,
)
from tests.harness import faults
from tests.harness.meeting import meet
from tests.harness.rank_process import RankProcess, Talk


def one_round(engine: Engine, number: int) -> None:
    """Run one operation of several kinds, and compare each result."""
    size, rank = engine.size, engine.rank
    total = size * (size + 1) / 2
    assert (allreduce(engine, f"big {number}", np.full(300_001, rank + 1.0)) == total).all()
    assert (allreduce(engine, f"small {number}", np.full(3, rank + 1.0)) == total).all()
    joined, rows = allgather(engine, f"rows {number}", np.full((rank + 1, 501), rank, np.int32))
    assert rows == tuple(range(1, size + 1))
    assert (joined[:, 0] == np.repeat(np.arange(size), rows)).all()
    root = number % size
    assert (broadcast(engine, f"copy {number}", np.full(50_001, rank), root) == root).all()
    received = np.empty(100_001)
    pair = [
        start_receive(engine, f"from {number}", received, (rank + 1) % size, tag=1),
        start_send(engine, f"to {number}", np.full(100_001, rank + 1.0), (rank - 1) % size, tag=1),
    ]
    engine.barrier(name=f"all {number}").wait()
    for work in pair:
        work.wait()
    assert (received == (rank + 1) % size + 1).all()


def work_until_lost(engine: Engine, talk: Talk) -> Any:
    """Repeat rounds until the end of another rank ends this rank."""
    talk.say("running")
    number = 0
    while True:
        one_round(engine, number)
        number += 1


def wait_for_a_rank_with_memory(engine: Engine, talk: Talk) -> Any:
    """Wait for rank 1, which has this many MiB resident, and return when this rank learns of its end, by the machine's clock."""
    num_bytes = talk.hear() << 20
    with mmap.mmap(-1, num_bytes) as memory:
        if engine.rank == 1:
            # The kernel frees small pages one by one, and takes a tenth of a second for a GiB.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
        engine.barrier(name="start").wait()
        talk.say("running")
        if engine.rank == 1:
            time.sleep(600)
        try:
            engine.barrier(name="never").wait()
        except PeerLostError as error:
            return {"at": time.monotonic(), "lost": dict(error.lost)}
        raise AssertionError("no rank was lost")


def time_until_known(ranks: list[RankProcess], resident_mib: int) -> tuple[float, float]:
    """Kill rank 1 of three, and return the seconds until the others know it, and until the process is gone."""
    for rank in ranks:
        rank.tell(resident_mib)
    for rank in ranks:
        assert rank.expect() == "running"
    time.sleep(0.1)  # the others have gone to sleep
    began = time.monotonic()
    ranks[1].kill(signal.SIGKILL)
    ranks[1].wait()
    gone = time.monotonic() - began
    known = [ranks[place].expect() for place in (0, 2)]
    assert [each["lost"] for each in known] == [{"1": "dead"}] * 2
    return max(each["at"] for each in known) - began, gone


def error_kinds(engine: Engine) -> dict[int, str]:
    return {rank: loss.name for rank, loss in engine.losses().items()}


def large_round(engine: Engine, number: int) -> None:
    """Run all operations that move whole tensors, 24 MiB each, in the world and in a process set at the same time."""
    size, rank = engine.size, engine.rank
    added = engine.add_process_set(range(size))
    added.wait()
    values = np.full((size, 1 << 20), rank + 1.0)
    root = number % size
    copies, parts = (
        [np.empty_like(values) for _ in range(2)],
        [np.empty((1, 1 << 20)) for _ in range(2)],
    )
    works = []
    for place, process_set in enumerate((0, added.output().rows[0])):
        for collective, views, numbers in (
            (Collective.BROADCAST, [view(values, copies[place])], ()),
            (Collective.ALLGATHER, [view(values)], ()),
            (Collective.ALLTOALL, [view(values)], (1,) * size),
            (Collective.REDUCESCATTER, [view(values, parts[place])], ()),
        ):
            call = engine.prepare(
                collective,
                views,
                dtype_of(values),
                Reduction(ReduceOp.SUM),
                process_set,
                root,
                numbers,
            )
            works.append(engine.start(call, f"{collective.name} {number}", (values, copies, parts)))
    for work in works:
        work.wait()
    assert all((copy == root + 1).all() for copy in copies)
    assert all((part == size * (size + 1) / 2).all() for part in parts)
    engine.remove_process_set(added.output().rows[0]).wait()


def move_large_tensors(engine: Engine, talk: Talk) -> Any:
    """Repeat rounds with large tensors, otherwise like `work_until_told`."""
    return work_until_told(engine, talk, large_round)


def move_large_tensors_until_lost(engine: Engine, talk: Talk) -> Any:
    """Repeat rounds with large tensors until the end of another rank ends this one. Rank 0 aborts when it receives a reason."""
    if engine.rank == 0:
        threading.Thread(target=lambda: engine.abort(talk.hear()), daemon=True).start()
    talk.say("running")
    number = 0
    while True:
        large_round(engine, number)
        number += 1


def work_until_told(
    engine: Engine, talk: Talk, one_round: Callable[[Engine, int], None] = one_round
) -> Any:
    """Repeat rounds until rank 0 receives a stop. Report their number, and the longest."""
    talk.say("running")
    stopping = threading.Event()
    if engine.rank == 0:
        threading.Thread(target=lambda: (talk.hear(), stopping.set()), daemon=True).start()
    number, longest = 0, 0.0
    while True:
        began = time.monotonic()
        one_round(engine, number)
        wish = allreduce(engine, f"stop {number}", np.array([float(stopping.is_set())]))
        longest = max(longest, time.monotonic() - began)
        number += 1
        if wish[0]:
            return {"rounds": number, "longest_s": longest}


def connections() -> Iterator[socket.socket]:
    """Return a copy of every connected socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(name)))
                sock.getpeername()
                yield sock


def lose_a_connection(engine: Engine, talk: Talk) -> Any:
    """Break one connection of rank 1 during the work, while both of its processes live."""
    if engine.rank == 1:

        def cut() -> None:
            list(connections())[talk.hear()].shutdown(socket.SHUT_RDWR)

        threading.Thread(target=cut, daemon=True).start()
    return work_until_lost(engine, talk)


def fork_while_working(engine: Engine, talk: Talk) -> Any:
    """Fork children during operations that another thread waits for. The children outlive their parent."""
    stop = threading.Event()

    def fork() -> None:
        while not stop.wait(0.05):
            child = os.fork()
            if child == 0:
                time.sleep(4)
                os._exit(0)

    threading.Thread(target=fork, daemon=True).start()
    return work_until_lost(engine, talk)


def train_with_forked_loaders(engine: Engine, talk: Talk) -> Any:
    """Train on batches of a DataLoader's forked workers, which stay alive for an epoch."""
    import torch

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(64.0)),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    number = 0
    while True:
        for (batch,) in loader:
            result = allreduce(engine, f"batch {number}", batch.numpy())
            assert (result == engine.size * batch.numpy()).all()
            if number == 20:
                talk.say("running")
            number += 1


def stop_inside_a_reduce(engine: Engine, talk: Talk) -> Any:
    """Stop the last rank during a reduce. The others time out and meet again without it.

    Their results must not change, whatever the stopped rank does when it continues.
    """
    (meeting,) = sockets._open_rendezvous
    survivors = engine.size - 1
    talk.say("running")
    number = 0
    reason = ""
    while not reason:
        try:
            allreduce(engine, f"step {number}", np.full(1_000_000, engine.rank + 1.0))
            number += 1
        except CollectiveError as error:
            reason = str(error)
    engine.shutdown()
    if engine.rank == survivors:
        return reason
    talk.say(reason)
    job = replace(
        meeting.job, size=survivors, attempt=1, endpoints=meeting.job.endpoints[:survivors]
    )
    again = rendezvous.SocketRendezvous(job, meeting._listener, meeting.settings)
    with Engine(again.connect(), again.settings) as second:
        seed = random.Random(second.rank).randrange(2**32)
        buffers = [np.random.default_rng(seed + i).integers(0, 99, 100_000) for i in range(20)]
        copies = [buffer.copy() for buffer in buffers]
        sums = [allreduce(second, f"sum {i}", buffer) for i, buffer in enumerate(buffers)]
        kept = [total.copy() for total in sums]
        talk.say("met again")
        talk.hear()  # the stopped rank continues, and ends
        unchanged = all((a == b).all() for a, b in zip(buffers + sums, copies + kept, strict=True))
        for step in range(50):
            one_round(second, step)
    return unchanged


def limited(limit: str) -> list[float]:
    """Run a job under a limit of this process, called by run_local."""
    if limit == "memlock 0, 64 descriptors":
        drop_capabilities()  # root may lock whatever the limit says
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    elif limit.startswith("group "):
        Path(limit.removeprefix("group "), "cgroup.procs").write_text(str(os.getpid()))
    with meet() as engine:
        shared = "memfd:sparkhvd" in Path("/proc/self/maps").read_text()
        mine = engine.rank + 1.0
        return [
            float(shared),
            float(allreduce(engine, "sum", np.full(300_001, mine)).sum()),
            float(allgather(engine, "rows", np.full((engine.rank + 1, 7), mine))[0].sum()),
            float(broadcast(engine, "copy", np.full(100_000, mine), 1).sum()),
        ]


def killed_in_the_middle() -> None:
    """Kill the last rank while the memory of the host is mapped and in use."""
    engine = meet()
    for step in range(100):
        if step == 5 and engine.rank == engine.size - 1:
            faults.kill_self()
        allreduce(engine, f"step {step}", np.ones(300_000))


def drop_capabilities() -> None:
    """Drop the capabilities of this thread and of the threads that it starts."""

    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def too_few_descriptors(engine: Engine, talk: Talk) -> Any:
    """Run generations in which rank 1 has room for 0, 1, 2, ... descriptors, and return how each ended here."""
    (meeting,) = sockets._open_rendezvous
    engine.shutdown()
    limit = 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    endings = []
    for room in range(talk.hear()):
        fill: list[int] = []
        try:
            while engine.rank == 1 and len(os.listdir("/proc/self/fd")) - 1 < limit - room:
                fill.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:  # the listing needs one itself
            for _ in range(room):
                os.close(fill.pop())
        try:
            with Engine(meeting.connect(), meeting.settings) as again:
                one_round(again, 0)
            endings.append("")
        except Exception as error:  # noqa: BLE001 - reported to the test
            endings.append(f"{type(error).__name__}: {error}")
        for descriptor in fill:
            os.close(descriptor)
    return endings


def too_little_memory(engine: Engine, talk: Talk) -> Any:
    """Gather twice, and keep the results, while rank 1 has memory for only a part. Then continue with less."""
    room = talk.hear()
    rows = np.ones(room["bytes"] // 8 // engine.size)
    engine.barrier(name="start").wait()
    if engine.rank == 1:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room["left"],) * 2)
    found: list[Any] = []
    kept = []  # results stay in memory as long as their works
    for number in range(3):
        work = engine.allgather(view(rows), name=f"rows {number}", dtype=dtype_of(rows), keep=rows)
        try:
            work.wait()
            kept.append(work)
            found.append("done")
        except ResultMemoryError as error:
            found.append(str(error))
    found.append(allreduce(engine, "after it", np.ones(3)).tolist())
    return found


def leave_beside_a_stopped_rank(engine: Engine, talk: Talk) -> Any:
    """Leave, or abort and leave, with messages queued for the last rank, which is stopped. Return the seconds."""
    last = engine.size - 1
    engine.barrier(name="begin").wait()
    never = np.empty(3)
    waits = start_receive(engine, "never", never, 0, tag=99) if engine.rank == last else None
    talk.say("running")
    if waits is not None:
        try:
            waits.wait()
        except CollectiveError as error:
            return str(error)
        raise AssertionError("the operation has succeeded")
    reason = talk.hear()
    for number in range(12):
        start_send(engine, f"message {number}", np.full(7000, number, np.float64), last, tag=5)
    talk.say("queued")
    talk.hear()  # every rank has queued: no rank queues after another's abort
    if reason:
        engine.abort(reason)
        time.sleep(0.2)
    began = time.monotonic()
    engine.shutdown()
    talk.say(time.monotonic() - began)
    return None  # the process ends: with the last words on their way


def summed() -> float:
    """Connect the ranks of any launcher, and return the sum of their numbers from 1."""
    if rendezvous.current_rendezvous() is not None:
        engine = meet()
    else:
        found = launchers.find()
        assert found is not None
        engine = Engine(found.connect(), found.settings)
    with engine:
        return float(allreduce(engine, "sum", np.array([engine.rank + 1.0]))[0])
