"""Malicious peers with and without the key: no crash, hang or growth, and no effect on another job."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.engine.work import Work
from sparkhvd.errors import CollectiveError, CollectiveTimeoutError, PeerLostError, SparkhvdError
from sparkhvd.rendezvous import Connections, Endpoint, Job, Listener, SocketRendezvous, handshake
from sparkhvd.settings import Settings
from tests.engine.arrays import start_allreduce
from tests.harness.descriptors import descriptors
from tests.harness.paths import ROOT
from tests.harness.rank_process import rank_processes
from tests.harness.ranks import run_threads
from tests.harness.soak import SOAK, amount
from tests.rendezvous import hostile

pytestmark = pytest.mark.processes

# Together 20,000 in `make test` and a million in `make soak`.
FRAMES_OF_PEERS = amount(10_000, 500_000)
MESSAGES_WITHOUT_KEY = amount(10_000, 500_000)
SEED = secrets.randbelow(2**32) if SOAK else 1
MIB = 1 << 20


def run_module(name: str, *arguments: object, given: Any = None, timeout_s: float) -> Any:
    """Run `python -m name` and return its JSON."""
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", name, *map(str, arguments)],
        input=None if given is None else json.dumps(given),
        cwd=ROOT,
        # One arena per thread would make the memory of short-lived threads look like a leak.
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, f"exit {ended.returncode}\n{ended.stderr[-5000:]}"
    return json.loads(ended.stdout)


# --- Peers that have the key ---


@pytest.mark.timeout(120 if not SOAK else 3600)
def test_mutated_frames_raise_errors_that_name_the_peer() -> None:
    found = run_module(
        "tests.rendezvous.hostile", FRAMES_OF_PEERS, SEED, timeout_s=100 if not SOAK else 3500
    )
    repeat = f"python -m tests.rendezvous.hostile 1 {SEED} --only <session>"
    assert found["problems"] == [], f"{found}\nRepeat a session with: {repeat}"
    assert found["frames"] >= FRAMES_OF_PEERS
    assert found["operations_of_others"] > 100
    # Enough sessions end by an error of the engine, not by the test's time limit.
    assert found["stalled"] < found["sessions"] / 5
    assert found["descriptor_growth"] <= 0, found
    assert found["thread_growth"] <= 0, found
    assert found["mapping_growth"] <= 20, found
    assert found["rss_growth_bytes"] < 24 * MIB, found


def test_frame_types_in_the_attack_tests_match_the_engine() -> None:
    header = (ROOT / "native/src/message.h").read_text()
    for name in ("HELLO", "MAPPED", "REFUSE", "DATA", "ABORT"):
        number = re.search(rf"k{name.title()} = (\d+)", header)
        assert number, name
        assert getattr(hostile, name) == int(number[1])


@contextmanager
def victim_of(
    recording: hostile.Recording, rank: int, settings: Settings, handshake: bytes | None = None
) -> Iterator[tuple[Engine, socket.socket, socket.socket]]:
    """Yield an engine of two ranks, and the sockets of its peer, which has said hello: for frames, for tensors."""
    mine, theirs = socket.socketpair()
    data, their_data = socket.socketpair()
    with mine, data:
        mine.sendall(
            b"".join(recording.handshake(1 - rank, rank)) if handshake is None else handshake
        )
        sockets = [[-1, -1], [-1, -1]]
        sockets[0][1 - rank] = theirs.detach()
        sockets[1][1 - rank] = their_data.detach()
        engine = Engine(Connections(rank, 2, recording.hosts, *sockets), settings)
        try:
            yield engine, mine, data
        finally:
            mine.close()
            engine.shutdown()


def test_rank_fails_in_time_if_the_coordinator_sends_unrequested_bytes() -> None:
    """The rank waits only a limited time for the order of a tensor whose bytes have already arrived."""
    recording = hostile.record(2, (0, 1))
    data = next(f for f in recording.frames[0, 1] if hostile.type_of(f) == 6)
    settings = Settings(stall_shutdown_s=0.5, stall_warning_s=0, connect_timeout_s=5)
    with victim_of(recording, 1, settings) as (engine, peer, tensors):
        tensors.sendall(data)
        peer.close()
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="rank 0") as caught:
            start_allreduce(engine, "x", np.ones(3))[0].wait(20)
        assert "It continues" not in str(caught.value)
        assert time.monotonic() - began < 0.5 + 5 + 1


@pytest.mark.parametrize("cut", ["header", "body"])
@pytest.mark.parametrize("then", ["closes", "is silent"])
def test_error_names_the_rank_that_sent_half_a_frame(cut: str, then: str) -> None:
    recording = hostile.record(2, (0, 1))
    frame = next(f for f in recording.frames[1, 0] if hostile.type_of(f) == 3)
    settings = Settings(stall_shutdown_s=1, stall_warning_s=0, connect_timeout_s=5)
    with victim_of(recording, 0, settings) as (engine, peer, _):
        work = start_allreduce(engine, "x", np.ones(3))[0]
        peer.sendall(frame[:5] if cut == "header" else frame[:-1])
        if then == "closes":
            peer.recv(1 << 16)  # unread bytes would reset the connection
            peer.close()
        began = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            work.wait(10)
        if then == "closes":
            assert isinstance(caught.value, PeerLostError)
            assert "rank 1 is lost: its connection closed without a goodbye" in str(caught.value)
            assert time.monotonic() - began < 0.5
        else:
            assert isinstance(caught.value, CollectiveTimeoutError)
            assert "rank 1 did not submit it within 1" in str(caught.value)
            assert time.monotonic() - began < 2


# Passed by a malicious peer of the same host instead of its memory and its eventfd.


def memory(size: int, seals: int = 0) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def event() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def null() -> int:
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


SHRINK = 0x2
PASSED: dict[str, Any] = {
    "nothing": list,
    "one": lambda: [memory(64 * MIB, SHRINK)],
    "memory that may shrink": lambda: [memory(64 * MIB), event()],
    "memory that is too small": lambda: [memory(4096, SHRINK), event()],
    "no memory": lambda: [null(), event()],
    "an eventfd for memory": lambda: [event(), event()],
    "no eventfd": lambda: [memory(64 * MIB, SHRINK), null()],
    "memory without contents": lambda: [memory(64 * MIB, SHRINK), event()],
    "too many": lambda: [null() for _ in range(12)],
}


@pytest.mark.parametrize("what", PASSED)
def test_invalid_passed_descriptors_are_refused_without_leaks(what: str) -> None:
    recording = hostile.record(2, (0, 0))
    greeting = recording.handshake(1, 0)
    # MAPPED says "yes": the malicious peer has mapped everything.
    hello, mapped = greeting[0], hostile.frame_of(hostile.MAPPED, b"\1")
    ready = [f for f in recording.frames[1, 0] if hostile.type_of(f) == 3]
    settings = Settings(
        stall_shutdown_s=0.3, stall_warning_s=0, connect_timeout_s=5, slot_bytes=262144, slots=4
    )
    gc.collect()  # reference cycles of earlier tests must not be freed during the test
    before = descriptors()
    passed = PASSED[what]()
    mine, theirs = socket.socketpair()
    data, their_data = socket.socketpair()
    with mine, data:
        socket.send_fds(mine, [hello], passed)
        mine.sendall(mapped)
        sockets = [[-1, theirs.detach()], [-1, their_data.detach()]]
        engine = Engine(Connections(0, 2, (0, 0), *sockets), settings)
        works = hostile.start_everything(engine)
        mine.sendall(b"".join(ready))
        # No longer expected: they must not accumulate.
        for _ in range(20):
            socket.send_fds(mine, [b"\0"], passed[:1])
        if what == "memory without contents":  # counters and slots with random bytes
            for _ in range(50):
                os.pwrite(passed[0], secrets.token_bytes(8192), 0)
        texts = [outcome_of(work) for work in works]
        assert all(re.search("rank 1|ranks disagree|^done$", text) for text in texts), texts
        assert set(texts) != {"done"}, "the lies had no consequence"
        mine.close()
        engine.shutdown()
        del engine, works
    for descriptor in passed:
        os.close(descriptor)
    gc.collect()
    assert descriptors() <= before


def outcome_of(work: Work) -> str:
    """Return `done`, or the error that ended it."""
    try:
        work.wait(5)
    except SparkhvdError as error:
        return "hangs" if "continues: wait again" in str(error) else str(error)
    return "done"


def authenticated(job: Job, rank: int, generation: int = 0) -> socket.socket:
    """Yield an authenticated connection of `rank` to rank 0. The test sends the next messages."""
    endpoint = job.endpoints[0]
    sock = socket.create_connection((endpoint.address, endpoint.port), timeout=5)
    nonce = secrets.token_bytes(32)
    stage = handshake.ConnectionPhase(generation, 0)
    sock.sendall(handshake.HELLO.pack(b"sparkhvd", rank, generation, 0, nonce))
    reply = sock.recv(64, socket.MSG_WAITALL)
    sock.sendall(
        handshake.proof_of(job, b"C", client=rank, server=0, stage=stage, nonces=nonce + reply[:32])
    )
    return sock


NEWS = {
    "unknown news": struct.pack("!BI", 77, 0) + bytes(2),
    "late rank that does not exist": struct.pack("!BI", 2, 4_000_000_000) + bytes(2),
    "lost rank that does not exist": struct.pack("!BI", 1, 77) + bytes(2),
    "row of nonsense": struct.pack("!BI", 0, 0) + b"\xff\x80",
    "half a row": struct.pack("!BI", 0, 0),
}


@contextmanager
def lonely_rank(settings: Settings) -> Iterator[SocketRendezvous]:
    """Rank 0 of two, without Unix sockets."""
    with ExitStack() as stack:
        endpoints = []
        for _ in range(2):
            listener = stack.enter_context(Listener.bind("127.0.0.1", settings))
            endpoints.append(Endpoint("127.0.0.1", listener.endpoint().port, "", ""))
            if len(endpoints) == 1:
                mine = listener
        mine._endpoint = endpoints[0]
        job = Job(secrets.token_bytes(32), "job", 0, 0, 2, tuple(endpoints))
        yield SocketRendezvous(job, mine, settings)


@pytest.mark.parametrize("news", NEWS)
def test_error_names_a_malicious_peer_in_the_rendezvous(news: str) -> None:
    with lonely_rank(Settings(connect_timeout_s=1)) as meeting:

        def attack() -> None:
            with authenticated(meeting.job, 1) as sock:
                sock.sendall(NEWS[news])
                sock.settimeout(0.3)
                with contextlib.suppress(TimeoutError):  # until it is closed, or is accepted
                    while news != "half a row" and sock.recv(100):
                        pass

        outcome, _ = run_threads([meeting.connect, attack])
        # An invalid row is accepted, and the engines compare its consequences. This peer has left.
        assert isinstance(outcome, CollectiveError), repr(outcome)
        assert "rank 1" in str(outcome)


@pytest.mark.parametrize("about", [2, 2**32 - 1])
def test_a_notice_about_a_nonexistent_rank_is_ignored(about: int) -> None:
    with lonely_rank(Settings(connect_timeout_s=0.5)) as meeting:
        notice = handshake.Notice(teller=1, generation=0, kind=1, about=about)

        def attack() -> None:
            endpoint = meeting.job.endpoints[0]
            with socket.create_connection((endpoint.address, endpoint.port)) as sock:
                sock.sendall(notice.to_bytes(meeting.job, 0))
                sock.settimeout(5)
                assert sock.recv(1) == b""

        outcome, error = run_threads([meeting.connect, attack])
        assert error is None
        assert isinstance(outcome, CollectiveTimeoutError), repr(outcome)
        assert "rank 1 at 127.0.0.1" in str(outcome)


# --- Peers without the key ---


def recorded_handshakes(job: Job) -> list[tuple[int, str, str]]:
    """Return the recordings of an eavesdropper: genuine hellos, and proofs for other challenges."""
    recorded = []
    for server in range(job.size - 1):
        for generation in (0, 1, 3, 1000, 10**6):
            client = server + 1
            nonce = secrets.token_bytes(32)
            hello = handshake.HELLO.pack(b"sparkhvd", client, generation, 0, nonce)
            proof = handshake.proof_of(
                job,
                b"C",
                client=client,
                server=server,
                stage=handshake.ConnectionPhase(generation, 0),
                nonces=nonce + secrets.token_bytes(32),
            )
            recorded.append((server, hello.hex(), proof.hex()))
    return recorded


@pytest.mark.parametrize("tcp_only", [False, True])
@pytest.mark.timeout(120 if not SOAK else 3600)
def test_job_forms_generations_under_attack_by_unauthenticated_peers(
    tcp_only: bool, tmp_path: Path
) -> None:
    settings = Settings(connect_timeout_s=60, stall_shutdown_s=60)
    body = "tests.engine.generations:until_told"
    results: list[Any] = []
    with rank_processes(body, 3, tcp_only=tcp_only, settings=settings) as ranks:
        job = ranks[0].job
        plan = {
            "endpoints": [endpoint.to_dict() for endpoint in job.endpoints],
            "messages": MESSAGES_WITHOUT_KEY // 2,
            "until": str(tmp_path / "met often"),
            "within_s": 3400 if SOAK else 90,
            "seed": SEED,
            "recorded": recorded_handshakes(job),
        }
        # From before the ranks have met.
        attack = threading.Thread(
            target=lambda: results.append(
                run_module(
                    "tests.rendezvous.malicious_peers", given=plan, timeout_s=3500 if SOAK else 100
                )
            )
        )
        attack.start()
        assert [rank.expect(60) for rank in ranks] == ["met"] * 3
        # On any machine, the attack lasts until the ranks have met a few times.
        assert [rank.expect(90) for rank in ranks] == ["met often"] * 3
        (tmp_path / "met often").touch()
        attack.join()
        ranks[0].tell("stop")
        reports = [rank.expect(60) for rank in ranks]
    (found,) = results
    assert found["messages"] >= MESSAGES_WITHOUT_KEY // 2
    assert found["accepted"] == 0, found
    assert found["answers"] > 0, found  # some false proofs were answered
    assert found["connections"] > found["refused"], found
    assert len({report["generations"] for report in reports}) == 1
    for report in reports:
        assert report["generations"] > 5, report
        assert report["slowest_s"] < 10, report
        before, after = report["before"], report["after"]
        assert after["descriptors"] <= before["descriptors"], report
        assert after["threads"] <= before["threads"], report
        assert after["rss"] < before["rss"] + 16 * MIB, report


def test_an_unauthenticated_peer_of_a_running_job_receives_nothing() -> None:
    """Ranks that have met accept no connection, so the peer waits in the backlog and learns nothing."""
    with rank_processes("tests.rendezvous.test_attack:work_a_while", 2) as ranks:
        assert [rank.expect() for rank in ranks] == ["working"] * 2
        heard = []
        for endpoint in ranks[0].job.endpoints:
            with socket.create_connection((endpoint.address, endpoint.port)) as sock:
                sock.sendall(secrets.token_bytes(100_000))
                sock.settimeout(0.2)
                try:
                    heard.append(sock.recv(1))
                except TimeoutError:
                    heard.append(None)
        assert heard == [None, None]
        for rank in ranks:
            rank.tell("stop")
        assert [rank.expect() for rank in ranks] == ["done"] * 2


def work_a_while(engine: Engine, talk: Any) -> str:
    start_allreduce(engine, "x", np.ones(3))[0].wait()
    talk.say("working")
    talk.hear()
    start_allreduce(engine, "y", np.ones(3))[0].wait()
    return "done"


def scribble(engine: Engine, talk: Any) -> Any:
    """Let rank 1 keep overwriting the positions of all messages through shared memory."""
    try:
        engine.barrier(name="start").wait()
    except PeerLostError as error:  # rank 1 was out of it, and began, before rank 0 had looked
        return str(error)
    ended = threading.Event()
    scribbler: threading.Thread | None = None
    if engine.rank == 1:
        page = 4096
        # Of a rank's piece: the words of the host, the stages, the claims; then two words before the ring.
        offset = 3 * page + 2 * 64
        maps = Path("/proc/self/maps").read_text().splitlines()
        pieces = [int(line.split("-")[0], 16) for line in maps if "/memfd:sparkhvd" in line]
        words = [ctypes.c_uint64.from_address(piece + offset) for piece in pieces]
        assert [0 < word.value < 16 << 10 for word in words] == [True, True], words

        def overwrite() -> None:
            while not ended.is_set():
                for word in words:
                    word.value |= 1 << 40

        scribbler = threading.Thread(target=overwrite)
        scribbler.start()
    try:
        for number in range(10_000):
            engine.barrier(name=f"after {number}").wait()
    except PeerLostError as error:
        return str(error)
    finally:
        ended.set()
        if scribbler is not None:
            scribbler.join()
    return "nothing"


def test_invalid_shared_memory_positions_raise_on_every_rank() -> None:
    with rank_processes(f"{__name__}:scribble", 2) as ranks:
        said = [rank.expect() for rank in ranks]
    for text in said:
        assert "it sent an invalid frame through shared memory" in text, said
