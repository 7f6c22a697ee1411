"""Process sets from communicators, and errors of `init(comm=...)` in a process that has joined a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers import environment
from tests.harness.communicators import NullComm, ThreadComm, world
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks


def on_comms(size: int, body: Callable[[ThreadComm], Any]) -> list[Any]:
    """Call the body on ranks with a communicator of all of them, in another order."""
    comms = world(size)
    return on_ranks(size, lambda: body(comms[size - 1 - hvd.rank()]))


def total(process_set: Any) -> float:
    return hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum, process_set=process_set).item()


def test_each_split_communicator_becomes_a_process_set() -> None:
    def body(comm: ThreadComm) -> Any:
        part = comm.Split(hvd.rank() % 2)
        made = hvd.ProcessSet(part)
        assert (made.ranks, made.size(), made.mpi_comm) == (None, None, part)
        hvd.add_process_set(made)
        assert (made.included(), made.size()) == (True, len(made.ranks or ()))
        assert f"mpi_comm={part!r}" in str(made)
        first = total(made)
        with pytest.raises(InvalidArgumentError, match="is registered already"):
            hvd.add_process_set(made)
        assert hvd.remove_process_set(made)
        assert not hvd.remove_process_set(made)
        again = hvd.add_process_set(part)  # type: ignore[arg-type]  # a communicator for tests
        return made.process_set_id, again.ranks, again.rank(), first, total(again)

    even, odd = [0, 2, 4], [1, 3]
    assert on_comms(5, body) == [
        (None, ranks, ranks.index(rank), float(sum(ranks)), float(sum(ranks)))
        for rank, ranks in enumerate((even, odd, even, odd, even))
    ]


def test_ranks_outside_a_communicator_know_its_process_set() -> None:
    def body(comm: ThreadComm) -> Any:
        made = hvd.add_process_set(comm.Split(0 if hvd.rank() > 0 else None))
        with pytest.raises(InvalidArgumentError, match="duplicate process set"):
            hvd.add_process_set([1, 2])
        return made.ranks, made.included(), total(made) if made.included() else None

    assert on_comms(3, body) == [([1, 2], False, None), ([1, 2], True, 3.0), ([1, 2], True, 3.0)]


def test_inconsistent_communicators_raise_on_every_rank() -> None:
    def body(comm: ThreadComm) -> None:
        with pytest.raises(InvalidArgumentError, match="every rank passed a null communicator"):
            hvd.add_process_set(NullComm())
        of_two = comm.Split(0 if hvd.rank() < 2 else None)
        other: Any = comm.Split(0 if hvd.rank() > 0 else None)
        # Ranks 0 and 1 meet over one communicator, in which rank 1 says that it is rank 2.
        if hvd.rank() == 1:
            of_two.allgather("2")
            other = NullComm()
        with pytest.raises(
            InvalidArgumentError,
            match=r"the communicator of ranks \[0, 2\] has rank 2, but rank 2 passed a communicator of ranks \[\]",
        ):
            hvd.add_process_set(of_two if hvd.rank() == 0 else NullComm())
        with pytest.raises(InvalidArgumentError, match="duplicate process set"):
            hvd.add_process_set(comm)
        del other

    on_comms(3, body)


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
def test_init_refuses_ranks_other_than_those_of_the_job() -> None:
    hvd.init(comm=world(1)[0])
    hvd.init(comm=[0])
    with pytest.raises(
        InvalidArgumentError,
        match="rank 2 of 3 in the communicator, but this process is rank 0 of a job of 1 ranks already",
    ):
        hvd.init(comm=world(3)[2])
    with pytest.raises(InvalidArgumentError, match=r"init\(comm=\[0, 1\]\): these are 2 ranks"):
        hvd.init(comm=[0, 1])
    assert hvd.size() == 1


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 1], "the launcher's ranks are 0 to 0"),
        ([], "0 to 0"),
        ([0, 0], "0 to 0"),
        ([-1], "0 to 0"),
    ],
)
def test_lists_of_nonexistent_ranks_are_refused(ranks: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        hvd.init(comm=ranks)
    assert not hvd.is_initialized()


def test_job_over_a_communicator_can_be_started_again() -> None:
    for _ in range(2):
        hvd.init(comm=world(1)[0], process_sets="dynamic")
        assert (hvd.rank(), hvd.size()) == (0, 1)
        hvd.shutdown()


def test_horovod_transport_variables_print_one_note() -> None:
    chosen = {"HOROVOD_CPU_OPERATIONS": "mpi", "HOROVOD_CONTROLLER": "MPI"}
    line = environment.note_of(chosen)
    assert line.startswith(
        "sparkhvd: HOROVOD_CPU_OPERATIONS=mpi and HOROVOD_CONTROLLER=MPI: MPI places the ranks"
    )
    assert "engine moves the bytes" in environment.note_of({"HOROVOD_CONTROLLER": "gloo"})
    assert "Horovod knows mpi or gloo for HOROVOD_CONTROLLER" in environment.note_of(
        {"HOROVOD_CONTROLLER": "x"}
    )
    assert environment.note_of({"HOROVOD_CPU_OPERATIONS": ""}) == ""


def test_mpi_threads_are_supported_only_in_processes_started_by_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not hvd.mpi_threads_supported()
    monkeypatch.setenv("PMI_RANK", "0")
    assert hvd.mpi_threads_supported()
