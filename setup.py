"""Builds native/ with CMake and puts the library into the package; the rest is in pyproject.toml.

One wheel serves every Python and every torch, because the library is plain C behind ctypes: the wheel is
tagged `py3-none-<platform>`. Nothing of torch, CUDA, MPI or Python's headers is needed to build it.

    pip install .                             a wheel, built in a temporary folder
    python setup.py build_ext --inplace       the library into the checkout (`make native`)
    SPARKHVD_BUILD_ENGINE=0 pip wheel .       py3-none-any without the library, for clients
    CMAKE_TOOLCHAIN_FILE=<file> pip wheel .   the library for another machine (tools/wheel.py)
    SPARKHVD_UNITY_BUILD=ON pip install -e .  the first build of a checkout, several sources at a time
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
LIBRARY = "sparkhvd.lib.libsparkhvd"
COMPILERS = ("c++", "g++", "clang++")
# The newest parts of the standard library that native/ uses.
CXX20_PROBE = """
#include <source_location>
#include <span>
#include <stop_token>
std::stop_token token;
std::span<int> span;
std::source_location here = std::source_location::current();
"""


class BuildProblem(BaseError):
    """Something on this machine prevents the build; the message is one sentence with the remedy."""


def builds_engine() -> bool:
    """Whether the wheel gets the library; see SPARKHVD_BUILD_ENGINE above."""
    return os.environ.get("SPARKHVD_BUILD_ENGINE", "1") != "0"


def compiler() -> str:
    """The C++ compiler: $CXX, else the first of the usual names that understands C++20."""
    chosen = os.environ.get("CXX")
    candidates = [chosen] if chosen else [c for c in COMPILERS if shutil.which(c)]
    for candidate in candidates:
        if understands_cxx20(candidate):
            return candidate
    found = f"found only {', '.join(candidates)}" if candidates else "found none"
    raise BuildProblem(
        f"Building sparkhvd needs a C++20 compiler (g++ 11 or clang 16, or newer) and {found}: "
        "install one, for example with `apt-get install g++` on Debian and Ubuntu or "
        "`dnf install gcc-c++` on Fedora and RHEL, or name yours in the variable CXX."
    )


def understands_cxx20(command: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cc"
        probe.write_text(CXX20_PROBE)
        # CXX may hold a launcher and flags, such as "ccache g++ -m64".
        line = [*command.split(), "-std=c++20", "-fsyntax-only", str(probe)]
        try:
            return subprocess.run(line, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def tool(name: str) -> str | None:
    """A build tool from its PyPI package in this environment, else from the machine."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def replace(source: Path, target: Path) -> None:
    """Copy by rename: a process that has the old library mapped keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".so.new")
    shutil.copy2(source, fresh)
    fresh.replace(target)


class CMakeBuild(build_ext):
    """Runs CMake where build_ext would call the compiler once per source."""

    def run(self) -> None:
        """Remember which kind of build this is; setuptools clears `inplace` while it builds."""
        self.in_checkout = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # The checkout keeps its build folder, so that a rebuild compiles only what changed.
        build = (ROOT / "build" if self.in_checkout else Path(self.build_temp).resolve()) / "native"
        cmake = tool("cmake")
        if cmake is None:
            raise BuildProblem(
                "Building sparkhvd needs CMake and found none: run `pip install cmake ninja` first, "
                "or build without --no-build-isolation."
            )
        configure = [
            cmake,
            f"-S{ROOT / 'native'}",
            f"-B{build}",
            # A wheel has no use for 15 MB of debug information.
            f"-DCMAKE_BUILD_TYPE={'RelWithDebInfo' if self.in_checkout else 'Release'}",
            f"-DSPARKHVD_BUILD_TESTS={'ON' if self.in_checkout else 'OFF'}",
        ]
        if not (build / "CMakeCache.txt").exists():
            # A toolchain file, which CMake takes from the environment, names its own compiler.
            if not os.environ.get("CMAKE_TOOLCHAIN_FILE"):
                configure.append(f"-DCMAKE_CXX_COMPILER={compiler()}")
            if (ninja := tool("ninja")) is not None:
                configure += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
            # Several sources at a time compile in half of the time, once; after an edit they take longer.
            configure.append(f"-DCMAKE_UNITY_BUILD={os.environ.get('SPARKHVD_UNITY_BUILD', 'OFF')}")
        self.announce(f"building {target.name} in {build}", level=2)
        jobs = str(os.cpu_count() or 1)
        for command in (
            configure,
            [cmake, "--build", str(build), "--target", "sparkhvd", "-j", jobs],
        ):
            if subprocess.run(command, check=False).returncode != 0:
                raise BuildProblem(
                    "Building the native library failed; the compiler's message is above."
                )
        replace(build / "libsparkhvd.so", target)

    def copy_extensions_to_source(self) -> None:
        """Put the library into the checkout's package."""
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            inplace, regular = self._get_inplace_equivalent(build_py, ext)
            replace(Path(regular), Path(inplace))

    def get_ext_filename(self, fullname: str) -> str:
        """`sparkhvd/lib/libsparkhvd.so`: no Python ABI in the name, because it uses none."""
        return str(Path(*fullname.split("."))) + ".so"


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3: of this platform, or of any where it has no library."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(LIBRARY, sources=[])] if builds_engine() else [],
        cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
    )
