"""Several connections per pair of ranks: `Settings.streams`, over real sockets on loopback."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from sparkhvd.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
)
from sparkhvd.rendezvous import (
    Connections,
    Job,
    SingleRendezvous,
    SocketRendezvous,
    handshake,
    in_process,
)
from sparkhvd.rendezvous.listener import MAX_UNAUTHENTICATED
from sparkhvd.rendezvous.mesh import MeshBuilder, PeerLink, agree_on_hosts
from sparkhvd.settings import Settings
from tests.harness.descriptors import descriptors
from tests.harness.ranks import run_threads
from tests.rendezvous.test_rendezvous import ADDRESSES, connect_all, connection_to, job_of

pytestmark = pytest.mark.processes

THREE = Settings(connect_timeout_s=20, streams=3)


def rows_of(connections: Connections) -> list[list[int]]:
    """Return the descriptors of every stream, by rank."""
    size = connections.size
    every = [*connections.sockets, *connections.stream_sockets]
    return [every[start : start + size] for start in range(0, len(every), size)]


def family_of(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family != socket.AF_UNIX:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        return sock.family


def links_of(mine: Connections) -> list[tuple[int, int, int]]:
    """Return stream, peer and descriptor of every connection of a rank."""
    rows = rows_of(mine)
    assert [row[mine.rank] for row in rows] == [-1] * len(rows)
    return [(s, p, d) for s, row in enumerate(rows) for p, d in enumerate(row) if p != mine.rank]


def assert_connected(met: list[Any], streams: int) -> None:
    """Exchange stream and ranks between every pair in every stream, then close everything."""
    for outcome in met:
        if isinstance(outcome, BaseException):
            raise outcome
        assert len(outcome.stream_sockets) == streams * outcome.size
    everything = {d for mine in met for _, _, d in links_of(mine)}
    assert len(everything) == (1 + streams) * len(met) * (len(met) - 1)
    try:
        for mine in met:
            for stream, peer, descriptor in links_of(mine):
                assert not os.get_inheritable(descriptor)
                assert os.get_blocking(descriptor)
                os.write(descriptor, bytes([stream, mine.rank, peer]))
        for mine in met:
            for stream, peer, descriptor in links_of(mine):
                # No byte of the handshake or of another stream is left.
                assert os.read(descriptor, 100) == bytes([stream, peer, mine.rank])
    finally:
        for mine in met:
            mine.close()
            assert {*mine.sockets, *mine.stream_sockets} == {-1}
    for descriptor in everything:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_pair_has_a_separate_connection_per_stream(address: str) -> None:
    # Ranks 0 and 2 are on one host, 1 and 3 on the other.
    with job_of(
        4,
        address=address,
        settings=THREE,
        edit=lambda r, e: replace(e, host_key=f"host {r % 2}"),
    ) as meetings:
        met = connect_all(meetings)
        assert [c.hosts for c in met] == [(0, 1, 0, 1)] * 4
        for row in rows_of(met[0]):
            tcp = socket.AF_INET6 if ":" in address else socket.AF_INET
            assert [family_of(d) for d in row[1:]] == [tcp, socket.AF_UNIX, tcp]
        assert_connected(met, 3)


@pytest.mark.parametrize("streams", [1, 2, 64])
def test_number_of_streams_follows_the_setting(streams: int) -> None:
    with job_of(
        2,
        settings=Settings(connect_timeout_s=20, streams=streams),
        edit=lambda _, e: replace(e, host_key="", unix_name=""),
    ) as meetings:
        assert_connected(connect_all(meetings), streams)


def test_ranks_of_one_host_without_shared_memory_get_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def split(job: Job, links: Mapping[int, PeerLink]) -> tuple[int, ...]:
        for peer, link in links.items():
            if 1 in (peer, job.rank):  # rank 1 shares with no other
                link.shares_memory = False
            link.row = bytes([1, 0, 1]) if peer != 1 else bytes([0, 1, 0])
        return agree_on_hosts(job, links)

    monkeypatch.setattr("sparkhvd.rendezvous.mesh.agree_on_hosts", split)
    with job_of(3, settings=THREE) as meetings:
        met = connect_all(meetings)
        assert [c.hosts for c in met] == [(0, 1, 2)] * 3
        for row in rows_of(met[2]):
            assert [family_of(d) for d in row[:2]] == [socket.AF_INET] * 2
        assert_connected(met, 3)


def test_next_generation_has_streams_although_one_rank_is_ahead() -> None:
    with job_of(3, settings=THREE) as meetings:

        def twice(rank: int) -> list[Connections]:
            first = meetings[rank].connect()
            if rank == 0:  # the others knock for generation 1 meanwhile
                time.sleep(0.2)
            return [first, meetings[rank].connect()]

        pairs = run_threads([lambda r=r: twice(r) for r in range(3)])
        assert_connected([p[0] for p in pairs], 3)
        assert_connected([p[1] for p in pairs], 3)


def test_streams_open_despite_unauthenticated_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peers connect between the first turn and the second, some with the hello of a stream."""
    real = MeshBuilder._open_streams
    socks = []

    def disturbed(self: Any, hosts: tuple[int, ...]) -> None:
        if self.job.rank == 0:
            endpoint = self.job.endpoints[0]
            for number in range(MAX_UNAUTHENTICATED + 20):
                sock = socket.create_connection((endpoint.address, endpoint.port))
                socks.append(sock)
                phase = handshake.PHASE_STREAM + number % 2
                if number % 3:
                    sock.sendall(handshake.HELLO.pack(b"sparkhvd", 1, 0, phase, bytes(32)))
        real(self, hosts)

    monkeypatch.setattr(MeshBuilder, "_open_streams", disturbed)
    try:
        with job_of(2, settings=THREE) as meetings:
            assert_connected(connect_all(meetings), 3)
    finally:
        for sock in socks:
            sock.close()


