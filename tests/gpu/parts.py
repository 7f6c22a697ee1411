"""The checks of a machine with a GPU, in order. They need neither pytest nor Spark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.gpu.machine import is_stand_in, nccl_environment, nccl_library
from tests.gpu.ranks import START_S, RankPool, hear, started

ROOT = Path(__file__).resolve().parents[2]
# Seconds within which the survivors of a killed process must raise.
DETECTED_S = 5.0
SKIPPED = "skipped: "
# Checks of the estimator, the most important first, because time may be short.
ESTIMATOR = (
    "training equals one process",
    "bf16-mixed",
    "channels_last",
    "16-mixed",
    "a resumed run",
    "compile",
)


class Part(NamedTuple):
    """A check.

    Attributes:
        name: as in the table.
        run: returns its finding as a line, or raises if it is wrong. Its argument: the available seconds.
        seconds: its time limit.
    """

    name: str
    run: Callable[[float], str]
    seconds: float


def parts(pool: RankPool) -> list[Part]:
    """Return all parts: foundations first, the estimator's last."""

    def body(name: str, size: int) -> Callable[[float], str]:
        return lambda seconds: pool.do(name, size, seconds)[0]

    def alone(run: Callable[[float], str]) -> Callable[[float], str]:
        def wrapped(seconds: float) -> str:
            pool.stop()
            return run(seconds)

        return wrapped

    two = "2 ranks on one GPU"
    trained = [Part(f"estimator: {ESTIMATOR[0]}, {two}", alone(estimator(ESTIMATOR[0], 2)), 60)]
    if not is_stand_in():
        together = Together({name: estimator(name, 1) for name in ESTIMATOR})
        trained += [
            Part(f"estimator: {name}, 1 rank", alone(together.wait_for(name)), 60)
            for name in ESTIMATOR
        ]
    return [
        Part("CUDA and NCCL do what the engine expects, 1 rank", conformity(1), 60),
        Part("every collective, 1 rank", body("collectives", 1), 90),
        Part("order of streams, 1 rank", body("streams", 1), 40),
        Part("training as in one process, 1 rank", body("training", 1), 60),
        Part("no wait of the host in a step, 1 rank", body("unsynchronized", 1), 40),
        Part("a graph's capture is refused, 1 rank", body("capture", 1), 30),
        Part("bf16 and fp16 with a scaler, 1 rank", body("mixed_precision", 1), 40),
        Part("torch.compile, 1 rank", body("compiled", 1), 90),
        Part("torch.distributed over ours, 1 rank", body("backend", 1), 60),
        Part(f"CUDA and NCCL do what the engine expects, {two}", alone(conformity(2)), 90),
        Part(f"every collective, {two}", body("collectives", 2), 120),
        Part(f"megabytes, {two}", body("large", 2), 60),
        Part(f"order of streams, {two}", body("streams", 2), 60),
        Part(f"training as in one process, {two}", body("training", 2), 90),
        Part(f"no wait of the host in a step, {two}", body("unsynchronized", 2), 40),
        Part(
            f"no wait with views, fp16, shards, PowerSGD, {two}",
            body("unsynchronized_otherwise", 2),
            40,
        ),
        Part(f"reductions beside backward, {two}", body("overlap", 2), 40),
        Part(f"bf16 and fp16 with a scaler, {two}", body("mixed_precision", 2), 40),
        Part(f"torch.distributed over ours, {two}", body("backend", 2), 60),
        Part(f"leave and meet again three times, {two}", alone(again), 60),
        Part(f"a rank is killed in its collectives, {two}", alone(killed("until_killed")), 60),
        Part(
            f"a rank is killed while NCCL starts, {two}",
            alone(killed("killed_at_first", 0.1)),
            60,
        ),
        Part(
            f"a rank is killed before NCCL starts, {two}",
            alone(killed("killed_at_first", 0.0)),
            60,
        ),
        *trained,
    ]


# --- The suite in C++. ---


def conformity(ranks: int) -> Callable[[float], str]:
    """Return the part that runs the program of native/tests on the real libraries."""

    def run(seconds: float) -> str:
        program = ROOT / "build" / "native" / "nccl_conformity"
        if not program.exists():
            return f"{SKIPPED}{program.relative_to(ROOT)} is not built (its target in build/native)"
        command = [str(program), "--ranks", str(ranks)]
        if not is_stand_in():
            command += ["--cuda-library", "libcuda.so.1", "--nccl-library", nccl_library()]
        if ranks > 1:
            command += ["--processes", "--same-gpu"]
        return passed(command, seconds)

    return run


