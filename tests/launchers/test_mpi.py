"""`hvd.init(comm=...)` in processes: communicators without MPI, and lists of a launcher's ranks. tests/soak/mpi has mpi4py."""

from __future__ import annotations

from typing import Any

import pytest

from sparkhvd.runner import run_local
from tests.harness.by_value import by_value
from tests.harness.communicators import ProcessComm

pytestmark = pytest.mark.processes

by_value(__name__)
by_value(ProcessComm.__module__)


def in_turn() -> dict[str, Any]:
    """Be a rank of one job after the other, in this process."""
    import torch

    import sparkhvd.torch as hvd
    from sparkhvd.runner import context

    place = context()
    assert place is not None
    rank, size = place.rank, place.size

    def job(comm: Any) -> Any:
        hvd.init(comm=comm)
        total = hvd.allreduce(torch.ones(1) * rank, op=hvd.Sum).item()
        here = context()
        seen = (hvd.rank(), hvd.size(), total)
        assert here is not None
        assert (here.rank, here.size, here.local_rank) == (seen[0], seen[1], hvd.local_rank())
        hvd.shutdown()
        assert context() == place
        return seen

    found = {"communicator": job(ProcessComm("all", size - 1 - rank, size)), "none": job(None)}
    part = [2, 0] if rank != 1 else [1]
    found["part"] = job(ProcessComm(f"{part}", part.index(rank), len(part)))
    found["list"] = job(part)
    found["list again"] = job(part)
    found["all"] = job([0, 1, 2])
    try:
        hvd.init(comm=[(rank + 1) % 3])
    except ValueError as error:
        found["refused"] = str(error)
    try:
        hvd.init(comm=[ProcessComm(f"several {number}", rank, size) for number in range(2)])
    except ValueError as error:
        found["several"] = str(error)
    assert not hvd.is_initialized()
    return found


def test_jobs_over_communicators_and_rank_lists_run_in_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for rank, found in enumerate(run_local(in_turn, num_proc=3)):
        of_part = [(1, 2, 2.0), (0, 1, 1.0), (0, 2, 2.0)][rank]
        assert found["communicator"] == (2 - rank, 3, 3.0)
        assert found["none"] == found["all"] == (rank, 3, 3.0)
        assert found["part"] == found["list"] == found["list again"] == of_part
        assert (
            f"this process is the launcher's rank {rank}, which is not in the list"
            in found["refused"]
        )
        assert "a process can join only one job. Give the communicator of all " in found["several"]
