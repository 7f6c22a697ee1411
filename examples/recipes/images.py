"""Classify images from a folder: Spark lists the files, ranks decode them while they train.

    python examples/recipes/images.py [--images 400] [--epochs 6]

The images are made here: circles and squares in noise. With a folder of your own, `spark.read.format("binaryFile")` lists it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from torch import nn

from sparkhvd.estimator import TorchEstimator, image

SIZE = 64


def make_images(folder: Path, count: int) -> None:
    """Write `circle-<n>.jpg` and `square-<n>.jpg`, of different sizes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        size = int(rng.integers(60, 120))
        one = Image.fromarray(rng.integers(0, 80, (size, size, 3), np.uint8))
        radius = int(rng.integers(12, size // 3))
        x, y = rng.integers(radius, size - radius, 2)
        kind, draw = ("circle", "square")[number % 2], ImageDraw.Draw(one)
        shape = draw.ellipse if kind == "circle" else draw.rectangle
        shape((x - radius, y - radius, x + radius, y + radius), fill=(200, 180, 90))
        one.save(folder / f"{kind}-{number}.jpg")


class Net(nn.Module):
    """Three convolutions over bytes (rows, 3, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        widths, layers = (3, 8, 16, 32), []
        for before, after in zip(widths, widths[1:], strict=False):
            conv = nn.Conv2d(before, after, 3, padding=1)
            layers += [conv, nn.BatchNorm2d(after, momentum=0.3), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(4 * widths[-1], 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.training:  # every second image in a mirror, on average
            chosen = torch.rand(len(pixels), 1, 1, 1, device=pixels.device) < 0.5
            pixels = torch.where(chosen, pixels.flip(3), pixels)
        return self.head(self.layers(pixels / 255))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=6)
    given = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").appName("images").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), given.images)
        files = spark.read.format("binaryFile").load(folder).select("path")  # no bytes are stored
        df = files.selectExpr("path", "int(path like '%/circle-%') AS is_circle")
        seen, held_out = df.randomSplit([0.8, 0.2], seed=1)
        torch.manual_seed(0)
        model = TorchEstimator(
            model=Net(),
            optimizer=torch.optim.Adam,
            learning_rate=0.005,
            loss=nn.CrossEntropyLoss(),
            inputs={"pixels": "path"},
            label_cols=["is_circle"],
            decoders={"path": image(SIZE, SIZE, dtype="uint8")},
            num_workers=2,  # threads per rank that decode
            batch_size=16,
            epochs=given.epochs,
            num_proc=2,
            random_seed=1,
        ).fit(seen)
        predicted = model.transform(held_out)
        evaluator = MulticlassClassificationEvaluator(labelCol="is_circle", metricName="accuracy")
        print(f"accuracy {evaluator.evaluate(predicted):.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
