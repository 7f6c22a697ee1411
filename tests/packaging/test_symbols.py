"""Symbols of the compiled files: only the C interface, and none that belongs to a single instruction set."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sparkhvd.engine.library import library_path
from tests.harness.spark import ROOT
from tools import elf

pytestmark = pytest.mark.pure

KERNELS = ROOT / "native" / "src" / "kernels"
OBJECTS = ROOT / "build" / "native" / "CMakeFiles" / "sparkhvd_core.dir" / "src" / "kernels"
ISAS = ("avx2", "avx512", "neon")
ISA_SOURCES = sorted(p.name for isa in ISAS for p in KERNELS.glob(f"*{isa}*.cc"))


def compile_cxx(folder: Path, name: str, source: str, *flags: str) -> Path:
    """Compile a text with the machine's compiler, and return the object or, with -shared, the library."""
    output = folder / name
    command = ["c++", "-std=c++20", "-fPIC", "-O0", "-x", "c++", "-", "-o", str(output), *flags]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return output


def test_every_instruction_set_has_its_own_object_file() -> None:
    assert {f"{isa}.cc" for isa in ISAS} <= set(ISA_SOURCES)


@pytest.mark.parametrize("source", ISA_SOURCES)
def test_kernel_files_share_no_symbols_with_other_files(source: str) -> None:
    object_file = OBJECTS / f"{source}.o"
    assert object_file.exists(), f"{object_file} is missing: run `make native`"
    assert elf.kernel_problems(object_file) == []


def test_symbol_check_finds_shared_code_in_a_kernel_file(tmp_path: Path) -> None:
    source = """
    namespace sparkhvd::kernels_detail {
      inline int square(int x) { return x * x; }
      template <typename T> T twice(T x) { return x + x; }
      static int hidden(int x) { return x - 1; }
      const void* avx2_table() noexcept { static int x = square(hidden(twice(2))); return &x; }
      int visible = 3;
    }
    """
    # The name belongs to a real object and tells which table is the file's own.
    object_file = compile_cxx(tmp_path, "avx2.cc.o", source, "-c")
    where = "sparkhvd::kernels_detail::"
    hint = "give it internal linkage (an anonymous namespace)"
    assert elf.kernel_problems(object_file) == [
        f"defines int {where}twice<int>(int) (W): {hint}",
        f"defines {where}square(int) (W): {hint}",
        f"defines {where}visible (D): {hint}",
    ]


def test_symbol_check_finds_a_table_of_another_instruction_set(tmp_path: Path) -> None:
    source = "namespace sparkhvd::kernels_detail { const void* avx512_table() { return nullptr; } }"
    object_file = compile_cxx(tmp_path, "avx2.cc.o", source, "-c")
    assert elf.kernel_problems(object_file) == [
        "defines sparkhvd::kernels_detail::avx512_table() (T): "
        "give it internal linkage (an anonymous namespace)"
    ]


def test_library_exports_only_its_c_interface_and_needs_only_glibc() -> None:
    assert elf.library_problems(library_path()) == []


def test_symbol_check_finds_foreign_exports_and_dependencies(tmp_path: Path) -> None:
    source = '#include <cstdlib>\nextern "C" void* stray() { return malloc(1); } void other() { throw 1; }'
    library = compile_cxx(tmp_path, "libbad.so", source, "-shared")
    *others, glibc = elf.library_problems(library, glibc=(2, 0))
    assert others == [
        "exports _Z5otherv, stray: only sparkhvd_* may be visible",
        "exports no function sparkhvd_*",
        "needs libstdc++.so.6 to load: only glibc may be needed",
    ]
    assert re.fullmatch(r"needs glibc 2[.\d]+, the limit is 2\.0", glibc)
