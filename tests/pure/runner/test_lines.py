"""Lines of a rank's output, whole and without an end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from sparkhvd.runner.lines import Tail, is_redrawn, read_lines, shown

MOST = 1 << 10


def of_pipe(*parts: bytes | float) -> list[tuple[float, bytes]]:
    """Return the lines of a pipe and when they came, in seconds; numbers among what is written are pauses."""
    reader, writer = os.pipe()

    def write() -> None:
        for part in parts:
            if isinstance(part, bytes):
                os.write(writer, part)
            else:
                time.sleep(part)
        os.close(writer)

    thread = threading.Thread(target=write)
    began = time.monotonic()
    thread.start()
    found = [(time.monotonic() - began, line) for line in read_lines(reader, MOST)]
    thread.join()
    os.close(reader)
    return found


def test_lines_come_whole_and_long_ones_in_pieces() -> None:
    lines = [line for _, line in of_pipe(b"one\n\ntw", 0.05, b"o\n", b"x" * 3000, 0.05, b"y\nlast")]
    assert b"".join(lines) == b"one\n\ntwo\n" + b"x" * 3000 + b"y\nlast"
    assert lines[:3] == [b"one\n", b"\n", b"two\n"]
    assert lines[-1] == b"last"
    assert len(lines) > 5


@pytest.mark.parametrize("character", ["ü", "€", "😀"])
def test_pieces_of_a_long_line_hold_whole_characters(character: str) -> None:
    for start in ("", "a", "ab", "abc"):
        written = (start + character * 3000).encode()
        lines = [line for _, line in of_pipe(written[:5001], 0.02, written[5001:], b"\n")]
        assert b"".join(lines) == written + b"\n"
        assert len(lines) > 1
        assert all(
            "\N{REPLACEMENT CHARACTER}" not in line.decode(errors="replace") for line in lines
        )


def test_bytes_that_are_no_text_come_in_pieces_too() -> None:
    lines = [line for _, line in of_pipe(b"\x80" * 5000, 0.02, b"\xff" * 5000)]
    assert b"".join(lines) == b"\x80" * 5000 + b"\xff" * 5000


def test_text_without_an_end_comes_within_a_second() -> None:
    (when, asked), (_, answer) = of_pipe(b"Continue? ", 1.5, b"yes\n")
    assert (asked, answer) == (b"Continue? ", b"yes\n")
    assert when < 1.0


def test_a_progress_bar_that_is_always_redrawn_comes_about_once_per_second() -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    code = "import time, tqdm\nfor _ in tqdm.trange(100): time.sleep(0.03)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as bar:
        assert bar.stderr is not None
        lines = list(read_lines(bar.stderr.fileno(), MOST))
    assert 3 <= len(lines) <= 6
    assert all(is_redrawn(line) for line in lines[:-1])
    percents = [int(shown(line).partition("%")[0]) for line in lines]
    assert percents == sorted(percents)
    assert percents[-1] == 100


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain\n", "plain"),
        (b"windows\r\n", "windows"),
        (b"\r 10%\r 20%", " 20%"),
        (b"10%\r20%\r", "20%"),
        (b"\r100%\r     \r", "100%"),
        (b"\r\r", ""),
        (b"  \n", ""),
        (b"caf\xc3\n", "caf\ufffd"),
    ],
)
def test_shown_is_what_was_drawn_last(line: bytes, text: str) -> None:
    assert shown(line) == text


def test_a_progress_bar_is_one_of_the_last_lines() -> None:
    tail = Tail(3)
    for line in (b"a\n", b"b\n", b"\r 10%", b"\r 50%", b"\r100%\n", b"c\n"):
        tail.add(line)
    assert tail.lines() == ("b", "100%", "c")
