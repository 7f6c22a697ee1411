"""examples/digits.py with every kind of Spark: the same code and seed give the same weights."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.soak import soak
from tests.harness.spark import ROOT, standalone_cluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

EXAMPLE = ROOT / "examples" / "digits.py"
EPOCHS = 12
LOOPBACK = {"SPARK_LOCAL_IP": "127.0.0.1"}


@dataclass(frozen=True)
class Outcome:
    """Output of a run of the example."""

    output: str
    weights: str
    accuracy: float
    plot: Path


def run_example(command: list[str], folder: Path, timeout_s: float = 280) -> Outcome:
    """Run the example in a fresh process group, from another folder and without an activated environment."""
    plot = folder / "loss.png"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "VIRTUAL_ENV"))}
    environ.update(LOOPBACK, MPLCONFIGDIR=str(folder / "matplotlib"))
    process = subprocess.Popen(
        [*command, "--epochs", str(EPOCHS), "--plot", str(plot)],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} ran longer than {timeout_s} s:\n{output}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    weights = re.search(r"weights sha256: ([0-9a-f]{64})", output)
    accuracy = re.search(r"test accuracy (\d\.\d+)", output)
    assert weights is not None, output
    assert accuracy is not None, output
    return Outcome(output, weights[1], float(accuracy[1]), plot)


def check(outcome: Outcome) -> None:
    assert outcome.accuracy >= 0.95
    assert outcome.plot.read_bytes().startswith(b"\x89PNG")
    lines = [line for line in outcome.output.splitlines() if re.search(r"\bepoch\b.*rows/s", line)]
    assert len(lines) == EPOCHS, outcome.output
    assert all("loss" in line and "accuracy" in line for line in lines)
    assert re.search(
        r"materialize [\d.]+ s, launch [\d.]+ s, train [\d.]+ s, transform", outcome.output
    )


@pytest.fixture(scope="module")
def on_local(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The reference of the other modes: plain Python, which starts local[2] itself."""
    return run_example([sys.executable, str(EXAMPLE)], tmp_path_factory.mktemp("local"))


@soak("docs/test_page_blocks: programs of plain Python; test_migration: scripts of examples")
def test_digits_trains_and_reports_when_started_by_plain_python(on_local: Outcome) -> None:
    check(on_local)


@soak("cluster/test_fits: the same weights in every mode")
@pytest.mark.parametrize("option", ["--master", "--remote"], ids=["local-cluster", "connect"])
def test_digits_gives_equal_weights_in_executor_processes(
    option: str, on_local: Outcome, tmp_path: Path
) -> None:
    command = [sys.executable, str(EXAMPLE), option, "local-cluster[2,1,1024]"]
    outcome = run_example(command, tmp_path)
    check(outcome)
    assert outcome.weights == on_local.weights


@soak("cluster/test_fits; cluster/test_programs: standalone")
def test_digits_gives_equal_weights_when_submitted_to_a_standalone_cluster(
    on_local: Outcome, tmp_path: Path
) -> None:
    import pyspark

    home = Path(pyspark.__file__).parent
    with standalone_cluster(tmp_path) as master:
        command = [
            "env",
            f"SPARK_HOME={home}",
            f"PYSPARK_PYTHON={sys.executable}",
            str(home / "bin" / "spark-submit"),
            *("--master", master),
            *("--conf", "spark.driver.host=127.0.0.1"),
            *("--conf", "spark.ui.enabled=false"),
            str(EXAMPLE),
            *("--store", str(tmp_path / "store")),
        ]
        outcome = run_example(command, tmp_path)
    check(outcome)
    assert outcome.weights == on_local.weights
