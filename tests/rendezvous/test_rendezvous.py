"""Rendezvous of ranks over real sockets on loopback, with malicious peers and ranks that leave."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from sparkhvd.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    PreflightError,
)
from sparkhvd.rendezvous import (
    Connections,
    Endpoint,
    Job,
    Listener,
    SingleRendezvous,
    SocketRendezvous,
    current_rendezvous,
    handshake,
    in_process,
    install_rendezvous,
)
from sparkhvd.rendezvous.event_loop import UNAUTHENTICATED_S
from sparkhvd.rendezvous.listener import MAX_UNAUTHENTICATED, unix_address
from sparkhvd.rendezvous.mesh import MeshBuilder, check_memory
from sparkhvd.settings import Settings
from sparkhvd.wire import rebuild
from tests.harness.descriptors import descriptors
from tests.harness.ranks import run_threads

pytestmark = pytest.mark.processes

KEY = bytes(range(32))
QUICK = Settings(connect_timeout_s=20)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


ADDRESSES = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")),
]


@contextmanager
def job_of(
    size: int,
    *,
    address: str = "127.0.0.1",
    settings: Settings = QUICK,
    edit: Callable[[int, Endpoint], Endpoint] = lambda _, endpoint: endpoint,
) -> Iterator[list[SocketRendezvous]]:
    """Yield one rendezvous per rank. `edit` changes the published endpoints (also for the rank itself)."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(Listener.bind(address, settings)) for _ in range(size)]
        for rank, listener in enumerate(listeners):
            listener._endpoint = edit(rank, listener.endpoint())
        endpoints = tuple(listener.endpoint() for listener in listeners)
        meetings = [
            SocketRendezvous(Job(KEY, "job", 0, rank, size, endpoints), listener, settings)
            for rank, listener in enumerate(listeners)
        ]
        yield meetings
        for meeting in meetings:
            meeting.close()


def connect_all(meetings: list[Any]) -> list[Any]:
    return run_threads([meeting.connect for meeting in meetings], deadline_s=40)


def assert_connected(meetings: list[Connections], family: socket.AddressFamily | None) -> None:
    """Exchange ranks between every pair, then close everything."""
    for outcome in meetings:
        if isinstance(outcome, BaseException):
            raise outcome
    try:
        for mine in meetings:
            assert mine.sockets[mine.rank] == -1
            for peer, descriptor in enumerate(mine.sockets):
                if peer != mine.rank:
                    assert not os.get_inheritable(descriptor)
                    assert os.get_blocking(descriptor)
                    os.write(descriptor, bytes([mine.rank, peer]))
        for mine in meetings:
            for peer, descriptor in enumerate(mine.sockets):
                if peer != mine.rank:
                    assert os.read(descriptor, 100) == bytes([peer, mine.rank])
                    if family is not None:
                        with socket.socket(fileno=os.dup(descriptor)) as sock:
                            assert sock.family == family
    finally:
        for mine in meetings:
            mine.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_of_one_host_connect_by_unix_sockets(size: int) -> None:
    with job_of(size) as meetings:
        met = connect_all(meetings)
        assert [c.hosts for c in met] == [(0,) * size] * size
        assert_connected(met, socket.AF_UNIX)


@pytest.mark.parametrize("address", ADDRESSES)
def test_ranks_of_different_hosts_connect_by_tcp(address: str) -> None:
    with job_of(
        4, address=address, edit=lambda r, e: replace(e, host_key=f"host {r % 2}")
    ) as meetings:
        # Ranks 0 and 2 are on one host, 1 and 3 on the other.
        met = connect_all(meetings)
        assert [c.hosts for c in met] == [(0, 1, 0, 1)] * 4
        with socket.socket(fileno=os.dup(met[0].sockets[1])) as sock:
            assert sock.family == (socket.AF_INET6 if ":" in address else socket.AF_INET)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with socket.socket(fileno=os.dup(met[0].sockets[2])) as sock:
            assert sock.family == socket.AF_UNIX
        assert_connected(met, None)


def test_ranks_without_unix_sockets_count_as_separate_hosts() -> None:
    with job_of(3, edit=lambda _, e: replace(e, host_key="", unix_name="")) as meetings:
        met = connect_all(meetings)
        assert [c.hosts for c in met] == [(0, 1, 2)] * 3
        assert_connected(met, socket.AF_INET)


