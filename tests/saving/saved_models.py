"""Models and an estimator as this version saves them, kept in `fixtures/` for every later version to load.

After a change of the format, `python -c "from tests.saving.saved_models import write; write()"`
regenerates `fixtures/saved_model_v<format>/`. Folders of older formats stay unchanged.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkhvd import TorchEstimator
from sparkhvd.estimator.saving.persistence import FORMAT_VERSION
from tests.harness.spark import CONF

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIXTURES = Path(__file__).parent / "fixtures"


class Scaled(nn.Module):
    """A user's module, which needs trust."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("factor", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


def data(spark: SparkSession) -> DataFrame:
    """Make the rows on which the fixtures' models were trained and are compared."""
    rows = [([i / 8, 1 - i / 4], i % 3) for i in range(12)]
    return spark.createDataFrame(rows, "x array<double>, y int").coalesce(1)


def estimators() -> dict[str, TorchEstimator]:
    """Make the estimators that are fitted and saved: one with only `torch.nn`, one that needs trust."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    shared: dict[str, Any] = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 4,
        "num_proc": 1,
        "random_seed": 5,
        "verbose": 0,
    }
    plain = TorchEstimator(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.02, betas=(0.8, 0.9)),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics=["accuracy"],
        predictionCol="prediction",
        probabilityCol="p",
        **shared,
    )
    own = TorchEstimator(
        model=Scaled(),
        optimizer=torch.optim.SGD,
        loss=nn.functional.mse_loss,
        label_dtypes={"y": "float32"},
        **shared,
    )
    return {"plain": plain, "own": own}


def outputs(model: Any, df: DataFrame) -> list[list[Any]]:
    """Return the columns that these estimators name, of every row, as plain numbers."""
    found = model.transform(df)
    names = [n for n in ("y__output", "prediction", "p") if n in found.columns]
    found = found.select(*names).collect()
    return [[v.tolist() if hasattr(v, "tolist") else v for v in map(_array, row)] for row in found]


def _array(value: Any) -> Any:
    return value.toArray() if hasattr(value, "toArray") else value


def write() -> None:
    """Write the fixtures of this format."""
    from pyspark.sql import SparkSession

    folder = FIXTURES / f"saved_model_v{FORMAT_VERSION}"
    shutil.rmtree(folder, ignore_errors=True)
    spark = SparkSession.builder.master("local[2]").config(map=CONF).getOrCreate()
    df = data(spark)
    expected = {}
    with tempfile.TemporaryDirectory() as store:
        for name, estimator in estimators().items():
            model = estimator.copy().setStore(store).fit(df).setStore(None)
            model.save(f"{folder}/{name}_model")
            estimator.save(f"{folder}/{name}_estimator")
            expected[name] = outputs(model, df)
    spark.stop()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for left in [*folder.rglob(".*.crc"), *folder.rglob("_SUCCESS")]:
        left.unlink()
    sys.stdout.write(f"{folder}\n")
