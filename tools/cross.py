"""C++ cross compiler from PyPI's `ziglang`, as a CMake toolchain.

zig includes clang, libc++ and the symbols of every glibc, so one download compiles for x86-64 and aarch64 and
for the oldest supported glibc, without containers.

    python -m tools.cross aarch64     writes the toolchain file of aarch64 and prints its path
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "cross"
ARCHITECTURES = ("x86_64", "aarch64")
# PEP 600's manylinux_2_17, formerly manylinux2014: CentOS 7 and everything younger.
GLIBC = (2, 17)


def write(path: Path, text: str) -> None:
    """Write a file only if the text differs, so that CMake has nothing to rebuild."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def toolchain(architecture: str) -> Path:
    """Write the compiler and the CMake toolchain file for `architecture` and return the latter's path.

    Raises:
        SystemExit: the package `ziglang` is not installed.
    """
    try:
        import ziglang  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise SystemExit(
            "tools.cross: needs the package ziglang and this Python has none: use the environment that "
            "`make wheel` creates, or `pip install --group wheel`."
        ) from None
    zig = Path(ziglang.__file__).parent / "zig"
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = f"{architecture}-linux-gnu.{'.'.join(map(str, GLIBC))}"
    tools = {"c++": f"c++ -target {target}", "ar": "ar", "ranlib": "ranlib"}
    for name, arguments in tools.items():
        path = FOLDER / f"{architecture}-{name}"
        # zig caches its build of libc++ here instead of in the user's home.
        cache = f"export ZIG_GLOBAL_CACHE_DIR='{FOLDER}/zig' ZIG_LOCAL_CACHE_DIR='{FOLDER}/zig'"
        write(path, f"#!/bin/sh\n{cache}\nexec '{zig}' {arguments} \"$@\"\n")
        path.chmod(0o755)
    file = FOLDER / f"{architecture}.cmake"
    lines = [
        "set(CMAKE_SYSTEM_NAME Linux)",
        f"set(CMAKE_SYSTEM_PROCESSOR {architecture})",
        f"set(CMAKE_CXX_COMPILER {FOLDER}/{architecture}-c++)",
        f"set(CMAKE_AR {FOLDER}/{architecture}-ar)",
        f"set(CMAKE_RANLIB {FOLDER}/{architecture}-ranlib)",
    ]
    if architecture != os.uname().machine and (emulator := os.environ.get("EMULATOR")):
        lines.append(f'set(CMAKE_CROSSCOMPILING_EMULATOR "{";".join(emulator.split())}")')
    write(file, "\n".join(lines) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("architecture", choices=ARCHITECTURES)
    print(toolchain(parser.parse_args().architecture))


if __name__ == "__main__":
    sys.exit(main())
