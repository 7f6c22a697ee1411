"""Rank and size of a process, from the variables of its launcher.

`MASTER_ADDR` with `RANK` and `WORLD_SIZE` alone is set for torch.distributed by Kubernetes' operators and by hand.
A launcher's own variables take precedence.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkhvd.errors import InvalidArgumentError

# Launcher's name if only torch.distributed's variables are set.
PLAIN = "MASTER_ADDR"


@dataclass(frozen=True)
class LauncherEnv:
    """Rank, size and job of a process, from its launcher's variables.

    Attributes:
        launcher: its name.
        rank: index of this process.
        size: number of processes.
        local_size: number of processes on this host; 0 if unknown.
        job: distinguishes this job, and this launch of its ranks, from others.
        parent: distinguishes it from other jobs of the same user and host if the launcher gives it no name; else 0.
        master: MASTER_ADDR and MASTER_PORT; None if they are not set.
        restart: how often the launcher has restarted the ranks.
    """

    launcher: str
    rank: int
    size: int
    local_size: int
    job: str
    parent: int = 0
    master: tuple[str, int] | None = None
    restart: int = 0

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks run on this host."""
        if self.local_size:
            return self.local_size == self.size
        return self.master is not None and self.master[0] in _HERE


_HERE = ("localhost", "127.0.0.1", "::1")
# Name for MPICH, Intel MPI and srun's plugin for them, which does not set the local size.
_PMI = "MPI"


@dataclass(frozen=True)
class _Launcher:
    """Variable names of a launcher. In each tuple, the first set variable is used."""

    name: str
    mark: str  # only this launcher sets it
    rank: str
    size: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "torchrun",
        "TORCHELASTIC_RUN_ID",
        "RANK",
        ("WORLD_SIZE",),
        ("LOCAL_WORLD_SIZE",),
        ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        _PMI,
        "PMI_RANK",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALNRANKS",),
        ("PMI_ID", "HYDRA_JOB_ID"),
    ),
    _Launcher(
        "srun",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Launcher(
        PLAIN,
        "MASTER_ADDR",
        "RANK",
        ("WORLD_SIZE",),
        ("LOCAL_WORLD_SIZE",),
        ("MASTER_ADDR", "MASTER_PORT"),
    ),
)
_RESTART = "TORCHELASTIC_RESTART_COUNT"
_LAST_PORT = 65535


def place_in(variables: Mapping[str, str], parent: int) -> LauncherEnv | None:
    """Read the variables of this process's launcher, or return None without a launcher, or with one process.

    A launcher started by another one wins: torchrun over MPI and Slurm, MPI over Slurm, each over torch's variables
    alone. torchrun and MPI together are nested by mistake, unless one of them has a single process, and so are two MPIs
    that disagree on rank and size.

    Args:
        variables: environment of the process.
        parent: pid of its parent.

    Raises:
        InvalidArgumentError: a variable is not a number, two launchers contradict each other, or torch's variables name
            other ranks without an address.
    """
    variables = _of_torch(variables)
    places = [
        place
        for launcher in _LAUNCHERS
        if launcher.mark in variables and launcher.rank in variables
        for place in [_place(launcher, variables, parent)]
        if place.size > 1
    ]
    if not places:
        _check_lone(variables)
        return None
    kinds = {place.launcher for place in places} - {"srun", PLAIN}
    numbers = {(place.rank, place.size) for place in places if place.launcher in kinds}
    if len(kinds) > 1 and ("torchrun" in kinds or len(numbers) > 1):
        both = " and ".join(
            f"{place.launcher} (rank {place.rank} of {place.size})"
            for place in places
            if place.launcher in kinds
        )
        raise InvalidArgumentError(
            f"init(): this process has the variables of two launchers: {both}. Use one of them alone, or start "
            "torchrun once per host with a single MPI process there."
        )
    first = places[0]
    if first.launcher == _PMI and not first.local_size:
        # srun's plugin for MPI has set the variables of both.
        return next((place for place in places if place.launcher == "srun"), first)
    return first


