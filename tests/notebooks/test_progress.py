"""Progress of a fit in a Jupyter kernel: one line that is replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.soak import soak
from tests.harness.spark import CONF, ROOT

pytestmark = pytest.mark.spark

FIT = f"""
import time, torch
from pyspark.sql import SparkSession
from sparkhvd import TorchEstimator

builder = SparkSession.builder.master("local[2]")
for key, value in {CONF!r}.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
df = spark.createDataFrame([([float(i % 5)], float(i % 7)) for i in range(60)], "x array<double>, y double")

def slow(output, label):
    time.sleep(0.1)
    return ((output - label) ** 2).mean()

estimator = TorchEstimator(
    model=torch.nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=slow, feature_cols=["x"],
    label_cols=["y"], batch_size=1, epochs=2, num_proc=2, store=STORE)
"""


@soak("estimator/test_status_line")
@pytest.mark.timeout(300)
def test_fit_progress_is_one_cell_line_and_cleared_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [n for n in os.environ if n.startswith("PYSPARK_GATEWAY")]:
        monkeypatch.delenv(name)
    shown: list[str] = []

    class Watched(NotebookClient):  # type: ignore[misc]  # nbclient has no types
        def process_message(self, message: Any, cell: Any, cell_index: int) -> Any:
            if message["msg_type"] in ("display_data", "update_display_data"):
                shown.append(message["content"]["data"]["text/plain"])
            return super().process_message(message, cell, cell_index)

    cells = [
        nbformat.v4.new_code_cell(FIT.replace("STORE", repr(str(tmp_path / "store")))),
        nbformat.v4.new_code_cell("model = estimator.fit(df)"),
        nbformat.v4.new_code_cell("spark.stop()"),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    Watched(notebook, timeout=240, startup_timeout=120, kernel_name="python3").execute(
        cwd=str(tmp_path)
    )

    displays = [o for cell in notebook.cells for o in cell.outputs if "data" in o]
    assert [display["data"]["text/plain"] for display in displays] == [""]
    assert displays[0] in notebook.cells[1].outputs
    steps = [text for text in shown if text]
    line = (
        r"epoch [12]/2  step \d+/30  loss [\d.]+  \d+ rows/s  \d+ s left"
        r"(  waiting for rank [01] \d+%)?(  loss [\d.]+ in epoch 1)?"
    )
    assert all(re.fullmatch(line, text) for text in steps), steps
    assert len(steps) >= 8, steps
    assert "in epoch 1" in steps[-1]
    printed = "".join(o.get("text", "") for o in notebook.cells[1].outputs)
    assert [text[:9] for text in printed.splitlines() if text.startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]
