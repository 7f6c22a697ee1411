"""What a script's ranks of one host are given: a command that exists, variables, and inherited descriptors."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkhvd import as_horovod, processors
from sparkhvd.elastic import Invitation
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers.handover import Handover
from sparkhvd.launchers.place import Place
from sparkhvd.rendezvous import Job, Listener
from sparkhvd.topology import HOROVOD_NAMES, Topology, horovod_variables, topology

__all__ = [
    "HandedOver",
    "check_command",
    "hand_over",
    "hand_over_member",
    "member_variables",
    "words_of",
]


@dataclass(frozen=True)
class HandedOver:
    """What a rank is started with.

    Attributes:
        rank: its number.
        variables: of its environment.
        descriptors: that it inherits.
        place: which it takes by one of them, or a program that it starts; whoever starts the rank closes it behind the rank's end.
    """

    rank: int
    variables: dict[str, str]
    descriptors: list[int]
    place: Place


def _handed_over(
    rank: int, handover: Handover, listener: Listener, variables: Mapping[str, str]
) -> HandedOver:
    place = Place(handover, listener, is_own=False)
    sockets = [fd for fd in listener.filenos() if fd >= 0]
    found = {
        **variables,
        **as_horovod.path_variables(variables),
        **place.variables(variables, is_inherited=True),
    }
    return HandedOver(rank, found, [place.descriptor, *sockets], place)


def words_of(command: Sequence[str]) -> list[str]:
    """Return program and arguments without a leading `--`.

    Raises:
        InvalidArgumentError: there is none.
    """
    words = list(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise InvalidArgumentError(
            "there is no command. Put it last: sparkhvdrun -np 2 python train.py"
        )
    return words


def check_command(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Refuse a command that cannot run here, before anything starts.

    Args:
        words: program and arguments.
        env: variables of the ranks; PATH counts.

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
    """Yield what each rank of this host gets.

    Args:
        listeners: of these ranks, in their order; each is closed with its place.
        job: of the first of them; the others follow it.
        env: variables of all ranks.
        master: address for torch.distributed.
    """
    threads = max(1, int(processors.allowed() / len(listeners)))
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
    invitation: Invitation,
    env: Mapping[str, str],
    slot: int,
    num_threads: int,
) -> HandedOver:
    """Return what a member of an elastic job gets.

    Args:
        listener: of the member; closed with its place.
        invitation: to the job.
        env: variables of all members.
        slot: of its host, from 0 on; no other living member has it.
        num_threads: threads that it may use.
    """
    handover = Handover(
        json.dumps(invitation.to_dict()),
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
    return _handed_over(invitation.number, handover, listener, variables)


def member_variables(slot: int) -> dict[str, str]:
    """Return what is known of a member before it has met the others: its rank changes with them; its slot, and so its GPU, does not."""
    return {
        **{"LOCAL_RANK": str(slot), "HOROVOD_LOCAL_RANK": str(slot)},
        "HOROVOD_HOSTNAME": socket.gethostname(),
    }


def _variables(place: Topology, master: tuple[str, int]) -> dict[str, str]:
    """Return what Horovod and torch.distributed call a rank's place."""
    torch = {
        **{"RANK": place.rank, "WORLD_SIZE": place.size},
        **{"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size},
    }
    return {
        **horovod_variables(place, socket.gethostname()),
        **{name: str(value) for name, value in torch.items()},
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "PYTHONUNBUFFERED": "1",  # a rank's lines come when it prints them
    }
