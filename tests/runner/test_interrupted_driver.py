"""Ctrl-C in a Spark driver gives each rank KeyboardInterrupt and time to save. The driver or its JVM is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pyspark
import pytest

from tests.harness.processes import (
    TRAINER,
    children,
    find,
    wait_for_no_trainers,
    wait_until_gone,
)
from tests.harness.soak import soak
from tests.harness.spark import started_script, write_script
from tests.harness.waiting import wait_until

# The start of a JVM may take long on a busy machine.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

# Rank 0 waits in a collective. Rank 1 needs almost the whole time, more than Spark gives a cancelled task.
_SAVES = """
from sparkhvd import Settings, rendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.runner import run

FOLDER = os.path.dirname(os.path.abspath(__file__))

def saves(name, seconds=0.0):
    import subprocess
    def note(what):
        open(os.path.join(FOLDER, f"{name}-{what}{os.environ['RANK']}"), "w").close()

    met = rendezvous.current_rendezvous()
    subprocess.Popen(["sleep", "300"])
    with Engine(met.connect(), Settings()) as engine:
        engine.barrier(name="all").wait()
        while True:
            try:
                note("ready")
                if met.rank == 0:
                    engine.barrier(name="rank 1 stays away").wait()
                time.sleep(300)
            except KeyboardInterrupt:
                note("interrupted")
                time.sleep(seconds * met.rank)
                note("saved")
                if name != "stubborn":
                    raise
"""

_STAYS = """
import sparkhvd

def stays():
    import subprocess
    subprocess.Popen(["sleep", "300"])
    open(os.path.join(FOLDER, f"stays-ready{os.environ['RANK']}"), "w").close()
    time.sleep(300)

try:
    run(stays, num_proc=2, spark=spark)
except sparkhvd.SparkhvdError as e:
    print("FOUND", type(e).__name__, e, flush=True)
os._exit(0)  # pyspark's own handlers of the exit ask the JVM
"""

_RUNS = (
    _SAVES
    + """
for name, seconds in (("group", 3.5), ("stubborn", 0.0)):
    try:
        run(saves, (name, seconds), num_proc=2, spark=spark)
    except KeyboardInterrupt:
        print("ENDED", name)
        open(os.path.join(FOLDER, f"{name}-ended"), "w").close()
"""
    + _STAYS
)

_SUBMITTED = (
    _SAVES
    + """
try:
    run(saves, ("submitted", 3.0), num_proc=2, spark=spark)
except KeyboardInterrupt:
    open(os.path.join(FOLDER, "submitted-ended"), "w").close()
"""
)


def _wait_for(folder: Path, name: str, driver: subprocess.Popen[str], ranks: int = 2) -> None:
    files = [folder / f"{name}{rank}" for rank in range(ranks)]
    files = [folder / name] if name.endswith("ended") else files
    wait_until(
        lambda: all(map(Path.exists, files)) or driver.poll() is not None, name, within_s=120
    )
    assert all(map(Path.exists, files)), driver.stdout and driver.stdout.read()


@soak("Ctrl-C on a cluster: cluster/test_programs; interrupts of ranks: test_interrupts")
def test_interrupted_ranks_save_and_leave_no_process(tmp_path: Path) -> None:
    """SIGINT goes to the process group, as from a terminal, then twice to the driver alone. At last its JVM is killed."""
    script = write_script(tmp_path / "driver.py", _RUNS, master="local[2]")
    with started_script(script) as driver:
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
        _wait_for(tmp_path, "stays-ready", driver)
        # No earlier rank is left.
        assert len(find("sleep 300")) == 2
        (jvm,) = find("org.apache.spark.deploy.SparkSubmit") & children(driver.pid)
        _dies(jvm)
        output, _ = driver.communicate(timeout=120)
    assert wait_until_gone(find("sleep")) == set()
    for name in ("group", "stubborn"):
        assert all((tmp_path / f"{name}-saved{rank}").exists() for rank in range(2)), output
    found = "FOUND SparkhvdError Spark's JVM has died while it ran 'sparkhvd: 2 ranks, attempt 1'"
    assert found in output, output


def _dies(pid: int) -> None:
    """Kill a process. The ranks and their children must end too."""
    assert len(find(TRAINER)) == 2
    os.kill(pid, signal.SIGKILL)
    assert wait_for_no_trainers(20) == set()
    # Killed with its trainer, but on a busy machine the kernel may end it a moment later.
    assert wait_until_gone(find("sleep 300"), 10) == set()


@soak("the JVM, here, which ends with its driver, and the ranks with it")
def test_ranks_end_after_their_driver_is_killed(tmp_path: Path) -> None:
    body = f"from sparkhvd.runner import run\nFOLDER = {str(tmp_path)!r}\n{_STAYS}"
    script = write_script(tmp_path / "driver.py", body, master="local[2]")
    with started_script(script) as driver:
        _wait_for(tmp_path, "stays-ready", driver)
        _dies(driver.pid)


@soak(
    "interrupts of all and of the driver alone, and the death of its JVM: test_interrupted_ranks_save_and_leave_no_process"
)
def test_ranks_save_although_the_jvm_ends_immediately(tmp_path: Path) -> None:
    """Ctrl-C in a terminal also reaches the JVM of spark-submit, which ends Spark's Python workers."""
    script = write_script(tmp_path / "driver.py", _SUBMITTED, master="local[2]")
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    with started_script(script, python=[str(submit)]) as driver:
        _wait_for(tmp_path, "submitted-ready", driver)
        ranks = find(TRAINER)
        os.killpg(driver.pid, signal.SIGINT)
        driver.wait(30)
        assert wait_until_gone(ranks) == set()
        assert wait_until_gone(find("sleep")) == set()
        _wait_for(tmp_path, "submitted-saved", driver)
        _wait_for(tmp_path, "submitted-ended", driver)
