"""The place of a rank: exactly one process gets it, for any order of requests and any state of the holder."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.interfaces import loopback
from sparkhvd.launchers import rank_claim as places
from sparkhvd.launchers.bootstrap import Handover
from sparkhvd.launchers.rank_claim import VARIABLE, RankClaim, inherit
from sparkhvd.rendezvous import Job, Listener
from sparkhvd.rendezvous.listener import unix_address
from sparkhvd.settings import Settings
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def place() -> Iterator[RankClaim]:
    listener = Listener.bind(loopback(), Settings())
    job = Job(secrets.token_bytes(32), "job", 0, 0, 1, (listener.endpoint(),))
    made = RankClaim(
        Handover(job.to_json(), listener.endpoint().to_dict(), listener.filenos(), 0, 1),
        listener,
        is_own=True,
    )
    yield made
    made.close()


def name_of(place: RankClaim) -> str:
    return place.variables({}, is_inherited=False)[VARIABLE].split()[1]


def test_only_one_requesting_process_gets_the_rank(place: RankClaim) -> None:
    found: Counter[bool] = Counter()

    def ask() -> None:
        content, (tcp, unix) = places._ask(name_of(place))
        found[b"taken" in content] += 1
        assert (tcp >= 0) == (unix >= 0) == (b"taken" not in content)
        for fd in (tcp, unix):
            if fd >= 0:
                os.close(fd)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {True: 19, False: 1}
    address = (place._listener.endpoint().address, place._listener.endpoint().port)
    # No process waits for a rank that is gone.
    wait_until(lambda: is_refused(address), "the listener is closed")
    with pytest.raises(
        InvalidArgumentError, match=f"process {os.getpid()}, which this process started"
    ):
        place.claim()


def is_refused(address: tuple[str, int]) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(address) != 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_user_cannot_claim_the_rank(place: RankClaim) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setuid(65534)
            places._ask(name_of(place))
        except OSError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    place.claim()  # no process has taken it


def test_error_names_an_unresponsive_or_ended_holder_of_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "ANSWER_S", 0.2)
    name = secrets.token_hex(16)
    monkeypatch.setenv(VARIABLE, f"-1 {name} 4711 ")
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(unix_address(name))
        stopped.listen()
        with pytest.raises(
            InvalidArgumentError, match=r"process 4711, which holds it, .*did not answer in 0\.2 s"
        ):
            inherit()
    with pytest.raises(
        InvalidArgumentError, match=r"process 4711, .*refused.*without SPARKHVD_PLACE"
    ):
        inherit()


def test_launcher_started_by_a_rank_assigns_its_own_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLE, "-1 no-holder 4711 MASTER_ADDR/127.0.0.1/29500")
    inner = {"TORCHELASTIC_RUN_ID": "inner", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1"}
    for name, value in inner.items():
        monkeypatch.setenv(name, value)
    assert inherit() is None
