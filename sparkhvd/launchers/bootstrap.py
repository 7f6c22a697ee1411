"""A rank's job, exchanged among the ranks, if the launcher gives each only its number."""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sparkhvd import cpus
from sparkhvd.elastic import ElasticRendezvous, JoinToken
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.interfaces import loopback, own_address
from sparkhvd.launchers import gather
from sparkhvd.launchers.environment import (
    PLAIN,
    LauncherEnv,
    end_with_launcher,
    launcher_of,
    place_in,
)
from sparkhvd.launchers.gather import MeetingPoint
from sparkhvd.rendezvous import (
    Endpoint,
    Job,
    Listener,
    Rendezvous,
    SocketRendezvous,
    install_rendezvous,
)
from sparkhvd.settings import JobSettings, RankSettings, Settings, parse_place
from sparkhvd.topology import RankContext, install_rank_context, topology
from sparkhvd.wire import read_json, rebuild

# Variable that child processes inherit from a rank; it shows that they are not ranks.
_MARK = "SPARKHVD_RANK_PROCESS"
_BY_VARIABLES = "/variables"
_NUM_PORTS = 8


def mark(job: str = "", *, by_variables: bool = False) -> None:
    """Mark this process as a rank in the environment: its children inherit the variables and are not ranks.

    Args:
        job: `LauncherEnv.job`; empty for the job in torch's variables, which other launchers set, too.
        by_variables: whether the job's variables have made it a rank.
    """
    variables = os.environ  # noqa: TID251 - the launcher's
    if not job and "MASTER_ADDR" in variables:
        job = f"{PLAIN}/{variables.get('MASTER_ADDR', variables.get('PET_MASTER_ADDR'))}/{variables.get('MASTER_PORT', '')}"
    variables[_MARK] = f"{os.getpid()}{_BY_VARIABLES if by_variables else ''} {job}"


