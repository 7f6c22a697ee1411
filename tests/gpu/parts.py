"""The checks of a machine with a GPU, each a function that returns what it found or raises. No pytest, no Spark."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkhvd.settings import Settings
from tests.harness.rank_process import rank_processes

ROOT = Path(__file__).resolve().parents[2]
BODIES = "tests.gpu.bodies"
# A rank imports torch, makes a CUDA context, and NCCL loads its kernels.
START_S = 120.0
# What the survivors of a killed process may take to raise.
DETECTED_S = 5.0

Part = Callable[[], str]


def why_not() -> str:
    """Why the checks cannot run here; "" if they can."""
    try:
        import torch
    except ImportError as error:
        return f"torch is missing: {error}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (torch.cuda.is_available() is False)"
    return ""


def settings() -> Settings:
    return replace(Settings(), connect_timeout_s=START_S, stall_shutdown_s=120.0)


def outcomes(body: str, size: int, timeout_s: float = START_S) -> list[Any]:
    """What the body returns on every rank; raises what a rank raised."""
    with rank_processes(f"{BODIES}:{body}", size, settings=settings()) as ranks:
        return [rank.expect(timeout_s) for rank in ranks]


def conformity(ranks: int) -> str:
    program = ROOT / "build" / "native" / "nccl_conformity"
    if not program.exists():
        return f"skipped: {program.relative_to(ROOT)} is not built (make native builds it)"
    from sparkhvd.torch.device import find_nccl

    command = [str(program), "--cuda-library", "libcuda.so.1", "--nccl-library", find_nccl()]
    command += ["--ranks", str(ranks), *(["--processes", "--same-gpu"] if ranks > 1 else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip().splitlines()[-1]


def collectives(size: int) -> str:
    found = outcomes("collectives", size)
    return f"{found[0]['checks']} comparisons, NCCL {'.'.join(map(str, found[0]['versions']))}"


def streams(size: int) -> str:
    return f"{outcomes('streams', size)[0]} operations on two streams"


def training(size: int) -> str:
    return f"largest difference of a weight after 20 steps: {max(outcomes('training', size)):.1e}"


def unsynchronized() -> str:
    outcomes("unsynchronized", 1)
    return "no wait of the host in five steps"


def capture() -> str:
    return outcomes("capture", 1)[0].partition(".")[0][:80]


def killed(body: str) -> str:
    """Rank 1 of 2 is killed; rank 0 must raise in time, and two new ranks must work."""
    with rank_processes(f"{BODIES}:{body}", 2, settings=settings()) as ranks:
        for rank in ranks:
            rank.expect(START_S)
        if body == "until_killed":
            time.sleep(1.0)
            ranks[1].kill()
        else:
            for rank in ranks:
                rank.tell("go")
        began = time.monotonic()
        error = ranks[0].error(60.0)
        took = time.monotonic() - began
    assert error["kind"] == "PeerLostError", error["error"]
    assert "rank 1" in error["text"], error["text"]
    assert took < DETECTED_S, f"rank 0 raised after {took:.1f} s"
    began = time.monotonic()
    outcomes("streams", 2)
    return f"PeerLostError after {took:.2f} s; two new ranks worked {time.monotonic() - began:.0f} s later"


PARTS: dict[str, Part] = {
    "NCCL and CUDA as the stand-in has them, 1 rank": lambda: conformity(1),
    "NCCL and CUDA as the stand-in has them, 2 ranks on one GPU": lambda: conformity(2),
    "every collective, 1 rank": lambda: collectives(1),
    "every collective, 2 ranks on one GPU": lambda: collectives(2),
    "order of streams, 1 rank": lambda: streams(1),
    "order of streams, 2 ranks": lambda: streams(2),
    "training equals one process, 1 rank": lambda: training(1),
    "training equals one process, 2 ranks": lambda: training(2),
    "no host synchronization in a step": unsynchronized,
    "capture into a CUDA graph is refused": capture,
    "a rank is killed in its collectives": lambda: killed("until_killed"),
    "a rank is killed before its first collective": lambda: killed("late"),
}
