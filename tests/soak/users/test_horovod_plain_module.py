"""`horovod.spark.lightning.TorchEstimator` with a module that is no LightningModule: Lightning trains it on 2 ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pl = pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

import torch  # noqa: E402 - after importorskip
from torch import nn  # noqa: E402

import sparkhvd  # noqa: E402
from sparkhvd.errors import InvalidArgumentError  # noqa: E402
from sparkhvd.horovod.spark.common.store import Store  # noqa: E402
from sparkhvd.horovod.spark.lightning import TorchEstimator, TorchModel  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.drop = nn.Linear(2, 8), nn.Dropout(dropout)
        self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.drop(torch.tanh(self.first(x)))
        return self.a(hidden), self.b(hidden)


class Seen(pl.Callback):  # type: ignore[misc]  # untyped
    """Records the training, and may kill a rank."""

    def __init__(self, folder: Path, killed: tuple[int, int] | None = None) -> None:
        self.folder, self.killed = folder, killed

    def on_train_start(self, trainer: Any, module: Any) -> None:
        assert isinstance(module, pl.LightningModule)
        assert type(trainer.profiler).__name__ == "SimpleProfiler"
        assert trainer.gradient_clip_val == 1e6

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        file = self.folder / "killed"
        is_due = (trainer.current_epoch, number) == self.killed and not file.exists()
        if trainer.global_rank == 1 and is_due:
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        (self.folder / f"steps of {trainer.global_rank}").write_text(str(trainer.global_step))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [
        ([n / 100, n % 7 / 7], n / 100, float(n % 3 == 0), 1.0 + n % 2, n % 4 == 0)
        for n in range(104)
    ]
    return spark.createDataFrame(rows, ["x", "y", "z", "weight", "held_out"])


def arguments(net: nn.Module, **options: Any) -> dict[str, Any]:
    return {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.01),
        "loss": [nn.MSELoss(), nn.BCEWithLogitsLoss()],
        "loss_weights": [0.7, 0.3],
        "input_shapes": [[-1, 2]],
        "feature_cols": ["x"],
        "label_cols": ["y", "z"],
        "validation": "held_out",
        "batch_size": 6,
        "epochs": 3,
        "num_proc": 2,
        "random_seed": 3,
        "verbose": 0,
        **options,
    }


def of_lightning(folder: Path, **options: Any) -> dict[str, Any]:
    folder.mkdir()
    return {
        "store": Store.create(str(folder / "store")),
        "profiler": "simple",
        "trainer_args": {"gradient_clip_val": 1e6},
        "log_every_n_steps": 1,
        "callbacks": [
            Seen(folder, options.pop("killed", None)),
            # Its folder is the run's, whatever the user gave.
            pl.pytorch.callbacks.ModelCheckpoint("elsewhere", save_last=True),
        ],
        **options,
    }


def test_plain_module_is_trained_by_lightning(df: DataFrame, tmp_path: Path) -> None:
    """The fit has callbacks, a profiler, a logger and trainer_args. The weights equal those of sparkhvd's own loop."""
    net = Net()
    given = arguments(net, metrics=["mse"], **of_lightning(tmp_path / "a"))
    model = TorchEstimator(**given).fit(df)
    assert type(model) is TorchModel
    assert type(model.getModel()) is Net
    assert (tmp_path / "a" / "steps of 1").read_text() == "18"
    runs = tmp_path / "a" / "store" / "runs"
    # Lightning chooses it: TensorBoard if it is installed.
    assert [*runs.rglob("logs/**/metrics.csv"), *runs.rglob("logs/**/events.*")]
    assert list(runs.rglob("lightning/last.ckpt"))
    record = model.getHistory()[2]
    names = {"train_loss", "val_loss", "y_mse", "z_mse", "val_y_mse"}
    assert names <= set(record)
    assert record["rows"] == 72
    columns = model.transform(df).columns
    assert columns[-2:] == ["y__output", "z__output"]

    net = Net()
    ours = sparkhvd.TorchEstimator(
        **arguments(
            net, store=str(tmp_path / "ours"), drop_last=True, metrics=["mse"], lr_scaling="linear"
        )
    ).fit(df)
    for name, weights in ours.getModel().state_dict().items():
        torch.testing.assert_close(weights, model.getModel().state_dict()[name])
    for name, other in (("train_loss", "loss"), ("val_loss", "val_loss"), ("y_mse", "y_mse")):
        assert record[name] == pytest.approx(ours.history[2][other], rel=1e-4)


def test_a_fit_with_a_killed_rank_equals_an_undisturbed_fit(df: DataFrame, tmp_path: Path) -> None:
    """The rows have sample weights."""

    def fitted(folder: Path, **options: Any) -> Any:
        given = arguments(
            Net(0.5),
            sample_weight_col="weight",
            checkpoint_interval_s=1e-6,
            **of_lightning(folder, **options),
        )
        return TorchEstimator(**given).fit(df)

    whole = fitted(tmp_path / "whole")
    stopped = fitted(tmp_path / "stopped", killed=(1, 2))
    assert (tmp_path / "stopped" / "killed").exists()
    for name, weights in whole.getModel().state_dict().items():
        assert torch.equal(weights, stopped.getModel().state_dict()[name])
    assert whole.getHistory()[2]["train_loss"] == stopped.getHistory()[2]["train_loss"]


def test_wrong_arguments_are_refused_before_any_job(df: DataFrame, tmp_path: Path) -> None:
    def fit(**options: Any) -> None:
        TorchEstimator(**arguments(Net(), store=str(tmp_path), **options)).fit(df)

    with pytest.raises(InvalidArgumentError, match="loss has 1 entries, but label_cols has 2"):
        fit(loss=[nn.MSELoss()])
    with pytest.raises(InvalidArgumentError, match="optimizer is required"):
        fit(optimizer=None)
    with pytest.raises(InvalidArgumentError, match="precision has no effect on a LightningModule"):
        fit(precision="bf16-mixed")
    with pytest.raises(InvalidArgumentError, match="metrics has 'y_f1', but for a module"):
        fit(metrics=["f1"])
    with pytest.raises(InvalidArgumentError, match="has no argument 'reduction'"):
        fit(sample_weight_col="weight", loss=lambda output, label: (output - label).abs().mean())
