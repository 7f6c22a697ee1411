"""The key of a running Spark job is in no command line, environment or log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster
from tests.harness.soak import soak
from tests.harness.spark import run_on
from tests.rendezvous.key_search import check, forms_of

pytestmark = pytest.mark.spark

SCRIPT = """
from sparkhvd.runner import run
from tests.rendezvous.key_search import hunt
print("REPORTS", json.dumps(run(hunt, num_proc=2, spark=spark, verbose=2)))
"""


def search_after(output: str, folder: Path) -> None:
    """Check that the key is neither in the driver's output nor in a file below the folder."""
    line = next(line for line in output.splitlines() if line.startswith("REPORTS "))
    key = check(json.loads(line.removeprefix("REPORTS ")))
    logs = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    logs[Path("the driver's output")] = output.encode()
    assert any(b"a rank with a key prints" in data for data in logs.values()), sorted(logs)
    for path, data in logs.items():
        assert not any(form in data for form in forms_of(key)), path


def test_job_key_never_leaks_on_a_cluster(cluster: Cluster) -> None:
    output = cluster.run(SCRIPT)
    assert " INFO " in output  # it includes Spark's log
    search_after(output, cluster.directory)


@soak("test_job_key_never_leaks_on_a_cluster, here")
def test_job_key_never_leaks_on_a_local_master(tmp_path: Path) -> None:
    search_after(run_on("local[2]", SCRIPT, tmp_path), tmp_path)
