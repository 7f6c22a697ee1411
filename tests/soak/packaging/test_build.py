"""The wheel and the tools: one wheel for every Python, and one clear error for each missing tool."""

from __future__ import annotations

import os
import re
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the build reads, without build outputs."""
    folder = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "build")
    folder.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy2(source, folder / name)
    return folder


def run(
    command: list[str], folder: Path, *, timeout_s: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.timeout(960)  # a compiler beside other tests
def test_wheel_supports_every_python_and_does_not_link_to_torch(checkout: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    # -O0: this test looks at the shape of the wheel, not at its speed.
    done = run([*command, "-w", "wheels"], checkout, timeout_s=900, CXXFLAGS="-O0")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "wheels").glob("*.whl")
    assert re.fullmatch(r"sparkhvd-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)

    site = checkout / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    # One library, and none of the stand-ins that tests build beside it.
    assert [n for n in names if n.endswith(".so")] == ["sparkhvd/lib/libsparkhvd.so"]
    assert "sparkhvd/py.typed" in names
    assert [n for n in names if not n.startswith("sparkhvd")] == []

    linked = run(["ldd", "sparkhvd/lib/libsparkhvd.so"], site).stdout
    assert re.search(r"torch|cuda|nccl|mpi|python", linked) is None, linked

    probe = (
        "import ctypes, sys; sys.path.insert(0, '.'); import sparkhvd; print(sparkhvd.__file__);"
    )
    probe += "print(ctypes.CDLL('sparkhvd/lib/libsparkhvd.so').sparkhvd_abi_version())"
    shown = run([sys.executable, "-c", probe], site)
    assert shown.returncode == 0, shown.stderr
    assert str(site) in shown.stdout


def test_build_error_without_a_compiler_names_packages_to_install(checkout: Path) -> None:
    (checkout / "bin").mkdir()
    done = run(
        [sys.executable, "setup.py", "build_ext"], checkout, PATH=str(checkout / "bin"), CXX=""
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "error: Building sparkhvd needs a C++20 compiler (g++ 11 or clang 16, or newer) and found none: "
        "install one, for example with `apt-get install g++` on Debian and Ubuntu or "
        "`dnf install gcc-c++` on Fedora and RHEL, or name yours in the variable CXX."
    )


def test_build_error_names_a_too_old_compiler(checkout: Path) -> None:
    old = checkout / "old-c++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run([sys.executable, "setup.py", "build_ext"], checkout, CXX=str(old))
    assert done.returncode != 0
    assert f"found only {old}: install one" in done.stderr.strip().splitlines()[-1]


def linked_tools(folder: Path, *names: str) -> Path:
    """Make a folder for PATH with these programs only."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder


def test_java_script_finds_java_in_java_home(tmp_path: Path) -> None:
    home = tmp_path / "jdk"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.2\" 2024-01-16' >&2\n")
    java.chmod(0o755)
    done = run(["bash", str(ROOT / "tools/java.sh"), "--find"], tmp_path, JAVA_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(home)


def test_java_script_skips_a_too_old_java(tmp_path: Path) -> None:
    home = tmp_path / "jdk"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_412\"' >&2\n")
    java.chmod(0o755)
    done = run(["bash", str(ROOT / "tools/java.sh"), "--find"], tmp_path, JAVA_HOME=str(home))
    assert done.stdout.strip() != str(home)


def test_make_env_with_an_old_python_names_packages_to_install(tmp_path: Path) -> None:
    tools = linked_tools(tmp_path / "bin", "bash", "dirname")
    old = tools / "python3"
    old.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.8.10'\nexit 1\n")
    old.chmod(0o755)
    done = run(
        ["bash", str(ROOT / "tools/env.sh"), "build-tools"],
        tmp_path,
        PATH=str(tools),
        VENV=str(tmp_path / "venv"),
        TORCH="torch==2.13.0",
        PYTHON="",
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "make env: needs Python 3.10 to 3.13 and found none (Python 3.8.10): install one, for example with"
        " `apt-get install python3 python3-venv`, and name it with `make env PYTHON=python3.12`."
    )


def test_make_env_without_venv_names_the_package_to_install(tmp_path: Path) -> None:
    tools = linked_tools(tmp_path / "bin", "bash", "dirname")
    bare = tools / "python3"
    # New enough, but without the packages that Debian ships apart.
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    bare.chmod(0o755)
    done = run(
        ["bash", str(ROOT / "tools/env.sh"), "build-tools"],
        tmp_path,
        PATH=str(tools),
        VENV=str(tmp_path / "venv"),
        TORCH="torch==2.13.0",
        PYTHON="python3",
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "make env: python3 has no venv module: run `apt-get install python3-venv` (as root), then `make env` again."
    )
