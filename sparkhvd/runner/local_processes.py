"""Ranks of this host for the user's command: their start, output and end.

**Ownership**: each rank leads its own session and process group. Both end with it, and so do all processes that have
its mark in their environment. An `OrphanReaper` ends them if this process is killed.

**Threads**: per rank two for its output streams, one that waits for its end, and one for its claim.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sparkhvd import as_horovod, cpus
from sparkhvd.elastic import JoinToken
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers.bootstrap import Handover
from sparkhvd.launchers.rank_claim import RankClaim
from sparkhvd.rendezvous import Job, Listener
from sparkhvd.runner.orphans import OrphanReaper, kill, marked
from sparkhvd.runner.output import LineReader
from sparkhvd.runner.processes import FreshProcess, ProcessExit, ProcessGroup
from sparkhvd.topology import HOROVOD_NAMES, Topology, horovod_variables, topology

# Longer lines are passed on in pieces.
_LINE_BYTES = 1 << 20
# How long to read the rest of a rank's output once the rank has ended, because other processes may still write. A busy
# machine needs seconds for a full pipe.
_DRAIN_S = 5.0
_GATE = ("/bin/sh", "-c", 'read -r begin && exec "$@" </dev/null', "sparkhvd-gate")


class LocalProcesses:
    """Processes of ranks. The context manager kills the remaining processes at its end.

    Args:
        on_line: called with rank, "stdout" or "stderr", and line, from threads of this object.
        on_end: called with rank and status (negative for a signal) when a rank has ended and its output is read.
    """

    def __init__(
        self, on_line: Callable[[int, str, bytes], None], on_end: Callable[[int, int], None]
    ) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._reaper = OrphanReaper()
        # Guards `_groups`.
        self._lock = threading.Lock()
        self._groups: dict[int, ProcessGroup] = {}

    def start(self, given: HandedOver, command: Sequence[str]) -> None:
        """Start a rank. Its claim is closed after its end.

        Raises:
            OSError: the program cannot be started.
        """
        try:
            self._start(given, command)
        except BaseException:
            given.place.close()
            raise

    def _start(self, given: HandedOver, command: Sequence[str]) -> None:
        rank = given.rank
        mark = f"{self._reaper.mark}.{rank}"
        # The command starts after the reaper has its group: if this process is killed before that, the gate's standard
        # input ends without a line.
        started = FreshProcess(
            [*_GATE, *command],
            env=marked(given.variables, mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=given.descriptors,
        )
        self._reaper.add(started.pid)
        process = started.process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\n")
        readers = [
            self._read(rank, name, pipe)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        group = ProcessGroup(started, mark, f"sparkhvd-wait-{rank}", _DRAIN_S)
        with self._lock:
            self._groups[rank] = group

        def at_exit() -> None:
            given.place.close()  # the other ranks see that this one is gone
            self._reaper.remove(started.pid)

        def end(ended: ProcessExit) -> None:
            self._on_end(rank, ended.status or 0)
            with self._lock:
                del self._groups[rank]

        group.watch(readers, end, at_exit)

    def send(self, number: int, rank: int | None = None) -> None:
        """Signal the process groups of all running ranks, or of one rank.

        SIGKILL also kills all processes that they started.
        """
        with self._lock:
            groups = [group for each, group in self._groups.items() if rank in (None, each)]
        for group in groups:
            group.signal(number)
        if number == signal.SIGKILL:  # the reaper may have been killed
            kill(self._reaper.mark if rank is None else f"{self._reaper.mark}.{rank}")

    def _read(self, rank: int, stream: str, pipe: IO[bytes] | None) -> threading.Thread:
        assert pipe is not None

        def read() -> None:
            with pipe:
                LineReader(
                    pipe.fileno(), _LINE_BYTES, functools.partial(self._on_line, rank, stream)
                ).run()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            group.join()
        self._reaper.__exit__()


# ----------------------------------------------------------------------------------------------------
# Inputs of a script's ranks on one host: a command, variables, and inherited descriptors.


@dataclass(frozen=True)
class HandedOver:
    """Everything for the start of a rank.

    Attributes:
        rank: its number.
        variables: of its environment.
        descriptors: that it inherits.
        place: claimed through a descriptor by the rank or a program that it starts. The starter closes it after the
            rank's end.
    """

    rank: int
    variables: dict[str, str]
    descriptors: list[int]
    place: RankClaim


def _handed_over(
    rank: int, handover: Handover, listener: Listener, variables: Mapping[str, str]
) -> HandedOver:
    place = RankClaim(handover, listener, is_own=False)
    sockets = [fd for fd in listener.filenos() if fd >= 0]
    found = {
        **variables,
        **as_horovod.path_variables(variables),
        **place.variables(variables, is_inherited=True),
    }
    return HandedOver(rank, found, [place.descriptor, *sockets], place)


def words_of(command: Sequence[str]) -> list[str]:
    """Strip a leading `--` from a command.

    Raises:
        InvalidArgumentError: there is no command.
    """
    words = list(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise InvalidArgumentError(
            "there is no command. Put it last: sparkhvdrun -np 2 python train.py"
        )
    return words


def check_command(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Check that a command can run here, before anything starts.

    Args:
        words: program and arguments.
        env: variables of the ranks, with their PATH.

    Raises:
        InvalidArgumentError: its program or script does not exist here.
    """
    if shutil.which(words[0], path=env.get("PATH")) is None:
        raise InvalidArgumentError(
            f"the program {words[0]!r} does not exist or cannot be executed. For a Python script write: python {words[0]}"
        )
    script = next((word for word in words[1:] if not word.startswith("-")), None)
    is_python = os.path.basename(words[0]).startswith("python")
    runs_file = is_python and not {"-m", "-c"} & set(words) and (script or "").endswith(".py")
    if runs_file and not Path(script or "").is_file():
        raise InvalidArgumentError(f"the script {script!r} does not exist in {os.getcwd()}.")


