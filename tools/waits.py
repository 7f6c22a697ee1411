"""Write docs/waits.md: the limits of every wait between processes.

    .venv/bin/python -m tools.waits

The page follows from the sources alone: constants that end with `_S` and the comments above them. `tests/test_architecture.py`
compares it with them.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "waits.md"
PACKAGES = ("rendezvous", "elastic", "launchers", "runner")

_INTRODUCTION = """# Waits

<!-- Written by `python -m tools.waits`; do not edit. -->

How long the processes of a job wait for each other, in seconds, by the module that waits. Limits that users set are
[settings](settings.md). A wait for the user's own function has no limit: `connect_timeout_s`, `stall_shutdown_s` and Ctrl-C end it.
"""


class NoReasonError(Exception):
    """A constant has no comment."""


def page() -> str:
    """Generate the page from the current sources.

    Raises:
        NoReasonError: a constant has no comment above it or on its line.
    """
    parts = [_INTRODUCTION]
    for package in PACKAGES:
        paths = sorted((ROOT / "sparkhvd" / package).rglob("*.py"))
        rows = [row for path in paths for row in _rows(path)]
        parts.append(
            f"## {package}\n\n| module | constant | s | what |\n|---|---|---|---|\n{''.join(rows)}"
        )
    return "\n".join(parts)


def _rows(path: Path) -> list[str]:
    text = path.read_text()
    lines = text.splitlines()
    module = path.relative_to(ROOT / "sparkhvd").with_suffix("").as_posix().partition("/")[2]
    rows = []
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        found = [each.id for each in names if isinstance(each, ast.Name) and each.id.endswith("_S")]
        if not found:
            continue
        assert isinstance(node, ast.Assign)
        reason = _comment(lines, node.lineno - 1)
        if not reason:
            raise NoReasonError(f"{path}:{node.lineno}: {found[0]} has no comment")
        values = ast.unparse(node.value).strip("()")
        rows.append(
            f"| {module} | {', '.join(f'`{each}`' for each in found)} | {values} | {reason} |\n"
        )
    return rows


def _comment(lines: list[str], number: int) -> str:
    """Read the comment on a line, or on the lines above it."""
    _, found, own = lines[number].partition("  # ")
    if found:
        return own
    above: list[str] = []
    while number and lines[number - 1].startswith("# "):
        number -= 1
        if lines[number].startswith("# ---"):
            break
        above.insert(0, lines[number].removeprefix("# "))
    return " ".join(above)


def main() -> None:
    FILE.write_text(page())


if __name__ == "__main__":
    main()
