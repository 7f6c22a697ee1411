"""Times of checkpoints inside an epoch and of short epochs, on a fake clock."""

from __future__ import annotations

import pytest

from sparkhvd.training.checkpoints.saver import Budget, Cadence

pytestmark = pytest.mark.pure


def simulate(
    interval_s: float, step_s: float, write_s: float, seconds: float, slower: float = 1.0
) -> tuple[float, int, int]:
    """Return (longest loss after a kill at the worst moment, questions, checkpoints) of a run. Steps get `slower` half way."""
    now, until, questions, taken = 0.0, 1, 0, 0
    cadence = Cadence(interval_s, now)
    safe, writing, done, worst = 0.0, None, 0.0, 0.0
    while now < seconds:
        now += step_s * (slower if now > seconds / 2 else 1)
        worst = max(worst, min(now, done if writing is not None else now) - safe)
        if writing is not None and now >= done:
            cadence.written(write_s)
            safe, writing = writing, None
        worst = max(worst, now - safe)
        until -= 1
        if until:
            continue
        questions += 1
        is_due, until = cadence.ask(now, is_writing=writing is not None)
        assert until >= 1
        if is_due:
            assert writing is None
            cadence.taken(now)
            writing, done, taken = now, now + write_s, taken + 1
    return worst, questions, taken


@pytest.mark.parametrize("slower", [1.0, 3.0])
@pytest.mark.parametrize(
    ("interval_s", "step_s", "write_s"),
    [(300, 0.02, 1), (300, 0.1, 60), (300, 10, 5), (1, 0.01, 0.05), (10, 0.5, 2), (5, 0.001, 1.2)],
)
def test_kill_loses_at_most_the_interval_with_few_clock_checks(
    interval_s: float, step_s: float, write_s: float, slower: float
) -> None:
    worst, questions, taken = simulate(interval_s, step_s, write_s, 20 * interval_s, slower)
    assert worst <= interval_s
    assert questions < 20 * 60
    assert 20 <= taken <= 20 * 3


def test_next_checkpoint_follows_a_write_longer_than_the_interval() -> None:
    worst, _, taken = simulate(1.0, 0.01, 3.0, 60.0)
    assert worst < 6.5  # two writes: nothing can do better
    assert taken >= 18


def test_slow_first_steps_do_not_delay_a_checkpoint_beyond_the_interval() -> None:
    cadence = Cadence(10.0, 0.0)
    _, num_steps = cadence.ask(8.0, is_writing=False)  # the first step took 8 s
    assert num_steps == 1
    now = 8.0
    while now < 10.0:
        now += 0.001 * num_steps
        is_due, num_steps = cadence.ask(now, is_writing=False)
        if is_due:
            return
    pytest.fail("no checkpoint within the interval")


@pytest.mark.parametrize(
    ("epoch_s", "interval_s", "epochs", "expected"),
    [
        (1.0, 300.0, 50, 50),  # long ones have one each
        (0.01, 300.0, 10, 10),  # and so have the first ones
        (0.01, 300.0, 5000, 16 + 10),  # then one per 5 s
        (0.01, 1.0, 5000, 16 + 66),  # or as often as a shorter interval asks
        (0.5, 300.0, 1000, 16 + 100),
    ],
)
def test_short_epochs_write_fewer_checkpoints(
    epoch_s: float, interval_s: float, epochs: int, expected: int
) -> None:
    budget = Budget(interval_s, 0.0)
    due = [n for n in range(1, epochs + 1) if budget.spend(n * epoch_s)]
    assert abs(len(due) - expected) <= 2
    longest = max(b - a for a, b in zip(due, due[1:], strict=False)) * epoch_s
    assert longest <= max(epoch_s, min(5.0, 0.75 * interval_s)) + 2 * epoch_s
