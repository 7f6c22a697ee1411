"""One line on how far the fits of this process are, which the next one replaces: on a terminal, or in a notebook.

Threads: any number show and print; each draws the whole line, so that nobody draws over another's. Failure: a stream that is closed or full
ends nothing.
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
# A fit's part of the line is not cut to less; fits beyond that are counted.
_LEAST_COLUMNS = 24
_USUAL_COLUMNS = 80


class StatusLine:
    """Line with the newest text of each fit, in the order in which they began; elsewhere than on a terminal or in a notebook there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[object, str] = {}
        self._display_id = ""

    def show(self, fit: object, text: str, detail: str = "") -> bool:
        """Show a text in place of the fit's last one; return False where lines cannot be replaced.

        Args:
            fit: whose it is.
            text: one line; on a terminal cut to its width.
            detail: of it, for a notebook, where it has no line above it.
        """
        in_notebook = _is_notebook()
        if not in_notebook and not _is_terminal():
            return False
        with self._lock, contextlib.suppress(Exception):
            self._texts[fit] = text + detail if in_notebook else text
            self._draw()
        return True

    def remove(self, fit: object) -> None:
        """Remove a fit's text, if there is one; the last one leaves nothing behind."""
        with self._lock, contextlib.suppress(Exception):
            if self._texts.pop(fit, None) is not None:
                self._draw()

    def print(self, line: str) -> None:
        """Print a line that stays; on a terminal above this one, and in place of Spark's progress bar, which is drawn anew."""
        with self._lock, contextlib.suppress(Exception):
            is_terminal = _is_terminal()
            write_to(sys.stdout, f"{ERASE}{line}\n" if is_terminal else f"{line}\n")
            if is_terminal and self._texts:
                write_to(sys.stdout, _joined(list(self._texts.values()), _width()))

    @contextlib.contextmanager
    def erased(self) -> Iterator[None]:
        """Take the line off a terminal while others print there: warnings, or the user's function."""
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
        if not text:  # the next fit has a place of its own, in its cell
            self._display_id = ""


def _is_notebook() -> bool:
    """Return True in a kernel of Jupyter."""
    ipython: Any = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def _is_terminal() -> bool:
    """Return True if lines can be replaced; programs put streams with fewer methods in the place of stdout."""
    return sys.stdout is not None and getattr(sys.stdout, "isatty", lambda: False)()


def _width() -> int:
    """Return the columns that a line may fill; one more would wrap it."""
    columns = 0
    with contextlib.suppress(OSError, ValueError):  # a terminal of the program's own
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    return (columns or _USUAL_COLUMNS) - 1


def _joined(texts: Sequence[str], width: int) -> str:
    """Join texts to one line of no more columns; those that find no room are counted: "epoch 1/2 ... | epoch 2/2 ...  (+3)"."""
    if not texts:
        return ""
    between = len(_BETWEEN)
    shown = max(1, min(len(texts), (width + between) // (_LEAST_COLUMNS + between)))
    more = f"  (+{len(texts) - shown})" if shown < len(texts) else ""
    room = (width - len(more) - between * (shown - 1)) // shown
    return _BETWEEN.join(_cut(text, room) for text in texts[:shown]) + more


def _cut(text: str, columns: int) -> str:
    """Return the beginning of a text that fills no more columns of a terminal."""
    widths = [2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text]
    if sum(widths) <= columns:
        return text
    kept = text
    while kept and sum(widths[: len(kept)]) > columns - 3:
        kept = kept[:-1]
    return f"{kept.rstrip()}..."[: max(0, columns)]


of_this_process = StatusLine()
