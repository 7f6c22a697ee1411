"""Ranks on the hosts of `tests.harness.netns`, as processes.

    with two_hosts() as (a, b), ranks_on([a, b], "tests.engine.bodies:add") as ranks:
        assert [rank.expect() for rank in ranks] == [[3.0] * 3] * 2

They are like those of `rank_processes`, but each binds its listener itself, inside its namespace.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence

from sparkhvd.engine.engine import Engine
from sparkhvd.rendezvous import Endpoint, Job, Listener, SocketRendezvous
from sparkhvd.settings import Settings
from sparkhvd.wire import rebuild
from tests.harness.netns import Host
from tests.harness.paths import ROOT
from tests.harness.rank_process import DEADLINE_S, RankProcess, Talk


class HostRank(RankProcess):
    """A rank on a host. It first binds its listener and reports the address, then it receives the job."""

    def __init__(self, host: Host, rank: int) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            host.command(sys.executable, "-m", "tests.harness.ranks_on_hosts", host.address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            start_new_session=True,  # it is ended as a group
        )
        self._listen()


@contextlib.contextmanager
def ranks_on(
    hosts: Sequence[Host],
    target: str,
    *,
    settings: Settings | None = None,
    with_engine: bool = True,
) -> Iterator[list[RankProcess]]:
    """Start rank i of `target` ("module:function") on hosts[i], and kill all at the end.

    Args:
        hosts: the host of each rank. A host may appear several times.
        target: called as fn(engine, talk), or with `with_engine=False` as fn(rendezvous, talk).
        settings: for all.
        with_engine: whether the rank makes an engine before it calls `target`.
    """
    settings = settings or Settings(connect_timeout_s=DEADLINE_S)
    ranks: list[RankProcess] = []
    try:
        for rank, host in enumerate(hosts):
            ranks.append(HostRank(host, rank))
        endpoints = tuple(rebuild(Endpoint, rank.expect()) for rank in ranks)
        key = secrets.token_bytes(32)
        for process in ranks:
            job = Job(key, "test", 0, process.rank, len(ranks), endpoints)
            process.tell(
                {
                    "target": target,
                    "job": job.to_json(),
                    "settings": settings.to_json(),
                    "with_engine": with_engine,
                }
            )
        yield ranks
    finally:
        for process in ranks:
            process.close()


def main() -> None:
    """Run a rank: `python -m tests.harness.ranks_on_hosts ADDRESS`."""
    talk = Talk()
    # The settings come with the job; those of the listener are the defaults.
    listener = Listener.bind(sys.argv[1], Settings())
    talk.say(listener.endpoint().to_dict())
    start = talk.hear()
    settings = Settings.from_json(start["settings"])
    module, _, name = start["target"].partition(":")
    body = getattr(importlib.import_module(module), name)
    rendezvous = SocketRendezvous(Job.from_json(start["job"]), listener, settings)
    parent = os.getpid()
    try:
        if not start["with_engine"]:
            talk.say(body(rendezvous, talk))
            return
        with Engine(rendezvous.connect(), settings) as engine:
            talk.say(body(engine, talk))
    except BaseException as error:  # noqa: BLE001 - it is the outcome
        if os.getpid() != parent:
            raise
        message = {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
        said = {**message, "text": str(error), "traceback": traceback.format_exc()}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
