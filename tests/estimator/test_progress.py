from __future__ import annotations

import io
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.data import ownership
from sparkhvd.data.store.locks import LEASE_NAME, Lease, lease_of
from sparkhvd.data.store.store import Store
from sparkhvd.estimator import TorchEstimator
from sparkhvd.estimator.fitting import progress
from sparkhvd.estimator.fitting.progress import (
    EpochReporter,
    announce_late,
    format_epoch,
    format_step,
)
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.harness.steps import report_of_step
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.pure


def record(epoch: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "loss": 0.12345,
        "accuracy": 0.96,
        "rows": 100,
        "seconds": 0.1,
        "rows_per_s": 12345.6,
        "data_wait_s": 0.01,
        "lr": 0.1,
        "val_loss": 0.2,
    }


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(Store.create(tmp_path / "store"), "runs/r")


def save(checkpoints: Checkpoints, epochs: int) -> None:
    history = [record(e + 1) for e in range(epochs)]
    checkpoints.save(Checkpoint(epochs, {}, {}, None, history, "{}"))


def test_epoch_line_shows_metrics_and_rows_per_second() -> None:
    assert format_epoch(record(3), 10) == (
        "epoch  3/10  loss 0.1235  accuracy 0.9600  val_loss 0.2000  12,346 rows/s"
    )


def test_epoch_line_of_a_long_epoch_shows_waiting_times() -> None:
    data, rank, gradients = "data_wait_s", "rank_wait_s", "comm_wait_s"
    cases: list[tuple[float, dict[str, float], str]] = [
        (2.0, {data: 0.9}, "  waited for data 45%"),
        (2.0, {data: 0.1, rank: 0.1, gradients: 0.1}, ""),
        (0.9, {data: 0.9}, ""),
        (2.0, {rank: 0.5}, "  waited for rank 3 25%"),
        (
            2.0,
            {data: 0.2, rank: 0.4, gradients: 0.6},
            "  waited for data 10%, for rank 3 20%, for gradients 30%",
        ),
    ]
    for seconds, waited, said in cases:
        one = {**record(3), "seconds": seconds, "slowest_rank": 3, **waited}
        assert format_epoch(one, 3).partition(" rows/s")[2] == said


def test_step_line_shows_progress_waiting_rank_and_remaining_time() -> None:
    means = {"loss": 0.12345, "accuracy": 0.96}
    sizes = {"epochs": 10, "num_steps": 1500, "rows_per_s": 500.4}
    report = json.loads(report_of_step(2, 120, **sizes, left_s=27.6, means=means))
    beginning = "epoch 2/10  step 120/1,500  loss 0.1235  500 rows/s  28 s left"
    assert format_step(report, {0: 0.5}) == f"{beginning}  accuracy 0.9600"
    waits = {0: 0.45, 1: 0.3, 2: 0.5, 3: 0.25}
    assert format_step(report, waits) == f"{beginning}  waiting for rank 3 25%  accuracy 0.9600"
    assert "waiting" not in format_step(report, {0: 0.45, 1: 0.4})
    for left_s, shown in ((3990.0, "1 h 6 min left"), (90.0, "1 min 30 s left")):
        text = format_step(json.loads(report_of_step(1, 1, left_s=left_s)), {})
        assert text == f"epoch 1/2  step 1/9  1,000 rows/s  {shown}"


