"""Forecast many series with one network: windows by Spark's window functions, the next week from the last four.

    python examples/recipes/forecasting.py [--series 60] [--epochs 6]

The evaluation is on weeks that come after all of those trained on, beside the forecast that the next week is as the last.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.window import Window
from torch import nn

from sparkhvd.estimator import TorchEstimator

PAST, NEXT, DAYS = 28, 7, 240


def sales(spark: SparkSession, series: int) -> DataFrame:
    """Make daily sales (shop, day, sold) with a week's rhythm and a trend of each shop."""
    days = spark.range(series * DAYS).selectExpr(f"id div {DAYS} AS shop", f"id % {DAYS} AS day")
    level, trend = "(50 + 7 * (shop % 9))", "(shop % 5 - 2) * day / 20"
    week = "15 * sin(2 * pi() * (day + shop) / 7) + 8 * int((day + shop) % 7 = 5)"
    return days.selectExpr("shop", "day", f"{level} + {trend} + {week} + 2 * randn(3) AS sold")


def windows(df: DataFrame) -> DataFrame:
    """Make the rows: the past, the next days, both less the past's mean, which stays beside them."""
    by_day = Window.partitionBy("shop").orderBy("day")
    df = df.select(
        "shop",
        "day",
        F.collect_list("sold").over(by_day.rowsBetween(1 - PAST, 0)).alias("past"),
        F.collect_list("sold").over(by_day.rowsBetween(1, NEXT)).alias("next"),
    ).where(f"size(past) = {PAST} and size(next) = {NEXT}")
    df = df.withColumn("mean", F.expr(f"aggregate(past, 0D, (a, x) -> a + x) / {PAST}"))
    for name in ("past", "next"):
        df = df.withColumn(name, F.expr(f"transform({name}, x -> (x - mean) / 20)"))
    return df


class Forecaster(nn.Module):
    """(rows, PAST) to (rows, NEXT): a GRU that reads the past, and one layer for all days."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.GRU(1, 32, batch_first=True)
        self.tell = nn.Linear(32, NEXT)

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        _, state = self.read(past.unsqueeze(2))
        return self.tell(state[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--series", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=6)
    given = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").appName("forecasting").getOrCreate()
    df = windows(sales(spark, given.series)).cache()
    begin = DAYS - 8 * NEXT  # of the weeks to test on
    torch.manual_seed(0)
    model = TorchEstimator(
        model=Forecaster(),
        optimizer=torch.optim.Adam,
        learning_rate=0.005,
        loss=nn.SmoothL1Loss(),
        feature_cols=["past"],
        label_cols=["next"],
        gradient_clip_norm=1.0,
        batch_size=64,
        epochs=given.epochs,
        num_proc=2,
        random_seed=1,
    ).fit(df.where(f"day + {NEXT} < {begin}"))

    later = model.transform(df.where(f"day >= {begin}"))
    found = later.selectExpr(
        "next", f"slice(past, {PAST - NEXT + 1}, {NEXT}) AS last", "next__output"
    )
    rows = found.toPandas()
    truth, last, ours = (np.stack(rows[name]) for name in rows)
    errors = [20 * np.abs(each - truth).mean() for each in (ours, last)]
    print(f"mean absolute error {errors[0]:.2f}, as the last week {errors[1]:.2f}")
    spark.stop()


if __name__ == "__main__":
    main()
