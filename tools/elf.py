"""Symbols and dependencies of a compiled library or object, read with nm and readelf (binutils).

Both also read the files of other architectures.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# The parts of glibc, including the loaders; newer releases have merged all of them into libc.so.6.
GLIBC = re.compile(r"(libc|libm|libdl|librt|libpthread|ld-linux-\w[\w-]*)\.so\.\d+")
# Symbol types of nm that are invisible to other files and not merged by the linker. Visible are capital
# letters, and u, v, w, which are weak or unique. U is a reference, not a definition.
PRIVATE = "abdrnstN"


@dataclass(frozen=True)
class Symbol:
    """Symbol defined in a file. `kind` is nm's letter."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def exported(library: Path) -> set[str]:
    """Read the exported names of a shared library."""
    lines = _output("nm", "-D", "--defined-only", "--format=posix", library).splitlines()
    return {line.split()[0].split("@")[0] for line in lines}


def needed(library: Path) -> list[str]:
    """List the shared libraries needed to load this library."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-dW", library))


def newest_glibc(library: Path) -> tuple[int, ...]:
    """Find the newest glibc required by a library, such as (2, 17), or () if it needs no glibc."""
    text = _output("readelf", "-VW", library)
    versions = re.findall(r"GLIBC_(\d+(?:\.\d+)+)", text)
    return max((tuple(map(int, v.split("."))) for v in versions), default=())


def machine(library: Path) -> str:
    """Read the architecture of a library, spelled as in `uname -m`."""
    text = _output("readelf", "-hW", library)
    found = re.search(r"Machine:\s+(.*)", text)
    assert found is not None, text
    return {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}.get(
        found[1].strip(), found[1].strip()
    )


def visible_symbols(object_file: Path) -> set[Symbol]:
    """List the externally visible symbols of an object file, with demangled names."""
    symbols = set()
    for line in _output("nm", "-C", "--defined-only", object_file).splitlines():
        found = re.fullmatch(r"[0-9a-f]*\s*(\w) (.*)", line)
        assert found is not None, line
        if found[1] not in PRIVATE:
            symbols.add(Symbol(found[1], found[2]))
    return symbols


def library_problems(library: Path, *, glibc: tuple[int, ...] | None = None) -> list[str]:
    """Check that a library loads on other machines, beside other libraries.

    Returns the problems as sentences.

    Args:
        library: a shared library.
        glibc: the oldest glibc that it must load with; None skips the check.
    """
    problems = []
    names = exported(library)
    if foreign := sorted(n for n in names if not n.startswith("sparkhvd_")):
        problems.append(f"exports {', '.join(foreign[:5])}: only sparkhvd_* may be visible")
    if names <= set(foreign):
        problems.append("exports no function sparkhvd_*")
    if others := [n for n in needed(library) if not GLIBC.fullmatch(n)]:
        problems.append(f"needs {', '.join(others)} to load: only glibc may be needed")
    if glibc is not None and (newest := newest_glibc(library)) > glibc:
        problems.append(
            f"needs glibc {'.'.join(map(str, newest))}, the limit is {'.'.join(map(str, glibc))}"
        )
    return problems


def kernel_problems(object_file: Path) -> list[str]:
    """Check that an object of one instruction set shares nothing with the rest of the library.

    Returns the problems as sentences.

    The linker keeps one copy of what several objects define (inline functions, templates). If that were the copy of
    an object compiled for AVX-512, older CPUs would die of an illegal instruction. So such an
    object may define nothing visible except the functions that return its tables.
    """
    isa = object_file.name.removesuffix(".o").removesuffix(".cc").split("_")[-1]
    own = re.compile(rf"sparkhvd::kernels_detail::(\w+_)?{isa}(_\w+)?_table\(\)")
    visible = visible_symbols(object_file)
    return [
        f"defines {symbol}: give it internal linkage (an anonymous namespace)"
        for symbol in sorted(visible, key=str)
        if symbol.kind != "T" or not own.fullmatch(symbol.name)
    ] + ([] if visible else ["defines no function that returns its table"])
