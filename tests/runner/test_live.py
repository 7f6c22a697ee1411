"""Live output through real sockets, without Spark: order, cuts, silence, floods, unknown peers, and ends."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sparkhvd.data.store import Store
from sparkhvd.rendezvous.handshake import HELLO
from sparkhvd.runner.driver_port import proof_between
from sparkhvd.runner.live import connection, files, receiver, sender
from sparkhvd.runner.live.connection import LiveConnection
from sparkhvd.runner.live.files import ChunkReader, ChunkWriter, Mailbox, folder_of
from sparkhvd.runner.live.frames import PURPOSE
from sparkhvd.runner.live.receiver import Display, Receiver
from sparkhvd.runner.live.sender import OutputRoute, Sender
from sparkhvd.runner.outcomes import Outcome, OutcomeKind
from sparkhvd.runner.task import TaskSpec, output_of
from tests.harness.proxy import Proxy
from tests.harness.soak import amount
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.processes

KEY = secrets.token_hex(32)
SIZE = 3


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SILENT_S", 0.5)
    monkeypatch.setattr(connection, "_CONNECT_S", 0.5)
    monkeypatch.setattr(connection, "_GATHER_S", 0.01)
    monkeypatch.setattr(connection, "_PAUSES_S", (0.02, 0.1))
    monkeypatch.setattr(sender, "FLUSH_S", 1.0)


class Screen:
    """Lines that a driver has shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, text: str) -> None:
        self.lines += text.split("\n")

    def of(self, rank: int) -> list[str]:
        return [line for line in self.lines if line.startswith(f"[{rank}] ")]


def receiver_for(show: Callable[[str], None]) -> Receiver:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    return Receiver(listening, "127.0.0.1", Display(show, SIZE), KEY, "job", 0, SIZE)


@contextlib.contextmanager
def proxied(screen: Screen) -> Iterator[tuple[Receiver, Proxy]]:
    with receiver_for(screen.show) as driver, Proxy(driver.address) as proxy:
        yield driver, proxy


def sender_to(address: tuple[str, int], rank: int = 0, *, key: str = KEY, **way: bool) -> Sender:
    carrier = LiveConnection(address, proof_between(PURPOSE, key, "job", 0, rank + 1, SIZE + 1))
    return Sender(OutputRoute(address, **way), rank, carrier)


def texts(rank: int, count: int) -> list[str]:
    return [f"[{rank}] line {number}" for number in range(count)]


def printed(screen: Screen, rank: int) -> int:
    """Return the number of a rank's lines that a screen shows or counts as omitted."""
    counts = [re.search(r"\(([\d,]+) lines? left out", line) for line in screen.of(rank)]
    left_out = sum(int(found[1].replace(",", "")) for found in counts if found)
    return left_out + sum(found is None for found in counts)


def test_lines_and_messages_arrive_in_order_while_ranks_run() -> None:
    screen = Screen()
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(receiver_for(screen.show))
        senders = [stack.enter_context(sender_to(driver.address, rank)) for rank in range(SIZE)]
        for line in range(50):
            for rank, one in enumerate(senders):
                assert one.line(f"[{rank}] line {line}")
        began = time.monotonic()
        wait_until(lambda: len(screen.lines) == 50 * SIZE, "all lines are shown")
        assert time.monotonic() - began < 1.0
        assert all(screen.of(rank) == texts(rank, 50) for rank in range(SIZE))
        assert senders[2].message("[2] two\n[2] lines é \ud800")
        wait_until(
            lambda: screen.lines[-2:] == ["[2] two", "[2] lines é ?"], "the message is shown"
        )
        assert [one.close() for one in senders] == [[], [], []]


def test_metrics_arrive_once_and_in_order_over_broken_connections() -> None:
    screen, found = Screen(), list[tuple[int, str]]()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    display = Display(screen.show, SIZE, metrics=lambda rank, entry: found.append((rank, entry)))
    with (
        Receiver(listening, "127.0.0.1", display, KEY, "job", 0, SIZE) as driver,
        Proxy(driver.address) as proxy,
        sender_to(proxy.address, 1) as rank,
    ):
        for number in range(30):
            assert rank.line(f"[1] line {number}")
            assert rank.metrics(str(number))
            if number % 10 == 5:
                wait_until(lambda: found, "something has arrived")
                proxy.cut()
        wait_until(lambda: len(found) == 30, "all entries have arrived")
        assert rank.close() == []
    assert found == [(1, str(number)) for number in range(30)]
    assert screen.lines == texts(1, 30)


def test_metrics_without_loggers_are_shown_as_lines() -> None:
    screen = Screen()
    with receiver_for(screen.show) as driver, sender_to(driver.address, 1) as rank:
        rank.metrics("{}")
        wait_until(lambda: screen.lines, "it is shown")
    assert screen.lines == ["[1] metrics {}"]


