"""The key of a running job of Spark is in no command line, environment or log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.soak import soak
from tests.harness.spark import run_on, standalone_cluster
from tests.processes.key_search import check, forms_of

SCRIPT = """
from sparkhvd.runner import run
from tests.processes.key_search import hunt
spark.sparkContext.setLogLevel("INFO")
print("REPORTS", json.dumps(run(hunt, num_proc=2, spark=spark, verbose=2)))
"""


def search_after(output: str, tmp_path: Path) -> None:
    """Check that the key is neither in the driver's output nor in a file below `tmp_path`."""
    line = next(line for line in output.splitlines() if line.startswith("REPORTS "))
    key = check(json.loads(line.removeprefix("REPORTS ")))
    logs = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    logs[Path("the driver's output")] = output.encode()
    assert any(b"a rank with a key prints" in data for data in logs.values()), sorted(logs)
    for path, data in logs.items():
        assert not any(form in data for form in forms_of(key)), path


def test_key_of_a_spark_job_is_nowhere(tmp_path: Path) -> None:
    search_after(run_on("local[2]", SCRIPT, tmp_path), tmp_path)


@pytest.mark.timeout(450)
@soak("test_key_of_a_spark_job_is_nowhere, here")  # three more JVMs take a minute
def test_key_of_a_job_on_a_cluster_is_nowhere(tmp_path: Path) -> None:
    with standalone_cluster(tmp_path) as master:
        output = run_on(master, SCRIPT, tmp_path, timeout_s=400)
    search_after(output, tmp_path)
