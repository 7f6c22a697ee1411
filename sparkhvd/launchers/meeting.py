"""A rank's job from the ranks themselves, where the launcher tells each its number and nothing more."""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing
import os
import secrets
from dataclasses import dataclass

from sparkhvd import processors, rank_context
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.interfaces import own_address
from sparkhvd.knobs import parse_place
from sparkhvd.launchers import gathering, network
from sparkhvd.launchers.environment import PLAIN, Place, place_in
from sparkhvd.launchers.gathering import MeetingPoint
from sparkhvd.launchers.lifetime import end_with_launcher, launcher_of
from sparkhvd.rendezvous import Endpoint, Job, Listener, Rendezvous, SocketRendezvous, install
from sparkhvd.settings import Settings
from sparkhvd.topology import topology

__all__ = ["mark", "meet"]

# Tells a rank's children that they are none.
_MARK = "SPARKHVD_RANK_PROCESS"
_BY_VARIABLES = "/variables"
_LOOPBACK = "127.0.0.1"
_NUM_PORTS = 8


def mark(job: str = "", *, by_variables: bool = False) -> None:
    """Note in the environment that this process is a rank: its children, which inherit its variables, are none.

    Args:
        job: of its place; empty for the one that torch's variables tell, which other launchers set, too.
        by_variables: whether the job's variables have made it one.
    """
    variables = os.environ  # noqa: TID251 - the launcher's
    if not job and "MASTER_ADDR" in variables:
        job = f"{PLAIN}/{variables.get('MASTER_ADDR', variables.get('PET_MASTER_ADDR'))}/{variables.get('MASTER_PORT', '')}"
    variables[_MARK] = f"{os.getpid()}{_BY_VARIABLES if by_variables else ''} {job}"


def meet() -> Rendezvous | None:
    """Meet the other ranks of this process's launcher, and install the job; None without a launcher.

    Raises:
        InvalidArgumentError: the ranks are on several hosts and have no key or no address of rank 0, or this process is a child
            of a rank.
        PreflightError: a rank did not come within `start_timeout_s`, or this host has no address for the others.
    """
    variables = os.environ  # noqa: TID251 - the launcher's
    place = place_in(variables, os.getppid())
    if place is None:
        return None
    rank_process, _, job_of_rank = variables.get(_MARK, "").partition(" ")
    rank_process, by_variables, _ = rank_process.partition(_BY_VARIABLES)
    if job_of_rank == place.job and rank_process != str(os.getpid()):
        # `run` and sparkhvdrun set torch's, too: for torch.distributed.
        is_torchs = not by_variables or multiprocessing.parent_process() is not None
        if place.launcher == PLAIN and is_torchs:
            return None
        raise InvalidArgumentError(
            f"init(): this process inherited the variables of {place.launcher} from process {rank_process}, which is rank "
            f"{place.rank}, and is no rank itself. Let the rank communicate, or start this process without them."
        )
    if not place.rank < place.size:
        raise InvalidArgumentError(
            f"init(): {place.launcher} tells this process that it is rank {place.rank} of {place.size}; ranks count from 0."
        )
    settings = Settings.resolve()
    if (
        place.launcher == PLAIN
        and place.master is None
        and not place.local_size
        and not settings.directory
    ):
        raise InvalidArgumentError(
            f"init(): MASTER_ADDR={variables['MASTER_ADDR']}, RANK={place.rank} and WORLD_SIZE={place.size} are set and MASTER_PORT "
            "is not. Set MASTER_PORT=<a free port of rank 0's host> on every rank."
        )
    end_with_launcher(place)
    way = _on_one_host(place) if place.is_on_one_host else _on_several_hosts(place, settings)
    listener = Listener.bind(way.address, settings)
    try:
        job = _gather(place, way, listener.endpoint(), settings)
    except BaseException:
        listener.close()
        raise
    mark(place.job, by_variables=True)
    made = SocketRendezvous(job, listener, Settings.resolve)
    install(made)
    atexit.register(made.close)  # init() may come again before
    # By rank, as `hvd.local_rank()`: a launcher may number the processes of a host in another order.
    hosts = [each.host_key or f"rank {rank}" for rank, each in enumerate(job.endpoints)]
    here = topology(job.rank, hosts)
    threads = max(1, int(processors.allowed() / here.local_size))
    rank_context.install(rank_context.RankContext(job.rank, job.size, here.local_rank, 0, threads))
    return made


