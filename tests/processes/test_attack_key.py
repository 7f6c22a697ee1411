"""The key of a running job is in no command line, environment or log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.runner import run_local
from tests.harness.soak import soak
from tests.harness.spark import run_on, standalone_cluster
from tests.processes.key_search import forms_of, hunt


def check(reports: list[dict[str, Any]]) -> bytes:
    """Check the ranks' reports and return the key."""
    keys = {report["yek"][::-1] for report in reports}
    assert len(keys) == 1
    for report in reports:
        assert report["baits"] == 2, "the search itself finds nothing"
        assert report["read"] > 4
        assert report["found"] == []
    return bytes.fromhex(keys.pop())


def test_key_of_a_local_job_is_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    key = check(run_local(hunt, num_proc=2, verbose=2))
    captured = capfd.readouterr()
    output = (captured.out + captured.err).encode()
    assert b"a rank with a key prints" in output
    assert not any(form in output for form in forms_of(key))


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
