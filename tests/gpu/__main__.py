"""All that one GPU can show, as one table: `python -m tests.gpu` (`make gpu`). Needs torch, and neither pytest nor Spark.

    python -m tests.gpu [--only TEXT] [--no-benchmarks] [--rounds 5] [--write]

`--write` keeps the table as docs/results/gpu_checks.md and the benchmark's as docs/results/gpu.md. The exit status is 1
if a check failed.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.gpu.parts import PARTS, ROOT, why_not

LIMIT_S = 480


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="checks whose name contains this text")
    parser.add_argument("--no-benchmarks", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if reason := why_not():
        print(
            f"make gpu: {reason}. Run it on a machine with a GPU and torch with CUDA.",
            file=sys.stderr,
        )
        return 2
    rows, failed = [], 0
    for name, part in PARTS.items():
        if arguments.only not in name:
            continue
        began = time.monotonic()
        try:
            outcome, detail = "ok", part()
            if detail.startswith("skipped"):
                outcome, detail = "skipped", detail.partition(": ")[2]
        except Exception as error:  # noqa: BLE001 - the other checks still run
            failed += 1
            outcome, detail = "**failed**", f"{type(error).__name__}: {error}".splitlines()[0][:300]
            traceback.print_exc()
        rows.append((name, outcome, f"{time.monotonic() - began:.1f} s", detail))
        print(*rows[-1], sep=" | ", flush=True)
    text = table(rows)
    print("\n" + text)
    if arguments.write:
        (ROOT / "docs" / "results" / "gpu_checks.md").write_text(text)
    if not arguments.no_benchmarks:
        command = [sys.executable, "benchmarks/gpu.py", "--rounds", str(arguments.rounds)]
        failed += subprocess.run(
            [*command, *(["--write"] if arguments.write else [])], cwd=ROOT, check=False
        ).returncode
    return 1 if failed else 0


def table(rows: list[tuple[str, str, str, str]]) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    lines = ["## Checks on one GPU", "", "| check | outcome | time | detail |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    lines += [
        "",
        f"{date}, {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, driver's CUDA {driver()}, torch {torch.__version__},"
        f" NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} with torch, Python {platform.python_version()}.",
        "Command: `make gpu`",
        "",
    ]
    return "\n".join(lines)


def driver() -> str:
    """The newest CUDA that the driver knows."""
    import ctypes

    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