def test_rank_without_output_starts_no_thread_or_connection() -> None:
    with receiver_for(print) as driver, sender_to(driver.address) as silent:
        assert silent._thread is None
        assert silent.close() == []
        assert not silent.line("late")
        assert driver._display.last(0) == 0


def test_rank_can_connect_to_the_driver_before_its_first_line() -> None:
    screen = Screen()
    with receiver_for(screen.show) as driver, sender_to(driver.address, at_once=True) as rank:
        wait_until(lambda: driver.was_reached, "it has connected")
        rank.line("[0] line 0")
        wait_until(lambda: screen.lines, "its line is shown")
        assert rank.close() == []
    assert screen.lines == texts(0, 1)


def test_a_rank_with_an_unreachable_driver_ends_without_delay() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with sender_to(closed.getsockname(), at_once=True) as rank:
            rank.line("[0] line 0")
            time.sleep(connection._CONNECT_S + 0.1)
            began = time.monotonic()
            assert [record.text for record in rank.close()] == ["[0] line 0"]
            assert time.monotonic() - began < sender.FLUSH_S / 2


def test_no_line_is_lost_or_duplicated_when_connections_break() -> None:
    screen, count = Screen(), 3000
    with proxied(screen) as (_, proxy), sender_to(proxy.address, on_terminal=True) as rank:
        cuts = 0
        for number, line in enumerate(texts(0, count)):
            assert rank.line(line)
            if number % 300 == 299:
                wait_until(lambda: proxy.forwarded, "something is on its way")
                cuts += proxy.cut()
                time.sleep(0.02)
            if number == 1500:
                with proxy.refusing():
                    time.sleep(0.2)
        assert rank.close() == []
        assert cuts >= 3
        assert screen.lines == texts(0, count)


def test_rank_ends_in_time_and_the_driver_shows_its_lost_lines() -> None:
    """A line that was shown before its acknowledgement vanished is not shown again."""
    screen = Screen()
    with proxied(screen) as (driver, proxy):
        with sender_to(proxy.address) as rank:
            rank.line("[0] line 0")
            wait_until(lambda: screen.lines, "the first line is shown")
            proxy.swallows = True
            for line in texts(0, 5)[1:]:
                rank.line(line)
            time.sleep(1.2)  # past the deadline of an acknowledgement, and of a new connection
            began = time.monotonic()
            unsent = tuple(rank.close())
            assert time.monotonic() - began < sender.FLUSH_S + 0.5
        assert screen.lines == ["[0] line 0"]
        proxy.swallows = False
        ended = Outcome(0, OutcomeKind.OK, unsent=((1, "[0] line 0", 1, False), *unsent))
    again = Outcome.from_json(ended.to_json())
    assert not driver.is_stuck
    driver._display.show_rest(
        [again, Outcome(1, OutcomeKind.OK, unsent=((1, "[1] of another", 1, False),))]
    )
    assert screen.lines == [*texts(0, 5), "[1] of another"]


def test_lines_lost_in_transit_are_sent_again() -> None:
    screen, count = Screen(), amount(40, 4000)
    with proxied(screen) as (_, proxy), sender_to(proxy.address) as rank:
        for number, line in enumerate(texts(0, count)):
            rank.line(line)
            time.sleep(0.02)
            proxy.swallows = count // 8 <= number < count * 3 // 4
        wait_until(lambda: len(screen.lines) == count, "all lines are shown")
        assert rank.close() == []
    assert screen.lines == texts(0, count)


def test_slow_driver_shows_or_counts_every_line_of_an_ended_rank() -> None:
    """The queue is full, so the last lines arrive with the rank's outcome while earlier ones are in transit."""
    screen, echoed, count = Screen(), 0, 60_000

    def show(text: str) -> None:
        screen.show(text)
        time.sleep(0.03)

    with receiver_for(show) as driver, sender_to(driver.address, 1, on_terminal=True) as one:
        for number in range(count):
            echoed += not one.line(f"[1] line {number} {'x' * 100}")
        ended = Outcome(1, OutcomeKind.OK, unsent=tuple(one.close()))
    driver._display.show_rest([Outcome.from_json(ended.to_json())])
    assert printed(screen, 1) == count
    assert 0 < len(screen.lines) < count - echoed
    # A wrong message said that these lines were also on stderr.
    assert sum(line.endswith(" left out here)") for line in screen.lines) == 1
    numbers = [int(line.split()[2]) for line in screen.lines if "left out" not in line]
    assert numbers == sorted(set(numbers))


