"""Start, end and misuse of an engine: exact error messages, nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkhvd.engine.calls import Reduction, TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from sparkhvd.rendezvous import SingleRendezvous, in_process
from sparkhvd.settings import Settings
from tests.engine.arrays import (
    allgather,
    allreduce,
    broadcast,
    start_allreduce,
    view,
)
from tests.harness.descriptors import descriptors
from tests.harness.ranks import rank_outcomes, run_ranks
from tests.harness.soak import amount
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.ranks

ADVICE = "Make the same call on every rank, or use different names."
MISMATCHES: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "shape": (
        lambda e: allreduce(e, "w", np.ones((128, 64 >> e.rank), np.float32)),
        "allreduce('w'): ranks disagree on shape. Rank 0 sent (128, 64) float32, rank 1 sent (128, 32) "
        "float32. Build the same model on every rank, or give the two tensors different names.",
    ),
    "dtype": (
        lambda e: allreduce(e, "w", np.ones(3, np.float32 if e.rank else np.int32)),
        "allreduce('w'): ranks disagree on dtype. Rank 0 sent (3,) int32, rank 1 sent (3,) float32. Build "
        "the same model on every rank, or give the two tensors different names.",
    ),
    "operation": (
        lambda e: allreduce(e, "w", np.ones(3), op=ReduceOp.SUM if e.rank else ReduceOp.MIN),
        f"allreduce('w'): ranks disagree on the reduction. Rank 0 sent Min, rank 1 sent Sum. {ADVICE}",
    ),
    "root": (
        lambda e: broadcast(e, "w", np.ones(3), e.rank),
        f"broadcast('w'): ranks disagree on the root rank. Rank 0 sent 0, rank 1 sent 1. {ADVICE}",
    ),
    "collective": (
        lambda e: (
            allreduce(e, "w", np.ones(3)) if e.rank else broadcast(e, "w", np.ones(3), root_rank=0)
        ),
        f"broadcast('w'): ranks disagree on the operation. Rank 0 sent broadcast, rank 1 sent allreduce. {ADVICE}",
    ),
    "inner dimensions": (
        lambda e: allgather(e, "w", np.ones((2, 3 + e.rank), np.float32)),
        "allgather('w'): ranks disagree on shape. Rank 0 sent (2, 3) float32, rank 1 sent (2, 4) float32. "
        "Only the first dimension may differ: give every rank the same number of dimensions and the same "
        "sizes after the first, or use different names.",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.parametrize("hosts", [None, [0, 1]])
def test_mismatch_error_shows_both_values_and_the_engine_continues(
    what: str, hosts: list[int] | None
) -> None:
    call, message = MISMATCHES[what]

    def body(engine: Engine) -> tuple[str, float]:
        with pytest.raises(MismatchError) as caught:
            call(engine)
        return str(caught.value), float(allreduce(engine, "w", np.ones(5))[0])

    assert run_ranks(2, body, hosts=hosts) == [(message, 2.0)] * 2


BAD_CALLS: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "no name": (
        lambda e: allreduce(e, "", np.ones(3)),
        "the name has 0 bytes; it must have 1 to 4096",
    ),
    "average of bool": (
        lambda e: allreduce(e, "x", np.ones(3, np.bool_), op=ReduceOp.AVERAGE),
        "there is no Average of bool",
    ),
    "adasum": (
        lambda e: allreduce(e, "x", np.ones(3, np.int64), op=ReduceOp.ADASUM),
        "Adasum needs floating-point tensors, not int64",
    ),
    "process set": (
        lambda e: allreduce(e, "x", np.ones(3), process_set=7),
        "process set 7 does not exist",
    ),
    "root": (lambda e: broadcast(e, "x", np.ones(3), 9), "root_rank 9 is not in the process set"),
    "no memory": (
        lambda e: e.allreduce(
            [TensorView(0, 0, (3,))],
            name="x",
            dtype=DType.FLOAT32,
            reduction=Reduction(ReduceOp.SUM),
        ),
        "tensor 0 has no input",
    ),
    "negative shape": (
        lambda e: e.allreduce(
            [TensorView(8, 8, (-3,))],
            name="x",
            dtype=DType.FLOAT32,
            reduction=Reduction(ReduceOp.SUM),
        ),
        "impossible shape",
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_invalid_call_is_refused_at_submission(what: str) -> None:
    call, message = BAD_CALLS[what]

    def body(engine: Engine) -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            call(engine)
        allreduce(engine, "x", np.ones(3))  # nothing was submitted

    run_ranks(1, body)


def test_operation_name_cannot_be_reused_until_it_finishes() -> None:
    second_may_come = threading.Event()

    def body(engine: Engine) -> None:
        if engine.rank == 1:
            second_may_come.wait(10)
            allreduce(engine, "x", np.ones(3))
        else:
            work, _ = start_allreduce(engine, "x", np.ones(3))
            with pytest.raises(InvalidArgumentError) as caught:
                start_allreduce(engine, "x", np.ones(3))
            assert str(caught.value) == (
                "allreduce('x'): an operation of this name is in flight on this rank. Wait for it, or use "
                "another name."
            )
            second_may_come.set()
            work.wait()
        allreduce(engine, "x", np.ones(3))

    run_ranks(2, body)


def test_unavailable_instruction_set_is_refused() -> None:
    meeting = in_process(2)
    isa = "neon" if os.uname().machine == "x86_64" else "avx2"
    with pytest.raises(InvalidArgumentError) as caught:
        Engine(meeting[0].connect(), Settings(isa=isa))
    assert str(caught.value) == (
        f"Settings.isa is {isa!r}, which this CPU or this build does not have. Use isa='auto'."
    )


def test_operation_times_out_and_names_the_missing_rank() -> None:
    others_have_ended = threading.Barrier(3)

    def body(engine: Engine) -> None:
        if engine.rank == 1:
            others_have_ended.wait(30)
            time.sleep(0.2)
        start = time.monotonic()
        try:
            allreduce(engine, "x", np.ones(3), timeout_s=1)
        finally:
            if engine.rank != 1:
                seconds = time.monotonic() - start
                others_have_ended.wait(30)
                assert 0.9 < seconds < 5

    outcomes = rank_outcomes(3, body)
    late = re.compile(r"rank 1 did not submit it within [1-4][\d.]* s, while ranks 0 and 2 waited")
    kinds = {type(outcomes[0]), type(outcomes[2])}
    # The rank that times out first notifies the other.
    assert kinds <= {CollectiveTimeoutError, PeerLostError, CollectiveError}
    assert CollectiveTimeoutError in kinds
    assert all(late.search(str(outcome)) for outcome in outcomes), outcomes


def test_wait_times_out_while_the_operation_continues() -> None:
    may_come = threading.Event()

    def body(engine: Engine) -> Any:
        if engine.rank == 1:
            may_come.wait(10)
            return allreduce(engine, "x", np.ones(3)).tolist()
        work, result = start_allreduce(engine, "x", np.ones(3))
        assert not work.done()
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait(0.1)
        assert str(caught.value) == (
            "x: not finished within the 0.1 s of wait(). It continues: wait again, or shut the engine down."
        )
        may_come.set()
        work.wait()
        work.wait()  # a second call is allowed
        assert work.done()
        return result.tolist()

    assert run_ranks(2, body) == [[2.0] * 3] * 2


def test_other_ranks_name_a_rank_that_shut_down() -> None:
    def body(engine: Engine) -> None:
        if engine.rank == 0:
            time.sleep(0.1)
            engine.shutdown()
            engine.shutdown()  # a second call is allowed
        allreduce(engine, "x", np.ones(3))

    outcomes = rank_outcomes(3, body)
    assert type(outcomes[0]) is NotInitializedError
    assert str(outcomes[0]) == "x: the engine was shut down. Create a new one."
    text = (
        "allreduce('x'): rank 0 shut down before it, and it needs every rank. Call shutdown() on a rank "
        "only after its last operation."
    )
    # The first rank to notice leaves `with Engine` by its exception, which the other rank may receive.
    assert text in {str(outcome) for outcome in outcomes[1:]}
    for outcome in outcomes[1:]:
        assert isinstance(outcome, CollectiveError)
        assert text in str(outcome)


def test_results_outlive_shutdown_and_engine() -> None:
    def body(engine: Engine) -> Any:
        work = engine.allgather(
            view(array := np.full(3, engine.rank, np.int64)),
            name="g",
            dtype=DType.INT64,
            keep=array,
        )
        work.wait()
        return work

    works = run_ranks(2, body)
    for work in works:
        work.wait()
        output = work.output()
        assert output.rows == (3, 3)
        assert output.num_bytes == 48


def test_tensors_of_a_dropped_work_stay_until_it_finishes() -> None:
    class Buffer(np.ndarray):  # a plain array has no weak references in old NumPy
        pass

    may_come = threading.Event()

    def body(engine: Engine) -> None:
        if engine.rank == 1:
            may_come.wait(10)
            for i in range(3):
                allreduce(engine, f"x {i}", np.ones(50_000))
            return
        alive = []
        for i in range(3):
            array = np.ones(50_000).view(Buffer)
            alive.append(weakref.ref(array))
            engine.allreduce(
                [view(array, array)],
                name=f"x {i}",
                dtype=DType.FLOAT64,
                reduction=Reduction(ReduceOp.SUM),
                keep=array,
            )  # the Work is dropped at once
            del array
        gc.collect()
        assert all(ref() is not None for ref in alive)
        may_come.set()

        def are_given_up() -> bool:
            engine._state.reap()  # like any later call
            return all(ref() is None for ref in alive)

        wait_until(are_given_up, "arrays are given up", within_s=10)
        assert not engine._state.works

    run_ranks(2, body)


def test_slow_dropped_works_do_not_keep_later_works_in_memory() -> None:
    may_come = threading.Event()

    def body(engine: Engine) -> None:
        late = [f"late {i}" for i in range(20)]
        if engine.rank == 1:
            for i in range(200):
                allreduce(engine, f"quick {i}", np.ones(3))
            may_come.wait(10)
            for name in late:
                allreduce(engine, name, np.ones(3))
            return
        for name in late:
            start_allreduce(engine, name, np.ones(3))  # the Work is dropped at once
        for i in range(200):
            work, _ = start_allreduce(engine, f"quick {i}", np.ones(3))
            work.wait()
            del work
        assert len(late) <= len(engine._state.works) <= 2 * len(late)
        may_come.set()

        def are_given_up() -> bool:
            engine._state.reap(2)  # like any later call
            return not engine._state.works

        wait_until(are_given_up, "works are given up", within_s=10)

    run_ranks(2, body)


def test_engine_without_references_is_destroyed() -> None:
    before = {t.name for t in threading.enumerate()}
    engine = Engine(SingleRendezvous(Settings()).connect(), Settings())
    work, result = start_allreduce(engine, "x", np.ones(3))
    state = weakref.ref(engine._state)
    del engine
    work.wait()  # a work keeps its engine
    assert result.tolist() == [1.0] * 3
    del work
    gc.collect()
    assert state() is None
    assert {t.name for t in threading.enumerate()} <= before


def resources() -> Counter[str]:
    """Descriptors, threads and mapped memory files of this process."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    return Counter(
        {
            **dict.fromkeys(descriptors(), 1),
            "threads": len(os.listdir("/proc/self/task")),
            "maps of memory files": len(maps),
        }
    )


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_repeated_engine_generations_leak_nothing(hosts: list[int] | None) -> None:
    meetings = in_process(3, hosts)

    def body(engine: Engine) -> float:
        allreduce(engine, "big", np.ones(300_000, np.float32))
        if engine.rank == 0:
            start_allreduce(engine, "never finished", np.ones(1000))
        return float(allreduce(engine, "x", np.ones(3))[0])

    run_ranks(3, body, rendezvous=meetings)
    gc.collect()
    time.sleep(0.5)  # the kernel lists a thread a moment longer than it can be joined
    before = resources()
    for _ in range(amount(50)):
        assert run_ranks(3, body, rendezvous=meetings) == [3.0] * 3
    gc.collect()
    deadline = time.monotonic() + 10
    while (grown := resources() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not grown


def test_two_engines_in_one_process_are_independent() -> None:
    def world(value: float) -> list[float]:
        return run_ranks(2, lambda e: float(allreduce(e, "x", np.full(3, value))[0]))

    results: dict[float, list[float]] = {}
    threads = [
        threading.Thread(target=lambda v=v: results.update({v: world(v)})) for v in (1.0, 10.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1.0: [2.0, 2.0], 10.0: [20.0, 20.0]}


def test_many_threads_of_a_rank_share_one_engine() -> None:
    def body(engine: Engine) -> list[float]:
        results: list[float] = [0.0] * 8

        def use(index: int) -> None:
            for step in range(50):
                found = allreduce(engine, f"{index} {step}", np.full(100 * index + 1, 1.0 + index))
                results[index] += float(found[-1])

        threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert run_ranks(2, body) == [[100.0 * (1 + i) for i in range(8)]] * 2


def test_concurrent_operations_of_equal_shape_do_not_share_a_call() -> None:
    def body(engine: Engine) -> list[int]:
        wrong = [0] * 6

        def use(index: int) -> None:
            for step in range(100):
                array = np.full(5, float(index))
                call = engine.prepare(
                    Collective.ALLREDUCE,
                    [view(array, array)],
                    DType.FLOAT64,
                    Reduction(ReduceOp.SUM),
                )
                engine.run(call, f"{index} {step}", array)
                wrong[index] += array.tolist() != [2.0 * index] * 5

        threads = [threading.Thread(target=use, args=(i,)) for i in range(len(wrong))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not engine._state.works
        return wrong

    assert run_ranks(2, body) == [[0] * 6] * 2
