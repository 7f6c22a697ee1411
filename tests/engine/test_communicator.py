"""Jobs over communicators in ranks that are threads, with `tests/harness/communicators.py`. soak/mpi has mpi4py."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sparkhvd import topology
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.launchers import mpi
from sparkhvd.settings import Settings
from tests.harness.communicators import NullComm, ThreadComm, world
from tests.harness.ranks import run_threads

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    yield
    os.environ.pop("SPARKHVD_RANK_PROCESS", None)
    topology.install_rank_context(None)


def on_threads(size: int, body: Callable[[ThreadComm], Any]) -> list[Any]:
    comms = world(size)
    return run_threads([lambda c=comm: body(c) for comm in comms])


def meet(comm: Any) -> tuple[int, int, tuple[int, ...]]:
    """Join, meet all ranks, and return the rank's place."""
    with ExitStack() as cleanup:
        rendezvous = mpi.join(comm, cleanup)
        with Engine(rendezvous.connect(), rendezvous.settings) as engine:
            engine.barrier().wait()
            return engine.rank, engine.size, engine.topology.hosts


def test_whole_and_split_communicators_form_jobs_with_their_ranks() -> None:
    def body(comm: ThreadComm) -> Any:
        part = comm.Split(comm.Get_rank() % 2, -comm.Get_rank())
        return meet(comm), meet(part), meet(comm)

    of_parts = [(2, 3), (1, 2), (1, 3), (0, 2), (0, 3)]
    for rank, outcome in enumerate(on_threads(5, body)):
        place, size = of_parts[rank]
        whole = (rank, 5, (0,) * 5)
        assert outcome == (whole, (place, size, (0,) * size), whole)


def test_communicator_of_one_process_forms_a_job_of_one_rank() -> None:
    assert meet(world(1)[0]) == (0, 1, (0,))
    assert topology.context() is None


def test_listeners_close_when_the_job_ends() -> None:
    def body(comm: ThreadComm) -> Any:
        with ExitStack() as cleanup:
            rendezvous: Any = mpi.join(comm, cleanup)
            listener = rendezvous._listener
        return [each.fileno() for each in listener.sockets()]

    assert on_threads(2, body) == [[-1, -1], [-1, -1]]


def test_error_on_one_rank_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = Settings.resolve

    def resolve_on_rank_1(ports: str) -> Any:
        mine = threading.current_thread().name == "test-rank-1"
        return resolve({"SPARKHVD_PORT_RANGE": ports} if mine else {})

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for ports, message in (("much", "'much'"), (f"{port}-{port}", "every port of port_range")):
            made = staticmethod(lambda ports=ports: resolve_on_rank_1(ports))
            monkeypatch.setattr(mpi.Settings, "resolve", made)
            first, second, third = on_threads(3, meet)
            assert message in str(second)
            for other in (first, third):
                assert isinstance(other, PreflightError)
                assert re.search(rf"rank 1 cannot join: .*{message}", str(other))


def test_ranks_of_different_versions_raise_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["1.0", "2.0"])
    host = mpi._host
    monkeypatch.setattr(mpi, "_host", lambda: {**host(), "version": next(versions)})
    for outcome in on_threads(2, meet):
        assert "different versions of sparkhvd" in str(outcome)
        assert "2.0" in str(outcome)


def test_unusable_communicators_raise_a_clear_error() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be used: MPI_ERR_COMM.*COMM_NULL"):
        meet(NullComm())
    comm: Any = world(1)[0]
    comm.Is_inter = lambda: True
    with pytest.raises(InvalidArgumentError, match="intercommunicator"):
        meet(comm)


def test_missing_rank_raises_within_the_timeout() -> None:
    comm: Any = world(2)[0]
    comm.Iallgather = lambda *_: types.SimpleNamespace(Test=lambda: False)
    began = time.monotonic()
    with pytest.raises(PreflightError, match=r"rank 0 waited 0.2 s .* the other 1 processes"):
        mpi.gather("init(comm=...)", comm, "", 0.2)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("variables", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])  # fmt: skip
def test_an_mpi_unaware_of_its_launcher_raises_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, variables: tuple[str, str]
) -> None:
    rank, size = variables
    monkeypatch.setenv(rank, "2")
    monkeypatch.setenv(size, "4")
    monkeypatch.setattr(mpi, "end_with_launcher", lambda _: None)  # no launcher here
    module: Any = sys.modules[ThreadComm.__module__]
    single = world(1)[0]
    monkeypatch.setattr(module, "COMM_WORLD", single, raising=False)
    with pytest.raises(
        InvalidArgumentError,
        match=r"MPI's world has 1 process, and .*MPI has started 4: mpi4py has loaded",
    ):
        meet(single)
    monkeypatch.setattr(module, "COMM_WORLD", world(4)[2])
    assert meet(single) == (0, 1, (0,))  # COMM_SELF
