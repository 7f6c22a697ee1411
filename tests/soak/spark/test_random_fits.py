"""Fits whose processes are killed or stopped at random moments: the same weights bit by bit, or a named error in time.

After each life, a next fit of the run uses the store, and no process is left. A seed gives the same lives.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness.cluster import shared_cluster
from tests.harness.netns import Host, two_hosts, why_not
from tests.harness.paths import ROOT
from tests.harness.processes import (
    PYTHON_WORKER,
    TRAINER,
    ZYGOTE,
    children,
    find,
    is_alive,
    wait_until_gone,
)
from tests.harness.soak import amount
from tests.harness.spark import CONF, cluster_of_hosts, standalone_cluster, write_script

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
SEED = int(os.environ.get("SPARKHVD_LIVES_SEED", secrets.randbelow(2**32)))
LIVES = amount(1, int(os.environ.get("SPARKHVD_LIVES", "14")))
# An undisturbed fit takes seconds. A relaunch, waits for stopped processes and a busy machine add to it.
DEADLINE_S = 240.0
LEFT_S = 30.0
EXECUTOR = "CoarseGrainedExecutorBackend"

PROGRAM = """
import hashlib, traceback
import torch
from torch import nn
from sparkhvd import TorchEstimator, TorchModel
from sparkhvd.errors import SparkhvdError

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        if self.training:
            time.sleep(0.02)
        return self.layers(x)

def fitted(name):
    torch.manual_seed(0)
    df = spark.range(0, 320, 1, 2).selectExpr("array(id % 7 / 7, id % 5 / 5) AS x", "double(id % 3) AS y")
    estimator = TorchEstimator(
        model=Slow(), optimizer=torch.optim.Adam, loss="mse", feature_cols=["x"], label_cols=["y"],
        batch_size=8, epochs=8, num_proc=2, random_seed=3, store=STORE, run_id=name, verbose=0,
        max_retries=2)
    try:
        return estimator.fit(df)
    except SparkhvdError as error:
        if "is finished" not in str(error) and "finished run" not in str(error):
            raise
        return TorchModel.from_run(STORE, name, trust=True)

def digest(model):
    parts = [value.numpy().tobytes() for value in model.getModel().state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()

print("READY", flush=True)
for line in sys.stdin:
    name = line.strip()
    print("BEGUN", name, flush=True)
    try:
        print("WEIGHTS", name, digest(fitted(name)), flush=True)
    except BaseException as error:
        kind = type(error)
        print("FAILED", name, f"{kind.__module__}.{kind.__qualname__}", str(error).splitlines()[:1], flush=True)
        traceback.print_exc()
"""


class Driver:
    """A user's process: fits one run after the other, by names from its standard input."""

    def __init__(self, script: Path, on: Host | None = None) -> None:
        words = [sys.executable, str(script)]
        place = {} if on is None else {"SPARK_LOCAL_IP": on.address}
        self.process = subprocess.Popen(
            words if on is None else on.command(*words),
            cwd=script.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **place},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.printed: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="read driver", daemon=True)
        self._reader.start()
        assert self.wait_for("READY", DEADLINE_S), self.text()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def send(self, name: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()

    def wait_for(self, beginning: str, within_s: float) -> str | None:
        """Return the next line with this beginning, or a line of a failure. None if the process ends or the time is over."""
        end = time.monotonic() + within_s
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                return None
            if line is None:
                self._lines.put(None)
                return None
            if line.startswith((beginning, "FAILED")):
                return line.strip()
        return None

    def text(self) -> str:
        return "".join(self.printed[-200:])

    def jvm(self) -> set[int]:
        return {pid for pid in children(self.process.pid) if b"java" in _command(pid)}

    def is_usable(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert stream is not None
                stream.close()


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@dataclass
class Lives:
    """Random lives of fits in one kind of Spark.

    Attributes:
        start: makes a driver.
        victims: by name, the processes that a fault may choose.
        idle_s: time for which zygotes stay after the last driver, because their application continues.
        cable: of a host. Pulling it is a fault too.
        found: outcomes, counted.
    """

    start: Callable[[], Driver]
    victims: dict[str, Callable[[Driver], set[int]]]
    idle_s: float = 0.0
    cable: Host | None = None
    found: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)

    def run(self, mode: str) -> None:
        dice = random.Random(f"{SEED} {mode}")
        print(f"lives of {mode}: SPARKHVD_LIVES_SEED={SEED}", flush=True)
        driver = self.start()
        try:
            expected = self.weights(driver, "undisturbed")
            for number in range(LIVES):
                fault = dice.choice(["kill", "kill", "stop"])
                victim = dice.choice(sorted(self.victims))
                if self.cable and dice.random() < 0.7:
                    fault, victim = "pull", "cable"
                wait_s, stop_s = dice.uniform(0, 9), dice.choice([5, 5, 5, 20, 60])
                name, began = f"{mode}-{SEED}-{number}", time.monotonic()
                driver.send(name)
                assert driver.wait_for("BEGUN", 60), driver.text()
                time.sleep(wait_s)
                struck = self.strike(driver, victim, fault, stop_s, dice)
                line = driver.wait_for("WEIGHTS", DEADLINE_S)
                ended = self.outcome(driver, line, expected, name)
                took = time.monotonic() - began
                life = (f"{fault} {victim}" if struck else f"no {victim}", ended)
                if not driver.is_usable() or ended == "driver ended":
                    driver.end()
                    driver = self.start()
                # The store is usable, and the run continues to the same weights. After a kill its JVM may be gone.
                if ended != "equal weights" and self.weights_or_none(driver, name) != expected:
                    driver.end()
                    driver = self.start()
                    assert self.weights(driver, name) == expected, (SEED, name, driver.text())
                assert not self.left(), (SEED, name, life, self.left())
                self.found[life] += 1
                print(f"life {name} after {wait_s:.1f} s: {life}, {took:.1f} s", flush=True)
        finally:
            driver.end()
        left = self.left(ends=True)
        assert not left, (SEED, mode, left)
        for (what, ended), count in sorted(self.found.items()):
            print(f"| {mode} | {what} | {ended} | {count} |", flush=True)

    def strike(
        self, driver: Driver, victim: str, fault: str, stop_s: float, dice: random.Random
    ) -> bool:
        """Kill or stop one of the processes, if there is one, or pull the cable for a while."""
        if fault == "pull":
            assert self.cable is not None
            self.cable.set_cable("down")
            time.sleep(stop_s)
            self.cable.set_cable("up")
            return True
        there = sorted(pid for pid in self.victims[victim](driver) if is_alive(pid))
        if not there:
            return False
        pid = dice.choice(there)
        with contextlib.suppress(ProcessLookupError):
            if fault == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stop_s)
                os.kill(pid, signal.SIGCONT)
        return True

    def outcome(self, driver: Driver, line: str | None, expected: str, name: str) -> str:
        if line is None:
            assert driver.process.poll() is not None, (
                f"seed {SEED}: {name} took over {DEADLINE_S} s:\n{driver.text()}"
            )
            return "driver ended"
        if line.startswith("WEIGHTS"):
            assert line.split()[2] == expected, (SEED, name, driver.text())
            return "equal weights"
        kind = line.split()[2]
        assert kind.startswith(("sparkhvd.", "py4j.", "pyspark.")), (SEED, name, driver.text())
        return kind.rpartition(".")[2]

    def weights_or_none(self, driver: Driver, name: str) -> str | None:
        with contextlib.suppress(OSError):
            driver.send(name)
            line = driver.wait_for("WEIGHTS", DEADLINE_S)
            return line.split()[2] if line and line.startswith("WEIGHTS") else None
        return None

    def weights(self, driver: Driver, name: str) -> str:
        found = self.weights_or_none(driver, name)
        assert found, driver.text()
        return found

    def left(self, *, ends: bool = False) -> set[int]:
        """Wait for trainers and, at the end of the application, for zygotes. Return the remaining processes."""
        if not ends:
            return wait_until_gone(find(TRAINER), LEFT_S)
        return wait_until_gone(find(TRAINER) | find(ZYGOTE), self.idle_s + LEFT_S)