def passed(command: list[str], seconds: float) -> str:
    """Run the suite, and repeat it without failed tests until all others have passed."""
    deadline, failures, skipped = time.monotonic() + seconds, [], []
    while True:
        given = [word for name in skipped for word in ("--without", name)]
        left = deadline - time.monotonic()
        status, output = finish([*command, *given], left, nccl_environment())
        lines = output.splitlines()
        if status == 0:
            break
        print(f"{' '.join(command)}:\n{output[-4000:]}", file=sys.stderr)
        name, text = failure(lines)
        failures.append(f"{name}: {text}" if name else text)
        if not name or name in skipped or status is None:
            break
        skipped.append(name)
    counted = next((line for line in reversed(lines) if line.endswith("tests passed")), "")
    if failures:
        raise AssertionError(f"{counted or 'stopped'}; {'; '.join(failures)}")
    return counted


def failure(lines: list[str]) -> tuple[str, str]:
    """Return name and text of the first failed test."""
    for number, line in enumerate(lines):
        if line.startswith("FAILED") and "another rank failed" not in "".join(
            lines[number + 1 :][:1]
        ):
            name = line.rpartition(", ")[2].strip()
            return name, " ".join(lines[number + 1 : number + 2]).strip()
    done = [line.split()[-1] for line in lines if line.startswith("ok ")]
    return "", f"no answer in time after {done[-1] if done else 'the start'}"


def finish(
    command: list[str], seconds: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a program and return its exit status (None: it exceeded its time) and output. Its children end with it."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        status: int | None = None
        try:
            status = process.wait(timeout=max(0.1, seconds))
        except subprocess.TimeoutExpired:
            # A rank of Python prints its stacks first.
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(1.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


# --- Ranks that die, and ranks that replace them. ---


def killed(body: str, delay_s: float | None = None) -> Callable[[float], str]:
    """Rank 1 of 2 is killed. Rank 0 must raise in time, and its GPU and two new ranks must work."""

    def run(seconds: float) -> str:
        with started(body, 2) as ranks:
            hear(ranks, min(START_S, seconds))
            if delay_s is None:
                time.sleep(0.5)
                began = time.monotonic()
                ranks[1].kill()
            else:
                for rank in ranks:
                    rank.tell(delay_s)
                began = time.monotonic() + delay_s
            said = hear(ranks[:1], min(30.0, seconds))[0]
        took = said["at"] - began
        if "rank 1" not in said["text"]:
            raise AssertionError(f"the error does not name rank 1: {said['text']}")
        if took >= DETECTED_S:
            raise AssertionError(f"rank 0 raised after {took:.1f} s: {said['text']}")
        return (
            f"PeerLostError after {took:.2f} s, engine ended in {said['ended_s']:.2f} s,"
            " a new one works on the GPU"
        )

    return run


def again(seconds: float) -> str:
    with started("again", 2) as ranks:
        return f"{hear(ranks, seconds)[0]} times"


# --- The estimator. ---


class Together:
    """Programs of one rank that run at the same time, from the first wait on, because they mostly import torch."""

    def __init__(self, runs: dict[str, Callable[[float], str]]) -> None:
        self._runs = runs
        self._started: dict[str, Future[str]] = {}

    def wait_for(self, name: str) -> Callable[[float], str]:
        """Return the part that waits for a program."""

        def run(seconds: float) -> str:
            if not self._started:
                pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 3))
                self._started = {
                    each: pool.submit(run, seconds) for each, run in self._runs.items()
                }
                pool.shutdown(wait=False)
            return self._started[name].result(seconds + 5)

        return run


def estimator(name: str, size: int) -> Callable[[float], str]:
    """Return the part of a check of `tests.harness.estimator_checks`. With the stand-in, which the estimator does not know, it runs on the CPU."""

    def run(seconds: float) -> str:
        kind = "cpu" if is_stand_in() else "cuda"
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.gpu.estimator", name]
        status, output = finish([*command, str(size), kind], seconds)
        lines = [line for line in output.splitlines() if line.strip()]
        if status == 0 and lines:
            return lines[-1]
        print(output[-6000:], file=sys.stderr)
        if status is None:
            raise AssertionError(f"no answer in {seconds:.0f} s (stacks above)")
        raise AssertionError(lines[-1] if lines else f"ended with {status}")

    return run
