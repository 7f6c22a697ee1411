"""Tries the distributions in dist/ in fresh environments, and writes docs/compatibility.md (`make release`, behind `make wheel`).

    python -m tools.release .venv/bin/python            every Python that pyproject.toml names
    python -m tools.release .venv/bin/python 3.12       one of them; the page stays as it is

A fresh environment has a distribution, NumPy and cloudpickle, and neither torch nor pyspark. What this machine cannot try is written
as "not tried", with the reason. A fit and the time of an installation are tried beside torch and pyspark of the main environment.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from tools.cross import ROOT
from tools.wheel import DIST
from tools.wheel_tests import Missing, python_of

WORK = ROOT / "build" / "release"
PAGE = ROOT / "docs" / "compatibility.md"
OLDEST = ROOT / "build" / "oldest-env" / "bin" / "python"
ALONE = ("numpy>=1.26", "cloudpickle>=3")
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
# The limits of an installation beside torch and pyspark.
SECONDS, MEGABYTES = 5.0, 10.0

ENGINE = """
import numpy as np
from sparkhvd import launchers
from sparkhvd.engine.call import Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import DType, ReduceOp

rendezvous = launchers.find()
with Engine(rendezvous.connect(), rendezvous.settings) as engine:
    x = np.full(1000, engine.rank + 1.0, np.float32)
    view = TensorView(x.ctypes.data, x.ctypes.data, x.shape)
    engine.allreduce([view], name="x", dtype=DType.FLOAT32, reduction=Reduction(ReduceOp.SUM), keep=x).wait()
    assert (x == 3).all(), x
"""
CLIENT = """
import sys
import sparkhvd, sparkhvd.runner, sparkhvd.spark
from sparkhvd.engine.engine import load
assert sparkhvd.__file__.startswith(sys.prefix) and callable(sparkhvd.run)
assert sparkhvd.Settings().bucket_bytes == 4 << 20
assert not {"torch", "pyspark"} & set(sys.modules)
try:
    load()
except sparkhvd.EngineUnavailableError as e:
    assert "py3-none-any" in str(e)
else:
    raise AssertionError("the client's wheel has a library")
"""
FIT = """
import pyarrow, pyspark, torch
from pyspark.sql import SparkSession
from sparkhvd import TorchModel, TorchRegressor
conf = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
builder = SparkSession.builder.master("local[2]")
for key, value in conf.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
df = spark.range(500).selectExpr("array(rand(1), rand(2)) AS features").selectExpr("*", "features[0] - features[1] AS label")
model = TorchRegressor(model=torch.nn.Linear(2, 1), optimizer="sgd", learning_rate=0.3, epochs=4, num_proc=2, verbose=0).fit(df)
error = model.transform(df).selectExpr("avg(abs(prediction - label))").first()[0]
assert error < 0.1, error
print(f"torch {torch.__version__}, pyspark {pyspark.__version__}, pyarrow {pyarrow.__version__}")
"""


class Failed(Exception):
    """Something did not work; the message is what the command printed."""


def run(command: list[str | Path], folder: Path = WORK, **variables: str) -> str:
    """Run a command away from the checkout's package; return what it printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARKHVD_"))}
    done = subprocess.run(
        command, cwd=folder, env={**clean, **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=1800,
    )  # fmt: skip
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command[:4]))}:\n{done.stdout}")
    return done.stdout