def meet() -> Rendezvous | None:
    """Connect to the launcher's other ranks and install the job. Return None without a launcher.

    Raises:
        InvalidArgumentError: the ranks are on several hosts and have no key or no address of rank 0, or this process is
            a child of a rank.
        PreflightError: a rank did not connect within `start_timeout_s`, or this host has no address for the others.
    """
    variables = os.environ  # noqa: TID251 - the launcher's
    place = place_in(variables, os.getppid())
    if place is None:
        return None
    rank_process, _, job_of_rank = variables.get(_MARK, "").partition(" ")
    rank_process, by_variables, _ = rank_process.partition(_BY_VARIABLES)
    if job_of_rank == place.job and rank_process != str(os.getpid()):
        # `run` and sparkhvdrun also set torch's variables, for torch.distributed.
        is_torchs = not by_variables or multiprocessing.parent_process() is not None
        if place.launcher == PLAIN and is_torchs:
            return None
        raise InvalidArgumentError(
            f"init(): this process is no rank itself. It inherited the variables of {place.launcher} from process {rank_process}, which is rank "
            f"{place.rank}. Let the rank communicate, or start this process without these variables."
        )
    if not place.rank < place.size:
        raise InvalidArgumentError(
            f"init(): {place.launcher} gives this process rank {place.rank} of {place.size}; ranks count from 0."
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
    install_rendezvous(made)
    atexit.register(made.close)  # not at `shutdown()`: `init()` may follow
    # By rank, like `hvd.local_rank()`: a launcher may number the processes of a host in another order.
    hosts = [each.host_key or f"rank {rank}" for rank, each in enumerate(job.endpoints)]
    here = topology(job.rank, hosts)
    threads = max(1, int(cpus.allowed() / here.local_size))
    install_rank_context(RankContext(job.rank, job.size, here.local_rank, 0, threads))
    return made


@dataclass(frozen=True)
class _GatherPlan:
    """Where the ranks gather, this rank's own address, and the user's key (None: rank 0 creates one)."""

    point: MeetingPoint
    address: str
    key: bytes | None = None


def _on_one_host(place: LauncherEnv) -> _GatherPlan:
    parent = launcher_of(place) if place.parent else 0  # a rank in a wrapper has another parent
    text = f"{os.getuid()}/{place.job}/{parent}"
    name = hashlib.sha256(text.encode()).hexdigest()
    return _GatherPlan(gather.on_this_host(f"sparkhvd-{name}"), loopback())


def _on_several_hosts(place: LauncherEnv, settings: Settings) -> _GatherPlan:
    here = f", {place.local_size} of them on this host" if place.local_size else ""
    what = f"init(): {place.launcher} has started {place.size} ranks{here}"
    key = gather.network_key(settings, what)
    host, ports = _directory(place, settings, what)
    name = f"directory/{place.launcher}/{place.size}/{host}/{ports[0]}/{place.restart}"
    own = hashlib.sha256(name.encode()).digest()  # distinguishes jobs, and is not secret
    point = MeetingPoint(name, own if key is None else gather.derived_key(key, name), host, ports)
    return _GatherPlan(point, own_address(settings.interfaces, host), key)


def _directory(place: LauncherEnv, settings: Settings, what: str) -> tuple[str, tuple[int, ...]]:
    """Choose rank 0's host and ports: not MASTER_PORT, because torch's store uses it."""
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


def _gather(place: LauncherEnv, way: _GatherPlan, endpoint: Endpoint, settings: Settings) -> Job:
    """Exchange endpoints with the other ranks.

    Rank 0 sends the job's id, and its key unless the user has given one.
    """
    text: dict[str, object] = {"endpoint": endpoint.to_dict()}
    if place.rank == 0:
        text["id"] = secrets.token_hex(8)
        if way.key is None:
            text["key"] = secrets.token_hex(32)
    advice = (
        f"Look at the output of {place.launcher} for errors of other ranks. A rank with another number of ranks, or another key, is "
        "rejected."
    )
    try:
        texts = gather.gather(
            way.point, place.rank, place.size, json.dumps(text), settings.start_timeout_s, advice
        )
    except OSError as error:
        raise PreflightError(
            f"init(): rank {place.rank} of {place.launcher} cannot connect to the others at {way.point}: {error}. Is "
            "another job with the same address and port running?"
        ) from error
    entries = [read_json(each) for each in texts]
    endpoints = tuple(rebuild(Endpoint, entry["endpoint"]) for entry in entries)
    if not gather.is_one_host(endpoints):
        gather.check_addresses(endpoints, f"init(): {place.size} ranks of {place.launcher}")
    job_id = str(entries[0]["id"])
    if way.key is None:
        key = bytes.fromhex(entries[0]["key"])
    else:
        key = gather.derived_key(way.key, f"job {job_id}")
    return Job(key, job_id, 0, place.rank, place.size, endpoints)


# ----------------------------------------------------------------------------------------------------
# Handover of a job to the process that becomes the rank: from `sparkhvdrun` to a script, or to a program that the
# rank's process starts.

_NAME = "sparkhvd-handover"


@dataclass(frozen=True)
class Handover:
    """Data for the start of a rank. Its repr omits the job, because the job holds the key.

    Attributes:
        job: `Job.to_json()`; for a member of an elastic job its join token, as JSON.
        endpoint: of the rank's listener, as `Endpoint.to_dict` gives it.
        listener: descriptors of the bound listener (TCP, Unix or -1).
        local_rank: index among this host's ranks.
        num_threads: threads that the rank may use.
        is_elastic: whether the rank is a member of an elastic job.
        settings: `JobSettings.to_json()`; "" reads the variables at `init()`.
        before: variables that `settings` already includes; None for the current ones.
        gpu: ordinal of the rank's GPU in its process; None without a GPU.
    """

    job: str = field(repr=False)
    endpoint: dict[str, str | int]
    listener: tuple[int, int]
    local_rank: int
    num_threads: int
    is_elastic: bool = False
    settings: str = ""
    before: dict[str, str] | None = None
    gpu: int | None = None

    @property
    def who(self) -> str:
        """Name of the rank in a message."""
        values = read_json(self.job)
        return f"process {values['number']}" if self.is_elastic else f"rank {values['rank']}"

    def to_descriptor(self) -> int:
        """Write it to a memory descriptor. `take` reads it once from there."""
        descriptor = os.memfd_create(_NAME)
        os.write(descriptor, json.dumps(vars(self)).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)  # `take` locks from this offset
        return descriptor

    @classmethod
    def from_bytes(cls, content: bytes, listener: tuple[int, int] | None = None) -> Handover:
        """Rebuild a handover from the bytes of `take`.

        Args:
            content: as in the descriptor.
            listener: descriptors of this process; None if it has inherited them under their numbers.
        """
        made = rebuild(cls, read_json(content))
        return made if listener is None else replace(made, listener=listener)

    def listen(self) -> Listener:
        """Make the rank's listener. From then on, the listener owns the descriptors."""
        return Listener.from_filenos(*self.listener, rebuild(Endpoint, self.endpoint))

    def enter(self, listener: Listener) -> Rendezvous:
        """Make this process the rank: install its rendezvous and, if known, its rank context."""
        mark()
        # Variables that the user's program sets before init() count.
        ask: Callable[[], Settings] = Settings.resolve
        if self.settings:
            ask = RankSettings(JobSettings.from_json(self.settings), self.before).current
        if self.is_elastic:
            # A member's rank is known once it has joined a generation.
            join_token = rebuild(JoinToken, read_json(self.job))
            member = ElasticRendezvous(
                join_token, listener, ask, self.num_threads, self.local_rank, self.gpu
            )
            install_rendezvous(member)
            atexit.register(member.close)
            return member
        job = Job.from_json(self.job)
        made = SocketRendezvous(job, listener, ask)
        install_rendezvous(made)
        atexit.register(made.close)  # not at `shutdown()`: `init()` may follow
        install_rank_context(
            RankContext(
                job.rank, job.size, self.local_rank, job.attempt, self.num_threads, self.gpu
            )
        )
        return made


def is_handover(descriptor: int) -> bool:
    """Whether a descriptor of this process is from `Handover.to_descriptor`."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}")
    except OSError:
        return False


def take(descriptor: int) -> bytes | None:
    """Read a handover exclusively, or return None if another process has read it, or does now."""
    try:
        os.lockf(descriptor, os.F_TLOCK, 0)
    except OSError:
        return None
    try:
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.ftruncate(descriptor, 0)
    finally:
        os.lockf(descriptor, os.F_ULOCK, 0)
    return content or None
