"""Tensors over several connections per pair of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.settings import Settings
from tests.engine.arrays import allreduce
from tests.engine.streams_bodies import SIZES, inputs_of
from tests.harness.rank_process import rank_processes
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.processes

THREE = Settings(connect_timeout_s=30, streams=3)


@pytest.mark.parametrize("size", [2, 3])
def test_allreduce_over_three_streams_matches_numpy_and_uses_all(size: int) -> None:
    body = "tests.engine.streams_bodies:sums"
    with rank_processes(body, size, tcp_only=True, settings=THREE) as ranks:
        for rank in ranks:
            said = rank.expect()
            assert said["wrong"] == []
            everything, one = said["carried"]
            assert len(everything) == 4 * (size - 1)
            control, everything = everything[: size - 1], everything[size - 1 :]
            assert control[-1] < 50_000, control
            # Of 8 MB each peer sends its share of the sum and of the inputs, a third on every stream.
            share = 2 * 8_000_000 // size // 3
            assert everything[0] > share * 0.9, everything
            assert everything[-1] < share * 1.1 + 100_000, everything
            # One stream: the others carry nothing.
            assert one[: 2 * (size - 1)] == [0] * (2 * (size - 1))
            assert one[3 * (size - 1)] > 3 * share * 0.9


def test_forked_child_holds_no_connections_of_its_parent() -> None:
    body = "tests.engine.streams_bodies:fork"
    with rank_processes(body, 2, tcp_only=True, settings=THREE) as ranks:
        assert [rank.expect() for rank in ranks] == [[4, 0]] * 2


def test_allreduce_over_streams_works_if_some_ranks_share_a_host() -> None:
    def body(engine: Engine) -> None:
        for size in SIZES:
            inputs = [inputs_of(rank, size, "float32") for rank in range(engine.size)]
            found = allreduce(engine, str(size), inputs[engine.rank])
            np.testing.assert_array_equal(found, np.sum(inputs, axis=0))

    run_ranks(4, body, hosts=[0, 0, 1, 1], settings=THREE)
