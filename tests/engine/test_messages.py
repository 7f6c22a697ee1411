"""Messages from rank to rank arrive unchanged, in any order, beside collectives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import DType
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.settings import Settings
from tests.engine.arrays import (
    random_array,
    start_allreduce,
    start_receive,
    start_send,
)
from tests.engine.test_collectives import LAYOUTS
from tests.harness.ranks import run_ranks
from tests.harness.soak import amount

pytestmark = pytest.mark.ranks

ANY = -1
TAGS = 3
# Empty, small, larger than one send, larger than a lane.
COUNTS = (0, 1, 777, 20_011, 150_001)


def message(number: int, count: int) -> Any:
    dtypes = [dtype for dtype in DType if dtype != DType.BFLOAT16]
    return random_array(dtypes[number % len(dtypes)], (count,), seed=number)


@pytest.mark.parametrize(("world", "hosts", "settings"), LAYOUTS)
def test_random_programs_deliver_every_message(
    world: int, hosts: list[int] | None, settings: Settings
) -> None:
    """All ranks know the messages, but each submits its part in its own order and waits in another."""
    for seed in range(amount(1, 30)):
        dice = random.Random(seed)
        # (from, to, tag, number, elements). Messages received from any rank have unique tags.
        plan = [
            (dice.randrange(world), dice.randrange(world), dice.randrange(TAGS), number, count)
            for number, count in enumerate(dice.choices(COUNTS, k=30))
        ]
        plan += [(dice.randrange(world), 0, TAGS + number, number, 9_000) for number in range(5)]

        def body(engine: Engine, seed: int = seed, plan: list[Any] = plan) -> None:
            own = random.Random(100 * seed + engine.rank)
            sends = [entry for entry in plan if entry[0] == engine.rank]
            receives = [entry for entry in plan if entry[1] == engine.rank]
            sums = list(range(3))
            works: list[Any] = []
            received = []
            while sends or receives or sums:
                queue = own.choice([queue for queue in (sends, receives, sums) if queue])
                entry = queue.pop(0)
                if queue is sums:
                    work, _ = start_allreduce(engine, f"sum {entry}", np.ones(3_000))
                else:
                    sender, target, tag, number, count = entry
                    wanted = message(number, count)
                    if queue is sends:
                        work = start_send(engine, f"to {len(works)}", wanted, target, tag)
                    else:
                        source = sender if tag < TAGS else ANY
                        array = np.zeros_like(wanted)
                        work = start_receive(engine, f"from {len(works)}", array, source, tag)
                        received.append((work, array, wanted, (sender, tag, wanted.nbytes)))
                works.append(work)
            own.shuffle(works)
            for work in works:
                work.wait()
            for work, array, wanted, rows in received:
                np.testing.assert_array_equal(array, wanted)
                assert work.output().rows == rows

        run_ranks(world, body, hosts=hosts, settings=settings)


@pytest.mark.parametrize("hosts", [None, [0, 1]], ids=["one host", "two hosts"])
def test_large_messages_and_messages_shorter_than_the_buffer_arrive(
    hosts: list[int] | None,
) -> None:
    def body(engine: Engine) -> None:
        other = 1 - engine.rank
        for count in (100, 8 << 20):
            sent = np.arange(count) + engine.rank
            received = np.full(count + 5, -1)
            works = [
                start_receive(engine, "in", received, other, shorter=True),
                start_send(engine, "out", sent, other),
            ]
            for work in works:
                work.wait()
            assert works[0].output().rows == (other, 0, sent.nbytes)
            np.testing.assert_array_equal(received[:count], np.arange(count) + other)
            assert (received[count:] == -1).all()

    run_ranks(2, body, hosts=hosts)


def test_wrong_message_calls_raise_a_clear_error() -> None:
    def body(engine: Engine) -> None:
        other = 1 - engine.rank
        array = np.zeros(50_000)
        with pytest.raises(InvalidArgumentError, match="behind it 1 if shorter messages fit"):
            start_receive(engine, "wrong", array, other, tag=-1)
        works = [
            start_receive(engine, "in", array[:-1], other, shorter=True),
            start_send(engine, "out", array, other),
        ]
        text = r"50000 elements of float64 .* receives 49999 .* at least as many elements"
        for work in works:
            with pytest.raises(MismatchError, match=text):
                work.wait()

    run_ranks(2, body)
