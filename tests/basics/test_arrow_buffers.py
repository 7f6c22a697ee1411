"""Arrow arrays of plain values, and the imports that they need."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from sparkhvd.arrow_buffers import binary_array, int32_array
from tests.harness.paths import ROOT

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("values", [(), (0,), (-1, 2**31 - 1, -(2**31))])
def test_int32_array_equals_arrow(values: tuple[int, ...]) -> None:
    found = int32_array(*values)
    found.validate(full=True)
    assert found.equals(pa.array(list(values), pa.int32()))


@pytest.mark.parametrize("values", [(), (b"",), (b"one",), (b"", b"ab", b"", b"c")])
def test_binary_array_equals_arrow(values: tuple[bytes, ...]) -> None:
    found = binary_array(*values)
    found.validate(full=True)
    assert found.equals(pa.array(list(values), pa.binary()))


def test_arrow_conversion_imports_no_pandas() -> None:
    """An import of pandas costs each Python worker of Spark a second of CPU."""
    code = (
        "import sys, pyarrow as pa; from sparkhvd.arrow_buffers import *;"
        "pa.RecordBatch.from_arrays([int32_array(3), binary_array(b'ab')], names=['a', 'b']);"
        "import sparkhvd.runner.task, sparkhvd.data.store.remote as calls; calls._row(1, b'x');"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)
