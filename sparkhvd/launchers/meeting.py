"""A rank's job from the ranks themselves, where the launcher tells each its number and nothing more."""

from __future__ import annotations

import hashlib
import json
import os
import secrets

from sparkhvd import processors, rank_context
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.launchers import gathering
from sparkhvd.launchers.environment import Place, place_in
from sparkhvd.rendezvous import Endpoint, Job, Listener, Rendezvous, SocketRendezvous, install
from sparkhvd.settings import Settings

__all__ = ["meet"]

# Tells a rank's children that they are none.
_MARK = "SPARKHVD_RANK_PROCESS"
_ADDRESS = "127.0.0.1"


def meet() -> Rendezvous | None:
    """Meet the other ranks of this process's launcher, and install the job; None without a launcher.

    Raises:
        InvalidArgumentError: the ranks are on several hosts, or this process is a child of a rank.
        PreflightError: a rank did not come within `start_timeout_s`.
    """
    variables = os.environ  # noqa: TID251 - the launcher's
    place = place_in(variables, os.getppid())
    if place is None:
        return None
    if (rank_process := variables.get(_MARK)) not in (None, str(os.getpid())):
        raise InvalidArgumentError(
            f"init(): this process inherited the variables of {place.launcher} from process {rank_process}, which is rank "
            f"{place.rank}, and is no rank itself. Let the rank communicate, or start this process without them."
        )
    if place.local_size != place.size:
        raise InvalidArgumentError(
            f"init(): {place.launcher} has started {place.size} ranks, {place.local_size} of them on this host; in this version "
            "ranks that a launcher has started find each other on one host only. Use as many slots on one host, or "
            "start the ranks from Spark with sparkhvd.run."
        )
    settings = Settings.resolve()
    listener = Listener.bind(_ADDRESS, settings)
    try:
        job = _gather(place, listener.endpoint(), settings)
    except BaseException:
        listener.close()
        raise
    variables[_MARK] = str(os.getpid())
    threads = max(1, int(processors.allowed() / place.local_size))
    made = SocketRendezvous(job, listener, Settings.resolve)
    install(made)
    # By rank, as `hvd.local_rank()`: a launcher may number the processes of a host in another order.
    local_rank = place.rank
    rank_context.install(rank_context.RankContext(place.rank, place.size, local_rank, 0, threads))
    return made


def _gather(place: Place, endpoint: Endpoint, settings: Settings) -> Job:
    """Exchange endpoints with the other ranks; rank 0 brings the key."""
    text = {"place": [place.launcher, place.size], "endpoint": endpoint.to_dict()}
    if place.rank == 0:
        text |= {"key": secrets.token_hex(32), "id": secrets.token_hex(8)}
    name = "sparkhvd-" + hashlib.sha256(f"{os.getuid()}/{place.job}".encode()).hexdigest()
    advice = f"Look at the output of {place.launcher} for the others'."
    try:
        texts = gathering.gather(
            name, place.rank, place.size, json.dumps(text), settings.start_timeout_s, advice
        )
    except OSError as error:
        raise PreflightError(
            f"init(): rank {place.rank} of {place.launcher} cannot meet the others at a Unix socket of this host: {error}. Is "
            "another job with the same address and port running?"
        ) from error
    entries = [json.loads(each) for each in texts]
    endpoints = tuple(Endpoint.from_dict(entry["endpoint"]) for entry in entries)
    key = bytes.fromhex(entries[0]["key"])
    return Job(key, entries[0]["id"], 0, place.rank, place.size, endpoints)
