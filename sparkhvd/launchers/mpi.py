"""A rank's job over a communicator passed to `init()`: mpi4py's, or an object with the same methods.

MPI is neither linked nor imported: ranks, addresses and the job's key travel through `allgather` of the program's own
communicator, and nothing after that. So any MPI works, and the key is as safe as MPI's own messages.

**Failure**: an error of one rank is raised on all: they exchange their state before each step. A missing rank is
waited for up to `start_timeout_s`, if the communicator has `Iallgather`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

from sparkhvd import cpus
from sparkhvd._version import __version__
from sparkhvd.errors import InvalidArgumentError, PreflightError, SparkhvdError
from sparkhvd.interfaces import address_on, address_towards, interfaces, is_loopback, loopback
from sparkhvd.launchers.bootstrap import mark
from sparkhvd.launchers.environment import end_with_launcher, place_in
from sparkhvd.launchers.gather import check_addresses, is_one_host
from sparkhvd.launchers.rank_claim import receive
from sparkhvd.rendezvous import (
    Endpoint,
    Job,
    Listener,
    Rendezvous,
    SingleRendezvous,
    SocketRendezvous,
    current_rendezvous,
)
from sparkhvd.rendezvous.listener import host_key
from sparkhvd.settings import Settings
from sparkhvd.topology import RankContext, context, install_rank_context, topology
from sparkhvd.wire import read_json, rebuild

# Pause between two tests of an MPI request.
_PAUSE_S = 0.001
# Room for a rank's text, whose size MPI needs beforehand; addresses and failures are cut to fit.
_TEXT_BYTES = 8192
_MAX_ADDRESSES = 64
_MAX_FAILURE = 1200  # a character may take six bytes
_abandoned: list[object] = []
_METHODS = ("Get_rank", "Get_size", "allgather")


class Communicator(Protocol):
    """The methods used of mpi4py's communicator."""

    def Get_rank(self) -> int:
        """Number of this process."""

    def Get_size(self) -> int:
        """Number of processes."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Exchange a value with every process. The list is by rank."""


def is_communicator(value: object) -> TypeGuard[Communicator]:
    """Whether it has the methods of mpi4py's communicators. A null communicator has them too."""
    return all(callable(getattr(value, name, None)) for name in _METHODS)


def place_of(what: str, comm: Communicator) -> tuple[int, int]:
    """Rank and size of this process in a communicator.

    Args:
        what: the call, for errors.
        comm: the communicator.

    Raises:
        InvalidArgumentError: it is null, was freed, or is an intercommunicator.
    """
    try:
        rank, size = int(comm.Get_rank()), int(comm.Get_size())
        is_inter = bool(getattr(comm, "Is_inter", bool)())
    except Exception as error:  # noqa: BLE001 - MPI's own class, which cannot be imported here
        raise InvalidArgumentError(
            f"{what}: the communicator {comm!r} cannot be used: {error}. A process outside the communicator (MPI.COMM_NULL) must not "
            "call this with it."
        ) from error
    if is_inter:
        raise InvalidArgumentError(
            f"{what}: {comm!r} is an intercommunicator, whose groups only communicate with each other. Give an intracommunicator, "
            "such as the result of comm.Merge()."
        )
    return rank, size


def are_others(comm: Communicator, other: Communicator) -> bool:
    """Whether two communicators differ in their processes or their order. False if unknown."""
    module = sys.modules.get(type(comm).__module__)
    with contextlib.suppress(Exception):  # no communicator of mpi4py, or a freed one
        found = type(comm).Compare(comm, other)  # type: ignore[attr-defined]
        return found not in (module.IDENT, module.CONGRUENT)  # type: ignore[union-attr]
    return False


def gather(what: str, comm: Communicator, text: str, timeout_s: float) -> list[str]:
    """Exchange texts. The list is by rank. Every process of the communicator must call this.

    Raises:
        PreflightError: a rank did not call this within `timeout_s`, if the communicator has `Iallgather`.
    """
    start = getattr(comm, "Iallgather", None)
    if start is None:
        return comm.allgather(text)
    own = bytearray(text.encode().ljust(_TEXT_BYTES))
    texts = bytearray(_TEXT_BYTES * comm.Get_size())
    request, deadline = start(own, texts), time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            _abandoned.append((request, own, texts))  # MPI may still write there
            raise PreflightError(
                f"{what}: rank {comm.Get_rank()} waited {timeout_s:g} s (start_timeout_s) for the other {comm.Get_size() - 1} "
                "processes of the communicator. Every process in it must make this call."
            )
        time.sleep(_PAUSE_S)  # a blocking call of MPI would spin and block Ctrl-C
    ends = range(_TEXT_BYTES, len(texts) + 1, _TEXT_BYTES)
    return [texts[end - _TEXT_BYTES : end].decode().rstrip() for end in ends]


