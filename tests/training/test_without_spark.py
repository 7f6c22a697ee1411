"""The training half of the estimator runs without Spark and Java, as `make gpu` needs it with a bare Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.paths import ROOT
from tests.harness.soak import soak

pytestmark = pytest.mark.ranks

PROGRAM = """
import sys
from tests.harness.estimator_checks import CHECKS, Place

if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, "::", CHECKS[name](Place(size=2, kind="cpu")))
    assert not {"pyspark", "py4j", "pytest"} & set(sys.modules)
"""


@soak(
    "a worker of transform without pyspark: transform/test_worker; training without a session: the other tests of the loop"
)
@pytest.mark.timeout(200)
def test_ranks_train_without_pyspark(tmp_path: Path) -> None:
    for name in ("pyspark", "py4j", "pytest"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f"raise ModuleNotFoundError('no module {name} here', name={name!r})\n"
        )
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    checks = ["training equals one process"]
    done = subprocess.run(
        [sys.executable, str(script), *checks],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(" ::")[0] for line in done.stdout.splitlines()] == checks
