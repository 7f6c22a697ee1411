"""The estimator among Spark ML's stages, in threads, with nondeterministic data, and with all features together."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd import Store, TorchEstimator
from sparkhvd.estimator import Callback, pad
from tests.estimator.fits import assert_same_weights, estimator, mlp, one_process, only_data
from tests.harness.soak import soak

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


@soak("test_fit: cross-validation and param maps")
def test_train_validation_split_selects_best_params_in_pipeline(
    spark: SparkSession, store: Store
) -> None:
    generator = np.random.default_rng(1)
    points = generator.standard_normal((80, 2))
    rows = [(float(a), float(b), float(a + b > 0)) for a, b in points]
    df = spark.createDataFrame(rows, "a double, b double, label double").coalesce(2).cache()
    fit = estimator(
        mlp(2, 2),
        store,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam,
        epochs=4,
        num_proc=1,
        label_cols=["label"],
    )
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), fit])
    split = TrainValidationSplit(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(fit.learning_rate, [1e-9, 0.05]).build(),
        evaluator=BinaryClassificationEvaluator(),  # by rawPrediction
        trainRatio=0.75,
        seed=1,
    )
    chosen = split.fit(df)
    still, learned = chosen.validationMetrics
    assert learned > max(still, 0.9)
    best = chosen.bestModel.stages[1]
    assert best.getModel()[0].weight.ne(mlp(2, 2)[0].weight).all()  # it has learned
    found = chosen.transform(df)
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(found) > 0.9
    assert MulticlassClassificationEvaluator(metricName="logLoss").evaluate(found) < 0.6


def test_fits_in_two_threads_are_independent(spark: SparkSession, tmp_path: Path) -> None:
    found: dict[int, Any] = {}

    def fit(width: int) -> None:
        store = Store.create(tmp_path / str(width))
        columns = [F.sin(F.col("id") * (i + 1)).alias(f"a{i}") for i in range(width)]
        df = spark.range(40 + width).select(*columns, F.cos("id").alias("y"))
        names = [f"a{i}" for i in range(width)]
        found[width] = estimator(
            mlp(width),
            store,
            feature_cols=names,
            num_proc=1,
            epochs=2,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        ).fit(df)

    threads = [threading.Thread(target=fit, args=(width,)) for width in (2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for width, model in found.items():
        assert model.history[-1]["rows"] == 40 + width
        names = [f"a{i}" for i in range(width)]
        store = Store.create(tmp_path / str(width))
        expected = one_process(
            mlp(width), store, names, size=1, batch_size=8, lr=0.05, seed=3, epochs=2
        )
        assert_same_weights(model.getModel(), expected, 1e-5)
    assert sorted(found) == [2, 5]


def remember_rows(ctx: Any) -> None:
    """Run a user's loop that only records the rows of each part."""
    for name, loader in (("training", ctx.train_loader), ("validation", ctx.val_loader)):
        rows = [int(row) for batch in loader for row in batch["y"].tolist()]
        path = f"{ctx.run_dir}/user/{name}-{ctx.rank}"
        ctx.store.write_bytes(path, json.dumps(rows).encode())
    ctx.log({"loss": 0.0})


def test_nondeterministic_rows_are_in_either_training_or_validation(
    spark: SparkSession, store: Store
) -> None:
    df = (
        spark.range(300)
        .where(F.rand() < 0.5)
        .select(F.array(F.rand()).alias("x"), F.expr("id AS y"))
    )
    options = {"train_fn": remember_rows, "validation": 0.25, "run_id": "mine", "keep_data": True}
    model = estimator(mlp(1), store, num_proc=1, **options).fit(df)
    assert model.getPredictionCol() == ""  # only the loop knows what it has trained
    parts = {
        name: json.loads(store.read_bytes(f"runs/mine/user/{name}-0"))
        for name in ("training", "validation")
    }
    manifest, values = only_data(store)
    assert 50 < manifest.num_rows < 250
    assert len(parts["validation"]) == round(0.25 * manifest.num_rows)
    assert sorted(parts["training"] + parts["validation"]) == sorted(values["y"].tolist())


@soak("training/test_compiling")
def test_compiled_model_gives_the_same_weights(spark: SparkSession, store: Store) -> None:
    df = spark.range(32).select(
        F.array(F.sin("id"), F.cos("id")).alias("x"), F.sin("id").alias("y")
    )
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "epochs": 2, "num_proc": 1}
    compiled = estimator(mlp(2), store, compile=True, **options).fit(df)
    expected = one_process(mlp(2), store, ["x"], size=1, batch_size=8, lr=0.05, seed=3, epochs=2)
    assert_same_weights(compiled.getModel(), expected, 1e-5)
    assert compiled.transform(df).count() == 32


class Tokens(nn.Module):
    """Two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3)
        self.layer = nn.Linear(2, 3)

    def forward(self, level: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        scale = torch.stack([level, 1 - level], dim=1)
        return (self.layer(scale) * self.embedding(tokens).mean(dim=1)).sum(dim=1)


class Notes(Callback):
    def on_epoch_end(self, ctx: Any, record: dict[str, Any]) -> None:
        record["note"] = f"epoch {ctx.epoch}"


@soak("saving/test_save, saving/test_encoding")
def test_an_estimator_with_many_options_survives_saving(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [
        (["low", "high"][i % 2], list(range(1 + i % 4)), i % 3 / 2, 1.0 + i % 2) for i in range(36)
    ]
    df = spark.createDataFrame(rows, "s string, t array<int>, y double, w double").coalesce(1)
    fit = TorchEstimator(
        model=Tokens,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        loss=lambda output, label, reduction="mean": nn.functional.l1_loss(
            output, label, reduction=reduction
        ),
        lr_scheduler=lambda o, total_steps: torch.optim.lr_scheduler.LinearLR(
            o, 1.0, 0.5, total_iters=total_steps
        ),
        lr_scheduler_interval="step",
        feature_cols=["s", "t"],
        label_cols=["y"],
        inputs={"level": "s", "tokens": "t"},
        decoders={"s": {"low": 0.0, "high": 1.0}},
        collate_fn={"t": pad(8)},
        sample_weight_col="w",
        handle_invalid={"y": 0.0},
        validation=0.25,
        metrics={"size": lambda output, label: output.abs().mean()},
        callbacks=[Notes()],
        early_stopping={"patience": 3},
        return_model="best",
        gradient_clip_norm=1.0,
        gradient_compression=hvd.Compression.powersgd(rank=1),
        accumulate=2,
        precision="bf16-mixed",
        batch_size=4,
        epochs=2,
        num_proc=1,
        random_seed=3,
        verbose=0,
        store=tmp_path / "store",
        predictionCol="prediction",
    )
    path = str(tmp_path / "saved")
    fit.save(path)
    loaded = TorchEstimator.load(path, trust=True)
    assert {p.name for p in loaded._paramMap} == {p.name for p in fit._paramMap}
    for name in ("inputs", "decoders", "collate_fn", "handle_invalid", "early_stopping", "store"):
        assert loaded._get(name) == fit._get(name)
    models = [one.fit(df) for one in (fit, loaded)]
    first, second = (
        [{k: v for k, v in r.items() if not k.endswith(("_s", "seconds"))} for r in m.history]
        for m in models
    )
    assert first == second
    assert [r["note"] for r in first] == ["epoch 1", "epoch 2"]
    assert "val_size" in first[0]
    predictions = [m.transform(df).select("prediction", "y__output").collect() for m in models]
    assert predictions[0] == predictions[1]
