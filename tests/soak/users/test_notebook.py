"""notebooks/text.ipynb in a kernel: a tokenizer of Hugging Face and adapters of PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.notebooks import TIMEOUT_S, executed, num_images, number

pytestmark = pytest.mark.soak

for _module in ("transformers", "peft", "nbclient"):
    pytest.importorskip(_module, reason="runs where it is: make test-users")


@pytest.mark.timeout(TIMEOUT_S + 50)
def test_text_notebook_reaches_its_score_with_and_without_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = executed("text", tmp_path, monkeypatch)
    assert number(notebook, "test accuracy") > 0.9
    assert number(notebook, "with adapters") > 0.9
    assert num_images(notebook) >= 1
