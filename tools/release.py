"""Test the distributions in dist/ in fresh environments, and write docs/compatibility.md (`make release`, after `make wheel`).

    python -m tools.release .venv/bin/python            every Python that pyproject.toml names
    python -m tools.release .venv/bin/python 3.12       one of them; the page is not changed

A fresh environment has a distribution, NumPy and cloudpickle, but neither torch nor pyspark. What this machine cannot
test is listed as "not tried", with the reason. A fit and the time of an installation are tested beside torch and
pyspark of the main environment. Other versions of torch are tested with the checkout, in environments of
tools/torch_env.sh.
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
from sparkhvd.engine.calls import Reduction, TensorView
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
# Requirements for pip; versions that a constraint of pip forbids are not found.
TORCHES = {"newest": "torch", "main": "", "between": "torch==2.9.*", "oldest": "torch==2.4.*"}
TORCH_HEADER = [
    *("torch", "version", "engine", "`hvd`", "`torch.distributed`", "fit"),
    *("PyTorch's backend tests", "Python tests"),
]
NOT_FOUND = 3  # status of tools/torch_env.sh
HVD = """
import torch
import sparkhvd.torch as hvd

hvd.init()
x = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum)
assert (x == 3).all(), x
hvd.shutdown()
"""
BACKEND = """
import torch
import torch.distributed as dist
import sparkhvd.distributed

dist.init_process_group("sparkhvd")
alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
for group, expected in [(None, 3), (dist.new_group([0, 1]), 6), (alone, 6)]:
    x = x if group else torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(x, group=group)
    assert (x == expected).all(), x
dist.destroy_process_group()
"""


class Failed(Exception):
    """A command failed. The message is its output."""


def run(
    command: list[str | Path],
    folder: Path = WORK,
    *,
    timeout: float = 1800,
    check: bool = True,
    **variables: str,
) -> str:
    """Run a command isolated from the checkout's package and return its output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARKHVD_"))}
    done = subprocess.run(
        command, cwd=folder, env={**clean, **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout,
    )  # fmt: skip
    if check and done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command[:4]))}:\n{done.stdout}")
    return done.stdout


def pip(python: Path, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    return run([*command, "install", "-q", "--no-cache-dir", *arguments])


def environment(name: str, version: str) -> Path:
    """Create a fresh environment and return its Python."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run([python_of(version), "-m", "venv", "--without-pip", folder])
    return folder / "bin" / "python"


def two_ranks(python: Path, program: str = ENGINE) -> str:
    script = WORK / "two_ranks.py"
    script.write_text(program)
    run([python, "-m", "sparkhvd.runner.command", "-np", "2", python, script])
    return "works"


def try_engine(distribution: Path, version: str) -> str:
    """Import and reduce with two processes, from a wheel with the library or the source."""
    python = environment(f"{version}-{distribution.suffix.strip('.')}", version)
    pip(python, *ALONE)
    pip(python, "--no-deps", distribution)
    run([python, "-c", "import sys, sparkhvd; assert sparkhvd.__file__.startswith(sys.prefix)"])
    two_ranks(python)
    return f"import, two ranks, {megabytes(python):.1f} MB"


def try_client(distribution: Path, version: str) -> str:
    """Test what a client uses, without torch and the library."""
    python = environment(f"{version}-client", version)
    pip(python, *ALONE)
    pip(python, "--no-deps", distribution)
    run([python, "-c", CLIENT])
    return "client without torch"


def beside(name: str, *mains: Path) -> Path:
    """Create an environment with the packages of others except this one, the first taking precedence, and return its Python."""
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
    """Install the wheel with its dependencies present and return its time and size."""
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
    """Run an action, print a failure, and return the outcome in words."""
    try:
        outcome = action()
    except Missing as e:
        outcome = f"not tried: {str(e).split(',')[0]}"
    except (Failed, subprocess.TimeoutExpired) as e:
        print(f"make release: {what} failed: {e}", file=sys.stderr)
        outcome = "**failed**"
    print(f"{what}: {outcome}", flush=True)
    return outcome


def versions() -> list[str]:
    """Read the Python versions from the metadata."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def distributions() -> dict[str, Path | None]:
    """Find the files of a release, by kind. A missing file is None."""
    patterns = {"source": "*.tar.gz", "x86_64": "*x86_64.whl", "aarch64": "*aarch64.whl"}
    patterns["any"] = "*-none-any.whl"
    return {
        kind: next(iter(DIST.glob(f"sparkhvd-{pattern}")), None)
        for kind, pattern in patterns.items()
    }


def try_one(kind: str, path: Path | None, version: str, own: str) -> str:
    """Try a file under a Python and return the outcome in words."""
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
    """Try every distribution under every Python and return the rows of the table."""
    own = run([main, "-c", VERSION]).strip()
    rows = []
    for kind, path in distributions().items():
        cells = []
        for version in chosen:
            action = functools.partial(try_one, kind, path, version, own)
            cells.append(attempt(f"{kind}, Python {version}", action))
        rows.append([f"`{path.name.removeprefix('sparkhvd-')}`" if path else kind, *cells])
    return rows


def fit(python: Path) -> str:
    return run([python, "-c", FIT], PYSPARK_PYTHON=str(python)).strip().splitlines()[-1]


def fits(main: Path, wheel: Path) -> list[list[str]]:
    """Time an installation and fit something, with the newest and the oldest installed versions."""

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


def torch_environment(main: Path, name: str, requirement: str) -> Path:
    """Create an environment with another torch and return its Python."""
    folder = ROOT / "build" / f"torch-env-{name}"
    command = [ROOT / "tools" / "torch_env.sh", main, folder, requirement]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=3600)
    if done.returncode == NOT_FOUND:
        raise Missing(done.stderr.strip().splitlines()[-1].removeprefix("torch-env: "))
    if done.returncode != 0:
        raise Failed(f"tools/torch_env.sh {requirement}:\n{done.stderr}")
    return folder / "bin" / "python"