def pip(python: Path, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    return run([*command, "install", "-q", "--no-cache-dir", *arguments])


def environment(name: str, version: str) -> Path:
    """Make a fresh environment; return its Python."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run([python_of(version), "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"


def two_ranks(python: Path) -> None:
    script = WORK / "two_ranks.py"
    script.write_text(ENGINE)
    run([python.parent / "sparkhvdrun", "-np", "2", python, script])


def try_engine(distribution: Path, version: str) -> str:
    """Import and reduce with two processes, from a wheel with the library or the source."""
    python = environment(f"{version}-{distribution.suffix.strip('.')}", version)
    pip(python, *ALONE)
    pip(python, "--no-deps", distribution)
    run([python, "-c", "import sys, sparkhvd; assert sparkhvd.__file__.startswith(sys.prefix)"])
    two_ranks(python)
    return f"import, two ranks, {megabytes(python):.1f} MB"


def try_client(distribution: Path, version: str) -> str:
    """Use what a client uses, without torch and the library."""
    python = environment(f"{version}-client", version)
    pip(python, *ALONE)
    pip(python, "--no-deps", distribution)
    run([python, "-c", CLIENT])
    return "client without torch"


def beside(name: str, *mains: Path) -> Path:
    """Make an environment with the packages of others but this one, the first ones' first; return its Python."""
    version = run([mains[-1], "-c", VERSION]).strip()
    python = environment(name, version)
    others = WORK / f"{name}-packages"
    shutil.rmtree(others, ignore_errors=True)
    others.mkdir()
    for main in mains:
        for entry in Path(run([main, "-c", SITE]).strip()).iterdir():
            link = others / entry.name
            if "sparkhvd" not in entry.name and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    (Path(run([python, "-c", SITE]).strip()) / "zz_others.pth").write_text(f"{others}\n")
    return python


def installation(python: Path, wheel: Path) -> str:
    """Install the wheel with its dependencies beside them; return how long it took, and what it takes."""
    begin = time.monotonic()
    pip(python, "--no-index", wheel)
    seconds = time.monotonic() - begin
    size = megabytes(python)
    met = "met" if seconds <= SECONDS and size <= MEGABYTES else "**missed**"
    return f"{seconds:.1f} s, {size:.1f} MB with bytecode (<= {SECONDS:g} s and {MEGABYTES:g} MB: {met})"


def megabytes(python: Path) -> float:
    """Measure the installed package with its bytecode, in MB."""
    (package,) = python.parent.parent.glob("lib/python*/site-packages/sparkhvd")
    return sum(path.stat().st_size for path in package.rglob("*") if path.is_file()) / 1e6


def attempt(what: str, action: Callable[[], str]) -> str:
    """Return the outcome of an action in words; what goes wrong is printed."""
    try:
        outcome = action()
    except Missing as e:
        outcome = f"not tried: no such Python here ({str(e).split(',')[0]})"
    except (Failed, subprocess.TimeoutExpired) as e:
        print(f"make release: {what} failed: {e}", file=sys.stderr)
        outcome = "**failed**"
    print(f"{what}: {outcome}", flush=True)
    return outcome


def versions() -> list[str]:
    """Return the Pythons that the metadata name."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def distributions() -> dict[str, Path | None]:
    """Return the files that a release has, by kind; None for one that is not there."""
    patterns = {"source": "*.tar.gz", "x86_64": "*x86_64.whl", "aarch64": "*aarch64.whl"}
    patterns["any"] = "*-none-any.whl"
    return {
        kind: next(iter(DIST.glob(f"sparkhvd-{pattern}")), None)
        for kind, pattern in patterns.items()
    }


def try_one(kind: str, path: Path | None, version: str, own: str) -> str:
    """Try a file under a Python; return the outcome in words."""
    machine = platform.machine()
    if path is None:
        return "not tried: `make wheel` has not built it"
    if kind == "any":
        return try_client(path, version)
    if kind not in (machine, "source"):
        return f"not tried: this machine is {machine}"
    if kind == "source" and version != own:
        return "not tried: the wheels are built from it"
    return try_engine(path, version)


def matrix(main: Path, chosen: list[str]) -> list[list[str]]:
    """Try every distribution under every Python; return the rows of the table."""
    own = run([main, "-c", VERSION]).strip()
    rows = []
    for kind, path in distributions().items():
        cells = []
        for version in chosen:
            action = functools.partial(try_one, kind, path, version, own)
            cells.append(attempt(f"{kind}, Python {version}", action))
        rows.append([f"`{path.name.removeprefix('sparkhvd-')}`" if path else kind, *cells])
    return rows


def fits(main: Path, wheel: Path) -> list[list[str]]:
    """Time an installation and fit something, with the newest and the oldest versions that are here."""

    def fit(python: Path) -> str:
        return run([python, "-c", FIT], PYSPARK_PYTHON=str(python)).strip().splitlines()[-1]

    def oldest() -> str:
        if not OLDEST.exists():
            return "not tried: `make test-oldest` has not made its environment here"
        python = beside("oldest", OLDEST, main)
        pip(python, "--no-deps", wheel)
        return fit(python)

    python = beside("newest", main)
    actions = {
        "installing the wheel": lambda: installation(python, wheel),
        "a fit with the newest": lambda: fit(python),
        "a fit with the oldest pyspark and pyarrow": oldest,
    }
    return [[what, attempt(what, action)] for what, action in actions.items()]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(chosen: list[str], rows: list[list[str]], beside_rows: list[list[str]]) -> str:
    version = re.search(
        r'"(.*)"', (ROOT / "sparkhvd" / "_version.py").read_text().split("__version__")[1]
    )
    assert version is not None
    return f"""# Versions that were tried

<!-- Written by `make release`; do not edit. -->

sparkhvd {version[1]}, {date.today()}, {platform.system()} {platform.machine()}, glibc {platform.libc_ver()[1]}.

Each file of `dist/` in a fresh environment of each Python, beside NumPy and without torch: the package is imported and two processes
reduce with its engine. Of the wheel without a library the launches and settings are imported, and the engine's error names the right wheel; a session of Spark Connect without torch is not tried.

{table(["file", *(f"Python {v}" for v in chosen)], rows)}

Beside torch and pyspark, with Python {platform.python_version()}:

{table(["what", "outcome"], beside_rows)}

`make test` runs with the newest of these; `make test-oldest` the tests of fits and files with pyspark 3.5, pyarrow 14 and numpy 1.26, `make test-wheels` the engine's tests
under each Python, and `make test-aarch64` the C++ tests of the other machine, emulated.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("main", type=Path, help="a Python that has torch and pyspark")
    parser.add_argument("versions", nargs="*", metavar="version")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    chosen = options.versions or versions()
    main_python = options.main.absolute()
    rows = matrix(main_python, chosen)
    wheel = distributions().get(platform.machine())
    beside_rows = fits(main_python, wheel) if wheel else []
    text = page(chosen, rows, beside_rows)
    print(text)
    if not options.versions:
        PAGE.write_text(text)
    return int("**failed**" in text or "**missed**" in text)


if __name__ == "__main__":
    sys.exit(main())
