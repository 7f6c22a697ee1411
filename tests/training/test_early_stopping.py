from __future__ import annotations

from collections.abc import Mapping

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.early_stopping import EarlyStopping, Monitor, Stopper, best_epoch
from sparkhvd.training.types import Value

pytestmark = pytest.mark.pure

NAN = float("nan")


def history(*values: float) -> list[dict[str, float]]:
    return [{"epoch": i, "x": value} for i, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("min", [3, 1, 2, 1], 2),
        ("max", [3, 1, 2, 3], 1),
        ("min", [NAN, 5, NAN], 2),
        ("min", [NAN, NAN], 2),
        ("max", [], 0),
    ],
)
def test_best_epoch_follows_the_monitor_and_ignores_nan(
    mode: str, values: list[float], expected: int
) -> None:
    assert best_epoch(history(*values), Monitor("x", mode)) == expected


@pytest.mark.parametrize(
    ("saved", "expected"), [({1, 3}, 3), ({2, 4}, 2), ({5}, 5), ({0, 5, 9}, 5), (set(), 5)]
)
def test_best_epoch_is_chosen_among_saved_epochs(saved: set[int], expected: int) -> None:
    nan = float("nan")
    assert best_epoch(history(3.0, 2.0, 1.0, 4.0, nan), Monitor("x"), saved) == expected


@pytest.mark.parametrize(
    ("mode", "patience", "min_delta", "values", "stops_after"),
    [
        ("min", 1, 0.0, [3, 2, 2, 1], 3),
        ("min", 2, 0.0, [3, 2, 2, 1, 1, 1], 6),
        ("max", 2, 0.0, [1, 2, 1, 0, 5], 4),
        # Small steps add up only when together they are more than min_delta.
        ("min", 2, 0.5, [3, 2.8, 2.4, 2.3, 2.0], 5),
        ("min", 2, 0.0, [NAN, NAN, 1], 2),
        ("min", 9, 0.0, [1, 2, 3], None),
    ],
)
def test_fit_stops_after_patience_epochs_without_improvement(
    mode: str, patience: int, min_delta: float, values: list[float], stops_after: int | None
) -> None:
    early = EarlyStopping(Monitor("x", mode), patience, min_delta)
    done = [
        n for n in range(len(values) + 1) if Stopper(early).reason_to_stop(history(*values[:n]))
    ]
    assert (done[0] if done else None) == stops_after


def test_reason_to_stop_is_explained_in_words() -> None:
    early = EarlyStopping(Monitor("x"), 1)
    assert Stopper(early).reason_to_stop(history(1, 2)) == (
        "x has not improved for 1 epoch (its best is 1)"
    )
    assert Stopper(early).reason_to_stop(history(NAN)) == (
        "x has not improved for 1 epoch (it was never a number)"
    )
    assert not Stopper(None).reason_to_stop(history(1))
    early = EarlyStopping(Monitor("x"), 2, 0.05)
    assert Stopper(early).reason_to_stop(history(0.5, 0.0429, 0.02, 0.0013)) == (
        "x has not improved by more than min_delta=0.05 for 2 epochs (it was 0.0429 before, and is 0.0013)"
    )


def test_stopper_reads_each_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values, read = [3.0, NAN, 2.0, 2.5, 1.0, 1.0, 1.5, 1.2], []
    value = Monitor.value

    def counted(self: Monitor, record: Mapping[str, Value]) -> float:
        read.append(record["epoch"])
        return value(self, record)

    early = EarlyStopping(Monitor("x"), 3)
    expected = [Stopper(early).reason_to_stop(history(*values[:n])) for n in range(9)]
    monkeypatch.setattr(Monitor, "value", counted)
    stopper, records = Stopper(early), history(*values)
    assert [stopper.reason_to_stop(records[:n]) for n in range(9)] == expected
    assert expected[-1] == "x has not improved for 3 epochs (its best is 1)"
    assert read == list(range(1, 9))


def test_error_names_a_monitored_value_missing_from_records() -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        best_epoch(history(1), Monitor("auc"))
    assert str(failed.value) == (
        "monitor is 'auc', but the record of an epoch has no number of that name. It has 'epoch', 'x'."
    )