# --- Proofs ---


def turn_of(stream: int, generation: int = 0) -> Any:
    return handshake.ConnectionPhase(generation, handshake.PHASE_STREAM + stream - 1)


def hello(sock: socket.socket, stage: Any, rank: int) -> bytes:
    """Say hello as a rank, and return both nonces."""
    nonce = secrets.token_bytes(32)
    sock.sendall(handshake.HELLO.pack(b"sparkhvd", rank, stage.generation, stage.phase, nonce))
    sock.settimeout(5)
    return nonce + sock.recv(64, socket.MSG_WAITALL)[:32]


PROOFS: dict[str, Callable[[Any, bytes], bytes]] = {
    "right": lambda job, nonces: client_proof(job, turn_of(2), nonces),
    "of another stream": lambda job, nonces: client_proof(job, turn_of(1), nonces),
    "of the first turn": lambda job, nonces: client_proof(
        job, handshake.ConnectionPhase(0, 0), nonces
    ),
    "of another generation": lambda job, nonces: client_proof(job, turn_of(2, 1), nonces),
    "of another attempt": lambda job, nonces: client_proof(
        replace(job, attempt=1), turn_of(2), nonces
    ),
    "of another rank": lambda job, nonces: handshake.proof_of(
        job, b"C", client=2, server=0, stage=turn_of(2), nonces=nonces
    ),
    "wrong key": lambda job, nonces: client_proof(replace(job, key=bytes(32)), turn_of(2), nonces),
    "garbage": lambda job, nonces: secrets.token_bytes(32),
}


def client_proof(job: Any, stage: Any, nonces: bytes) -> bytes:
    return handshake.proof_of(job, b"C", client=1, server=0, stage=stage, nonces=nonces)


@pytest.mark.parametrize("trick", PROOFS)
def test_stream_accepts_only_its_own_authentication_proof(trick: str) -> None:
    with job_of(2, settings=THREE) as meetings:
        job = meetings[1].job

        def rank1() -> Any:
            with connection_to(job.endpoints[0]) as sock:
                nonces = hello(sock, turn_of(2), 1)
                sock.sendall(PROOFS[trick](job, nonces))
                assert sock.recv(10) == (handshake.WELCOME if trick == "right" else b"")
            return meetings[1].connect()

        # The rank with the right proof dropped its connection and connected again, as after a network error.
        assert_connected(run_threads([meetings[0].connect, rank1]), 3)


def test_client_proof_of_one_stream_is_refused_for_another() -> None:
    with job_of(2, settings=THREE) as meetings:
        job = meetings[1].job

        def rank1() -> Any:
            with connection_to(job.endpoints[0]) as sock:
                nonces = hello(sock, turn_of(1), 1)
                shown = client_proof(job, turn_of(1), nonces)
                sock.sendall(shown)
                assert sock.recv(10) == handshake.WELCOME
            for stream in (1, 2):
                with connection_to(job.endpoints[0]) as sock:
                    hello(sock, turn_of(stream), 1)
                    sock.sendall(shown)
                    assert sock.recv(10) == b""
            return meetings[1].connect()

        assert_connected(run_threads([meetings[0].connect, rank1]), 3)


@pytest.mark.parametrize("stream", [1, 2])
def test_server_proof_of_another_stream_is_refused(
    stream: int,
) -> None:
    with job_of(2, settings=THREE) as meetings:
        job = meetings[1].job
        meeting = MeshBuilder(job, meetings[1]._listener, THREE, 0, [], [])
        meeting.stage = turn_of(2)
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        accepted = []

        def introduce() -> Generator[Any, None, None]:
            accepted.append((yield from meeting._introduce(0, mine)))

        def impostor() -> None:
            message = theirs.recv(handshake.HELLO.size, socket.MSG_WAITALL)
            nonces = message[-32:] + bytes(32)
            theirs.sendall(
                bytes(32)
                + handshake.proof_of(
                    job, b"S", client=1, server=0, stage=turn_of(stream), nonces=nonces
                )
                + handshake.WELCOME
            )

        def client() -> None:
            meeting.loop.start(introduce())
            meeting.loop.run(meeting.loop.is_idle)

        with mine, theirs:
            assert run_threads([client, impostor]) == [None, None]
        meeting.loop.close()
        assert accepted == [stream == 2]


