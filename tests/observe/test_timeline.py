"""Clocks of ranks, and one trace made from several."""

from __future__ import annotations

import io
import json
import random
from typing import IO

import pytest

from sparkhvd.observe.timeline import clock_offset, merge
from tests.harness.soak import amount

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("seed", range(amount(20)))
def test_clock_offset_is_within_its_bound_with_any_slow_rank(seed: int) -> None:
    chance = random.Random(seed)
    true_offset = chance.choice([0, 10**12, -(10**12), 70_000, -3_000_000])
    now = 10**15
    own, reference = [], []
    for _ in range(12):
        entered = [now + chance.randrange(10**6) for _ in range(2)]
        left = [max(entered) + chance.randrange(5_000, 100_000) for _ in range(2)]
        now = max(left)
        reference.append((entered[0], left[0]))
        own.append((entered[1] + true_offset, left[1] + true_offset))
    offset, error = clock_offset(own, reference)
    assert error < 120_000
    assert abs(offset - true_offset) <= error + 1 or offset == 0
    if true_offset == 0:
        assert offset == 0


def trace(rank: int, start_ns: int, *events: str) -> IO[bytes]:
    """Make a file as the engine writes it."""
    meta = json.dumps(
        {"ph": "M", "pid": rank, "name": "sparkhvd", "args": {"start_monotonic_ns": start_ns}},
        separators=(",", ":"),
    )
    return io.BytesIO(("[\n" + ",\n".join([meta, *events]) + "\n]\n").encode())


def event(rank: int, ts: str, name: str) -> str:
    text = json.dumps({"name": name})
    return f'{{"ph":"i","pid":{rank},"tid":1,"ts":{ts},"s":"t","name":"x","args":{text}}}'


def test_merged_timeline_uses_the_clock_of_rank_0() -> None:
    # Rank 1's clock is 5 s ahead; its timeline began 2 ms after rank 0's.
    files = [
        trace(0, 1_000_000_000, event(0, "10.250", "a"), event(0, "-3.000", 'b "ts":1.000 Ü')),
        trace(1, 6_002_000_000, event(1, "0.500", '"ts":2.000,')),
        trace(2, 1_000_000_000),
    ]
    whole = "".join(merge(files, [0, 5_000_000_000, 0]))
    events = json.loads(whole)
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "i"] == [
        (0, 10.25),
        (0, -3.0),
        (1, 2000.5),
    ]
    assert events[2]["args"]["name"] == 'b "ts":1.000 Ü'
    assert events[4]["args"]["name"] == '"ts":2.000,'


def test_a_timeline_without_a_beginning_raises() -> None:
    files = [trace(0, 0), io.BytesIO(b"[\n]\n")]
    with pytest.raises(ValueError, match="the timeline of rank 1 has no beginning"):
        list(merge(files, [0, 0]))
