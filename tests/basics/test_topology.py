"""Local and cross ranks, computed from the hosts of all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.topology import Topology, topology

pytestmark = pytest.mark.pure


def test_single_rank_has_local_and_cross_size_one() -> None:
    assert topology(0, ["a"]) == Topology(0, 1, 0, 1, 0, 1, (0,))


def test_interleaved_ranks_of_two_hosts_get_local_and_cross_ranks() -> None:
    places = [topology(r, ["b", "a", "b", "a"]) for r in range(4)]
    assert [p.hosts for p in places] == [(0, 1, 0, 1)] * 4
    assert [(p.local_rank, p.local_size) for p in places] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [(p.cross_rank, p.cross_size) for p in places] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert all(p.is_homogeneous for p in places)


def test_cross_size_counts_only_hosts_that_have_the_local_rank() -> None:
    # Hosts: a has ranks 0 and 3, b has rank 1, c has ranks 2, 4 and 5.
    places = [topology(r, ["a", "b", "c", "a", "c", "c"]) for r in range(6)]
    assert [(p.cross_rank, p.cross_size) for p in places] == [
        (0, 3),
        (1, 3),
        (2, 3),
        (0, 2),
        (1, 2),
        (0, 1),
    ]
    assert not places[0].is_homogeneous


def test_rank_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        topology(2, [0, 0])
    assert str(caught.value) == "topology(rank=2): there are 2 ranks. Give a rank from 0 to 1."


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_local_and_cross_ranks_are_consistent_for_any_hosts(hosts: list[int]) -> None:
    places = [topology(r, hosts) for r in range(len(hosts))]
    for host in set(hosts):
        local = [p for p in places if hosts[p.rank] == host]
        assert [p.local_rank for p in local] == list(range(len(local)))
        assert {p.local_size for p in local} == {len(local)}
    for local_rank in {p.local_rank for p in places}:
        cross = [p for p in places if p.local_rank == local_rank]
        assert sorted(p.cross_rank for p in cross) == list(range(len(cross)))
        assert {p.cross_size for p in cross} == {len(cross)}
