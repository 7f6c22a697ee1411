"""Programs for MPI: `python -m tests.soak.mpi.programs <name>`. Each prints `ok <rank>` at its end."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from typing import Any

import torch
from mpi4py import MPI

import sparkhvd.torch as hvd
from sparkhvd.errors import SparkhvdError
from sparkhvd.topology import topology

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def total(**options: Any) -> float:
    return float(hvd.allreduce(torch.ones(3) * RANK, op=hvd.Sum, **options)[0])


def refused(text: str, comm: Any = WORLD) -> None:
    """Check that the world, or other processes, cannot be joined, for a reason."""
    try:
        hvd.init(comm=comm)
    except SparkhvdError as error:
        found = str(error)
    else:
        found = "it was accepted"
    assert text in found, found


def jobs() -> None:
    """Run one job after the other: the world, parts of it, process sets, lists."""
    hvd.init()
    assert hvd.mpi_threads_supported()
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    hvd.shutdown()
    part = WORLD.Split(RANK % 2, -RANK)
    for comm in (WORLD, part, WORLD.Dup(), MPI.COMM_SELF):
        hvd.init(comm=comm)
        assert (hvd.rank(), hvd.size()) == (comm.Get_rank(), comm.Get_size())
        assert total() == comm.allreduce(RANK)
        if comm is part:
            refused(f"rank {RANK} of {SIZE} in the communicator")
        hvd.shutdown()
    members = [rank for rank in range(SIZE) if rank % 2 == RANK % 2]
    hvd.init(comm=members)
    assert (hvd.rank(), hvd.size()) == (members.index(RANK), len(members))
    assert total() == sum(members)
    hvd.shutdown()


def several() -> None:
    """Check two communicators: one of all processes with process sets of others works, two jobs at the same time are refused."""
    odd, half = WORLD.Split(RANK % 2, RANK), WORLD.Split(RANK // 2, RANK)
    of_odd, of_half = hvd.ProcessSet(odd), hvd.ProcessSet(half)
    hvd.init(comm=WORLD, process_sets=[of_odd, of_half])
    for made, comm in ((of_odd, odd), (of_half, half)):
        assert (made.rank(), made.size()) == (comm.Get_rank(), comm.Get_size())
        assert total(process_set=made) == comm.allreduce(RANK)
    hvd.init(comm=WORLD.Dup())  # the same processes
    hvd.shutdown()
    hvd.init(comm=odd)
    refused("communicator", comm=half)  # of the same size and, on two ranks, with the same rank
    assert (hvd.rank(), hvd.size(), total()) == (odd.Get_rank(), 2, odd.allreduce(RANK))
    hvd.shutdown()
    refused("a process can join only one job", comm=[WORLD, odd])
    assert not hvd.is_initialized()


def sets() -> None:
    """Check process sets of communicators: from a split, and from a group that the other ranks do not have."""
    part = WORLD.Split(RANK % 2, RANK)
    of_part = hvd.ProcessSet(part)
    hvd.init(comm=WORLD, process_sets=[of_part])
    assert of_part.ranks == [rank for rank in range(SIZE) if rank % 2 == RANK % 2]
    assert of_part.rank() == part.Get_rank()
    assert total(process_set=of_part) == part.allreduce(RANK)
    first = WORLD.Create(WORLD.Get_group().Incl([0, 1]))
    assert (first == MPI.COMM_NULL) == (RANK > 1)
    of_first = hvd.add_process_set(hvd.ProcessSet(first))
    assert (of_first.ranks, of_first.included()) == ([0, 1], RANK < 2)
    if RANK < 2:
        assert total(process_set=of_first) == 1.0
    assert hvd.remove_process_set(of_part)
    assert hvd.remove_process_set(of_first)


def mixed() -> None:
    """Calls of MPI between, before and during ours, from two threads, in an order that only the seed knows."""
    hvd.init(comm=WORLD)
    others = WORLD.Dup()

    def beside() -> None:
        chosen = random.Random(2)
        for number in range(300):
            if chosen.random() < 0.5:
                assert others.allreduce(number) == number * SIZE
            else:
                assert hvd.allreduce(torch.ones(7), op=hvd.Sum, name=f"beside.{number}")[0] == SIZE

    thread = threading.Thread(target=beside)
    thread.start()
    chosen = random.Random(1)
    for number in range(300):
        size = chosen.choice([1, 1000, 200_000])
        handle = hvd.allreduce_async(
            torch.full((size,), float(RANK)), op=hvd.Sum, name=f"m.{number}"
        )
        kind = chosen.randrange(4)
        if kind == 0:
            assert WORLD.bcast(number if RANK == 0 else None) == number
        elif kind == 1:
            ours, theirs = torch.full((size,), 1.0).numpy(), torch.empty(size).numpy()
            WORLD.Allreduce(ours, theirs)
            assert theirs[-1] == SIZE
        elif kind == 2:
            request = WORLD.isend(RANK, (RANK + 1) % SIZE, tag=number)
            assert hvd.allgather_object(RANK, name=f"o.{number}") == list(range(SIZE))
            assert WORLD.recv(source=(RANK - 1) % SIZE, tag=number) == (RANK - 1) % SIZE
            request.wait()
        else:
            WORLD.Barrier()
            hvd.barrier()
        assert hvd.synchronize(handle)[0] == sum(range(SIZE))
    thread.join()


def unnoticed() -> None:
    """Check the refusal of an mpi4py whose MPI is not the launcher's. A child of a rank is no rank."""
    refused("MPI's world has 1 process, and ")


def children() -> None:
    """Check that processes that a rank starts cannot call `init()`."""
    hvd.init(comm=WORLD)
    code = "from sparkhvd import launchers; launchers.find()"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "is no rank itself" in child.stderr, child.stderr


def hosts() -> None:
    """Check the ranks on two hosts."""
    names = WORLD.allgather(socket.gethostname())
    assert len(set(names)) == 2, names
    hvd.init(comm=WORLD)
    place = topology(RANK, names)
    found = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    wanted = (place.local_rank, place.local_size, place.cross_rank, place.cross_size)
    assert (found, total()) == (wanted, 3.0), (found, wanted, names)
    hvd.shutdown()
    hvd.init(comm=WORLD.Split(RANK % 2, -RANK))
    assert total() == (1.0 if RANK == 1 else 2.0)


def alone() -> None:
    """Wait for a rank that never comes."""
    if RANK == 0:
        refused("waited 2 s (start_timeout_s)")
    WORLD.send("end", 1 - RANK)
    WORLD.recv()


if __name__ == "__main__":
    {
        each.__name__: each
        for each in (jobs, sets, several, mixed, unnoticed, children, hosts, alone)
    }[sys.argv[1]]()
    hvd.shutdown()
    sys.stdout.write(f"ok {RANK}\n")
    sys.stdout.flush()
