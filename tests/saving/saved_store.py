"""A store and a pipeline, written by the version before modules were merged (28 November 2026), in `fixtures/before_merge/`.

The store has a run whose rank died at the beginning of its second epoch. The fixture is never made again: `write` shows how it was made.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkhvd import Callback, RankError, TorchClassifier, TorchEstimator

if TYPE_CHECKING:
    from pyspark.ml import Pipeline
    from pyspark.sql import DataFrame, SparkSession

FIXTURE = Path(__file__).parent / "fixtures" / "before_merge"
RUN_ID = "killed"
EPOCHS = 4


class Decay(Callback):
    """A user's state: it halves the learning rate every other epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch_end(self, ctx: Any, record: dict[str, Any]) -> None:
        """Halve the rate."""
        self.epochs += 1
        if self.epochs % 2 == 0:
            for group in ctx.optimizer.param_groups:
                group["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the number of epochs."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""
        self.epochs = state["epochs"]


class Killed(Callback):
    """A rank that dies at the beginning of its second epoch if a variable says so."""

    def on_epoch_begin(self, ctx: Any) -> None:
        """Die."""
        if ctx.epoch == 2 and os.environ.get("SAVED_STORE_KILLED"):
            os._exit(9)


def rows(spark: SparkSession) -> DataFrame:
    """Make the rows of the run."""
    made = [([i / 16, 1 - i / 8], i % 2) for i in range(32)]
    return spark.createDataFrame(made, "features array<double>, label int").coalesce(1)


def estimator(store: str, **more: Any) -> TorchEstimator:
    """Make the estimator of the run."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=8,
        epochs=EPOCHS,
        num_proc=1,
        random_seed=5,
        verbose=0,
        store=store,
        callbacks=[Decay(), Killed()],
        checkpoint_interval_s=1e-6,
        **more,
    )


def pipeline() -> Pipeline:
    """Make a pipeline of a stage of Spark's and a classifier."""
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    torch.manual_seed(4)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    classifier = TorchClassifier(
        model=net, optimizer=torch.optim.SGD, maxIter=2, num_proc=1, random_seed=1, verbose=0
    )
    return Pipeline(stages=[assembler, classifier])


def columns(spark: SparkSession) -> DataFrame:
    """Make the rows of the pipeline."""
    made = [(i / 16, 1 - i / 8, i % 2) for i in range(16)]
    return spark.createDataFrame(made, "a double, b double, label int").coalesce(1)


def write(folder: Path) -> None:
    """Write the fixture, with the earlier version."""
    import json

    from pyspark.sql import SparkSession

    os.environ["SAVED_STORE_KILLED"] = "1"
    spark = SparkSession.builder.master("local[1]").getOrCreate()
    with contextlib.suppress(RankError):
        estimator(f"{folder}/store", run_id=RUN_ID).fit(rows(spark))
    model = pipeline().fit(columns(spark))
    pipeline().save(f"{folder}/pipeline")
    model.save(f"{folder}/pipeline_model")
    found = [list(map(float, r["probability"])) for r in model.transform(columns(spark)).collect()]
    (folder / "expected.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
