"""`fit` with `num_proc=(least, most)`: membership changes between epochs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd import InvalidArgumentError, Store, TorchModel
from sparkhvd.errors import PreflightError
from sparkhvd.estimator import Callback
from tests.estimator.fits import assert_same_weights, estimator, mlp, one_process
from tests.harness import faults
from tests.harness.by_value import by_value
from tests.harness.processes import wait_for_no_trainers
from tests.harness.soak import soak

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

travels_by_value = by_value(__name__)
pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Iterator[None]:
    yield
    assert wait_for_no_trainers() == set()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    data = [([float(i % 5), float(i % 3)], float(i % 7)) for i in range(401)]
    return spark.createDataFrame(data, "x array<double>, y double")


class Uncertain(torch.nn.Module):
    """A loss with a parameter, which new ranks must get."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = torch.nn.Parameter(torch.zeros(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label) ** 2).mean() * torch.exp(-self.log_var) + self.log_var


class Kill(Callback):
    """Kills the last of two ranks once, in the third step. The other rank is slow until a new rank joins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        del loss
        mark = self.folder / "killed"
        if ctx.step == 3 and hvd.rank() == 1 and not mark.exists():
            mark.touch()
            faults.kill_self()
        if hvd.size() == 1:
            time.sleep(0.06)


def printed_changes(captured: str) -> list[str]:
    """Return the changes that the driver has printed."""
    lines = re.findall(r"^sparkhvd: (\d+ (?:ranks?|->) .*)$", captured, re.MULTILINE)
    return [line.partition(" in ")[0] for line in lines]


def test_each_row_is_trained_on_once_when_ranks_join_and_leave(
    df: DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store.create(tmp_path / "store")
    model = mlp(2)
    given = {"epochs": 2, "batch_size": 8}
    fit = estimator(
        model,
        store,
        num_proc=(1, 2),
        elastic_batch="global",
        callbacks=[Kill(tmp_path)],
        checkpoint_interval_s=0.01,
        keep_data=True,
        verbose=1,
        **given,
    )
    fitted = fit.fit(df)
    history = fitted.history
    assert [(record["epoch"], record["rows"]) for record in history] == [(1, 401), (2, 401)]
    assert history[-1]["ranks"] == 2
    # Every step had the rows of one process with the same batches.
    alone = one_process(model, store, ["x"], size=1, lr=0.05, seed=3, **given)
    assert_same_weights(fitted.getModel(), alone, 1e-4)
    # The first epoch continued with one rank from the last saved step, and later with two.
    assert printed_changes(capfd.readouterr().err) == ["2 ranks", "2 -> 1 rank", "1 -> 2 ranks"]
    assert_changes_are_told(fitted)


def assert_changes_are_told(fitted: TorchModel) -> None:
    """The history and the report show which ranks joined and left, and the repeated rows."""
    lines = [line for record in fitted.history for line in record.get("rank_changes", ())]
    assert [line.partition(" in ")[0] for line in lines] == ["2 -> 1 rank", "1 -> 2 ranks"]
    assert "ended with signal SIGKILL" in lines[0]
    document = fitted.report().document
    assert document["history"] == fitted.history
    first, lost, joined = document["rank_changes"]
    assert (first["before"], first["after"], first["epoch"]) == (0, 2, 1)
    assert (lost["before"], lost["after"], lost["epoch"]) == (2, 1, 1)
    assert lost["why"] in lines[0]
    assert lost["repeated_rows"] % 8 == 0  # whole steps of all ranks
    assert joined["repeated_rows"] == 0
    again = sum(record["repeated_rows"] for record in fitted.history)
    assert again == lost["repeated_rows"] <= 3 * 8
    assert [len(epoch["rows"]) for epoch in document["epochs"]][-1] == 2
    html = fitted.report().html
    assert "Elastic training" in html
    assert "joined as rank 1" in html


def test_indivisible_epochs_change_ranks_only_between_epochs(df: DataFrame, tmp_path: Path) -> None:
    fit = estimator(
        mlp(2),
        Store.create(tmp_path / "store"),
        num_proc=(1, 2),
        loss=Uncertain(),
        optimizer="sgd",
        lr_scaling="linear",
        learning_rate=0.01,
        callbacks=[Kill(tmp_path)],
        shuffle_bytes=1024,
        batch_size=16,
        epochs=4,
    )
    fitted = fit.fit(df)
    history = fitted.history
    assert fitted.getLoss().log_var > 0.05
    assert {record["rows"] for record in history} == {401}
    ranks = [record["ranks"] for record in history]
    assert (ranks[0], ranks[-1]) == (1, 2), ranks
    for record in history:
        assert record["lr"] == pytest.approx(0.01 * record["ranks"])


def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps + 1)


class KillAll(Callback):
    """Kills each of two ranks in the second epoch, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        del loss
        with (self.folder / "epochs").open("a") as log:
            log.write(f"{ctx.epoch}\n")
        lost = len(list(self.folder.glob("killed-*")))
        if ctx.epoch == 2 and lost < 2:
            (self.folder / f"killed-{os.getpid()}").touch()
            faults.kill_self()


@soak("a fit that is relaunched from its checkpoint: estimator/test_faults; a lost rank: here")
def test_fit_resumes_from_its_checkpoint_after_losing_all_ranks(
    df: DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store.create(tmp_path / "store")
    given = {"callbacks": [KillAll(tmp_path)], "batch_size": 50, "epochs": 3, "verbose": 1}
    schedule = {"lr_scheduler": one_cycle, "lr_scheduler_interval": "step"}
    fit = estimator(mlp(2), store, num_proc=(1, 2), max_retries=1, **given, **schedule)
    fitted = fit.fit(df)
    assert [record["epoch"] for record in fitted.history] == [1, 2, 3]
    assert {record["rows"] for record in fitted.history} == {401}
    # The schedule has reached its end, whatever the number of steps of the epochs.
    assert fitted.history[-1]["lr"] == pytest.approx(0.1 / 25 / 1e4)
    written = capfd.readouterr().err
    assert "Relaunching (1 of 1)" in written, written
    # The first epoch was not repeated: 5 steps of each of 2 ranks.
    assert (tmp_path / "epochs").read_text().split().count("1") <= 10


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_proc": (2, 1)}, InvalidArgumentError, r"num_proc is \(2, 1\); the minimum number of ranks"),
        ({"num_proc": (0, 1)}, InvalidArgumentError, r"num_proc is \(0, 1\); it must be at least 1"),
        ({"num_proc": (1, 2, 3)}, TypeError, "a whole number, or the pair"),
        ({"num_proc": (3, 4)}, PreflightError, "num_proc=3: the application can run 2"),
        ({"num_proc": 2, "elastic_batch": "global"}, InvalidArgumentError, "elastic_batch is 'global', but num_proc is 2"),
        ({"num_proc": (1, 2), "timeline": True}, InvalidArgumentError, "timeline needs a fixed number of ranks"),
        ({"num_proc": (1, 2), "train_fn": print}, InvalidArgumentError, "train_fn has its own loop"),
        ({"num_proc": (1, 2), "gradient_compression": hvd.Compression.powersgd(2)}, InvalidArgumentError, "powersgd keeps a part"),
    ],
)  # fmt: skip
def test_invalid_elastic_params_are_refused(
    df: DataFrame, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        estimator(mlp(2), **given).fit(df)
