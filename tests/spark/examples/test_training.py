"""The page on user code in training: its examples, run as a reader would, in one fresh process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.soak import soak
from tests.harness.spark import ROOT, run_script

PAGE = (ROOT / "docs" / "training.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@soak("test_readme here; ranks/training/test_user_code")
@pytest.mark.timeout(300)  # five fits
def test_the_examples_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    assert list(BLOCKS) == ["declarative", "train_step", "train_fn", "callbacks", "transformations"]
    script = tmp_path / "training.py"
    script.write_text("\n".join(f"print('--- {name}')\n{block}" for name, block in BLOCKS.items()))
    result = run_script(script, timeout_s=280)
    assert result.returncode == 0, result.output
    output = dict(re.findall(r"--- (\w+)\n(.*?)(?=--- |\Z)", result.output, re.DOTALL))
    assert "'mae': " in output["train_step"]
    assert "'val_loss': " in output["train_step"]
    assert "'val_loss': " in output["train_fn"]
    # Every level prints its epochs, and gets better.
    for name in ("declarative", "train_step", "train_fn"):
        losses = [
            float(x) for x in re.findall(r"^epoch .* val_loss (\S+)", output[name], re.MULTILINE)
        ]
        assert len(losses) == 3
        assert losses[-1] < losses[0]
    epochs, good = output["callbacks"].split("\n")[-2].split()
    assert 1 <= int(epochs) < 50
    assert good == "1.0"
    assert "y__output" in output["transformations"]


MODELS = (ROOT / "docs" / "models.md").read_text()
PROGRAMS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", MODELS, re.DOTALL))


@soak("spark/estimator/test_kinds_of_models")
@pytest.mark.timeout(300)  # four fits
def test_the_programs_of_kinds_of_models_run_one_after_the_other(tmp_path: Path) -> None:
    names = [name for name in PROGRAMS if name != "classifier"]  # needs transformers
    assert names == ["data", "vae", "lstm", "gan", "lbfgs"]
    script = tmp_path / "programs.py"
    script.write_text("\n".join(f"print('--- {name}')\n{PROGRAMS[name]}" for name in names))
    result = run_script(script, timeout_s=280)
    assert result.returncode == 0, result.output
    output = dict(re.findall(r"--- (\w+)\n(.*?)(?=--- |\Z)", result.output, re.DOTALL))
    for name, column in (("vae", "mean"), ("lstm", "y__output"), ("gan", "output")):
        assert re.search(rf"\| +{column}\|", output[name]), output[name]
    assert float(output["lbfgs"].split()[-1]) < 1e-6