VICTIMS: dict[str, Callable[[Driver], set[int]]] = {
    "trainer": lambda _: find(TRAINER),
    "zygote": lambda _: find(ZYGOTE),
    "worker": lambda _: find(PYTHON_WORKER),
    "executor": lambda _: find(EXECUTOR),
    "driver": lambda driver: {driver.process.pid},
}
CLUSTER_CONF = {"spark.executor.memory": "512m", "spark.task.maxFailures": "8"}


@contextlib.contextmanager
def scripts(folder: Path) -> Iterator[Callable[..., Callable[[], Driver]]]:
    def starts(master: str, on: Host | None = None, **options: object) -> Callable[[], Driver]:
        body = f"STORE = {str(folder / 'store')!r}\n{PROGRAM}"
        script = write_script(folder / "driver.py", body, master=master, **options)  # type: ignore[arg-type]
        return lambda: Driver(script, on)

    (folder / "store").mkdir()
    yield starts


def test_killed_fits_recover_on_a_local_cluster(tmp_path: Path) -> None:
    with scripts(tmp_path) as starts:
        start = starts("local-cluster[2,1,1024]", conf=CLUSTER_CONF)
        Lives(start, {**VICTIMS, "jvm": Driver.jvm}).run("local-cluster")


def test_killed_fits_recover_on_a_standalone_cluster(tmp_path: Path) -> None:
    with standalone_cluster(tmp_path) as master, scripts(tmp_path) as starts:
        start = starts(master, conf=CLUSTER_CONF)
        Lives(start, {**VICTIMS, "jvm": Driver.jvm}).run("standalone")


@pytest.mark.skipif(why_not() is not None, reason=f"two hosts: {why_not()}")
def test_killed_fits_recover_on_a_cluster_of_two_hosts(tmp_path: Path) -> None:
    """The driver, the master and one executor share a host. The cable to the other executor's host is pulled."""
    with (
        two_hosts() as (here, there),
        cluster_of_hosts(tmp_path, (here, there)) as master,
        scripts(tmp_path) as starts,
    ):
        names = ("spark.driver.host", "spark.driver.bindAddress")
        conf = {**CLUSTER_CONF, **dict.fromkeys(names, here.address)}
        # Spark waits two minutes for an executor that is silent.
        conf |= {"spark.network.timeout": "20s", "spark.network.timeoutInterval": "5s"}
        conf["spark.executor.heartbeatInterval"] = "2s"
        start = starts(master, on=here, conf=conf)
        Lives(start, VICTIMS, cable=there).run("two-hosts")


def test_killed_fits_recover_over_connect(tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.mkdir()
    with shared_cluster(server, CLUSTER_CONF) as cluster, scripts(tmp_path) as starts:
        start = starts(cluster.remote, remote=True, conf=dict.fromkeys(CONF))
        # The server and its executors stay; their zygotes end after a minute without a launch.
        Lives(start, VICTIMS, idle_s=60).run("connect")
