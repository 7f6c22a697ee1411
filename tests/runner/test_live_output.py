"""Output of ranks on the driver while they run, in the shared `local[2]` session."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sparkhvd
from sparkhvd import Settings
from sparkhvd.errors import RankError
from sparkhvd.runner import run
from tests.harness.by_value import by_value
from tests.harness.soak import left_to_soak
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


def prints_until_seen(folder: str, lines: int) -> None:
    """Print, and continue only when the driver has seen it."""
    rank = os.environ["RANK"]
    for line in range(lines):
        print(f"line {line}")
    threads = [
        threading.Thread(target=sparkhvd.log_to_driver, args=(f"a thread {number}\nof it",))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sparkhvd.log_to_driver("y" * (70 << 10))
    deadline = time.monotonic() + 60
    while not os.path.exists(os.path.join(folder, "seen")):
        assert time.monotonic() < deadline, "the driver has not seen it"
        time.sleep(0.02)
    print("last words of", rank, end="")


def test_driver_shows_lines_and_messages_while_ranks_run(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A given stream gets all of them, once and in order, whatever `verbose` is."""
    output = io.StringIO()

    def look() -> None:
        text = wait_until(
            lambda: output.getvalue() if output.getvalue().count(" left out)") == 2 else "",
            "both ranks are seen",
        )
        (tmp_path / "seen").write_text(text)

    looking = threading.Thread(target=look)
    looking.start()
    run(prints_until_seen, (str(tmp_path), 20), num_proc=2, spark=spark, stdout=output, verbose=0)
    looking.join()
    assert "last words" not in (tmp_path / "seen").read_text()
    for rank in range(2):
        mine = [line for line in output.getvalue().splitlines() if line.startswith(f"[{rank}]")]
        assert [line for line in mine if " line " in line] == [
            f"[{rank}] line {number}" for number in range(20)
        ]
        for number in range(3):
            assert mine[mine.index(f"[{rank}] a thread {number}") + 1] == f"[{rank}] of it"
        assert f"[{rank}] {'y' * (64 << 10)}... (6,144 bytes left out)" in mine
        assert mine[-1] == f"[{rank}] last words of {rank}"
        assert len(mine) == 20 + 6 + 1 + 1
    assert capsys.readouterr().err == ""


def prints() -> None:
    print("a line")
    sparkhvd.log_to_driver("a message")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, {"[0] a line", "[0] a message"}),
        ({"verbose": 0}, set()),
        ({"settings": Settings(live_output="messages")}, {"[0] a message"}),
        ({"settings": Settings(live_output="0")}, set()),
    ],
)
def test_verbose_and_live_output_settings_select_the_shown_output(
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, object],
    shown: set[str],
) -> None:
    run(prints, num_proc=1, spark=spark, **options)  # type: ignore[arg-type]  # of several types
    assert set(capsys.readouterr().err.splitlines()) == shown


def test_last_lines_of_a_failed_rank_are_shown_once(
    spark: SparkSession,
) -> None:
    """Without a live channel, the last lines appear at the end."""

    def fails() -> None:
        sparkhvd.log_to_driver("about to fail")
        print("last words")
        os._exit(3)

    for choice in ("auto", "0"):
        output = io.StringIO()
        settings = Settings(live_output=choice)
        with pytest.raises(RankError) as e:
            run(fails, num_proc=1, spark=spark, stdout=output, max_retries=0, settings=settings)
        assert e.value.log_tail == "last words"
        assert output.getvalue().count("[0] last words\n") == 1
        assert output.getvalue().count("[0] about to fail\n") == (choice == "auto")


def test_messages_outside_a_rank_process_are_printed_to_stderr(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def forks() -> None:
        pid = os.fork()
        sparkhvd.log_to_driver(f"forked: {pid == 0}")
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    sparkhvd.log_to_driver(3)
    assert capsys.readouterr().err == "3\n"
    output = io.StringIO()
    run(forks, num_proc=1, spark=spark, stdout=output)
    assert sorted(output.getvalue().splitlines()) == ["[0] forked: False", "[0] forked: True"]


@pytest.mark.parametrize("way", ["run", *left_to_soak("the other launcher, here", "run_local")])
def test_ascii_stream_shows_other_characters_escaped(
    spark: SparkSession, tmp_path: Path, way: str
) -> None:
    launchers: dict[str, Callable[..., object]] = {
        "run": lambda *a, **k: run(*a, spark=spark, **k),
        "run_local": sparkhvd.run_local,
    }
    with (tmp_path / "ascii").open("w", encoding="ascii") as file:
        launchers[way](lambda: print("\u00e9!"), num_proc=1, stdout=file)
    assert (tmp_path / "ascii").read_text() == "[0] \\xe9!\n"
