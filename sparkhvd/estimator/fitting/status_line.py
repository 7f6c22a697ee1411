"""Show the progress of this process's fits in one replaceable line on a terminal or in a notebook.

Threads: any number of threads may show and print; each draws the whole line under a lock. Failure: errors of a closed
or full stream are ignored.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import unicodedata
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from sparkhvd.runner.launching import ERASE, write_to

_BETWEEN = " | "
# Minimum number of columns for a fit's part of the line. Fits that do not fit into the line are only counted.
_LEAST_COLUMNS = 24
_USUAL_COLUMNS = 80


class StatusLine:
    """Line with the newest text of each fit in the order of their starts, on a terminal or in a notebook."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[object, str] = {}
        self._display_id = ""

    def show(self, fit: object, text: str, detail: str = "") -> bool:
        """Replace the text of a fit and return False if stdout cannot replace lines.

        Args:
            fit: owner of the text.
            text: one line, which a terminal cuts to its width.
            detail: text to append in a notebook.
        """
        in_notebook = _is_notebook()
        if not in_notebook and not _is_terminal():
            return False
        with self._lock, contextlib.suppress(Exception):
            self._texts[fit] = text + detail if in_notebook else text
            self._draw()
        return True

    def remove(self, fit: object) -> None:
        """Remove the text of a fit if it has text. The line is erased with the last text."""
        with self._lock, contextlib.suppress(Exception):
            if self._texts.pop(fit, None) is not None:
                self._draw()

    def print(self, line: str) -> None:
        """Print a permanent line above this line.

        On a terminal, it overwrites Spark's progress bar for a moment.
        """
        with self._lock, contextlib.suppress(Exception):
            is_terminal = _is_terminal()
            write_to(sys.stdout, f"{ERASE}{line}\n" if is_terminal else f"{line}\n")
            if is_terminal and self._texts:
                write_to(sys.stdout, _joined(list(self._texts.values()), _width()))

    @contextlib.contextmanager
    def erased(self) -> Iterator[None]:
        """Erase the line on a terminal while other code prints there, such as a warning or the user's function."""
        with self._lock, contextlib.suppress(Exception):
            if self._texts and _is_terminal():
                write_to(sys.stdout, ERASE)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(Exception):
                if self._texts and _is_terminal():
                    self._draw()

    def _draw(self) -> None:
        texts = list(self._texts.values())
        if _is_notebook():
            self._display("\n".join(texts))
        elif _is_terminal():
            write_to(sys.stdout, ERASE + _joined(texts, _width()))

    def _display(self, text: str) -> None:
        from IPython.display import display

        is_new = not self._display_id
        self._display_id = self._display_id or uuid.uuid4().hex
        display({"text/plain": text}, raw=True, display_id=self._display_id, update=not is_new)
        if not text:  # the next fit gets a new output, in its own notebook cell
            self._display_id = ""


def _is_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def _is_terminal() -> bool:
    """Whether stdout is a terminal. A program's own replacement of stdout may lack methods."""
    return sys.stdout is not None and getattr(sys.stdout, "isatty", lambda: False)()


def _width() -> int:
    """Find the maximum width of a line without wrapping, in columns."""
    columns = 0
    # A program's own stdout may not be a real terminal.
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    return (columns or _USUAL_COLUMNS) - 1


def _joined(texts: Sequence[str], width: int) -> str:
    """Join texts to a line of at most `width` columns. "(+3)" at its end counts omitted texts."""
    if not texts:
        return ""
    between = len(_BETWEEN)
    shown = max(1, min(len(texts), (width + between) // (_LEAST_COLUMNS + between)))
    more = f"  (+{len(texts) - shown})" if shown < len(texts) else ""
    room = (width - len(more) - between * (shown - 1)) // shown
    return _BETWEEN.join(_cut(text, room) for text in texts[:shown]) + more


def _cut(text: str, columns: int) -> str:
    """Cut a text to at most `columns` columns of a terminal."""
    widths = [2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text]
    if sum(widths) <= columns:
        return text
    kept = text
    while kept and sum(widths[: len(kept)]) > columns - 3:
        kept = kept[:-1]
    return f"{kept.rstrip()}..."[: max(0, columns)]


of_this_process = StatusLine()
