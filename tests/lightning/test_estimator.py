"""A LightningModule is fitted, relaunched inside an epoch, and transforms. tests/soak/users/test_lightning_estimator.py has more."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

pl = pytest.importorskip("lightning", reason="Lightning is not installed")

import torch  # noqa: E402 - after importorskip
from torch import nn  # noqa: E402

from sparkhvd.lightning import TorchEstimator  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402
from tests.harness.soak import soak  # noqa: E402

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)
ROWS = 50


class Regression(pl.LightningModule):  # type: ignore[misc]  # untyped
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch["x"][:, None])[:, 0], batch["y"])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class KilledOnce(pl.Callback):  # type: ignore[misc]  # untyped
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        is_due = (trainer.global_rank, trainer.current_epoch, number) == (1, 1, 3)
        if is_due and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@soak("training/test_resume; estimator/test_faults")
def test_a_fit_with_a_killed_rank_equals_an_undisturbed_fit(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = spark.createDataFrame([(n / ROWS, 2.0 * n / ROWS) for n in range(ROWS)], ["x", "y"])
    whole, stopped = (
        TorchEstimator(
            model=Regression(),
            feature_cols=["x"],
            label_cols=["y"],
            num_proc=2,
            batch_size=4,
            epochs=2,
            store=str(tmp_path),
            random_seed=5,
            checkpoint_interval_s=1e-6,
            callbacks=callbacks,
            trainer_args={"precision": "bf16-mixed"},
            verbose=0,
        ).fit(df)
        for callbacks in ([], [KilledOnce(tmp_path / "killed")])
    )
    assert (tmp_path / "killed").exists()
    for name, weights in whole.getModel().state_dict().items():
        assert torch.equal(weights, stopped.getModel().state_dict()[name])
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in stopped.history]
    for model in (whole, stopped):
        assert [r["rows"] for r in model.history] == [ROWS, ROWS]
    assert stopped.getPrecision() == "bf16-mixed"  # of transform, too
    assert stopped.transform(df).where("y__output IS NULL").count() == 0
