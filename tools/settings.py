"""Write the table of settings in docs/settings.md from `sparkhvd/settings.py`.

    .venv/bin/python -m tools.settings

`tests/test_architecture.py` compares the page with the code.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparkhvd.settings import markdown_table

FILE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def page() -> str:
    """Replace the table in the text of the page by the current table."""
    table = f"<!-- settings -->\n{markdown_table()}\n<!-- /settings -->"
    return re.sub(
        r"<!-- settings -->\n.*<!-- /settings -->",
        lambda _: table,
        FILE.read_text(),
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    FILE.write_text(page())
