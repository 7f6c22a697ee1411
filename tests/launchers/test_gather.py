"""Texts that ranks gather at rank 0, over a Unix socket or a port."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sparkhvd.errors import PreflightError
from sparkhvd.launchers import gather as gathering
from sparkhvd.launchers.gather import MeetingPoint, gather, name_of, on_this_host
from sparkhvd.rendezvous.event_loop import EventLoop, Task
from sparkhvd.rendezvous.handshake import SERVICE_STAGE, introduce

pytestmark = pytest.mark.pure


def test_socket_name_depends_on_key_job_and_attempt() -> None:
    names = {
        name_of(key, job, attempt) for key in ("ab", "cd") for job in "xy" for attempt in (0, 1)
    }
    assert len(names) == 8
    assert name_of("ab", "x", 0) in names


def port_of_nobody() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def point_on(way: str, name: str, key: bytes = b"k" * 32) -> MeetingPoint:
    """Return a meeting point whose first port belongs to another program."""
    if way == "unix":
        return on_this_host(f"sparkhvd-test-{name}")
    port = port_of_nobody()
    return MeetingPoint(name, key, "localhost", (port, port + 1, port + 2))


@pytest.mark.parametrize(("way", "size"), [("unix", 1), ("unix", 2), ("unix", 16), ("tcp", 5)])
def test_gather_gives_every_rank_all_texts_in_rank_order(way: str, size: int) -> None:
    generator = random.Random(size)
    texts = [
        f"rank {rank} \n ü " + "x" * generator.choice([0, 10, 200_000]) for rank in range(size)
    ]
    delays = [generator.random() / 5 for _ in texts]
    point = point_on(way, f"all {size}")

    def task(rank: int) -> list[str]:
        time.sleep(delays[rank])
        return gather(point, rank, size, texts[rank], 10)

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(task, range(size))) == [texts] * size


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_error_names_a_rank_that_does_not_connect(way: str) -> None:
    text = "Rank 0 waited 0.2 s .*of 2 ranks these did not connect: 1"
    with pytest.raises(PreflightError, match=text):
        gather(point_on(way, "no other rank"), 0, 2, "", 0.2)
    with pytest.raises(PreflightError, match=r"Rank 1 waited 0.2 s .*has not answered \(.*refused"):
        gather(point_on(way, "no other rank"), 1, 2, "", 0.2)


def test_error_names_a_host_without_an_address() -> None:
    point = MeetingPoint("x", b"k" * 32, "no.such.invalid", (29501,))
    with pytest.raises(PreflightError, match="no.such.invalid has no address"):
        gather(point, 1, 2, "", 0.2)


def arrive(point: MeetingPoint, rank: int, size: int) -> socket.socket:
    """Connect to rank 0 as a rank does, and send nothing."""
    until = time.monotonic() + 10
    family, address = point.addresses()[-1]
    while True:
        sock = socket.socket(family)
        if sock.connect_ex(address) == 0:
            break
        sock.close()
        assert time.monotonic() < until
        time.sleep(0.01)

    def knock() -> Task:
        assert (yield from introduce(point.job(rank, size), 0, SERVICE_STAGE, sock, until))

    loop = EventLoop()
    loop.start(knock())
    loop.run(loop.is_idle)
    loop.close()
    return sock


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_rank_that_ends_during_the_gather_raises(way: str) -> None:
    point = on_this_host("sparkhvd-test-ends")
    if way == "tcp":
        point = MeetingPoint("ends", b"k" * 32, "127.0.0.1", (port_of_nobody(),))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gather, point, 0, 2, "", 10)
        arrive(point, 1, 2).close()
        with pytest.raises(PreflightError, match="Rank 0 cannot start: another rank"):
            waiting.result()


def test_waiting_ranks_print_the_missing_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gathering, "_SAY_AFTER_S", 0.05)
    point = MeetingPoint("unknown", b"k" * 32, "host.invalid", (port_of_nobody(),))
    for rank in range(2):
        with pytest.raises(PreflightError):
            gather(point, rank, 2, "", 0.3)
    lead, joining = capsys.readouterr().err.splitlines()
    assert "rank 0 waits" in lead
    assert "these did not connect: 1 (host.invalid has no address" in lead
    assert "rank 1 waits" in joining
    assert "host.invalid has no address" in joining


def test_gather_refuses_unauthenticated_peers_and_sends_them_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = MeetingPoint("strangers", b"k" * 32, "127.0.0.1", (port_of_nobody(),))
    other = replace(point, key=b"x" * 32)
    monkeypatch.setattr(gathering, "_REFUSED_S", 0.3)
    with ThreadPoolExecutor(3) as pool:
        lead = pool.submit(gather, point, 0, 2, "secret", 10)
        with pytest.raises(
            PreflightError, match="is of another job.*number of ranks, here.*SPARKHVD_JOB_KEY_FILE"
        ):
            gather(other, 1, 2, "", 10)
        with socket.create_connection(("127.0.0.1", point.ports[0])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 1000)
            assert gather(point, 1, 2, "mine", 10) == ["secret", "mine"]
        assert lead.result() == ["secret", "mine"]


def test_gather_skips_port_of_another_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        first = int(other.getsockname()[1])
        point = MeetingPoint("second", b"k" * 32, "127.0.0.1", (first, first + 1, first + 2))
        accepted = []
        with ThreadPoolExecutor(3) as pool:
            pool.submit(lambda: accepted.append(other.accept()[0].close()))
            lead = pool.submit(gather, point, 0, 2, "a", 20)
            assert gather(point, 1, 2, "b", 20) == lead.result() == ["a", "b"]
        assert accepted


def test_gather_raises_if_every_port_is_taken() -> None:
    with socket.create_server(("", 0)) as other:
        point = MeetingPoint("taken", b"k" * 32, "127.0.0.1", (other.getsockname()[1],))
        with pytest.raises(OSError, match="every port of 127.0.0.1, port .* is taken"):
            gather(point, 0, 2, "", 1)
