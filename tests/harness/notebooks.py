"""Runs a notebook of notebooks/ in a kernel, from its first cell to its last."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.paths import ROOT

FOLDER = ROOT / "notebooks"
TIMEOUT_S = 450


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a notebook of this name in an empty folder, and return it with its outputs.

    A cell with the tag `raises-exception` must raise an exception, and no other cell may.
    """
    import nbformat
    from nbclient import NotebookClient

    for variable in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(folder / variable.lower()))
    monkeypatch.setenv("MPLCONFIGDIR", str(folder / "matplotlib"))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # The kernel starts its own session, and must not inherit this process's gateway.
    for variable in [n for n in os.environ if n.startswith("PYSPARK_GATEWAY")]:
        monkeypatch.delenv(variable)
    work = folder / "work"
    work.mkdir()
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=TIMEOUT_S, startup_timeout=180, kernel_name="python3").execute(
        cwd=str(work)
    )
    expected = [c.id for c in notebook.cells if "raises-exception" in c.metadata.get("tags", [])]
    raised = [c.id for c in notebook.cells if errors_of(c)]
    assert raised == expected, [errors_of(c) for c in notebook.cells if errors_of(c)]
    return notebook


def errors_of(cell: Any) -> list[str]:
    """Return the classes of the exceptions that a cell has shown."""
    return [o.ename for o in cell.get("outputs", []) if o.output_type == "error"]


def text_of(notebook: Any) -> str:
    """Return all that the cells printed and returned."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)


def number(notebook: Any, label: str) -> float:
    """Return the number printed after a label."""
    found = re.search(rf"{re.escape(label)} (-?[\d.]+)", text_of(notebook))
    assert found, text_of(notebook)
    return float(found[1])


def num_images(notebook: Any) -> int:
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return sum("image/png" in o.get("data", {}) for o in outputs)
