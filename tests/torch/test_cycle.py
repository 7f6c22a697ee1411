"""States of a reduction cycle, and the recognition of its results."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from sparkhvd.torch.gradients.dense import GradientSlot
from sparkhvd.torch.gradients.reducer import BackwardEnd, Cycle, CycleState, ReducedGradients

pytestmark = pytest.mark.pure


class Pass:
    """A running backward pass. Only autograd holds its end, so it is freed if the pass fails."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        cycle.enter(cast("BackwardEnd", self))

    def leave(self) -> bool:
        return self.cycle.leave(cast("BackwardEnd", self))


def reduced(cycle: Cycle) -> None:
    """Run a cycle of one pass to its end."""
    running = Pass(cycle)
    assert running.leave()
    cycle.complete()
    cycle.reset()
    cycle.finish()


def entry(index: int = 0) -> GradientSlot:
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    return GradientSlot(index, f"p{index}", param, torch.float32)


def test_reduction_cycle_lasts_from_first_gradient_to_step() -> None:
    cycle = Cycle(passes=1)
    assert (cycle.state, cycle.is_open, cycle.is_in_pass) == (CycleState.IDLE, False, False)
    running = Pass(cycle)
    assert (cycle.state, cycle.is_open, cycle.is_in_pass) == (CycleState.COLLECTING, True, True)
    cycle.send()
    assert (cycle.state, cycle.is_in_flight) == (CycleState.SENDING, True)
    assert running.leave()
    assert not cycle.is_in_pass
    cycle.complete()
    cycle.send()  # a late bucket is no step back
    assert (cycle.state, cycle.is_in_flight) == (CycleState.SENT, True)
    cycle.reset()
    cycle.finish()
    assert (cycle.state, cycle.is_open, cycle.count) == (CycleState.REDUCED, False, 1)
    cycle.use()
    assert (cycle.state, cycle.count) == (CycleState.IDLE, 1)


def test_last_of_several_passes_completes_the_cycle() -> None:
    cycle = Cycle(passes=3)
    for _ in range(2):
        assert not Pass(cycle).leave()
        assert cycle.state is CycleState.COLLECTING
    assert Pass(cycle).leave()
    cycle.reset()
    assert cycle.passes_left == 3


def test_end_of_a_pass_is_ignored_after_a_reset() -> None:
    cycle = Cycle(passes=1)
    running = Pass(cycle)
    cycle.reset()  # a step inside the pass
    assert not running.leave()
    assert cycle.state is CycleState.IDLE


def test_pass_ended_by_an_exception_is_recognized() -> None:
    cycle = Cycle(passes=1)
    running = Pass(cycle)
    assert not cycle.is_interrupted
    del running
    assert cycle.is_interrupted
    assert not cycle.is_in_pass
    cycle.reset()
    assert not cycle.is_interrupted


def test_a_pass_cannot_begin_while_operations_are_in_flight() -> None:
    cycle = Cycle(passes=1)
    cycle.send()
    with pytest.raises(AssertionError):
        Pass(cycle)


def test_using_unreduced_gradients_does_not_change_the_cycle() -> None:
    cycle = Cycle(passes=1)
    running = Pass(cycle)
    cycle.use()
    assert cycle.state is CycleState.COLLECTING
    assert running.leave()


def test_further_pass_may_add_to_reduced_gradients() -> None:
    cycle = Cycle(passes=1)
    reduced(cycle)
    reduced(cycle)
    assert cycle.count == 2


def test_dropping_gradients_clears_recorded_results() -> None:
    cycle = Cycle(passes=1)
    reduced(cycle)
    cycle.results.note([entry()])
    cycle.added_to_kept = "p0"
    cycle.drop()
    assert (cycle.state, bool(cycle.results), cycle.added_to_kept) == (CycleState.IDLE, False, "")


@pytest.mark.parametrize("change", ["in place", "replaced", "dropped"])
def test_changed_reduced_gradients_are_detected(change: str) -> None:
    results, entries = ReducedGradients(), [entry(0), entry(1)]
    results.note(entries)
    assert results.find_changed(entries) is None
    assert not results.was_dropped(entries[1], entries)
    param = entries[1].param
    assert param.grad is not None
    if change == "in place":
        param.grad.mul_(2)
    else:
        param.grad = torch.ones(3) if change == "replaced" else None
    assert results.find_changed(entries) == "p1"
    assert results.is_added_to(entries[1]) is (change == "in place")
    assert results.was_dropped(entries[1], entries) is (change != "in place")


def test_first_new_gradient_shows_that_others_were_dropped() -> None:
    results, entries = ReducedGradients(), [entry(0), entry(1)]
    entries[1].param.grad = None
    results.note(entries)
    entries[1].param.grad = torch.ones(3)
    assert not results.was_dropped(entries[1], entries)
    entries[0].param.grad = None
    assert results.was_dropped(entries[1], entries)