def hand_over(
    listeners: Sequence[Listener],
    job: Job,
    env: Mapping[str, str],
    master: tuple[str, int],
) -> Iterator[HandedOver]:
    """Yield what each rank of this host receives.

    Args:
        listeners: of these ranks, in order; each is closed with its claim.
        job: of the first rank; the others follow it.
        env: variables of all ranks.
        master: address for torch.distributed.
    """
    threads = max(1, int(cpus.allowed() / len(listeners)))
    hosts = [each.host_key or f"rank {rank}" for rank, each in enumerate(job.endpoints)]
    for rank, listener in enumerate(listeners, job.rank):
        here = topology(rank, hosts)
        own = Job(job.key, job.job_id, job.attempt, rank, job.size, job.endpoints)
        handover = Handover(
            own.to_json(),
            listener.endpoint().to_dict(),
            listener.filenos(),
            here.local_rank,
            threads,
        )
        variables = {"OMP_NUM_THREADS": str(threads), **env, **_variables(here, master)}
        yield _handed_over(rank, handover, listener, variables)


def hand_over_member(
    listener: Listener,
    join_token: JoinToken,
    env: Mapping[str, str],
    slot: int,
    num_threads: int,
) -> HandedOver:
    """Prepare what a member of an elastic job receives.

    Args:
        listener: of the member; closed with its claim.
        join_token: to the job.
        env: variables of all members.
        slot: of its host, from 0; no other running member has it.
        num_threads: threads that it may use.
    """
    handover = Handover(
        json.dumps(join_token.to_dict()),
        listener.endpoint().to_dict(),
        listener.filenos(),
        slot,
        num_threads,
        is_elastic=True,
    )
    others = {name: value for name, value in env.items() if name not in HOROVOD_NAMES}
    variables = {
        **{"OMP_NUM_THREADS": str(num_threads), **others},
        **member_variables(slot),
        "PYTHONUNBUFFERED": "1",
    }
    return _handed_over(join_token.number, handover, listener, variables)


def member_variables(slot: int) -> dict[str, str]:
    """Variables of a member before its first generation: it has a slot, and so a GPU, but no rank."""
    return {
        **{"LOCAL_RANK": str(slot), "HOROVOD_LOCAL_RANK": str(slot)},
        "HOROVOD_HOSTNAME": socket.gethostname(),
    }


def _variables(place: Topology, master: tuple[str, int]) -> dict[str, str]:
    """Variables of Horovod and of torch.distributed."""
    torch = {
        **{"RANK": place.rank, "WORLD_SIZE": place.size},
        **{"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size},
    }
    return {
        **horovod_variables(place, socket.gethostname()),
        **{name: str(value) for name, value in torch.items()},
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "PYTHONUNBUFFERED": "1",  # lines arrive when the rank prints them
    }
