"""Python blocks of the README, run as a reader would, in a fresh process."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.spark import ROOT, run_script

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_examples_run_as_they_stand(tmp_path: Path) -> None:
    # The second block goes on in the first one's session, as the page reads.
    script = tmp_path / "readme.py"
    script.write_text("\n".join(BLOCKS))
    result = run_script(script)
    assert result.returncode == 0, result.output
    assert "y__output" in result.output
    assert "[0.5, 0.5]" in result.output


def test_readme_example_is_about_twenty_lines() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 22