@dataclass(frozen=True)
class _Way:
    """How the ranks meet: where, this rank's own address, and the user's key (None: rank 0 makes one)."""

    point: MeetingPoint
    address: str
    key: bytes | None = None


def _on_one_host(place: Place) -> _Way:
    parent = launcher_of(place) if place.parent else 0  # ranks in wrappers have other parents
    text = f"{os.getuid()}/{place.job}/{parent}"
    name = hashlib.sha256(text.encode()).hexdigest()
    return _Way(gathering.on_this_host(f"sparkhvd-{name}"), _LOOPBACK)


def _on_several_hosts(place: Place, settings: Settings) -> _Way:
    here = f", {place.local_size} of them on this host" if place.local_size else ""
    what = f"init(): {place.launcher} has started {place.size} ranks{here}"
    key = network.network_key(settings, what)
    host, ports = _directory(place, settings, what)
    name = f"directory/{place.launcher}/{place.size}/{host}/{ports[0]}/{place.restart}"
    own = hashlib.sha256(name.encode()).digest()  # tells jobs apart, and keeps nobody out
    point = MeetingPoint(name, own if key is None else network.derived_key(key, name), host, ports)
    return _Way(point, own_address(settings.interfaces, host), key)


def _directory(place: Place, settings: Settings, what: str) -> tuple[str, tuple[int, ...]]:
    """Return host and ports at which rank 0 waits: not MASTER_PORT itself, which is for torch's store."""
    if given := parse_place(settings.directory):
        return given[0], (given[1],)
    if place.master is None:
        raise InvalidArgumentError(
            f"{what}, and nothing says where rank 0 is. Set SPARKHVD_DIRECTORY=<rank 0's host>:<free port there> on every rank "
            "(mpirun -x, srun --export), or MASTER_ADDR and MASTER_PORT."
        )
    host, port = place.master
    after = (port + step for step in range(1, _NUM_PORTS + 1))
    return host, tuple(each if each < 65536 else each - 65536 + 1024 for each in after)


def _gather(place: Place, way: _Way, endpoint: Endpoint, settings: Settings) -> Job:
    """Exchange endpoints with the other ranks; rank 0 brings the job's id, and its key where the user has given none."""
    text: dict[str, object] = {"endpoint": endpoint.to_dict()}
    if place.rank == 0:
        text["id"] = secrets.token_hex(8)
        if way.key is None:
            text["key"] = secrets.token_hex(32)
    advice = (
        f"Look at the output of {place.launcher} for the others'. Ranks that were told another number of ranks, or another key, are "
        "turned away."
    )
    try:
        texts = gathering.gather(
            way.point, place.rank, place.size, json.dumps(text), settings.start_timeout_s, advice
        )
    except OSError as error:
        raise PreflightError(
            f"init(): rank {place.rank} of {place.launcher} cannot meet the others at {way.point}: {error}. Is "
            "another job with the same address and port running?"
        ) from error
    entries = [json.loads(each) for each in texts]
    endpoints = tuple(Endpoint.from_dict(entry["endpoint"]) for entry in entries)
    if not network.is_one_host(endpoints):
        network.check_addresses(endpoints, f"init(): {place.size} ranks of {place.launcher}")
    job_id = str(entries[0]["id"])
    if way.key is None:
        key = bytes.fromhex(entries[0]["key"])
    else:
        key = network.derived_key(way.key, f"job {job_id}")
    return Job(key, job_id, 0, place.rank, place.size, endpoints)