def python_tests(python: Path) -> str:
    """Run the whole Python suite and return pytest's closing line."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    output = run(command, ROOT, timeout=7200, check=False)
    closing = output.strip().splitlines()[-1].strip("= ")
    if "passed" in closing and not re.search("failed|error", closing):
        return closing
    print(output, file=sys.stderr)
    return f"**failed**: {closing}"


def backend_tests(python: Path) -> str:
    """Run PyTorch's own tests of a backend on Gloo and on ours, and return how many of Gloo's pass on ours."""
    command = [python, "-m", "pytest", "-q", "-s", "tests/soak/distributed"]
    output = run(command, ROOT, timeout=3600, check=False)
    found = re.search(r"(\d+ of \d+) that pass on Gloo", output)
    if found is None:
        raise Failed(output)
    return f"{found[1]} that pass on Gloo"


def torch_row(main: Path, name: str, requirement: str) -> list[str]:
    """Try a version of torch and return its row of the table."""
    made: list[Path] = [main]

    def version() -> str:
        if requirement:
            made.append(torch_environment(main, name, requirement))
        return run([made[-1], "-c", "import torch; print(torch.__version__)"]).strip()

    tries: list[Callable[[], str]] = [
        version,
        lambda: two_ranks(made[-1]),
        lambda: two_ranks(made[-1], HVD),
        lambda: two_ranks(made[-1], BACKEND),
        lambda: fit(made[-1]),
    ]
    if name in ("newest", "main"):
        tries.append(lambda: backend_tests(made[-1]))
    if name == "newest":
        tries.append(lambda: python_tests(made[-1]))
    row = [name]
    for action in tries:
        row.append(attempt(f"{name} torch", action))
        if len(row) == 2 and not row[1][0].isdigit():
            break
    return row + ["-"] * (len(TORCH_HEADER) - len(row))


def torch_rows(main: Path) -> list[list[str]]:
    return [torch_row(main, name, requirement) for name, requirement in TORCHES.items()]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(
    chosen: list[str], rows: list[list[str]], beside_rows: list[list[str]], torches: list[list[str]]
) -> str:
    version = re.search(
        r'"(.*)"', (ROOT / "sparkhvd" / "_version.py").read_text().split("__version__")[1]
    )
    assert version is not None
    return f"""# Tested versions

<!-- Written by `make release`; do not edit. -->

sparkhvd {version[1]}, {date.today()}, {platform.system()} {platform.machine()}, glibc {platform.libc_ver()[1]}.

Each file of `dist/` in a fresh environment of each Python, beside NumPy and without torch: the package is imported and two processes
reduce with its engine. Of the wheel without a library the launches and settings are imported, and the engine's error names the right wheel; a session of Spark Connect without torch is not tried.

{table(["file", *(f"Python {v}" for v in chosen)], rows)}

Beside torch and pyspark, with Python {platform.python_version()}:

{table(["what", "outcome"], beside_rows)}

With other versions of torch, from the checkout: the engine, `hvd.allreduce`, and the backend of `torch.distributed` with `new_group` on two ranks, a fit with two ranks, PyTorch's own tests of a backend, and with the newest version that pip finds all Python tests of `make test`.

{table(TORCH_HEADER, torches)}

`make test` runs with the main one, and a cross-section with `TORCH_NEWEST` of the Makefile; `make test-oldest` the tests of fits and files with pyspark 3.5, pyarrow 14 and numpy 1.26, `make test-wheels` the engine's tests
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
    torches = [] if options.versions else torch_rows(main_python)
    text = page(chosen, rows, beside_rows, torches)
    print(text)
    if not options.versions:
        PAGE.write_text(text)
    return int("**failed**" in text or "**missed**" in text)


if __name__ == "__main__":
    sys.exit(main())