DRIVER = f"""
import socket, sys
from sparkhvd.runner.live.receiver import Display
from sparkhvd.runner.live.receiver import Receiver

listening = socket.create_server(("127.0.0.1", 0))
listening.setblocking(False)
show = lambda text: print(text, flush=True)
with Receiver(listening, "127.0.0.1", Display(show, {SIZE}), sys.argv[1], "job", 0, {SIZE}) as driver:
    print(driver.address[1], flush=True)
    sys.stdin.read()
"""


def test_driver_paused_for_a_while_shows_each_line_once() -> None:
    """The stop is longer than the time limit of an acknowledgement, under `make soak` a minute."""
    count = amount(30, 1500)
    command = [sys.executable, "-c", DRIVER, KEY]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        with sender_to(("127.0.0.1", int(driver.stdout.readline()))) as rank:
            rank.line("[0] line 0")
            shown = driver.stdout.readline()
            driver.send_signal(signal.SIGSTOP)
            for line in texts(0, count)[1:]:
                assert rank.line(line)
                time.sleep(0.04)
            driver.send_signal(signal.SIGCONT)
            shown += "".join(driver.stdout.readline() for _ in range(count - 1))
            assert rank.close() == []
        rest, _ = driver.communicate("", timeout=20)
    assert shown.splitlines() == texts(0, count)
    assert rest == ""


@pytest.mark.parametrize("on_terminal", [False, True])
def test_every_line_of_a_flood_is_shown_or_counted(on_terminal: bool) -> None:
    """The flood exceeds the rate limit, or a slow driver's speed where no limit applies."""
    screen, echoed = Screen(), 0

    def show(text: str) -> None:
        screen.show(text)
        if on_terminal:
            time.sleep(0.02)

    with receiver_for(show) as driver, sender_to(driver.address, 1, on_terminal=on_terminal) as one:
        until, count, longest = time.monotonic() + 1.0, 0, 0.0
        while time.monotonic() < until or not echoed:  # a busy machine floods slowly
            began = time.monotonic()
            echoed += not one.line(f"[1] line {count} {'x' * 100}")
            longest = max(longest, time.monotonic() - began)
            count += 1
            if count % 5000 == 0:
                one.message("[1] message")
        wait_until(lambda: one._backlog._bytes < 1 << 18, "the driver has come after")
        assert one.close() == []
    messages = screen.lines.count("[1] message")
    assert messages == count // 5000
    assert printed(screen, 1) - messages == count
    assert count - echoed == len(screen.lines) - messages - sum(
        "left out" in s for s in screen.lines
    )
    assert echoed > 0
    notices = [line for line in screen.lines if "left out" in line]
    where = "they are on stderr" if on_terminal else "the executor's log has all"
    assert all(line.endswith(f" left out here; {where})") for line in notices), notices[:3]
    if not on_terminal:
        assert 3000 <= count - echoed <= 10000
        assert 1 <= len(notices) <= 5 + messages  # each message follows one
    assert longest < 0.5


def test_lines_sent_with_an_outcome_are_bounded_and_count_omitted_lines() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rank = sender_to(silent.getsockname()[:2], on_terminal=True, is_shown=False)
        taken = [rank.line(f"[0] {number} {'y' * 1000}") for number in range(6000)]
        rest = rank.close()
    assert not all(taken)
    assert sum(len(record.text) for record in rest) < 300 << 10
    screen = Screen()
    Display(screen.show, SIZE).show_rest([Outcome(0, OutcomeKind.OK, unsent=tuple(rest))])
    assert re.fullmatch(r"\[0\] \([\d,]+ lines left out here\)", screen.lines[0])
    assert printed(screen, 0) == 6000


def test_driver_shows_only_lines_of_ranks_with_the_key() -> None:
    screen = Screen()
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(receiver_for(screen.show))
        for message in (b"", b"half", secrets.token_bytes(300)):
            sock = stack.enter_context(socket.create_connection(driver.address))
            sock.sendall(message)
        stranger = stack.enter_context(sender_to(driver.address, key=secrets.token_hex(32)))
        stranger.line("[0] of a stranger")
        with sender_to(driver.address, 1) as known:
            known.line("[1] of a rank")
            wait_until(lambda: screen.lines, "the line is shown")
            assert known.close() == []
        with (
            socket.create_server(("127.0.0.1", 0)) as fake,
            sender_to(fake.getsockname()) as fooled,
        ):
            fooled.line("[0] secret")
            taken, _ = fake.accept()
            with taken:
                assert b"secret" not in taken.recv(HELLO.size, socket.MSG_WAITALL)
                taken.sendall(secrets.token_bytes(64))
                assert taken.recv(100) == b""
    assert screen.lines == ["[1] of a rank"]


