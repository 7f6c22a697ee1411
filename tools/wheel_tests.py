"""Install the wheel of this machine under several Pythons and run the engine's tests there (`make test-wheels`).

    python -m tools.wheel_tests                3.10 3.11 3.12 3.13
    python -m tools.wheel_tests 3.12           one of them

Each Python gets a fresh environment with only the wheel, NumPy and pytest: no torch, no pyspark, no
compiled files of this checkout. The tests run from a copy, so that they cannot import the checkout's package.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.cross import ROOT
from tools.wheel import DIST

WORK = ROOT / "build" / "wheel"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
TIMEOUT_S = 900
# The package's location, its engine, and the engine's detection of the CPU.
PROBE = """
import sys, sparkhvd.engine.engine as engine
assert engine.__file__.startswith(sys.prefix), engine.__file__
engine.load()
kernels = [isa for isa in ("scalar", "avx2", "avx512", "neon") if engine.isa_available(isa)]
flags = open("/proc/cpuinfo").read().split()
assert ("avx2" in kernels) == {"avx2", "f16c"}.issubset(flags), kernels
assert ("avx512" in kernels) == {"avx512f", "avx512bw", "avx512dq", "avx512vl"}.issubset(flags), kernels
print(*kernels)
"""


class Missing(Exception):
    """Missing requirement on this machine. The message has the remedy."""


# Tests of the engine need no torch.
TESTS = "tests/engine"
# Harness module whose fixtures they use, without an import of it.
FIXTURES = "forks"
# Import of a harness module.
USE = re.compile(r"from tests\.harness(?:\.| import )(\w+)")


def python_of(version: str) -> str:
    """Find an interpreter of `version`: on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    ask = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        try:
            done = subprocess.run(
                [candidate, "-c", ask], capture_output=True, text=True, timeout=60, check=False
            )
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    raise Missing(
        f"finds no Python {version} with venv, neither on PATH nor in {pyenv}: install it, for example with "
        f"`pyenv install {version}`, or name the versions that are there: make test-wheels PYTHONS='3.11 3.12'"
    )


def copy_tests() -> Path:
    """Copy the tests and their files, without the package."""
    copy = WORK / "tests"
    shutil.rmtree(copy, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for part in (TESTS, "native/include"):
        shutil.copytree(ROOT / part, copy / part, ignore=ignore)
    (copy / "tests/harness").mkdir()
    harness = [f"tests/harness/{name}.py" for name in sorted({"__init__", *harness_names()})]
    for part in ("tests/__init__.py", "tests/conftest.py", "pyproject.toml", *harness):
        shutil.copy2(ROOT / part, copy / part)
    return copy


def harness_names() -> set[str]:
    """List the harness modules used by the tests.

    The tests' configuration imports every harness module present, and many need torch.
    """
    used = {FIXTURES}
    harness = ROOT / "tests" / "harness"
    files = [
        *(ROOT / TESTS).rglob("*.py"),
        harness.parent / "conftest.py",
        harness / f"{FIXTURES}.py",
    ]
    while files:
        text = files.pop().read_text()
        new = set(USE.findall(text)) - used
        used |= new
        files += [harness / f"{name}.py" for name in new]
    return used


def run_under(version: str, tests: Path, arguments: list[str]) -> bool:
    """Install and test under one Python, and return whether all succeeded."""
    environment = WORK / f"python{version}"
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([python_of(version), "-m", "venv", "--without-pip", environment], check=True)
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    pip += ["install", "-q", "--no-cache-dir"]
    subprocess.run([*pip, "--group", f"{ROOT}/pyproject.toml:wheel-test"], check=True, cwd=tests)
    # By name, beside py3-none-any: pip has to choose the one with the library.
    wheel = ["--no-deps", "--no-index", f"--find-links={DIST}", "sparkhvd"]
    subprocess.run([*pip, *wheel], check=True, cwd=tests)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARKHVD_"))}
    done = subprocess.run(
        [python, "-c", PROBE], capture_output=True, text=True, cwd=tests, env=clean, check=False
    )
    print(f"Python {version}: kernels {done.stdout.strip()}{done.stderr}", flush=True)
    if done.returncode != 0:
        return False
    pytest = [python, "-m", "pytest", "-q", "--durations=0", "--durations-min=5", TESTS]
    limit = ["timeout", "--kill-after=30", str(TIMEOUT_S)]
    return (
        subprocess.run([*limit, *pytest, *arguments], cwd=tests, env=clean, check=False).returncode
        == 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", metavar="version", default=VERSIONS)
    parser.add_argument("--pytest", default="", help="more arguments for pytest")
    options = parser.parse_args()
    tests = copy_tests()
    failed = []
    for version in options.versions or VERSIONS:
        start = time.monotonic()
        try:
            if not run_under(version, tests, options.pytest.split()):
                failed.append(version)
        except Missing as missing:
            print(f"make test-wheels: {missing}.", file=sys.stderr)
            failed.append(version)
        print(f"Python {version}: {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        print(f"make test-wheels: failed under Python {', '.join(failed)}.", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
