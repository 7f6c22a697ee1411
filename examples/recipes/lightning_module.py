"""Train a LightningModule on a DataFrame: Lightning's Trainer on every rank, a model of Spark ML in the end.

    python examples/recipes/lightning_module.py [--epochs 8]

The rows are the handwritten digits that come with scikit-learn. Loss, metrics, optimizer and schedule are the module's; data, ranks,
checkpoints and relaunches are the estimator's. `pip install 'sparkhvd[spark,examples,lightning]'`.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from sparkhvd.lightning import TorchEstimator


def digits(spark: SparkSession) -> DataFrame:
    pixels, labels = load_digits(return_X_y=True)
    rows = [((x / 16).tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    return spark.createDataFrame(rows, "pixels array<float>, digit long")


class Digits(lightning.LightningModule):
    """Two convolutions and a layer; `batch` is a dict of tensors by column."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch["pixels"]), batch["digit"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        scores = self(batch["pixels"])
        right = (scores.argmax(1) == batch["digit"]).float().mean()
        self.log("val_loss", F.cross_entropy(scores, batch["digit"]), sync_dist=True)
        self.log("val_accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").appName("lightning").getOrCreate()
    seen, held_out = digits(spark).randomSplit([0.8, 0.2], seed=1)
    torch.manual_seed(0)
    model = TorchEstimator(
        model=Digits(learning_rate=0.005),
        feature_cols=["pixels"],
        label_cols=["digit"],
        validation=0.1,
        batch_size=32,
        epochs=given.epochs,
        num_proc=2,
        random_seed=1,
        callbacks=[EarlyStopping("val_loss", patience=3)],
        trainer_args={"gradient_clip_val": 1.0},
    ).fit(seen)
    print(model.history_frame()[["train_loss", "val_loss", "val_accuracy"]])

    # The loss is the module's own, so what the scores mean is said here.
    model.setOutputFn(lambda scores: scores.softmax(1)).setPredictionCol("prediction")
    predicted = model.transform(held_out)
    evaluator = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")
    print(f"test accuracy {evaluator.evaluate(predicted):.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
