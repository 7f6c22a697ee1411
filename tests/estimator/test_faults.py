"""A rank dies during `fit`: it is named in time, the checkpoints stay readable, and a relaunch changes no bit."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkhvd import RankError, Store, TorchModel
from sparkhvd.estimator import Callback
from sparkhvd.runner import context
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.estimator.fits import estimator
from tests.harness import faults
from tests.harness.by_value import by_value
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak
from tests.harness.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

LIMIT_S = 10.0


class Changes(Callback):
    """Changes groups and trained parameters in the first epoch. A resumed fit does not call it again."""

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        layer = ctx.model.layer
        if ctx.step == 1:
            layer.bias.requires_grad_(False)
            (group,) = ctx.optimizer.param_groups
            rest = {**group, "params": [layer.bias], "lr": 0.2}
            group.update(params=[layer.weight], weight_decay=0.1)
            ctx.optimizer.param_groups.append(rest)
        if ctx.step == 5:
            layer.bias.requires_grad_(True)


# Options of a fit that dies in its second epoch, and of the fit that it must equal.
OPTIONS: dict[str, Any] = {
    "optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
    "validation": 0.2,
    "epochs": 3,
    "callbacks": [Changes()],
}


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Iterator[None]:
    yield
    assert wait_for_no_trainers() == set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    data = [([float(i % 5), float(i % 3)], float(i % 7)) for i in range(40)]
    return spark.createDataFrame(data, "x array<double>, y double")


@pytest.fixture(scope="module")
def whole(folder: Path, df: DataFrame) -> TorchModel:
    """The model of a fit without a fault."""
    return estimator(Dying("never", folder), Store.create(folder / "whole"), **OPTIONS).fit(df)


def assert_same(found: TorchModel, whole: TorchModel) -> None:
    """Assert that two models have the same weights and losses, bit by bit."""
    for name, value in whole.getModel().state_dict().items():
        assert torch.equal(value, found.getModel().state_dict()[name])
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in found.history]


class DyingStore(Store):
    """Kills rank 1 when its trainer unpickles it: before `init`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = context()
        if place is not None and place.rank == 1:
            die(state["url"].removeprefix("file://"))
        super().__setstate__(state)


class Dying(nn.Module):
    """Kills rank 1 in the second epoch, at the given moment, at most once if a marker is kept."""

    def __init__(self, moment: str, folder: Path, *, once: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        with torch.no_grad():
            self.layer.weight.fill_(0.1)
            self.layer.bias.fill_(0.0)
        self.moment = moment
        self.folder = str(folder)
        self.once = once
        self.steps = self.validations = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            self.steps += self.training
            self.validations += not self.training
            # An epoch has two training steps and one of validation.
            if self.moment == "step" and self.steps == 4:
                self.die()
            if self.moment == "validation" and self.validations == 2:
                self.die()
            if self.moment == "exit" and self.steps == 4:
                faults.kill_at_exit()
        return self.layer(x)

    def die(self) -> None:
        if not (self.once and (Path(self.folder) / "died").exists()):
            die(self.folder)


def die(folder: str) -> None:
    (Path(folder) / "died").write_text(str(time.time()))
    faults.kill_self()


def named_in_time(fit: Any, df: DataFrame, place: Path, run_id: str, expected: int) -> None:
    """Assert that the fit names rank 1 soon after its death and leaves the checkpoints of `expected` epochs."""
    with pytest.raises(RankError) as failed:
        fit.fit(df)
    ended = time.time()
    died = place / "died"
    if died.exists():
        assert ended - float(died.read_text()) < LIMIT_S
    assert (failed.value.rank, failed.value.exit) == (1, "signal SIGKILL")
    assert str(failed.value).startswith("Rank 1 of 2 on host ")
    checkpoints = Checkpoints(Store(str(place)), f"runs/{run_id}")
    assert checkpoints.latest_epoch() == expected
    if expected:
        saved = checkpoints.latest()
        assert saved is not None
        assert saved.epoch == expected
        assert "layer.weight" in saved.model


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before init", marks=soak("runner/test_faults: a rank killed before init")),
        pytest.param("validation", marks=soak("a rank killed in a step, here")),
        "exit",
    ],
)
def test_killed_rank_is_named_within_seconds(folder: Path, df: DataFrame, moment: str) -> None:
    run_id = moment.replace(" ", "-")
    place = folder / run_id
    store: Store = Store.create(place)
    if moment == "before init":
        store = DyingStore(store.url)
    fit = estimator(
        Dying(moment, place),
        store,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        validation=0.2,
        epochs=2,
        run_id=run_id,
    )
    named_in_time(fit, df, place, run_id, {"before init": 0, "validation": 1, "exit": 2}[moment])


