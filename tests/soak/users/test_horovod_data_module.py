"""A data module written for Horovod's Lightning estimator reads its rank's part of plain Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pl = pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

import pyarrow.parquet as pq  # noqa: E402 - after importorskip
import torch  # noqa: E402
from pyspark.ml.linalg import Vectors  # noqa: E402
from torch import nn  # noqa: E402

from sparkhvd.horovod.spark.common.store import LocalStore  # noqa: E402
from sparkhvd.horovod.spark.lightning import TorchEstimator  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)


class Rows(pl.LightningDataModule):  # type: ignore[misc]  # untyped
    """Reads Parquet by pyarrow, like a user's data module."""

    def __init__(
        self, train_dir: str, val_dir: str, num_train_epochs: int = 1, has_val: bool = True, train_batch_size: int = 32,
        val_batch_size: int = 32, shuffle: bool = True, transformation: Any = None, cur_shard: int = 0, shard_count: int = 1,
        schema_fields: Any = None, storage_options: Any = None, steps_per_epoch_train: int = 1, steps_per_epoch_val: int = 1,
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert schema_fields == ["x", "text", "y", "weight"], schema_fields
        assert (num_train_epochs, storage_options) == (2, None)
        assert (steps_per_epoch_train, steps_per_epoch_val) == ((4, 1) if has_val else (5, 0))
        self.share = slice(cur_shard, None, shard_count)
        self.names, self.sizes = schema_fields, (train_batch_size, val_batch_size)
        self.folders = {"train": train_dir, "val": val_dir if has_val else None}

    def _loader(self, role: str, size: int) -> Any:
        table = pq.read_table(self.folders[role], columns=self.names)
        rows = table.to_pylist()[self.share]
        assert all(isinstance(row["text"], str) and len(row["x"]) == 2 for row in rows)
        made = [
            {
                "x": torch.tensor(row["x"], dtype=torch.float32),
                "text": len(row["text"]),
                "y": torch.tensor(row["y"]),
                "weight": torch.tensor(row["weight"]),
            }
            for row in rows
        ]
        return torch.utils.data.DataLoader(made, size)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self._loader("train", self.sizes[0])

    def val_dataloader(self) -> Any:
        return self._loader("val", self.sizes[1]) if self.folders["val"] else None


class Sees(pl.LightningModule):  # type: ignore[misc]  # untyped
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Any:
        assert set(batch) == {"x", "text", "y", "weight"}
        assert batch["y"].dtype == torch.float32
        options = {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True}
        self.log("sum_of_y", batch["y"].sum(), **options)
        return nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])

    def validation_step(self, batch: Any, _: int) -> None:
        total = batch["y"].sum()
        self.log("val_sum_of_y", total, on_epoch=True, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> Any:
        return self.net(x) + text[:, None]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [
        (Vectors.dense(n / 40, n % 3), f"row {n}", float(n), 1.0 + n % 2, int(n % 5 == 0))
        for n in range(40)
    ]
    return spark.createDataFrame(rows, ["x", "text", "y", "weight", "held_out"])


def arguments(store: Path, **options: Any) -> dict[str, Any]:
    return {
        "feature_cols": ["x", "text"],
        "label_cols": ["y"],
        "sample_weight_col": "weight",
        "validation": "held_out",
        "data_module": Rows,
        "batch_size": 4,
        "epochs": 2,
        "num_proc": 2,
        "verbose": 0,
        "store": LocalStore(str(store)),
        **options,
    }


def test_data_module_ranks_get_plain_parquet(df: DataFrame, tmp_path: Path) -> None:
    """The first fit writes it, and the second fit and fit_on_parquet read the same files."""
    given = arguments(tmp_path)
    held_out = sum(range(0, 40, 5))
    models = [TorchEstimator(model=Sees(), **given).fit(df) for _ in range(2)]
    assert (tmp_path / "intermediate_train_data.0").is_dir()
    assert not (tmp_path / "intermediate_train_data.1").exists()
    models.append(TorchEstimator(model=Sees(), **given).fit_on_parquet(dataset_idx=0))
    for model in models:
        record = model.getHistory()[1]
        assert record["sum_of_y"] == sum(range(40)) - held_out
        assert record["val_sum_of_y"] == held_out


def test_data_module_needs_no_validation_loader_without_validation_rows(
    df: DataFrame, tmp_path: Path
) -> None:
    model = TorchEstimator(model=Sees(), **arguments(tmp_path, validation=None)).fit(df)
    assert model.getHistory()[1]["sum_of_y"] == sum(range(40))


def test_plain_module_is_trained_on_data_module_batches(df: DataFrame, tmp_path: Path) -> None:
    net = Net()
    model = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.001),
        loss=nn.MSELoss(),
        input_shapes=[[-1, 2], [-1]],
        **arguments(tmp_path),
    ).fit(df)
    assert type(model.getModel()) is Net
    assert model.getHistory()[1]["train_loss"] < model.getHistory()[0]["train_loss"]