# --- Ranks that differ, and ranks that leave ---


def test_different_stream_settings_raise_on_every_rank() -> None:
    with job_of(3, settings=THREE) as meetings:
        meetings[1].settings = replace(THREE, streams=1)
        before = descriptors()
        start = time.monotonic()
        errors = connect_all(meetings)
        assert time.monotonic() - start < 2
        for rank, error in enumerate(errors):
            assert isinstance(error, MismatchError)
            assert str(error) == (
                f"Rendezvous of rank {rank}: ranks disagree on Settings.streams. Rank 0 has 3, rank 1 has 1. "
                "Start every rank with the same settings (SPARKHVD_STREAMS)."
            )
        assert descriptors() <= before
        meetings[1].settings = THREE
        assert_connected(connect_all(meetings), 3)


@contextmanager
def instead_of_streams(
    monkeypatch: pytest.MonkeyPatch, rank: int, act: Callable[[Any], None]
) -> Iterator[None]:
    """Let `rank` call a function when the others open stream 1, and then fail."""
    real = MeshBuilder._open_streams

    def patched(self: Any, hosts: tuple[int, ...]) -> None:
        if self.job.rank == rank:
            act(self)
            raise RuntimeError("gone")
        real(self, hosts)

    with monkeypatch.context() as patch:
        patch.setattr(MeshBuilder, "_open_streams", patched)
        yield


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_every_rank_names_a_rank_that_dies_between_two_streams(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_of(3, settings=THREE) as meetings:
        before = {fd for m in meetings for fd in m._listener.filenos()}

        def die(meeting: Any) -> None:
            meetings[lost].close()

        start = time.monotonic()
        with instead_of_streams(monkeypatch, lost, die):
            errors = connect_all(meetings)
        assert time.monotonic() - start < 3
        for rank, error in enumerate(errors):
            if rank == lost:
                assert isinstance(error, RuntimeError)
                continue
            assert isinstance(error, PeerLostError), error
            assert f"rank {lost} at {meetings[0].job.endpoints[lost]} is gone" in str(error)
            assert str(error).count("is gone") == 1
        left = {fd for m in meetings for fd in m._listener.filenos()}
        assert left - before == {-1}


def test_other_ranks_name_a_rank_missing_from_a_stream_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(connect_timeout_s=1, streams=2)
    with job_of(3, settings=settings) as meetings:
        before = descriptors()
        done = threading.Event()

        def waits(meeting: SocketRendezvous) -> Any:
            try:
                return meeting.connect()
            finally:
                if meeting.rank == 2:
                    done.set()

        def stay(_: Any) -> None:
            assert done.wait(20)

        with instead_of_streams(monkeypatch, 1, stay):
            errors = run_threads([lambda m=m: waits(m) for m in meetings])
        for error in (errors[0], errors[2]):
            assert isinstance(error, CollectiveTimeoutError)
            assert "not all of 3 ranks connected within 1 s" in str(error)
            assert "rank 1" in str(error)
        assert isinstance(errors[1], RuntimeError)
        assert descriptors() <= before


def test_forked_child_closes_unused_stream_connections() -> None:
    with job_of(2, settings=THREE) as meetings:
        met = connect_all(meetings)
        child = os.fork()
        if child == 0:
            is_closed = True
            for mine in met:
                is_closed = is_closed and {*mine.sockets, *mine.stream_sockets} == {-1}
            os._exit(0 if is_closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_connected(met, 3)


# --- Without sockets ---


def test_in_process_ranks_have_streams_in_every_generation() -> None:
    meetings = in_process(3, hosts=[0, 0, 1], settings=THREE)
    for _ in range(2):
        met = connect_all(meetings)
        for row in rows_of(met[0]):
            assert [family_of(d) for d in row[1:]] == [socket.AF_UNIX, socket.AF_INET]
        assert_connected(met, 3)


def test_single_rank_has_no_stream_connection() -> None:
    assert SingleRendezvous(THREE).connect() == Connections(0, 1, (0,), [-1], [-1, -1, -1])


@pytest.mark.parametrize("streams", [0, 65, -1])
def test_number_of_streams_outside_its_limits_raises(streams: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Settings(streams=streams)
    assert str(caught.value) == f"Settings.streams is {streams}; it must be from 1 to 64."
    assert Settings.resolve({"SPARKHVD_STREAMS": "4"}).streams == 4
