"""The wheel without the library: all modules import, and only functions that need the engine say what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.spark import ROOT

pytestmark = pytest.mark.soak

SOURCES = (
    "native",
    "sparkhvd",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)

IMPORT_ALL = """
import importlib, pkgutil, sparkhvd
for module in pkgutil.walk_packages(sparkhvd.__path__, "sparkhvd."):
    importlib.import_module(module.name)
    print(module.name)
for name in sparkhvd.__all__:
    getattr(sparkhvd, name)
print(sparkhvd.__file__)
"""

USE_ENGINE = """
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import EngineUnavailableError
from sparkhvd.rendezvous import SingleRendezvous
from sparkhvd.settings import Settings
settings = Settings()
try:
    Engine(SingleRendezvous(settings).connect(), settings)
except EngineUnavailableError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, as in site-packages."""
    folder = tmp_path_factory.mktemp("client")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            # With a compiled library in it, as in a checkout: the wheel must not pick that up.
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "-q", "--no-cache-dir", "-w", str(folder)],
        cwd=tree,
        # Without a compiler on the way: none is needed.
        env={**os.environ, "SPARKHVD_BUILD_ENGINE": "0", "CXX": "/nonexistent"},
        check=True,
        timeout=120,
    )
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [n for n in archive.namelist() if n.endswith(".so")] == []
        archive.extractall(folder / "site")
    return folder / "site"


# Windows has none of these modules and names. The libraries below may import them, so they
# come first.
WITHOUT_UNIX = """
import os, signal, socket, sys
import cloudpickle, fsspec, pandas, pyarrow, pyspark.ml, pyspark.sql.connect.session, torch
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for module, names in (
    (os, "fork register_at_fork pidfd_open killpg setsid getuid sched_getaffinity memfd_create WNOHANG"),
    (signal, "SIGKILL SIGHUP SIGUSR1 SIGSTOP SIGCONT SIGALRM pthread_sigmask"),
    (socket, "AF_UNIX SCM_RIGHTS SO_PEERCRED TCP_USER_TIMEOUT MSG_DONTWAIT TCP_KEEPIDLE send_fds"),
):
    for name in names.split():
        vars(module).pop(name, None)
"""


def run(code: str, site: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_all_modules_import_without_the_native_library(site: Path) -> None:
    *modules, file = run(IMPORT_ALL, site)
    assert file == str(site / "sparkhvd" / "__init__.py")
    assert {
        "sparkhvd.engine.engine",
        "sparkhvd.torch",
        "sparkhvd.runner",
        "sparkhvd.estimator",
    } <= set(modules)


def test_all_modules_import_without_unix_modules(site: Path) -> None:
    assert run(WITHOUT_UNIX + IMPORT_ALL, site) == run(IMPORT_ALL, site)


def test_error_without_the_native_library_names_the_package_to_install(site: Path) -> None:
    path = site / "sparkhvd" / "lib" / "libsparkhvd.so"
    assert run(USE_ENGINE, site) == [
        f"Engine(): cannot load {path}: the file is missing. In a checkout run `make env`. Elsewhere install the "
        "wheel for Linux on x86-64 or aarch64, or compile the library on this machine: `pip install "
        "--force-reinstall --no-deps --no-binary sparkhvd sparkhvd`. (The wheel py3-none-any is for clients "
        "and has no library.)"
    ]