def test_unreachable_unix_name_falls_back_to_tcp() -> None:
    with job_of(2, edit=lambda _, e: replace(e, unix_name="00" * 16)) as meetings:
        met = connect_all(meetings)
        assert [c.hosts for c in met] == [(0, 1)] * 2
        assert_connected(met, socket.AF_INET)


def test_host_group_splits_if_a_pair_cannot_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = check_memory

    def check(sock: socket.socket, until: float) -> Any:
        shared = yield from real(sock, until)
        # Rank 1 of the thread that accepts pretends that it could not map.
        return shared and threading.current_thread().name != "test-rank-1"

    monkeypatch.setattr("sparkhvd.rendezvous.mesh.check_memory", check)
    # Ranks 0, 1, 2 on one host, where only the pair (1, 2) fails; 3 and 4 share another.
    with job_of(5, edit=lambda r, e: replace(e, host_key="a" if r < 3 else "b")) as meetings:
        met = connect_all(meetings)
        assert {c.hosts for c in met} == {(0, 1, 2, 3, 3)}
        with socket.socket(fileno=os.dup(met[3].sockets[4])) as sock:
            assert sock.family == socket.AF_UNIX
        for c in met[:3]:
            for peer, descriptor in enumerate(c.sockets):
                if peer != c.rank:
                    with socket.socket(fileno=os.dup(descriptor)) as sock:
                        assert sock.family == socket.AF_INET
        assert_connected(met, None)


def test_next_generation_forms_although_one_rank_is_ahead() -> None:
    with job_of(3) as meetings:
        barrier = threading.Barrier(3)

        def twice(rank: int) -> list[Connections]:
            first = meetings[rank].connect()
            if rank == 0:  # the others knock for generation 1 meanwhile
                time.sleep(0.2)
            second = meetings[rank].connect()
            barrier.wait()
            return [first, second]

        pairs = run_threads([lambda r=r: twice(r) for r in range(3)])
        assert_connected([p[0] for p in pairs], socket.AF_UNIX)
        assert_connected([p[1] for p in pairs], socket.AF_UNIX)


def test_connection_for_a_later_generation_is_kept_until_then() -> None:
    with job_of(2) as meetings:
        knocked = threading.Event()

        def rank0() -> list[Connections]:
            knocked.wait(10)
            time.sleep(0.2)  # the knock for generation 1 is first in the backlog
            return [meetings[0].connect(), meetings[0].connect()]

        def rank1_ahead() -> Connections:
            ahead = MeshBuilder(meetings[1].job, meetings[1]._listener, QUICK, 1, [], [])
            knocked.set()
            return ahead.run()

        def rank1() -> Connections:
            knocked.wait(10)
            time.sleep(0.4)
            return meetings[1].connect()

        both, second, first = run_threads([rank0, rank1_ahead, rank1])
        assert_connected([both[0], first], socket.AF_UNIX)
        assert_connected([both[1], second], socket.AF_UNIX)


