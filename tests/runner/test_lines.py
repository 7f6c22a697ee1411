"""Lines of a rank's output, complete and without an end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from sparkhvd.runner.output import LineReader, Tail, is_redrawn, shown

pytestmark = pytest.mark.pure

MOST = 1 << 10


def of_pipe(*parts: bytes | float) -> list[tuple[float, bytes]]:
    """Return the lines of a pipe and their arrival in seconds. Numbers in the written parts are pauses."""
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
    found: list[tuple[float, bytes]] = []
    thread.start()
    LineReader(reader, MOST, lambda line: found.append((time.monotonic() - began, line))).run()
    thread.join()
    os.close(reader)
    return found


def test_short_lines_arrive_whole_and_long_lines_in_parts() -> None:
    lines = [line for _, line in of_pipe(b"one\n\ntw", 0.05, b"o\n", b"x" * 3000, 0.05, b"y\nlast")]
    assert b"".join(lines) == b"one\n\ntwo\n" + b"x" * 3000 + b"y\nlast"
    assert lines[:3] == [b"one\n", b"\n", b"two\n"]
    assert lines[-1] == b"last"
    assert len(lines) > 5


@pytest.mark.parametrize("character", ["ü", "€", "😀"])
def test_parts_of_a_long_line_contain_whole_characters(character: str) -> None:
    for start in ("", "a", "ab", "abc"):
        written = (start + character * 3000).encode()
        lines = [line for _, line in of_pipe(written[:5001], 0.02, written[5001:], b"\n")]
        assert b"".join(lines) == written + b"\n"
        assert len(lines) > 1
        assert all(
            "\N{REPLACEMENT CHARACTER}" not in line.decode(errors="replace") for line in lines
        )


def test_binary_output_arrives_in_parts() -> None:
    lines = [line for _, line in of_pipe(b"\x80" * 5000, 0.02, b"\xff" * 5000)]
    assert b"".join(lines) == b"\x80" * 5000 + b"\xff" * 5000


def test_an_unfinished_line_arrives_within_a_second() -> None:
    (when, asked), (_, answer) = of_pipe(b"Continue? ", 1.5, b"yes\n")
    assert (asked, answer) == (b"Continue? ", b"yes\n")
    assert when < 1.0


def test_a_redrawn_progress_bar_arrives_about_once_per_second() -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    code = "import time, tqdm\nfor _ in tqdm.trange(100): time.sleep(0.03)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as bar:
        assert bar.stderr is not None
        lines: list[bytes] = []
        LineReader(bar.stderr.fileno(), MOST, lines.append).run()
    assert 3 <= len(lines) <= 6
    assert all(is_redrawn(line) for line in lines[:-1])
    percents = [int(shown(line).partition("%")[0]) for line in lines]
    assert percents == sorted(percents)
    assert percents[-1] == 100


def test_nested_progress_bars_arrive_about_once_per_second() -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    code = (
        "import time, tqdm\n"
        "for _ in tqdm.trange(2, desc='epoch'):\n"
        "    for _ in tqdm.trange(40, desc='step', leave=False): time.sleep(0.05)\n"
        "print('done')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as bars:
        assert bars.stdout is not None
        lines: list[str] = []
        LineReader(bars.stdout.fileno(), MOST, lambda line: lines.append(shown(line))).run()
    assert 5 <= len(lines) <= 11, lines
    assert all(line.startswith(("epoch: ", "step: ")) for line in lines[:-1]), lines
    assert lines[-2].startswith("epoch: 100%")
    assert lines[-1] == "done"


def test_outer_progress_bar_ends_the_line_of_the_inner() -> None:
    up = b"\x1b[A"
    lines = [
        line
        for _, line in of_pipe(
            b"\ra",
            b"\n\n\rc1" + up + up,
            0.02,
            b"\n\n\rc2" + up + up,
            0.02,
            b"\n\rb1" + up,
            b"\n\n\rc3" + up + up,
        )
    ]
    assert [shown(line) for line in lines] == ["a", "", "b1", "c3"]


def test_forwarded_progress_bar_adds_no_empty_lines() -> None:
    up = b"\x1b[A"
    lines = [
        shown(line) for _, line in of_pipe(b"\r10%" + up, 1.3, b"\n\r20%" + up, 1.3, b"\n\r30%\n")
    ]
    assert lines == ["10%", "20%", "30%"]


def test_an_unfinished_line_contains_whole_characters() -> None:
    first, second = [line for _, line in of_pipe("5 €".encode()[:-1], 0.7, "€\n".encode()[-2:])]
    assert first + second == "5 €\n".encode()
    assert first == b"5 "
    lines = [line for _, line in of_pipe(b"5 \xe2", 1.3, b"6\n")]  # no character after all
    assert lines == [b"5 ", b"\xe2", b"6\n"]


def test_catch_up_forwards_earlier_output_of_a_flooded_pipe() -> None:
    reader, writer = os.pipe()
    found: list[bytes] = []
    is_over = threading.Event()

    def take(line: bytes) -> None:
        found.append(line)

    def flood() -> None:
        while not is_over.is_set():
            os.write(writer, b"x\n" * 2000)
        os.close(writer)

    lines = LineReader(reader, MOST, take)
    running = threading.Thread(target=lines.run, daemon=True)
    running.start()
    os.write(writer, b"first\n")
    lines.catch_up(10.0)
    assert found == [b"first\n"]
    writing = threading.Thread(target=flood, daemon=True)
    writing.start()
    for number in range(20):
        os.write(writer, b"%d\n" % number)
        began = time.monotonic()
        lines.catch_up(10.0)
        assert b"%d\n" % number in found
        assert time.monotonic() - began < 1.0
    is_over.set()
    writing.join()
    running.join()
    lines.catch_up(10.0)  # of a pipe that has ended
    os.close(reader)


def test_blocked_stream_delays_other_threads_only_briefly() -> None:
    reader, writer = os.pipe()
    blocks, goes_on = threading.Event(), threading.Event()

    def take(line: bytes) -> None:
        blocks.set()
        assert goes_on.wait(10)

    lines = LineReader(reader, MOST, take)
    running = threading.Thread(target=lines.run, daemon=True)
    running.start()
    os.write(writer, b"first\n")
    assert blocks.wait(10)
    lines.catch_up(0.1)
    goes_on.set()
    os.close(writer)
    running.join()
    os.close(reader)


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
        (b"\r50%\x1b[A", "50%"),
        (b"100%\r      \x1b[A\r", "100%"),
        (b"\x1b[2K\x1b[1;5Hx\x1b[?25l\x1b[31mred\x1b[0m\n", "x\x1b[31mred\x1b[0m"),
        (b"\x1b[1;38;2;1;2;3mcolours\tstay\x1b[m\n", "\x1b[1;38;2;1;2;3mcolours\tstay\x1b[m"),
        # Clipboard, title, reset, character set, a device's answer, C1, bell, backspace: terminal control codes become text.
        (b"\x1b]52;c;aGk=\x07\n", r"\x1b]52;c;aGk=\x07"),
        (b"\x1b]0;title\x1b\\\n", r"\x1b]0;title\x1b" + "\\"),
        (b"\x1bc\x1b(0\x1b[c\x1b[3;5r\n", r"\x1bc\x1b(0\x1b[c\x1b[3;5r"),
        ("\x9b2J\x90q\n".encode(), r"\x9b2J\x90q"),
        (b"a\x08\x07\x00\x7f\x0b\n", r"a\x08\x07\x00\x7f\x0b"),
        (b"\x1b[31\n", r"\x1b[31"),
    ],
)
def test_shown_text_is_the_last_state_of_a_redrawn_line(line: bytes, text: str) -> None:
    assert shown(line) == text


def test_progress_bar_counts_as_one_of_the_last_lines() -> None:
    tail = Tail(3)
    for line in (b"a\n", b"b\n", b"\r 10%", b"\r 50%", b"\r100%\n", b"c\n"):
        tail.add(line)
    assert tail.lines() == ("b", "100%", "c")
