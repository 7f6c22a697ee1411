"""Lightning over a prepared data set: its loaders, and a checkpoint inside an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pl = pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

import torch  # noqa: E402 - after importorskip
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torch import nn  # noqa: E402

from sparkhvd.data import Dataset, data_module, prepare  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.soak

ROWS, BATCH = 103, 10


@pytest.fixture
def dataset(spark: SparkSession, tmp_path: Path) -> Dataset:
    df = spark.createDataFrame([(n, n % 10 == 0) for n in range(ROWS)], ["id", "held_out"])
    return prepare(df, tmp_path / "store", validation="held_out")


def trained(dataset: Dataset, folder: Path, ckpt_path: Path | None = None, **options: Any) -> Any:
    class Sees(pl.LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.training_rows: list[int] = []
            self.validation_rows: list[int] = []

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.training_rows += batch["id"].tolist()
            return (self.weight * batch["id"]).sum()

        def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
            self.validation_rows += batch["id"].tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    model, module = Sees(), data_module(dataset, BATCH, seed=3)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing="callbacks" in options,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(model, datamodule=module, ckpt_path=ckpt_path)
    return model


def test_lightning_reads_each_row_once_per_epoch_and_resumes_mid_epoch(
    dataset: Dataset, tmp_path: Path
) -> None:
    held_out = set(range(0, ROWS, 10))
    wanted = set(range(ROWS)) - held_out
    whole = trained(dataset, tmp_path, max_epochs=2)
    first, second = whole.training_rows[: len(wanted)], whole.training_rows[len(wanted) :]
    assert set(first) == set(second) == wanted
    assert len(second) == len(wanted)
    assert first != second
    assert whole.validation_rows == sorted(held_out) * 2
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    assert (
        trained(dataset, tmp_path, callbacks=[saves], max_epochs=2).training_rows == first + second
    )
    for step in (4, 8, 12):
        rest = trained(dataset, tmp_path, tmp_path / f"step={step}.ckpt", max_epochs=2)
        done = step * BATCH if step <= 9 else len(first) + (step - 10) * BATCH
        assert rest.training_rows == (first + second)[done:]
