"""notebooks/quickstart.ipynb runs from its first cell to its last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.soak import soak
from tests.harness.spark import ROOT

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


@soak("pure/estimator/test_progress, examples/test_readme")
@pytest.mark.timeout(500)
def test_quickstart_notebook_runs_with_live_progress_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    # The kernel starts a session of its own; nothing of this process's gateway may reach it.
    for name in [n for n in os.environ if n.startswith("PYSPARK_GATEWAY")]:
        monkeypatch.delenv(name)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=450, startup_timeout=180, kernel_name="python3", allow_errors=False
    )
    client.execute(cwd=str(tmp_path))

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    images = [o for o in outputs if "image/png" in o.get("data", {})]
    texts = "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)
    assert len(images) >= 2
    assert "test accuracy" in texts


def test_quickstart_notebook_is_stored_without_outputs() -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [c for c in notebook.cells if c.cell_type == "code" and c.outputs] == []
