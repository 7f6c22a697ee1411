"""Functions of members of an elastic job. Each is called as fn(rendezvous, talk)."""

from __future__ import annotations

import os
import time

import numpy as np

from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError
from tests.engine.arrays import allreduce
from tests.harness.rank_process import Talk


def go_on(rendezvous: ElasticRendezvous, talk: Talk) -> None:
    """Reduce in generation after generation, and report each one. Each hundredth operation is a commit."""
    while True:
        with Engine(rendezvous.connect(), rendezvous.settings) as engine:
            began = time.monotonic()
            total = allreduce(engine, "first", np.full(3, engine.rank + 1.0))[0]
            assert total == engine.size * (engine.size + 1) / 2
            talk.say(
                {
                    "generation": rendezvous.generation,
                    "members": rendezvous.members,
                    "rank": engine.rank,
                    "pid": os.getpid(),
                    "at": began,
                }
            )
            rendezvous.note_synced()
            try:
                work(engine, rendezvous)
            except CollectiveError as error:
                rendezvous.standing.lost = error.lost
                rendezvous.standing.why = str(error)
                rendezvous.standing.needs_sync = True
                engine.shutdown()


def work(engine: Engine, rendezvous: ElasticRendezvous) -> None:
    """Work until the members must change."""
    for step in range(1_000_000):
        allreduce(engine, "gradients", np.full(100_001, 1.0))
        rendezvous.standing.version += 1
        if step % 100 == 0:
            news = np.array([float(rendezvous.should_change()[0])])
            if allreduce(engine, "commit", news)[0]:
                return


def die_when_it_meets(rendezvous: ElasticRendezvous, _: Talk) -> None:
    """Take part in a decision, and die before the rendezvous ends."""
    rendezvous._link.ask(rendezvous._question())
    os.kill(os.getpid(), 9)


def stop_when_it_meets(rendezvous: ElasticRendezvous, talk: Talk) -> None:
    """Take part in a decision, and stop before the rendezvous ends. Continue when woken."""
    rendezvous._link.ask(rendezvous._question())
    talk.say("stopped")
    os.kill(os.getpid(), 19)
    go_on(rendezvous, talk)