def test_waiting_times_start_anew_in_each_epoch(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PLAIN_S", 0.0)
    with EpochReporter(checkpoints, epochs=2, verbose=1, progress=None) as reporter:
        for epoch, waited in ((1, 0.1), (1, 0.15), (2, None)):
            if waited is not None:
                reporter.show_step(json.dumps({"rank": 1, "epoch": epoch, "waited": waited}))
            reporter.show_step(report_of_step(epoch, 5, waited=0.5))
    waiting = [text.partition("left")[2].strip() for text in capsys.readouterr().out.splitlines()]
    assert waiting == ["waiting for rank 1 40%", "waiting for rank 1 35%", ""]


def test_waiting_times_omit_lost_ranks_of_an_elastic_fit(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PLAIN_S", 0.0)
    with EpochReporter(checkpoints, epochs=2, verbose=1, progress=None) as reporter:
        reporter.show_step(json.dumps({"rank": 1, "epoch": 1, "waited": 0.6}))
        for size in (2, 1):
            reporter.show_step(report_of_step(1, 5, waited=0.1, size=size))
    before, after = capsys.readouterr().out.splitlines()
    assert before.endswith("  waiting for rank 0 50%")
    assert after.endswith("s left")


def test_an_epoch_with_step_progress_prints_no_waiting_line(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "announce_late", partial(announce_late, after_s=0.5))
    for steps in (1, 0):
        with EpochReporter(
            checkpoints, epochs=2, verbose=1, progress=None, poll_s=0.01
        ) as reporter:
            for step in range(steps):
                reporter.show_step(report_of_step(1, step))
            time.sleep(0.8)
        assert capsys.readouterr().out == ("" if steps else "waiting for epoch 1/2\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_replaces_its_terminal_line_and_is_rare_elsewhere(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with EpochReporter(checkpoints, epochs=2, verbose=1, progress=None, label="x") as reporter:
        reporter.show_step(report_of_step(1, 1))
        monkeypatch.setattr(progress, "_PLAIN_S", 0.0)
        reporter.show_step(report_of_step(1, 1))
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        reporter.show_step(report_of_step(1, 1))
        reporter.show_step(report_of_step(1, 2))
    reporter.show_step(report_of_step(1, 9))
    erase = "\r\x1b[K"
    first, second = (f"epoch 1/2  step {step}/9  1,000 rows/s  3 s left" for step in (1, 2))
    assert terminal.getvalue() == f"{erase}[x] {first}{erase}[x] {second}{erase}"
    monkeypatch.undo()
    assert capsys.readouterr().out == f"[x] {first}\n"
    with EpochReporter(checkpoints, epochs=2, verbose=0, progress=None) as reporter:
        monkeypatch.setattr(progress, "_PLAIN_S", 0.0)
        reporter.show_step(report_of_step(1, 9))
    assert capsys.readouterr().out == ""


def test_epoch_line_counts_rows_with_broken_images() -> None:
    line = format_epoch({**record(3), "broken_rows": 2, "val_broken_rows": 1}, 10)
    assert line.endswith(" rows/s  3 broken rows left out")
    assert "val_broken" not in line
    assert "left out" not in format_epoch({**record(3), "broken_rows": 0}, 10)
    assert format_epoch({**record(3), "broken_rows": 1}, 10).endswith("  1 broken row left out")


def test_very_large_and_small_numbers_are_shown_with_significant_digits() -> None:
    numbers = {"loss": 1e10, "a": 12345.678, "b": 2.5e-5, "c": 0.0, "d": float("nan"), "e": -0.5}
    shown = format_epoch({"epoch": 1, **numbers}, 1)
    assert shown == "epoch 1/1  loss 1e+10  a 12346  b 2.5e-05  c 0.0000  d nan  e -0.5000"


def test_epoch_line_shows_values_of_a_custom_record() -> None:
    own = {"epoch": 1, "seconds": 0.1, "note": "good", "hits": 3, "none": None}
    assert format_epoch(own, 2) == "epoch 1/2  note good  hits 3.0000  none None"


def test_step_progress_of_a_reported_epoch_is_hidden(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PLAIN_S", 0.0)
    with EpochReporter(checkpoints, epochs=2, verbose=1, progress=None) as reporter:
        save(checkpoints, 1)
        wait_until(lambda: reporter._reported == 1, "the epoch is reported")
        reporter.show_step(report_of_step(1, 2))
        reporter.show_step(report_of_step(2, 1))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        format_epoch(record(1), 2),
        "epoch 2/2  step 1/9  1,000 rows/s  3 s left",
    ]


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


@pytest.mark.parametrize("stream", [Closed(), None, object()])
def test_the_progress_function_receives_records_despite_a_broken_stdout(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    seen: list[int] = []
    reporter = EpochReporter(
        checkpoints, epochs=2, verbose=1, progress=lambda r: seen.append(r["epoch"])
    )
    with reporter:
        reporter.show_step(report_of_step(1, 1))
        save(checkpoints, 1)
        save(checkpoints, 2)
    assert seen == [1, 2]


def test_every_epoch_is_reported_once_during_the_fit(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    save(checkpoints, 1)  # of an earlier fit that this one resumes
    seen: list[int] = []
    reporter = EpochReporter(
        checkpoints, epochs=4, verbose=1, progress=lambda r: seen.append(r["epoch"])
    )
    with reporter:
        save(checkpoints, 2)
        wait_until(lambda: seen, "an epoch is reported", within_s=10)
        assert seen == [2]
        save(checkpoints, 4)
    assert seen == [2, 3, 4]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines] == ["epoch 2/4", "epoch 3/4", "epoch 4/4"]


@pytest.mark.parametrize("saved", [0, 2])
def test_resumed_fit_reports_repeated_epochs(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str], saved: int
) -> None:
    """A killed fit has recorded later epochs than its last checkpoint, or its checkpoints were deleted."""
    if saved:
        save(checkpoints, saved)
    checkpoints.write_history([record(epoch + 1) for epoch in range(4)])
    resumed = Checkpoints(checkpoints._store, "runs/r")
    seen: list[int] = []
    reporter = EpochReporter(
        resumed, epochs=5, verbose=1, progress=lambda r: seen.append(r["epoch"])
    )
    with reporter:
        reporter.show_step(report_of_step(saved + 1, 1))
        assert seen == []
        for epochs in range(saved + 1, 6):
            resumed.write_history([record(epoch + 1) for epoch in range(epochs)])
    assert seen == list(range(saved + 1, 6))


def test_lines_of_concurrent_fits_show_their_names(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        EpochReporter(checkpoints, epochs=2, verbose=1, progress=None, name=name, label=label)
        for name, label in (("cv-0", ""), ("cv-1", "batch_size=4"))
    )
    with first:
        save(checkpoints, 1)
        wait_until(lambda: first._reported == 1, "an epoch is reported", within_s=10)
        with second:
            save(checkpoints, 2)
    first.ended("enough", 2)
    history = [{"epoch": 1, "val_auc": 0.90531}, {"epoch": 2, "val_auc": 0.9}]
    first.returns(1, history, "val_auc")
    first.returns(2, history, "val_auc")  # the last epoch's weights need no line
    lines = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "epoch 1/2"
    assert sorted(lines[1:]) == [
        "[cv-0] epoch 2/2",
        "[cv-0] stopped after epoch 2/2: enough",
        "[cv-0] the model has the weights of epoch 1/2: val_auc 0.9053",
        "[cv-1: batch_size=4] epoch 2/2",
    ]


def test_only_long_phases_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with announce_late("reading", 1, after_s=30.0), announce_late("quiet", 0, after_s=0.0):
        with announce_late("writing", 1, after_s=0.0):
            wait_until(lambda: "writing" in capsys.readouterr().out, "it is announced", within_s=10)
        time.sleep(0.05)
    assert capsys.readouterr().out == ""


def test_lines_name_the_fold_and_the_params_of_a_fit(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    base = TorchEstimator(batch_size=2)
    assert base.copy()._label == base.copy({base.run_id: "mine"})._label == ""
    tried = base.copy({base.batch_size: 4, base.optimizer: "adam"})
    assert tried._label == "batch_size=4, optimizer='adam'"
    folds = base.copy()
    assert [folds._folds.label(), base._folds.label()] == ["", "fold 2"]
    folds._label = "fold 2"
    label = folds.copy({base.epochs: 3})._label
    with EpochReporter(checkpoints, epochs=3, verbose=1, progress=None, label=label):
        save(checkpoints, 1)
    assert capsys.readouterr().out.startswith("[fold 2, epochs=3] epoch 1/3  ")


@pytest.mark.parametrize("name", ["loss", "val_loss"])
def test_the_first_non_finite_loss_causes_one_warning(checkpoints: Checkpoints, name: str) -> None:
    history = [record(epoch) for epoch in (1, 2, 3)]
    history[1][name] = history[2][name] = float("nan")
    with (
        pytest.warns(UserWarning, match="is nan") as warned,
        EpochReporter(checkpoints, epochs=3, verbose=0, progress=None),
    ):
        checkpoints.save(Checkpoint(3, {}, {}, None, history, "{}"))
    (only,) = [str(w.message) for w in warned]
    assert only.startswith(f"{name} of epoch 2 is nan: the training has diverged, ")
    assert "Lower learning_rate (0.1 now), or set gradient_clip_norm=1.0; terminate_on_nan" in only


def test_the_first_nan_metric_causes_one_warning(checkpoints: Checkpoints) -> None:
    history = [{**record(epoch), "auc": float("nan")} for epoch in (1, 2)]
    with (
        pytest.warns(
            UserWarning, match="auc of epoch 1 is nan: .*'auc' needs rows of both"
        ) as warned,
        EpochReporter(checkpoints, epochs=2, verbose=0, progress=None),
    ):
        checkpoints.save(Checkpoint(2, {}, {}, None, history, "{}"))
    assert len(warned) == 1


def test_terminal_line_replaces_the_progress_bar_of_spark(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with EpochReporter(checkpoints, epochs=1, verbose=1, progress=None):
        save(checkpoints, 1)
    assert capsys.readouterr().out.startswith("\r\x1b[Kepoch 1/1  loss")


def test_slow_progress_function_gets_every_epoch_before_fit_returns(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkhvd.estimator.fitting.progress._LAST_READ_S", 0.3)
    seen: list[int] = []

    def slow(found: dict[str, Any]) -> None:
        time.sleep(0.6)
        seen.append(found["epoch"])

    with EpochReporter(checkpoints, epochs=3, verbose=0, progress=slow, poll_s=0.01):
        save(checkpoints, 1)
        time.sleep(0.2)  # the function is running
        save(checkpoints, 3)
    assert seen == [1, 2, 3]


def test_the_reporter_does_not_wait_for_an_unresponsive_store(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkhvd.estimator.fitting.progress._LAST_READ_S", 0.1)
    answers = threading.Event()

    def history() -> list[dict[str, Any]]:
        answers.wait(20)
        return []

    with EpochReporter(checkpoints, epochs=3, verbose=0, progress=None) as reporter:
        monkeypatch.setattr(reporter._checkpoints, "history", history)
        time.sleep(0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    answers.set()
    reporter._thread.join(20)


def test_unreachable_store_ends_neither_reports_nor_other_lease_renewals(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_owned", ownership._Owned())
    stores = [Store.create(tmp_path / name) for name in ("gone", "here")]
    old = time.time() - 7200
    for store in stores:
        ownership.own(store, "data/k/a", Lease("a", old))
    here = stores[1]
    # A file is in the place of the folder: its contents can be requested, but not written.
    (tmp_path / "gone" / "data" / "k" / "a" / LEASE_NAME).unlink()
    (tmp_path / "gone" / "data" / "k" / "a" / LEASE_NAME).mkdir()
    seen: list[int] = []
    reporter = EpochReporter(
        checkpoints, epochs=2, verbose=0, progress=lambda r: seen.append(r["epoch"]), poll_s=0.01
    )
    with reporter:

        def is_renewed() -> bool:
            lease = lease_of(here, "data/k/a")
            return lease is not None and lease.renewed > old

        wait_until(is_renewed, "the lease of the other store is renewed", within_s=10)
        save(checkpoints, 1)
        wait_until(lambda: seen, "an epoch is reported", within_s=10)
        assert seen == [1]  # before the end of the block: the thread lives


def test_a_failing_progress_function_is_dropped_and_the_fit_continues(
    checkpoints: Checkpoints,
) -> None:
    calls = []

    def progress(given: dict[str, Any]) -> None:
        calls.append(given)
        raise ValueError("no")

    reporter = EpochReporter(checkpoints, epochs=2, verbose=0, progress=progress)
    with (
        pytest.warns(UserWarning, match="progress raised ValueError: no. It is not called again"),
        reporter,
    ):
        save(checkpoints, 2)
    assert len(calls) == 1
