"""Names in programs and saves of earlier versions still import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.soak import soak

pytestmark = pytest.mark.pure

# Names in the README, docs, examples and notebooks before modules were merged (28 November 2026).
PUBLIC = Path(__file__).with_name("public_names.txt")

_PROGRAM = """
import importlib, pickle, sys, warnings
from pathlib import Path
from sparkhvd._moved import MOVED, present_name

warnings.simplefilter("error")
missing = []
for name in Path(sys.argv[1]).read_text().split():
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
            break
        except ModuleNotFoundError:
            continue
    for part in parts[count:]:
        value = getattr(value, part, None)
    if value is None:
        missing.append(name)
assert not missing, missing

for former, present in MOVED.items():
    assert importlib.import_module(former) is importlib.import_module(present), former
    assert importlib.import_module(present).__name__ == present, present

# A pickle by a former path is the present class, and is written by the present path.
cls = importlib.import_module("sparkhvd.data.columns.schema").DataSchema
assert pickle.loads(b"csparkhvd.data.columns.shapes\\nDataSchema\\n.") is cls
assert b"columns.schema" in pickle.dumps(cls)
assert present_name("sparkhvd.data.columns.shapes.DataSchema") == "sparkhvd.data.columns.schema.DataSchema"
assert present_name("numpy.ndarray") == "numpy.ndarray"
"""


@soak("saving/test_saved_versions: saves of earlier versions load by former names")
def test_public_names_and_former_module_names_still_import() -> None:
    # In a separate process, because a former name stays in its package as an attribute.
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(PUBLIC)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