@pytest.mark.parametrize("tcp_only", [False, True])
def test_rank_reconnects_if_its_authentication_was_not_read(
    tcp_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that completes a generation may close a connection for the next one after its proof was sent."""
    real = MeshBuilder._adopt
    dropped = []

    def adopt(self: Any, peer: int, sock: socket.socket) -> None:
        if peer in dropped:
            real(self, peer, sock)
        else:
            dropped.append(peer)
            sock.close()

    def edit(_: int, endpoint: Endpoint) -> Endpoint:
        return replace(endpoint, host_key="", unix_name="") if tcp_only else endpoint

    monkeypatch.setattr(MeshBuilder, "_adopt", adopt)
    with job_of(3, edit=edit) as meetings:
        assert_connected(connect_all(meetings), socket.AF_INET if tcp_only else socket.AF_UNIX)
    assert sorted(dropped) == [1, 2]


# --- Unauthenticated peers ---


@contextmanager
def connection_to(endpoint: Endpoint, *, unix: bool = False) -> Iterator[socket.socket]:
    if unix:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(unix_address(endpoint.unix_name))
    else:
        sock = socket.create_connection((endpoint.address, endpoint.port))
    with sock:
        yield sock


def test_rendezvous_works_despite_silent_or_garbage_sending_peers() -> None:
    with ExitStack() as stack, job_of(3) as meetings:
        endpoints = meetings[0].job.endpoints
        for number in range(MAX_UNAUTHENTICATED + 20):
            sock = stack.enter_context(connection_to(endpoints[number % 2], unix=number % 3 == 0))
            if number % 4 == 1:
                sock.sendall(secrets.token_bytes(4000))
            if number % 4 == 2:
                sock.sendall(handshake.HELLO.pack(b"sparkhvd", 2, 0, 0, bytes(32)))
            if number % 4 == 3:
                sock.sendall(handshake.HELLO.pack(b"sparkhvd", 77, 0, 0, bytes(32)) * 100)
        start = time.monotonic()
        met = connect_all(meetings)
        assert time.monotonic() - start < 2
        assert_connected(met, socket.AF_UNIX)


def test_silent_peer_is_disconnected_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkhvd.rendezvous.listener.UNAUTHENTICATED_S", 0.3)
    with (
        job_of(2) as meetings,
        connection_to(meetings[0].job.endpoints[0]) as sock,
    ):
        sock.settimeout(UNAUTHENTICATED_S)  # its own deadline would be this one
        start = time.monotonic()

        def rank1() -> Any:
            assert sock.recv(1) == b""
            assert time.monotonic() - start > 0.2
            monkeypatch.undo()
            return meetings[1].connect()

        assert_connected(run_threads([meetings[0].connect, rank1]), socket.AF_UNIX)


def test_excess_unauthenticated_connections_are_closed_oldest_first() -> None:
    with ExitStack() as stack, job_of(2) as meetings:
        endpoint = meetings[0].job.endpoints[0]

        def rank1() -> Any:
            socks = [
                stack.enter_context(connection_to(endpoint)) for _ in range(MAX_UNAUTHENTICATED + 1)
            ]
            socks[0].settimeout(3)
            assert socks[0].recv(1) == b""  # well before its 5 s
            socks[-1].setblocking(False)
            with pytest.raises(BlockingIOError):
                socks[-1].recv(1)
            return meetings[1].connect()

        assert_connected(run_threads([meetings[0].connect, rank1]), socket.AF_UNIX)


def exchange_as_client(sock: socket.socket, rank: int) -> tuple[bytes, bytes, bytes]:
    """Say hello, and return the own nonce, the server's nonce and its proof."""
    nonce = secrets.token_bytes(32)
    sock.sendall(handshake.HELLO.pack(b"sparkhvd", rank, 0, 0, nonce))
    sock.settimeout(5)
    reply = b""
    while len(reply) < 64:
        reply += sock.recv(64 - len(reply))
    return nonce, reply[:32], reply[32:]


@pytest.mark.parametrize("trick", ["wrong key", "reflected", "replayed", "other attempt"])
def test_peer_with_an_invalid_proof_is_refused(trick: str) -> None:
    with job_of(2) as meetings:
        job = meetings[1].job
        stage = handshake.ConnectionPhase(0, 0)
        replayed: list[bytes] = []

        def attack() -> bytes:
            if trick == "replayed":  # proves itself once, and shows the same proof again
                with connection_to(job.endpoints[0]) as sock:
                    mine, theirs, _ = exchange_as_client(sock, 1)
                    replayed.append(
                        handshake.proof_of(
                            job, b"C", client=1, server=0, stage=stage, nonces=mine + theirs
                        )
                    )
            with connection_to(job.endpoints[0]) as sock:
                mine, theirs, proof = exchange_as_client(sock, 1)
                # The bytes that an honest rank needs to answer.
                assert proof == handshake.proof_of(
                    job, b"S", client=1, server=0, stage=stage, nonces=mine + theirs
                )
                other = {
                    "wrong key": replace(job, key=bytes(32)),
                    "other attempt": replace(job, attempt=1),
                }.get(trick, job)
                answers = {"reflected": proof, "replayed": replayed[0] if replayed else b""}
                honest = handshake.proof_of(
                    other, b"C", client=1, server=0, stage=stage, nonces=mine + theirs
                )
                sock.sendall(answers.get(trick) or honest)
                return sock.recv(1)

        def rank1() -> Any:
            assert attack() == b""
            return meetings[1].connect()

        assert_connected(run_threads([meetings[0].connect, rank1]), socket.AF_UNIX)


def test_impostor_at_the_port_of_a_rank_gets_no_proof() -> None:
    """Another process listens at a dead rank's port. It learns nothing and is not accepted."""
    settings = Settings(connect_timeout_s=1)
    with (
        socket.create_server(("127.0.0.1", 0)) as fake,
        job_of(
            2,
            settings=settings,
            edit=lambda r, e: replace(e, port=fake.getsockname()[1], host_key="x") if r == 0 else e,
        ) as meetings,
    ):
        received = []

        def impostor() -> None:
            conn, _ = fake.accept()
            with conn:
                hello = conn.recv(1000)
                conn.sendall(secrets.token_bytes(64))
                conn.settimeout(5)
                received.append((len(hello), conn.recv(100)))

        error = run_threads([meetings[1].connect, impostor])[0]
        assert isinstance(error, CollectiveTimeoutError)
        assert "wrong proof" in str(error)
        assert received == [(handshake.HELLO.size, b"")]


# --- Ranks that leave ---


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_every_rank_names_a_rank_whose_listener_closes(lost: int) -> None:
    with job_of(3, settings=Settings(connect_timeout_s=30)) as meetings:
        others = [m for m in meetings if m.rank != lost]

        def desert() -> float:
            time.sleep(0.7)
            closed_at = time.monotonic()
            meetings[lost].close()
            return closed_at

        *errors, closed_at = run_threads([*(m.connect for m in others), desert])
        assert time.monotonic() - closed_at < 3
        for meeting, error in zip(others, errors, strict=True):
            assert isinstance(error, PeerLostError), error
            endpoint = meetings[lost].job.endpoints[lost]
            assert re.match(
                rf"Rendezvous of rank {meeting.rank} at 127\.0\.0\.1:\d+: rank {lost} at "
                rf"127\.0\.0\.1:{endpoint.port} is gone \(",
                str(error),
            )


@pytest.mark.parametrize("tcp_only", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_error_names_the_dead_rank_and_not_ranks_that_left_afterwards(
    victim: int, tcp_only: bool
) -> None:
    """Rank 1 dies and `victim` leaves because of it. The error of the last rank still names rank 1."""
    late = 2 - victim

    def edit(_: int, endpoint: Endpoint) -> Endpoint:
        return replace(endpoint, host_key="", unix_name="") if tcp_only else endpoint

    with job_of(3, edit=edit) as meetings:
        meetings[1].close()
        noticed = run_threads([meetings[victim].connect])[0]
        assert "rank 1 at 127.0.0.1" in str(noticed)
        meetings[victim].close()
        before = descriptors()
        error = run_threads([meetings[late].connect])[0]
        ports = [e.port for e in meetings[0].job.endpoints]
        assert isinstance(error, PeerLostError)
        assert str(error) == (
            f"Rendezvous of rank {late} at 127.0.0.1:{ports[late]}: rank 1 at 127.0.0.1:{ports[1]} is gone "
            f"(rank {victim} reports it). Look for its error in its own log; start the job again."
        )
        assert descriptors() <= before


def test_error_names_all_ranks_that_left_without_notice() -> None:
    with job_of(4) as meetings:
        meetings[1].close()
        meetings[3].close()
        error = run_threads([meetings[0].connect])[0]
        ports = [e.port for e in meetings[0].job.endpoints]
        why = "is gone ([Errno 111] Connection refused)"
        assert str(error) == (
            f"Rendezvous of rank 0 at 127.0.0.1:{ports[0]}: rank 1 at 127.0.0.1:{ports[1]} {why}, "
            f"rank 3 at 127.0.0.1:{ports[3]} {why}. Look for their errors in their own logs; start the job "
            "again."
        )


def test_error_tells_a_late_rank_which_rank_gave_up() -> None:
    with job_of(2, settings=Settings(connect_timeout_s=0.3)) as meetings:
        run_threads([meetings[0].connect])
        meetings[0].close()
        meetings[1].settings = QUICK  # it would wait long
        start = time.monotonic()
        error = run_threads([meetings[1].connect])[0]
        assert time.monotonic() - start < QUICK.connect_timeout_s / 2
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 0 gave up waiting for rank 1" in str(error)


def test_ranks_connect_again_after_a_failed_generation() -> None:
    with job_of(2, settings=Settings(connect_timeout_s=0.5)) as meetings:
        errors = run_threads([meetings[0].connect])
        errors += run_threads([meetings[1].connect])  # by the notice of rank 0
        assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2
        for meeting in meetings:
            meeting.settings = QUICK
        assert_connected(connect_all(meetings), socket.AF_UNIX)


def test_unauthenticated_peer_is_ignored_between_generations() -> None:
    with job_of(2) as meetings, ExitStack() as stack:
        assert_connected(connect_all(meetings), socket.AF_UNIX)
        for meeting in meetings:
            endpoint = meeting.job.endpoints[meeting.rank]
            for unix in (False, True):
                sock = stack.enter_context(connection_to(endpoint, unix=unix))
                sock.sendall(b"x" * 100)
                sock.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    sock.recv(1)
        assert_connected(connect_all(meetings), socket.AF_UNIX)


def test_loss_notice_for_a_later_generation_is_delayed() -> None:
    with job_of(2) as meetings:
        ahead = replace(meetings[1].job)

        def rank1() -> Any:
            notice = handshake.Notice(teller=1, generation=1, kind=handshake.NEWS_LOST, about=0)
            with connection_to(ahead.endpoints[0], unix=True) as sock:
                sock.sendall(notice.to_bytes(ahead, 0))
            return meetings[1].connect()

        # Rank 0 first, because the notice is accepted before rank 1 completes the generation.
        met = run_threads([meetings[0].connect, rank1])
        assert_connected(met, socket.AF_UNIX)
        error = run_threads([meetings[0].connect])[0]
        assert isinstance(error, PeerLostError)
        assert "rank 1 at 127.0.0.1" in str(error)
        assert "it lost its connection to this rank" in str(error)


@pytest.mark.parametrize("trick", ["wrong key", "other rank", "other attempt", "changed", "cut"])
def test_forged_loss_notice_is_ignored(trick: str) -> None:
    with job_of(3) as meetings:
        job = meetings[1].job
        other = {
            "wrong key": replace(job, key=bytes(32)),
            "other attempt": replace(job, attempt=1),
        }.get(trick, job)
        notice = handshake.Notice(teller=1, generation=0, kind=handshake.NEWS_LOST, about=2)
        message = notice.to_bytes(other, 2 if trick == "other rank" else 0)
        if trick == "changed":  # about rank 1 instead
            message = message[:20] + b"\1" + message[21:]
        if trick == "cut":
            message = message[:-1]
        with connection_to(job.endpoints[0]) as sock:
            sock.sendall(message)
            assert_connected(connect_all(meetings), socket.AF_UNIX)


def test_timeout_on_every_rank_names_missing_ranks() -> None:
    with job_of(4, settings=Settings(connect_timeout_s=1.2)) as meetings:
        # Ranks 0 and 3 connect. Ranks 1 and 2 do not, but have open ports. Rank 3 would wait longer, but rank 0 notifies it.
        meetings[3].settings = QUICK
        errors = run_threads([meetings[0].connect, meetings[3].connect])
        ports = [e.port for e in meetings[0].job.endpoints]
        for error in errors:
            assert isinstance(error, CollectiveTimeoutError), error
        assert str(errors[0]) == (
            f"Rendezvous of rank 0 at 127.0.0.1:{ports[0]}: not all of 4 ranks connected within 1.2 s: "
            f"rank 1 at 127.0.0.1:{ports[1]} has not connected (its port is open); "
            f"rank 2 at 127.0.0.1:{ports[2]} has not connected (its port is open). "
            "Make sure that every rank calls init() and that the hosts reach each other on these ports "
            "(SPARKHVD_PORT_RANGE), or raise SPARKHVD_CONNECT_TIMEOUT_S."
        )
        assert "rank 0 gave up waiting for rank 1" in str(errors[1])


def test_an_unreachable_address_is_reported_with_its_errno() -> None:
    # 255.255.255.255 is no destination of a connection: the kernel answers at once.
    with job_of(
        2,
        settings=Settings(connect_timeout_s=0.5),
        edit=lambda r, e: replace(e, address="255.255.255.255", host_key="x") if r == 0 else e,
    ) as meetings:
        error = run_threads([meetings[1].connect])[0]
        assert isinstance(error, CollectiveTimeoutError)
        assert re.search(
            r"rank 0 at 255\.255\.255\.255:\d+ has not answered \(\[Errno \d+\] ", str(error)
        )


def test_failed_rendezvous_leaks_no_descriptor() -> None:
    with job_of(3, settings=Settings(connect_timeout_s=0.3)) as meetings:
        before = descriptors()
        run_threads([meetings[0].connect, meetings[1].connect])
        assert descriptors() <= before


# --- Listener and Job ---


def test_listener_binds_one_interface_in_the_port_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(port_range=f"{port}-{port}")
        with pytest.raises(PreflightError) as caught:
            Listener.bind("127.0.0.1", settings)
        assert str(caught.value) == (
            f"Listener.bind('127.0.0.1'): every port of port_range='{port}-{port}' is taken on this host. "
            "Widen the range (SPARKHVD_PORT_RANGE), or end the processes that hold its ports."
        )
    with Listener.bind("127.0.0.1", settings) as listener:
        assert listener.endpoint().port == port
        assert not any(os.get_inheritable(fd) for fd in listener.filenos())


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "localhost"])
def test_listener_refuses_addresses_other_than_one_interface(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Give the (numeric )?.*address of"):
        Listener.bind(address, Settings())


def test_listener_refuses_an_address_of_another_machine() -> None:
    with pytest.raises(PreflightError, match=os.strerror(errno.EADDRNOTAVAIL)):
        Listener.bind("192.0.2.1", Settings())


def test_listener_can_be_rebuilt_from_its_descriptors() -> None:
    with job_of(2) as meetings:
        old = meetings[0]._listener
        tcp, unix = (os.dup(fd) for fd in old.filenos())
        os.set_inheritable(tcp, True)
        endpoint = old.endpoint()
        old.close()
        meetings[0]._listener = Listener.from_filenos(tcp, unix, endpoint)
        assert not os.get_inheritable(tcp)
        assert_connected(connect_all(meetings), socket.AF_UNIX)
        meetings[0].close()


def test_forked_child_closes_the_listener() -> None:
    with job_of(2) as meetings:
        listening = meetings[0]._listener.filenos()[0]
        child = os.fork()
        if child == 0:
            closed = meetings[0]._listener.filenos()[0] == -1
            os._exit(0 if closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert meetings[0]._listener.filenos()[0] == listening


def test_job_and_endpoint_survive_json_and_hide_the_key() -> None:
    endpoints = (Endpoint("::1", 1, "k", "ab"), Endpoint("10.0.0.1", 2, "", ""))
    job = Job(KEY, "app-1", 3, 1, 2, endpoints)
    assert Job.from_json(job.to_json()) == job
    assert rebuild(Endpoint, endpoints[0].to_dict()) == endpoints[0]
    assert KEY.hex() not in repr(job)
    assert repr(KEY) not in repr(job)
    assert [str(e) for e in endpoints] == ["[::1]:1", "10.0.0.1:2"]


def test_job_with_a_bad_key_or_rank_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="Job.key has 3 bytes; it must have 32"):
        Job(b"abc", "j", 0, 0, 1, (Endpoint("::1", 1, "", ""),))
    with pytest.raises(InvalidArgumentError, match=r"Job\(rank=2, size=2\) with 0 endpoints"):
        Job(KEY, "j", 0, 2, 2, ())


# --- Without sockets ---


def test_single_rendezvous_gives_a_job_of_one_rank() -> None:
    assert SingleRendezvous(Settings()).connect() == Connections(0, 1, (0,), [-1], [-1])


def test_in_process_ranks_connect_in_every_generation() -> None:
    meetings = in_process(3, hosts=[0, 0, 1])
    for _ in range(2):
        met = connect_all(meetings)
        assert [c.hosts for c in met] == [(0, 0, 1)] * 3
        with socket.socket(fileno=os.dup(met[0].sockets[2])) as sock:
            assert sock.family == socket.AF_INET
        assert_connected(met, None)


def test_installed_rendezvous_is_returned_as_current() -> None:
    assert current_rendezvous() is None
    rendezvous = SingleRendezvous(Settings())
    install_rendezvous(rendezvous)
    try:
        assert current_rendezvous() is rendezvous
    finally:
        install_rendezvous(None)
    assert current_rendezvous() is None