def join(comm: Communicator, cleanup: contextlib.ExitStack) -> Rendezvous:
    """Join the processes of a communicator, with their ranks in it. All of them must call this.

    Args:
        comm: intracommunicator of any size.
        cleanup: receives the resources of the job.

    Raises:
        InvalidArgumentError: the communicator cannot be used, or MPI's world differs from the launcher's.
        PreflightError: a rank cannot join; raised on all of them.
    """
    what = "init(comm=...)"
    rank, size = place_of(what, comm)
    _check_world(comm)
    if size == 1:
        _take_place(rank, ["this"], cleanup)
        return SingleRendezvous(Settings.resolve())
    hosts = _Step(what, comm).share(_host)
    if len({host["version"] for host in hosts}) > 1:
        versions = ", ".join(f"rank {r}: {host['version']}" for r, host in enumerate(hosts))
        raise PreflightError(
            f"{what}: the ranks have different versions of sparkhvd ({versions}). Install the same one on every host."
        )
    settings = Settings.resolve()

    def listen() -> dict[str, Any]:
        listener = Listener.bind(_address(rank, hosts, settings.interfaces), settings)
        cleanup.callback(listener.close)
        listeners.append(listener)
        key = {"key": secrets.token_hex(32), "id": secrets.token_hex(8)} if rank == 0 else {}
        return {"endpoint": listener.endpoint().to_dict(), **key}

    listeners: list[Listener] = []
    entries = _Step(what, comm).share(listen)
    endpoints = tuple(rebuild(Endpoint, entry["endpoint"]) for entry in entries)
    if not is_one_host(endpoints):
        check_addresses(endpoints, what)
    job = Job(bytes.fromhex(entries[0]["key"]), entries[0]["id"], 0, rank, size, endpoints)
    _take_place(rank, [host["host"] for host in hosts], cleanup)
    return SocketRendezvous(job, listeners[0], Settings.resolve)


class _Step:
    """Step of all ranks. An error of one rank is raised on all."""

    def __init__(self, what: str, comm: Communicator) -> None:
        self._what, self._comm = what, comm
        self._timeout_s = Settings().start_timeout_s
        with contextlib.suppress(InvalidArgumentError):  # the step itself raises it
            self._timeout_s = Settings.resolve().start_timeout_s

    def share(self, step: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run the step, and return the result of every rank, by rank.

        Raises:
            SparkhvdError: it failed here.
            PreflightError: it failed elsewhere.
        """
        failure: SparkhvdError | None = None
        try:
            own = step()
        except SparkhvdError as error:
            failure, own = error, {"failure": str(error)[:_MAX_FAILURE]}
        texts = gather(self._what, self._comm, json.dumps(own), self._timeout_s)
        if failure is not None:
            raise failure
        entries: list[dict[str, Any]] = [read_json(text) for text in texts]
        for rank, entry in enumerate(entries):
            if "failure" in entry:
                raise PreflightError(f"{self._what}: rank {rank} cannot join: {entry['failure']}")
        return entries


def _host() -> dict[str, Any]:
    """Facts about this host for the other ranks, before this rank listens."""
    Settings.resolve()  # a wrong variable of one rank is an error on all
    name = socket.gethostname()
    return {
        "host": host_key() or name,
        "name": name,
        "addresses": [
            each.address for each in interfaces() if each.is_up and not is_loopback(each.address)
        ][:_MAX_ADDRESSES],
        "version": __version__,
    }


def _address(rank: int, hosts: list[dict[str, Any]], choice: str) -> str:
    """Address for this rank's listener: of the chosen interface, or of the interface towards another host.

    The other host is found by its name, or else by its addresses.

    Raises:
        PreflightError: there is no route to another host.
    """
    own = hosts[rank]
    other = next((host for host in hosts if host["host"] != own["host"]), None)
    if other is None:
        return loopback()
    if choice:
        return address_on(choice)
    # Container bridges have the same address on every host, so an address that this host has, too, leads nowhere.
    theirs = [each for each in other["addresses"] if each not in own["addresses"]]
    for place in (other["name"], *theirs):
        with contextlib.suppress(OSError):
            if not is_loopback(address := address_towards(place)):
                return address
    raise PreflightError(
        f"init(comm=...): host {own['name']}, with the addresses {own['addresses']}, has no route to {other['name']}, with "
        f"{other['addresses']}. Connect them by a network, or choose an interface with SPARKHVD_INTERFACES."
    )


def _take_place(rank: int, hosts: list[str], cleanup: contextlib.ExitStack) -> None:
    """Install the rank context of this process until `cleanup`, and mark its child processes as no ranks."""
    before = context()
    place = topology(rank, hosts)
    made = RankContext(
        rank,
        place.size,
        place.local_rank,
        0 if before is None else before.attempt,
        max(1, int(cpus.allowed() / place.local_size)),
        None if before is None else before.gpu,
    )
    install_rank_context(made)
    cleanup.callback(install_rank_context, before)
    started = place_in(os.environ, os.getppid())  # noqa: TID251 - the launcher's
    if started is not None:
        mark(started.job)
        end_with_launcher(started)


def _check_world(comm: Communicator) -> None:
    """Reject an MPI that has not detected its launcher: each of its processes is a separate world.

    Raises:
        InvalidArgumentError: the size of the communicator's world differs from the launcher's number of processes.
    """
    world = getattr(sys.modules.get(type(comm).__module__), "COMM_WORLD", None)
    if not is_communicator(world):
        return
    size = int(world.Get_size())
    started = (current_rendezvous() or receive()) if size == 1 else None
    if started is not None:
        launcher, count = "the launcher of this process", started.size
    else:
        place = place_in(os.environ, os.getppid())  # noqa: TID251 - the launcher's
        launcher, count = ("", size) if place is None else (place.launcher, place.size)
    if count != size:
        raise InvalidArgumentError(
            f"init(comm=...): MPI's world has {size} process{'es' if size > 1 else ''}, and {launcher} has started {count}: "
            "mpi4py has loaded an MPI that is not the launcher's. Start the ranks with the mpirun of mpi4py's MPI "
            "(MPI.Get_library_version() names it; MPI4PY_LIBMPI chooses it), or leave comm out."
        )
