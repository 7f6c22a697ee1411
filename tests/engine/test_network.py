"""Ranks on two hosts, which are network namespaces joined by a cable."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator

import pytest

from sparkhvd.settings import Settings
from tests.engine.fault_bodies import time_until_known
from tests.harness.netns import Host, two_hosts, why_not
from tests.harness.rank_process import RankProcess
from tests.harness.ranks_on_hosts import ranks_on
from tests.harness.soak import amount, left_to_soak, soak
from tests.harness.waiting import wait_until

BODIES = "tests.engine.network_bodies"
HOST_LOSS_S = 3.0

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(why_not() is not None, reason=f"two hosts: {why_not()}"),
]


@pytest.mark.parametrize("per_host", [1, 2])
def test_collectives_on_two_hosts_equal_numpy(per_host: int) -> None:
    with two_hosts() as (a, b):
        hosts = [a] * per_host + [b] * per_host
        with ranks_on(hosts, f"{BODIES}:collectives") as ranks:
            for rank in ranks:
                rank.tell(amount(1, 30))
            seen = [rank.expect(amount(30, 600)) for rank in ranks]
    assert seen == [[0] * per_host + [1] * per_host] * len(hosts)


def test_collectives_work_on_ipv6_only_hosts() -> None:
    with two_hosts(ipv6_only=True) as (a, b):
        for host in (a, b):
            addresses = json.loads(host.run("ip", "-json", "-4", "address"))
            assert not any(device.get("addr_info") for device in addresses), addresses
        with ranks_on([a, b], f"{BODIES}:collectives") as ranks:
            for rank in ranks:
                rank.tell(1)
            assert [rank.expect() for rank in ranks] == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("body", "per_host", "pause_s"),
    [("keep_busy", 1, 0.3), ("wait_in_silence", 2, 0.0), ("wait_in_silence", 1, 0.3)],
)
def test_disconnected_cable_raises_on_both_sides(body: str, per_host: int, pause_s: float) -> None:
    settings = Settings(host_loss_s=HOST_LOSS_S, connect_timeout_s=20)
    with two_hosts() as (a, b):
        hosts = [a] * per_host + [b] * per_host
        with ranks_on(hosts, f"{BODIES}:{body}", settings=settings) as ranks:
            for rank in ranks:
                assert rank.expect() == "running"
            time.sleep(pause_s)
            began = time.monotonic()
            a.set_cable("down")
            for rank in ranks:
                lost = rank.expect()
                took = lost["at"] - began
                assert HOST_LOSS_S - 1 < took < HOST_LOSS_S + 1, (rank.rank, took)
                assert lost_rank(lost["text"]) // per_host != rank.rank // per_host, (
                    rank.rank,
                    lost,
                )
                # The nearest rank may have noticed first, and reported it.
                assert set(lost["lost"].values()) == {"silent"}, (rank.rank, lost)


@pytest.mark.parametrize("resident_mib", [512, *left_to_soak("512 MiB, here", 4096)])
def test_other_hosts_detect_a_killed_rank_before_its_memory_is_freed(resident_mib: int) -> None:
    """The rank on the same host reports the death, within 50 ms in the fastest round."""
    took = []
    body = "tests.engine.fault_bodies:wait_for_a_rank_with_memory"
    with two_hosts() as (a, b):
        for _ in range(amount(3, 10)):
            with ranks_on([a, a, b], body) as ranks:
                took.append(time_until_known(ranks, resident_mib)[0])
    assert min(took) < 0.05, took


@pytest.mark.parametrize("stop_in_transfer", [True, *left_to_soak("in a transfer, here", False)])
def test_a_lost_host_with_a_stopped_rank_is_detected_in_time(stop_in_transfer: bool) -> None:
    """A kernel whose peer has no room seldom asks for room, and does not ask whether the host is alive."""
    settings = Settings(host_loss_s=HOST_LOSS_S, connect_timeout_s=20)
    with stopped_without_room(settings, stop_in_transfer) as (a, ranks):
        # Long enough that the kernel asks more rarely than host_loss_s, and for a false alarm.
        time.sleep(1.5 * HOST_LOSS_S)
        began = time.monotonic()
        a.set_cable("down")
        lost = ranks[0].expect()
        assert HOST_LOSS_S - 1 < lost["at"] - began < HOST_LOSS_S + 2, lost
        assert lost["lost"] == {"1": "silent"}, lost


@pytest.mark.parametrize("pause_s", [0.3, *left_to_soak("0.3 s, here", 1.5)])
def test_a_lost_host_with_a_just_stopped_rank_is_detected_in_time(pause_s: float) -> None:
    """This kernel's probes get no answer before the peer's kernel has sent a probe."""
    settings = Settings(host_loss_s=HOST_LOSS_S, connect_timeout_s=20)
    with stopped_without_room(settings, stop_in_transfer=True) as (a, ranks):
        time.sleep(pause_s)
        began = time.monotonic()
        a.set_cable("down")
        lost = ranks[0].expect()
        assert HOST_LOSS_S - 1 < lost["at"] - began < HOST_LOSS_S + 2, lost


@pytest.mark.parametrize("stopped_s", [2 * HOST_LOSS_S, *left_to_soak("6 s, here", 20, 150)])
def test_stopped_rank_with_full_buffers_is_not_considered_lost(stopped_s: float) -> None:
    """The kernel may ask for room less often than `host_loss_s`: after 150 s, only every 100 s."""
    settings = Settings(host_loss_s=HOST_LOSS_S, connect_timeout_s=20)
    with stopped_without_room(settings, stop_in_transfer=True) as (_, ranks):
        time.sleep(stopped_s)
        ranks[1].kill(signal.SIGCONT)
        assert [rank.expect() for rank in ranks] == ["all came"] * 2


@contextlib.contextmanager
def stopped_without_room(
    settings: Settings, stop_in_transfer: bool
) -> Iterator[tuple[Host, list[RankProcess]]]:
    """Two ranks. Rank 1 is stopped, and bytes on the connections to it wait for room."""
    body = f"{BODIES}:fill_the_window_of_a_stopped_rank"
    with two_hosts() as (a, b), ranks_on([a, b], body, settings=settings) as ranks:
        for rank in ranks:
            rank.tell({"stop_in_transfer": stop_in_transfer})
        if stop_in_transfer:
            a.shape("50mbit")  # 32 MiB take 5.4 s, during which even a busy machine stops the rank
        for rank in ranks:
            assert rank.expect() == "running"
        time.sleep(0.4 if stop_in_transfer else 0)
        ranks[1].kill(signal.SIGSTOP)
        ranks[0].tell("send")
        assert ranks[0].expect() == "sent"
        full = 2 if stop_in_transfer else 1
        wait_until(
            lambda: len(unsent_bytes(a)) == full, "bytes that wait for room on each connection"
        )
        if stop_in_transfer:
            a.shape(None)
        yield a, ranks


def unsent_bytes(host: Host) -> list[int]:
    """Return the bytes of each connection that its peer has not acknowledged, of those that have any."""
    # State, Recv-Q, Send-Q, addresses.
    queued = [int(line.split()[2]) for line in host.run("ss", "-Htn").splitlines()]
    return [num_bytes for num_bytes in queued if num_bytes > 0]


@soak("a process that does not read for longer than host_loss_s: engine/test_faults")
def test_slow_network_is_not_considered_a_host_loss() -> None:
    """An alltoall takes 29 s at 10 MB/s with the default host_loss_s, and another operation waits for it."""
    with two_hosts() as (a, b):
        for host in (a, b):
            host.shape("80mbit")
        with ranks_on([a, b, b], f"{BODIES}:exchange_on_a_slow_path") as ranks:
            for rank in ranks:
                rank.tell(140)
            assert max(rank.expect(120) for rank in ranks) > Settings().host_loss_s + 5


def lost_rank(text: str) -> int:
    """Return the rank that the error is about."""
    found = re.search(r"rank (\d+) is lost", text, re.IGNORECASE)
    assert found, text
    return int(found[1])
