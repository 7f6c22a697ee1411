"""The status line of fits, on a real terminal with a given width."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkhvd.data.store.store import Store
from sparkhvd.estimator.fitting.progress import EpochReporter
from sparkhvd.estimator.fitting.status_line import StatusLine, _joined
from sparkhvd.runner.job import print_line
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.harness.steps import report_of_step
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.pure


class Screen:
    """Text on a terminal with this many columns, for the control characters that the line uses."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.seen: list[str] = []
        self._at = 0

    def feed(self, text: str) -> None:
        while text:
            if text.startswith("\x1b[K"):
                self.lines[-1] = self.lines[-1][: self._at]
                text = text[3:]
                continue
            first, text = text[0], text[1:]
            if first == "\r":
                self._at = 0
            elif first == "\n":
                self.lines.append("")
                self._at = 0
            else:
                if self._at == self.columns:
                    self.lines.append("")
                    self._at = 0
                self.lines[-1] = self.lines[-1][: self._at] + first + self.lines[-1][self._at + 1 :]
                self._at += 1
        self.seen.append(self.lines[-1])


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[Screen]:
    """Let stdout be a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen = Screen(columns)

    def read() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                screen.feed(data.decode())
        except OSError:  # the other end is closed
            pass

    reading = threading.Thread(target=read)
    reading.start()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield screen
    reading.join(10)
    os.close(ours)


def test_two_fits_share_the_status_line_and_clear_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(Store.create(tmp_path / "store"), "runs/r")
    with terminal(monkeypatch, 60) as screen:

        def sees(text: str) -> None:
            wait_until(lambda: screen.lines[-1] == text, "it is shown")

        first, second = (
            EpochReporter(checkpoints, epochs=2, verbose=1, progress=None, name=name, label=label)
            for name, label in (("20261127-202404-3076979b", "a"), ("20261127-202404-b", ""))
        )
        with first:
            first.show_step(report_of_step(1, 1))
            sees("[a] epoch 1/2  step 1/9  1,000 rows/s  3 s left")
            with second:
                second.show_step(report_of_step(1, 3))
                sees("[a] epoch 1/2  step 1/9... | [b] epoch 1/2  step 3/9...")
                first.show_step(report_of_step(1, 5, left_s=5400.0))
                sees("[a] epoch 1/2  step 5/9... | [b] epoch 1/2  step 3/9...")
                second.ended("enough", 1)
                sees("[a] epoch 1/2  step 5/9... | [b] epoch 1/2  step 3/9...")
            sees("[a] epoch 1/2  step 5/9  1,000 rows/s  1 h 30 min left")
        first.show_step(report_of_step(1, 9))
        sees("")
    assert screen.lines == ["[20261127-202404-b] stopped after epoch 1/2: enough", ""]


def test_status_line_is_cut_to_the_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    line = StatusLine()
    with terminal(monkeypatch, 30) as screen:
        line.show(0, "[fit 0] step 0 of very many steps")
        wait_until(lambda: screen.lines[-1], "it is shown")
        for number in range(20):
            line.show(number % 4, f"[fit {number % 4}] step {number} of very many")
        line.print("a line that stays")
        for number in range(4):
            line.remove(number)
        wait_until(lambda: screen.lines == ["a line that stays", ""], "all that is left")
    assert "[fit 0] step 0 of very man..." in screen.seen


@pytest.mark.parametrize(
    ("texts", "width", "shown"),
    [
        ([], 79, ""),
        (["ab"], 2, "ab"),
        (["abcd"], 3, "..."),
        (["abcde"], 4, "a..."),
        (["模模模"], 5, "模..."),
        (["a" * 30, "b" * 30], 51, f"{'a' * 21}... | {'b' * 21}..."),
        (["a" * 30, "b" * 30], 50, f"{'a' * 41}..."[:30] + "  (+1)"),
    ],
)
def test_status_line_of_several_fits_is_shortened_to_the_width(
    texts: list[str], width: int, shown: str
) -> None:
    assert _joined(texts, width) == shown
    assert len(shown) <= width


def test_ascii_stream_shows_other_characters_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    StatusLine().print("[größe=2] epoch 1/2")
    assert raw.getvalue() == rb"[gr\xf6\xdfe=2] epoch 1/2" + b"\n"


def test_other_output_is_not_mixed_with_the_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = StatusLine()
    with terminal(monkeypatch, 60) as screen:
        monkeypatch.setattr(sys, "stderr", sys.stdout)
        line.show("a fit", "epoch 1/2  step 3/9")
        with line.erased():
            print("of the user's function")
        print_line(1, "2 -> 1 rank")
        line.show("a fit", "epoch 1/2  step 3/9")
        wait_until(lambda: screen.lines[-1] == "epoch 1/2  step 3/9", "it is drawn again")
        line.remove("a fit")
        print("kept", end="", flush=True)
        with line.erased():
            pass
    assert screen.lines == ["of the user's function", "sparkhvd: 2 -> 1 rank", "kept"]
