"""Iceberg's Spark runtime with the oldest pyspark: reuse by snapshot, and its tables read in place (`make test-oldest`).

The runtime and Iceberg's table are real. The package `snowpark-connect-deps-iceberg` has the jars of PyPI. `tools/relocated_jackson.py` makes the
classes that they lack.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.harness.paths import ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not pyspark.__version__.startswith("3.5.")
        or importlib.util.find_spec("snowpark_connect_deps_iceberg") is None,
        reason="needs pyspark 3.5 and Iceberg's jars; run make test-oldest",
    ),
]
_JARS = ("iceberg-spark-runtime-3.5_2.12", "iceberg-spark-extensions-3.5_2.12")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run the program in its own session, and return its folder and its output."""
    folder = tmp_path_factory.mktemp("iceberg")
    jackson = folder / "jackson.jar"
    subprocess.run([sys.executable, "-m", "tools.relocated_jackson", jackson], check=True, cwd=ROOT)
    (package,) = importlib.util.find_spec(
        "snowpark_connect_deps_iceberg"
    ).submodule_search_locations  # type: ignore[union-attr,misc]
    jars = [str(next(Path(package, "jars").glob(f"{name}-*.jar"))) for name in _JARS]
    command = [sys.executable, "-m", "tests.soak.oldest.iceberg_program"]
    done = subprocess.run(
        [*command, ",".join([*jars, str(jackson)]), str(folder)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if "RESULT " in line]
    found: dict[str, Any] = json.loads(line.partition("RESULT ")[2])
    return folder, found


def test_iceberg_data_are_reused_by_snapshot(results: tuple[Path, dict[str, Any]]) -> None:
    wrong = [each for each in results[1]["reused"] if not each[1]]
    assert wrong == []


def test_iceberg_tables_written_by_spark_are_read_in_place(
    results: tuple[Path, dict[str, Any]],
) -> None:
    """The main environment reads position deletes, deletion vectors, branches, tags and hidden partitions that Spark wrote."""
    folder, found = results
    (folder / "results.json").write_text(json.dumps(found))
    python = ROOT / ".venv" / "bin" / "python"
    command = [str(python), "-m", "tests.soak.oldest.read_iceberg"]
    done = subprocess.run(
        [*command, str(folder / "warehouse"), str(folder / "results.json")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert "EQUAL" in done.stdout, done.stderr[-4000:]
