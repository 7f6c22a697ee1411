"""`sparkhvd.lightning.TorchEstimator`: a LightningModule from a DataFrame, on 2 ranks as on one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pl = pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

import torch  # noqa: E402 - after importorskip
from torch import nn  # noqa: E402

from sparkhvd.errors import InvalidArgumentError  # noqa: E402
from sparkhvd.lightning import TorchEstimator  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(600)
travels_by_value = by_value(__name__)
ROWS = 96  # of which 72 are trained on: 6 whole steps


class Regression(pl.LightningModule):  # type: ignore[misc]  # untyped
    def __init__(self, batch_format: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(2, 1)
        self.batch_format = batch_format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = (batch["x"], batch["y"]) if self.batch_format == "dict" else batch
        return nn.functional.mse_loss(self(x)[:, 0], y)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.log("loss", loss := self.loss(batch), sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [([n / ROWS, n % 7 / 7], n / ROWS + n % 7, n % 4 == 0) for n in range(ROWS)]
    return spark.createDataFrame(rows, ["x", "y", "held_out"])


def fitted(df: DataFrame, store: Path, num_proc: int, batch_format: str) -> Any:
    estimator = TorchEstimator(
        model=Regression(batch_format),
        feature_cols=["x"],
        label_cols=["y"],
        num_proc=num_proc,
        batch_size=12 // num_proc,
        epochs=3,
        store=store,
        validation="held_out",
        batch_format=batch_format,
    )
    return estimator.fit(df)


def test_two_ranks_give_the_model_of_one(df: DataFrame, tmp_path: Path) -> None:
    two, one = (fitted(df, tmp_path, n, f) for n, f in ((2, "dict"), (1, "tuple")))
    for name, weights in one.getModel().state_dict().items():
        found = two.getModel().state_dict()[name]
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-4)
    assert [record["epoch"] for record in two.history] == [0, 1, 2]
    assert two.history[2]["val_loss"] < two.history[0]["val_loss"]
    predicted = two.transform(df).select("x", "y__output").limit(5).collect()
    for row in predicted:
        wanted = two.getModel()(torch.tensor([row.x]))[0, 0].item()
        assert row["y__output"] == pytest.approx(wanted, abs=1e-5)


def test_wrong_arguments_are_refused_before_any_job() -> None:
    with pytest.raises(InvalidArgumentError, match="model is a Linear; it must be a LightningModu"):
        TorchEstimator(model=nn.Linear(2, 1), feature_cols=["x"])
    with pytest.raises(InvalidArgumentError, match="batch_format is 'list'"):
        TorchEstimator(model=Regression("dict"), feature_cols=["x"], batch_format="list")