def test_relaunched_fit_equals_an_undisturbed_fit_bit_by_bit(
    folder: Path, df: DataFrame, whole: TorchModel, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder / "relaunch"
    options = {**OPTIONS, "max_retries": 1, "verbose": 1}
    fit = estimator(Dying("step", place, once=True), Store.create(place), **options)
    disturbed = fit.fit(df)
    assert (place / "died").exists()
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "Relaunching (1 of 1)" in text
    assert [line[:9] for line in text.splitlines() if line.startswith("epoch")] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert_same(disturbed, whole)
    report = disturbed.report().document
    (relaunch,) = report["relaunches"]
    assert "SIGKILL" in relaunch["cause"]
    # The figures of the epoch before the loss are there, too.
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2, 3]
    assert "lost launches" in {phase["name"] for phase in report["phases"]}


def test_a_killed_rank_is_named_promptly_and_a_new_fit_resumes(
    folder: Path, df: DataFrame, whole: TorchModel
) -> None:
    place = folder / "killed"
    store = Store.create(place)
    killed = estimator(Dying("step", place, once=True), store, run_id="killed", **OPTIONS)
    named_in_time(killed, df, place, "killed", 1)
    assert (place / "died").exists()
    with pytest.warns(UserWarning, match="has not finished: the model has .* after epoch 1 of 3"):
        early = TorchModel.from_run(store, "killed", trust=True)
    assert [record["epoch"] for record in early.history] == [1]
    failed = early.report().document
    assert (failed["state"], len(failed["epochs"])) == ("failed", 1)
    assert "SIGKILL" in failed["error"]
    resumed = killed.fit(df)
    late = TorchModel.from_run(store, "killed", trust=True)
    assert late.history == resumed.history
    assert late.timings == resumed.timings
    assert torch.equal(late.getModel().layer.weight, resumed.getModel().layer.weight)
    assert late.transform(df).columns == resumed.transform(df).columns
    assert_same(resumed, whole)


class Waits(Callback):
    """Waits in the second epoch until the rank is interrupted, once."""

    def __init__(self, folder: Path) -> None:
        self.ready, self.saved = folder / "ready", folder / "saved"

    def on_epoch_begin(self, ctx: Any) -> None:
        if ctx.epoch == 2 and not self.ready.exists():
            self.ready.touch()
            try:
                time.sleep(300)
            except KeyboardInterrupt:
                self.saved.touch()
                raise


def test_interrupted_fit_saves_a_checkpoint_and_resumes(
    tmp_path: Path, df: DataFrame, capfd: pytest.CaptureFixture[str]
) -> None:
    store, waits = Store.create(tmp_path / "store"), Waits(tmp_path)
    options = {**OPTIONS, "epochs": 2, "num_proc": 1, "verbose": 1, "callbacks": [waits]}
    fit = estimator(nn.Linear(2, 1), store, run_id="a", **options)

    def press_ctrl_c() -> None:
        wait_until(waits.ready.exists, "the second epoch begins", within_s=120)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press_ctrl_c)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        fit.fit(df)
    presses.join()
    assert waits.saved.exists()
    # The checkpoint of the first epoch was perhaps still being written.
    assert Checkpoints(store, "runs/a").latest_position() == (1, 0)
    resumed = fit.fit(df)
    assert len(resumed.history) == 2
    captured = capfd.readouterr()
    said = captured.out + captured.err
    assert "sparkhvd: interrupted. The checkpoint after epoch 1 of 2 stays: a fit with" in said
    assert re.search(r"run 'a' in file://\S+/store resumes after epoch 1 of 2\n", said), said
