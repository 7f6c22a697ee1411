"""The notebooks run from the first cell to the last, and their evaluations must reach a bound. soak/users has text.ipynb."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.notebooks import FOLDER, TIMEOUT_S, executed, num_images, number
from tests.harness.soak import soak

pytestmark = pytest.mark.spark

# The label of the printed number, its lower bound, and the number of plots.
EVALUATIONS = {
    "quickstart": ("test accuracy", 0.9, 2),
    "from_horovod": ("accuracy of the estimator's model", 0.9, 1),
    "from_torchdistributor": ("test accuracy", 0.9, 1),
    "images": ("test accuracy", 0.9, 2),
    "tuning": ("test area under ROC", 0.95, 1),
    "own_loop": ("better than the mean by", 0.1, 1),
    "when_it_fails": ("test r2", 0.9, 0),
}


@soak(
    "estimator/test_progress, estimator/test_recorder; docs/test_page_runs: programs of the pages"
)
@pytest.mark.timeout(TIMEOUT_S + 50)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_notebook_runs_and_reaches_its_score(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label, least, plots = EVALUATIONS[name]
    notebook = executed(name, tmp_path, monkeypatch)
    assert number(notebook, label) > least
    assert num_images(notebook) >= plots


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_file_contains_no_outputs(path: Path) -> None:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [c for c in notebook.cells if c.cell_type == "code" and c.outputs] == []
    assert {*EVALUATIONS, "text"} >= {path.stem}