def _of_torch(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Add torch's variables from those of a Kubernetes pod: an indexed Job's, or a TrainJob's for torchrun.

    Raises:
        InvalidArgumentError: a TrainJob wants several ranks in this pod.
    """
    if "RANK" in variables:
        return variables
    if (rank := variables.get("JOB_COMPLETION_INDEX")) and PLAIN in variables:
        return {**variables, "RANK": rank}
    if (rank := variables.get("PET_NODE_RANK")) and "PET_MASTER_ADDR" in variables:
        here = variables.get("PET_NPROC_PER_NODE", "1")
        if here != "1":
            raise InvalidArgumentError(
                f"init(): PET_NPROC_PER_NODE={here}, so this pod has several ranks. Start the script with torchrun, which starts "
                "them, or set it to 1."
            )
        found = {"RANK": rank, "WORLD_SIZE": variables.get("PET_NNODES", "1")}
        found |= {
            name: variables[f"PET_{name}"]
            for name in (PLAIN, "MASTER_PORT")
            if f"PET_{name}" in variables
        }
        return {**variables, **found}
    return variables


def _check_lone(variables: Mapping[str, str]) -> None:
    """Reject a single process whose environment claims a larger world."""
    rank, size = variables.get("RANK", ""), variables.get("WORLD_SIZE", "")
    if PLAIN not in variables and rank and size.isdecimal() and int(size) > 1:
        raise InvalidArgumentError(
            f"init(): RANK={rank} and WORLD_SIZE={size} are set and MASTER_ADDR is not, so nothing says where rank 0 is. Set "
            "MASTER_ADDR=<rank 0's host> and MASTER_PORT=<a free port there> on every rank, or unset RANK and WORLD_SIZE for a "
            "process on its own."
        )
    if PLAIN in variables and not rank and size.isdecimal() and int(size) > 1:
        raise InvalidArgumentError(
            f"init(): MASTER_ADDR={variables[PLAIN]} and WORLD_SIZE={size} are set and RANK is not. Set RANK, from 0 on, on every "
            "rank, or unset WORLD_SIZE for a process on its own."
        )
    if "PMIX_RANK" in variables and not any(each.mark in variables for each in _LAUNCHERS):
        raise InvalidArgumentError(
            f"init(): PMIX_RANK={variables['PMIX_RANK']} is set, and nothing says how many ranks there are. Start them with mpirun or "
            "srun, use mpi4py (init(comm=MPI.COMM_WORLD)), or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )


def _place(launcher: _Launcher, variables: Mapping[str, str], parent: int) -> LauncherEnv:
    def number(names: tuple[str, ...], default: int) -> int:
        for name in names:
            if text := variables.get(name):
                # Slurm writes "4" or "4(x2)" for 4 tasks on each of two nodes.
                digits = text.partition("(")[0].partition(",")[0]
                if not digits.isdecimal():
                    raise InvalidArgumentError(
                        f"init(): {name}={text!r}, a variable of {launcher.name}, is no number."
                    )
                return int(digits)
        return default

    size = number(launcher.size, 1)
    rank = number((launcher.rank,), 0)
    job = [variables[name] for name in launcher.job if variables.get(name)]
    host, port = variables.get("MASTER_ADDR", ""), number(("MASTER_PORT",), 0)
    if port > _LAST_PORT:
        raise InvalidArgumentError(
            f"init(): MASTER_PORT={port} is no port. Give one from 1 to {_LAST_PORT}."
        )
    return LauncherEnv(
        launcher.name,
        rank,
        size,
        number(launcher.local_size, 0 if launcher.name in (PLAIN, _PMI) else size),
        "/".join([launcher.name, *job]),
        0 if job else parent,
        (host, port) if host and port else None,
        number((_RESTART,), 0),
    )


# ----------------------------------------------------------------------------------------------------
# Horovod's variables and questions about MPI.

# One variable of each MPI launcher; it shows that MPI has started the process.
_MARKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_CHOICES = {
    "HOROVOD_CPU_OPERATIONS": ("mpi", "gloo", "ccl"),
    "HOROVOD_CONTROLLER": ("mpi", "gloo"),
}


def is_mpi(variables: Mapping[str, str] | None = None) -> bool:
    """Whether an MPI launcher has started this process.

    Args:
        variables: environment; None means this process's.
    """
    own = os.environ if variables is None else variables  # noqa: TID251 - the launcher's
    return any(mark in own for mark in _MARKS)


def note_of(variables: Mapping[str, str] | None = None) -> str:
    """Describe Horovod's transport variables in one line, or return "" without them.

    Args:
        variables: environment; None means this process's.
    """
    own = os.environ if variables is None else variables  # noqa: TID251 - Horovod's variable
    chosen = [(name, own[name]) for name in _CHOICES if own.get(name)]
    if not chosen:
        return ""
    said = " and ".join(f"{name}={value}" for name, value in chosen)
    wrong = [name for name, value in chosen if value.lower() not in _CHOICES[name]]
    if wrong:
        known = " or ".join(_CHOICES[wrong[0]])
        return f"sparkhvd: {said} without effect; Horovod knows {known} for {wrong[0]}. sparkhvd's own engine moves the bytes."
    places = "MPI places the ranks" if ("mpi" in {v.lower() for _, v in chosen}) else "accepted"
    return f"sparkhvd: {said}: {places}, and sparkhvd's own engine moves the bytes."


# ----------------------------------------------------------------------------------------------------
# A rank ends with its launcher: torchrun, mpirun and the like leave orphans if they are killed. A rank watches its
# launcher once it starts to connect, and ends with its process group if it leads one. The launcher is the first process
# above this one without the rank's variables, so a shell or another wrapper may stand between. If that process is a
# shell, a script sets the variables by hand and may end before its ranks, so they do not watch it.

# Time between SIGTERM and SIGKILL, in which a rank may save its state.
GRACE_S = 2.5
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh", "busybox")
_started = threading.Event()


def end_with_launcher(place: LauncherEnv | None = None) -> None:
    """End this process soon after its launcher's process on this host. The first call starts a thread for that.

    Args:
        place: of this rank; None reads it from the variables, if set.
    """
    if place is None:
        with contextlib.suppress(InvalidArgumentError):
            place = place_in(os.environ, os.getppid())  # noqa: TID251 - the launcher's
    if place is None or place.launcher == PLAIN or _started.is_set():
        return
    with contextlib.suppress(OSError):  # a kernel or a container without pidfds
        launcher = launcher_of(place)
        descriptor = os.pidfd_open(launcher)
        if launcher != launcher_of(place):  # the launcher has ended, and its pid may be reused
            os.close(descriptor)
        elif not _is_shell(launcher):
            _started.set()
            arguments = (place, launcher, descriptor)
            thread = threading.Thread(
                target=_wait, args=arguments, name="sparkhvd-launcher", daemon=True
            )
            thread.start()


def launcher_of(place: LauncherEnv) -> int:
    """Pid of this rank's launcher on this host."""
    number = os.getppid()
    with contextlib.suppress(OSError):  # a wrapper that has just ended
        while number > 1 and _is_of_rank(number, place):
            status = Path(f"/proc/{number}/stat").read_text()
            number = int(status.rpartition(")")[2].split()[1])
    return number


def _is_of_rank(number: int, place: LauncherEnv) -> bool:
    """Whether process `number` has the variables of this rank."""
    found = None
    with contextlib.suppress(
        OSError, InvalidArgumentError
    ):  # a process of another user, or of other launchers
        text = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace")
        entries = (entry.partition("=") for entry in text.split("\0"))
        found = place_in({name: value for name, _, value in entries}, place.parent)
    return found is not None and (found.job, found.rank) == (place.job, place.rank)


def _is_shell(number: int) -> bool:
    return Path(f"/proc/{number}/comm").read_text().strip() in _SHELLS


def _wait(place: LauncherEnv, launcher: int, descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()
    # The stream may be closed or missing, or its pipe broken.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(
            f"sparkhvd: rank {place.rank} ends, because {place.launcher} (process {launcher}), which has started it, has ended.\n"
        )
    send = os.killpg if os.getpgrp() == os.getpid() else os.kill
    send(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    send(os.getpid(), signal.SIGKILL)
