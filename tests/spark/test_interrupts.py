"""Ctrl-C in a Spark driver: every rank gets KeyboardInterrupt and time to save."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness.processes import TRAINER, find, wait_for_no_trainers, wait_until_gone
from tests.harness.spark import started_script, write_script
from tests.harness.waiting import wait_until

# A JVM starts; on a machine that does other things too this may take long.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

# Rank 0 waits in a collective; rank 1 needs all but the whole time, more than Spark leaves a task that it has cancelled.
_SAVES = """
from sparkhvd import Settings, rendezvous
from sparkhvd.engine import Engine
from sparkhvd.runner import run

FOLDER = os.path.dirname(os.path.abspath(__file__))

def saves(name, seconds=0.0):
    import subprocess
    def note(what):
        open(os.path.join(FOLDER, f"{name}-{what}{os.environ['RANK']}"), "w").close()

    met = rendezvous.current()
    subprocess.Popen(["sleep", "300"])
    with Engine(met.connect(), Settings()) as engine:
        engine.barrier(name="all").wait()
        while True:
            try:
                note("ready")
                if met.rank == 0:
                    engine.barrier(name="nobody else comes").wait()
                time.sleep(300)
            except KeyboardInterrupt:
                note("interrupted")
                time.sleep(seconds * met.rank)
                note("saved")
                if name != "stubborn":
                    raise
"""

_RUNS = (
    _SAVES
    + """
for name, seconds in (("alone", 0.0), ("group", 4.5), ("stubborn", 0.0)):
    try:
        run(saves, (name, seconds), num_proc=2, spark=spark)
    except KeyboardInterrupt:
        print("ENDED", name)
        open(os.path.join(FOLDER, f"{name}-ended"), "w").close()
assert run(os.getenv, ("RANK",), num_proc=2, spark=spark) == ["0", "1"]
print("ALL WELL")
"""
)


def _wait_for(folder: Path, name: str, driver: subprocess.Popen[str]) -> None:
    files = [folder / name] if name.endswith("ended") else [folder / f"{name}{r}" for r in (0, 1)]
    wait_until(
        lambda: all(map(Path.exists, files)) or driver.poll() is not None, name, within_s=120
    )
    assert all(map(Path.exists, files)), driver.stdout and driver.stdout.read()


def test_ranks_save_and_nothing_is_left(tmp_path: Path) -> None:
    """The driver alone is interrupted, then its process group as a terminal does it, then one that ends only at the second."""
    script = write_script(tmp_path / "driver.py", _RUNS, master="local[2]")
    with started_script(script) as driver:
        _wait_for(tmp_path, "alone-ready", driver)
        os.kill(driver.pid, signal.SIGINT)
        _wait_for(tmp_path, "alone-ended", driver)
        _wait_for(tmp_path, "group-ready", driver)
        os.killpg(driver.pid, signal.SIGINT)
        _wait_for(tmp_path, "group-ended", driver)
        _wait_for(tmp_path, "stubborn-ready", driver)
        ranks = find(TRAINER)
        os.kill(driver.pid, signal.SIGINT)
        _wait_for(tmp_path, "stubborn-saved", driver)
        began = time.monotonic()
        os.kill(driver.pid, signal.SIGINT)
        assert len(ranks) == 2
        assert wait_until_gone(ranks) == set()
        assert time.monotonic() - began < 1.5  # sooner than Spark kills its workers
        output, _ = driver.communicate(timeout=120)
    assert "ALL WELL" in output, output
    assert wait_for_no_trainers() == set()
    assert wait_until_gone(find("sleep")) == set()
    for name in ("alone", "group", "stubborn"):
        assert all((tmp_path / f"{name}-saved{rank}").exists() for rank in range(2)), output
