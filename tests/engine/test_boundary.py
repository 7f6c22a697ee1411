"""The C header and its ctypes mirror agree word by word."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest

from sparkhvd.engine import library
from sparkhvd.errors import EngineUnavailableError
from sparkhvd.rendezvous import handshake
from sparkhvd.settings import ISAS
from tests.harness.paths import ROOT

pytestmark = pytest.mark.ranks

HEADER = ROOT / "native" / "include" / "sparkhvd.h"
TEXT = re.sub(r"/\*.*?\*/|//[^\n]*", "", HEADER.read_text(), flags=re.DOTALL)

C_TYPES = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
    "void": None,
    "char*": ctypes.c_char_p,
    "void*": ctypes.c_void_p,
    "int32_t*": ctypes.POINTER(ctypes.c_int32),
    "uint32_t*": ctypes.POINTER(ctypes.c_uint32),
    "int64_t*": ctypes.POINTER(ctypes.c_int64),
    "char**": ctypes.POINTER(ctypes.c_char_p),
    "sparkhvd_device_options*": ctypes.POINTER(library.DeviceOptions),
    "sparkhvd_tensor*": ctypes.POINTER(library.Tensor),
    "sparkhvd_engine_options*": ctypes.POINTER(library.EngineOptions),
    "sparkhvd_request*": ctypes.POINTER(library.Request),
    "sparkhvd_output*": ctypes.POINTER(library.Output),
    "sparkhvd_loss*": ctypes.POINTER(library.LossEntry),
    "sparkhvd_engine*": ctypes.c_void_p,
    "sparkhvd_work*": ctypes.c_void_p,
    "sparkhvd_engine**": ctypes.POINTER(ctypes.c_void_p),
    "sparkhvd_work**": ctypes.POINTER(ctypes.c_void_p),
    "sparkhvd_buffer*": ctypes.c_void_p,
    "sparkhvd_buffer**": ctypes.POINTER(ctypes.c_void_p),
}


def split_declaration(text: str) -> tuple[str, str]:
    """Split a C declaration into type and name: "const char* name" -> ("char*", "name")."""
    text = re.sub(r"\*\s*const\s*\*", "**", text)
    words = re.fullmatch(r"(?:const\s+)?(\w+)\s*(\**)\s*(\w+)", text.strip())
    assert words, text
    return words[1] + words[2], words[3]


def header_structures() -> dict[str, list[tuple[str, str]]]:
    found = re.findall(r"typedef struct (\w+) \{(.*?)\}\s*\1;", TEXT, flags=re.DOTALL)
    return {
        name: [split_declaration(line) for line in body.split(";") if line.strip()]
        for name, body in found
    }


def header_functions() -> dict[str, tuple[str, list[str]]]:
    found = re.findall(r"SPARKHVD_API\s+(\w+\*?)\s+(\w+)\(([^)]*)\)\s*;", TEXT)
    return {
        name: (
            returns,
            []
            if arguments.strip() == "void"
            else [split_declaration(argument)[0] for argument in arguments.split(",")],
        )
        for returns, name, arguments in found
    }


def header_constants() -> dict[str, int]:
    found = re.findall(r"#define SPARKHVD_(\w+)\s+\(?(-?\d+)\)?", TEXT)
    return {name: int(value) for name, value in found}


def test_header_and_ctypes_structures_have_the_same_fields() -> None:
    structures = header_structures()
    assert structures.keys() == library.STRUCTURES.keys()
    for name, members in structures.items():
        expected = [(field, C_TYPES[c_type]) for c_type, field in members]
        assert list(library.STRUCTURES[name]._fields_) == expected, name


def test_header_and_ctypes_functions_have_the_same_signatures() -> None:
    functions = header_functions()
    assert functions.keys() == library.FUNCTIONS.keys()
    for name, (returns, arguments) in functions.items():
        signature = library.FUNCTIONS[name]
        assert signature.returns == C_TYPES[returns], name
        assert list(signature.arguments) == [C_TYPES[a] for a in arguments], name


def test_functions_that_may_block_release_the_gil() -> None:
    sentence = re.search(r"only (.*?) may block", " ".join(HEADER.read_text().split()))
    assert sentence
    documented = set(re.findall(r"sparkhvd_\w+", sentence[1]))
    blocking = {name for name, signature in library.FUNCTIONS.items() if signature.may_block}
    # destroy shuts down first if that was not done.
    assert blocking == documented | {"sparkhvd_engine_destroy"}


def test_header_and_python_constants_have_the_same_values() -> None:
    def values(prefix: str, members: type[IntEnum]) -> dict[str, int]:
        return {prefix + member.name: member.value for member in members}

    mirrored = {
        "ABI_VERSION": library.ABI_VERSION,
        "WIRE_VERSION": library.WIRE_VERSION,
        "DEVICE_CPU": library.DEVICE_CPU,
        **values("", library.Status),
        **values("", library.DType),
        **values("", library.ReduceOp),
        **values("", library.Collective),
        **values("", library.Loss),
        **values("ISA_", library.Isa),
        **values("KNOB_", library.Knob),
        "NUM_KNOBS": len(library.Knob),
        "NUM_COLLECTIVES": len(library.Collective),
    }
    assert mirrored == header_constants()
    assert tuple(isa.name.lower() for isa in library.Isa) == ISAS
    assert (handshake.ABI_VERSION, handshake.WIRE_VERSION) == (
        library.ABI_VERSION,
        library.WIRE_VERSION,
    )


def test_ctypes_layout_matches_the_compiled_header(tmp_path: Path) -> None:
    lines = ["#include <stdio.h>", '#include "sparkhvd.h"', "int main(void) {"]
    expected = []
    for name, structure in library.STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(structure, field).offset}")
    source = tmp_path / "layout.c"
    source.write_text("\n".join([*lines, "return 0; }"]))
    program = tmp_path / "layout"
    # Also proof that the header is plain C.
    build = ["cc", "-std=c11", "-Wall", "-Werror", f"-I{HEADER.parent}", source, "-o", program]
    subprocess.run(build, check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert output.splitlines() == expected


def test_library_exports_only_the_functions_of_the_header() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library.library_path()],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    exported = {s for s in symbols if s.startswith("sparkhvd")}
    assert exported == library.FUNCTIONS.keys()


def test_missing_native_library_error_gives_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "libsparkhvd.so"
    with pytest.raises(EngineUnavailableError) as caught:
        library.Library(path)
    assert str(caught.value) == (
        f"Engine(): cannot load {path}: the file is missing. In a checkout run `make env`. Elsewhere install "
        "the wheel for Linux on x86-64 or aarch64, or compile the library on this machine: `pip install "
        "--force-reinstall --no-deps --no-binary sparkhvd sparkhvd`. (The wheel py3-none-any is for clients "
        "and has no library.)"
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("unsigned sparkhvd_abi_version(void) { return 77; }", "77"),
        ("int unrelated;", "None"),
    ],
)
def test_native_library_of_another_abi_version_is_refused(
    tmp_path: Path, source: str, found: str
) -> None:
    path = tmp_path / f"libother{found}.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source, text=True, check=True
    )
    with pytest.raises(EngineUnavailableError) as caught:
        library.Library(path)
    assert str(caught.value) == (
        f"Engine(): {path} has ABI version {found}, this Python package needs {library.ABI_VERSION}. In a "
        "checkout run `make env` to build the library again; otherwise reinstall sparkhvd."
    )


def test_importing_the_package_loads_no_native_library() -> None:
    code = (
        "import sparkhvd.engine.engine, sparkhvd.rendezvous, sys; "
        "assert 'libsparkhvd' not in open('/proc/self/maps').read(); "
        "assert not {'torch', 'pyspark', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