def test_a_blocked_stream_delays_neither_the_rank_nor_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiver, "_JOIN_S", 0.3)
    released = threading.Event()
    with receiver_for(lambda _: released.wait()) as driver, sender_to(driver.address) as rank:
        rank.line("[0] a line")
        began = time.monotonic()
        unsent = tuple(rank.close())
    assert time.monotonic() - began < sender.FLUSH_S + 1.5
    assert unsent == ((1, "[0] a line", 1, False),)
    assert driver.is_stuck
    released.set()
    driver._thread.join(10)


def test_broken_driver_stream_loses_only_lines() -> None:
    def show(_: str) -> None:
        raise ValueError("I/O operation on closed file")

    with receiver_for(show) as driver, sender_to(driver.address) as rank:
        rank.line("[0] a line")
        assert rank.close() == []


@pytest.mark.parametrize(
    ("way", "is_quiet", "echoed"),
    [
        (None, False, ["line", "message"]),
        (None, True, []),
        ({}, False, ["line", "message"]),  # an executor's log has all lines
        ({"on_terminal": True}, False, []),  # otherwise they would appear twice
        ({"on_terminal": True, "shows_lines": False}, False, ["line"]),
    ],
)
def test_task_logs_only_lines_that_the_driver_does_not_show(
    way: dict[str, bool] | None,
    is_quiet: bool,
    echoed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen()
    with receiver_for(screen.show) as driver:
        live = None if way is None else OutputRoute(driver.address, **way).to_dict()
        spec = TaskSpec(SIZE, 0, "job", KEY, "", {}, {}, (), (), None, "")
        spec = TaskSpec.from_json(replace(spec, live=live, is_quiet=is_quiet).to_json())
        with output_of(spec, 0, None) as output:
            output.line("[0] line")
            output.message("[0] message")
            assert output.close() == ()
    sent = [] if way is None else ["message"] if "shows_lines" in way else ["line", "message"]
    assert screen.lines == [f"[0] {text}" for text in sent]
    assert capsys.readouterr().err == "".join(f"[0] {text}\n" for text in echoed)


def chunks_of(store: Store, screen: Screen, job_id: str = "job") -> ChunkReader:
    folder = folder_of("runs/r", 0, job_id)
    return ChunkReader(Mailbox(store.collect, 0.05), folder, Display(screen.show, SIZE))


def writer_to(store: Store, rank: int) -> Sender:
    folder = folder_of("runs/r", 0, "job")
    return Sender(OutputRoute(folder=folder), rank, ChunkWriter(store, folder, rank))


def test_lines_are_transferred_through_files_that_are_deleted_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of an earlier fit with the same run id is not shown."""
    monkeypatch.setattr(files, "_GATHER_S", 0.02)
    monkeypatch.setattr(files, "_PAUSE_S", 0.02)
    screen, store = Screen(), Store.create(tmp_path)
    old = f"{folder_of('runs/r', 0, 'old')}/000000-0000000001"
    store.write_bytes(old, b"\0")
    with chunks_of(store, screen), writer_to(store, 0) as first, writer_to(store, 2) as other:
        for line in range(50):
            first.line(f"[0] line {line}")
            other.line(f"[2] line {line}")
            time.sleep(0.005)
        wait_until(lambda: len(screen.lines) == 100, "all lines are shown")
        first.message("[0] two\n[0] lines")
        assert (first.close(), other.close()) == ([], [])
    assert screen.of(0) == [*texts(0, 50), "[0] two", "[0] lines"]
    assert screen.of(2) == texts(2, 50)
    assert store.list("runs/r", recursive=True) == [old]
    assert not (tmp_path / folder_of("runs/r", 0, "job")).exists()


def test_ended_client_or_failing_store_does_not_block_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank writes as many files as it may, continues when they are read, and then loses the store."""
    monkeypatch.setattr(files, "_GATHER_S", 0.01)
    monkeypatch.setattr(files, "_PAUSE_S", 0.02)
    monkeypatch.setattr(files, "_MOST_FILES", 3)
    screen, store = Screen(), Store.create(tmp_path / "store")
    folder = tmp_path / "store" / folder_of("runs/r", 0, "job")
    with writer_to(store, 0) as rank:
        for line in texts(0, 30):
            assert rank.line(line)
            time.sleep(0.02)
        assert len(list(folder.iterdir())) == 3
        with chunks_of(store, screen):
            wait_until(lambda: len(screen.lines) == 30, "all lines are shown")
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").write_text("in the way")
        rank.line("[0] unsent")
        began = time.monotonic()
        assert [record.text for record in rank.close()] == ["[0] unsent"]
        assert time.monotonic() - began < sender.FLUSH_S + 0.5
    assert screen.lines == texts(0, 30)
