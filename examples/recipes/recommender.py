"""Recommend items by two towers: users and items as vectors, whose product says how well they fit.

    python examples/recipes/recommender.py [--rows 20000] [--epochs 8]

Of each pair (user, item) that was bought, the other items of the batch are what was not: a softmax over the batch. The evaluation asks how
often the item that a user bought last is among the ten best of all.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn
from torch.nn import functional as F

from sparkhvd.estimator import TorchEstimator

USERS, ITEMS, WIDTH = 500, 300, 16


def purchases(spark: SparkSession, rows: int) -> tuple[DataFrame, DataFrame]:
    """Make purchases of users who have tastes; return the earlier ones, and the last of each user."""
    rng = np.random.default_rng(0)
    tastes, kinds = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    odds = np.exp(2 * tastes @ kinds.T)
    odds /= odds.sum(1, keepdims=True)
    users = rng.integers(0, USERS, rows)
    items = [rng.choice(ITEMS, p=odds[user]) for user in users]
    rows_of = zip(users.tolist(), map(int, items), range(rows), strict=True)
    df = spark.createDataFrame(list(rows_of), "user long, item long, time long")
    df = df.selectExpr(
        "*", "1 AS bought", "time = max(time) OVER (PARTITION BY user) AS is_last"
    ).cache()
    return df.where("not is_last"), df.where("is_last")


class TwoTowers(nn.Module):
    """How well users fit items: the product of a unit vector of each."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(USERS, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.item = nn.Sequential(nn.Embedding(ITEMS, WIDTH), nn.Linear(WIDTH, WIDTH))

    def vectors(self, user: torch.Tensor, item: torch.Tensor) -> list[torch.Tensor]:
        return [F.normalize(x, dim=1) for x in (self.user(user), self.item(item))]

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        users, items = self.vectors(user, item)
        return (users * items).sum(1)


def train_step(model: TwoTowers, batch: dict[str, torch.Tensor], ctx: Any) -> torch.Tensor:
    users, items = model.vectors(batch["user"], batch["item"])
    scores = users @ items.T / 0.1
    # Another row of the same item is no counterexample.
    is_same = batch["item"][:, None] == batch["item"]
    is_same.fill_diagonal_(fill_value=False)
    scores = scores.masked_fill(is_same, -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").appName("recommender").getOrCreate()
    earlier, last = purchases(spark, given.rows)
    torch.manual_seed(0)
    fitted = TorchEstimator(
        model=TwoTowers(),
        optimizer=torch.optim.Adam,
        learning_rate=0.01,
        train_step=train_step,
        inputs={"user": "user", "item": "item"},
        label_cols=["bought"],  # of every row; what was not bought is in the loss
        batch_size=256,
        epochs=given.epochs,
        num_proc=2,
        random_seed=1,
    ).fit(earlier)

    model = fitted.getModel()
    pairs = last.select("user", "item").toPandas()
    with torch.no_grad():
        users, items = model.vectors(torch.tensor(pairs["user"]), torch.arange(ITEMS))
    best = (users @ items.T).topk(10).indices.numpy()
    hits = np.mean([item in row for item, row in zip(pairs["item"], best, strict=True)])
    print(f"hit rate at 10: {hits:.3f}, by chance {10 / ITEMS:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
