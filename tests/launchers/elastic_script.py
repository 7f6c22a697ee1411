"""Script of an elastic job without torch: it reduces until a file exists, and continues with the remaining ranks.

Arguments: that file, and faults: `fail` (process 1 and the processes after it exit with 3 at their first step), `exit` (all exit with 4 at the
tenth step).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import numpy as np

from sparkhvd import launchers
from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveError
from tests.engine.arrays import allreduce


def work(engine: Engine, member: ElasticRendezvous, step: int, stop: Path) -> tuple[int, bool]:
    """Step until the ranks should change or all should stop. Return the step, and whether all should stop."""
    while True:
        if "exit" in sys.argv and step == 10:
            sys.exit(4)
        news = [float(member.should_change()[0]), float(stop.exists())]
        change, end = allreduce(engine, "commit", np.array(news))
        step += 1
        member.standing.version = step
        if end or change:
            member.standing.needs_sync = False
            return step, bool(end)
        time.sleep(0.02)


def main() -> None:
    member = launchers.find()
    assert isinstance(member, ElasticRendezvous)
    number, step = member._join_token.number, 0
    assert os.environ["HOROVOD_HOSTNAME"] == socket.gethostname()
    assert "HOROVOD_RANK" not in os.environ  # unknown, because an outer job's rank is not ours
    while True:
        with Engine(member.connect(), member.settings) as engine:
            try:
                if "fail" in sys.argv and number > 0 and engine.size > 1:
                    sys.exit(3)
                if member.must_sync:
                    sent = np.array([float(step) if engine.rank == 0 else 0.0])
                    step = int(allreduce(engine, "sync", sent)[0])
                member.note_synced()
                known = (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"])
                assert known == (str(engine.rank), str(engine.size))
                print(
                    f"rank {engine.rank} of {engine.size} pid {os.getpid()} slot {os.environ['LOCAL_RANK']}"
                )
                step, is_end = work(engine, member, step, Path(sys.argv[1]))
                if is_end:
                    break
            except CollectiveError as error:
                member.standing.lost, member.standing.why = error.lost, str(error)
                member.standing.needs_sync = True
                engine.shutdown()
    member.finish()
    print(f"done at {step}")


def train(stop: str) -> tuple[str, ...]:
    """Run as a function, and return rank and size of the last generation from Horovod's variables."""
    sys.argv[1:] = [stop]
    main()
    return tuple(os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE"))


if __name__ == "__main__":
    main()
