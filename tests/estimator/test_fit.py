"""Real fits on `local[2]`: equal to one process, whatever the rows, partitions, columns and ranks."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

from sparkhvd import Store, TorchEstimator
from sparkhvd.estimator.checkpoint import Checkpoints
from tests.estimator.fits import assert_same_weights, estimator, mlp, one_process
from tests.harness.processes import wait_for_no_trainers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def numbers(spark: SparkSession, rows: int, width: int, partitions: int) -> DataFrame:
    """`rows` rows of doubles a0, a1, ... and a label, in so many partitions (some may be empty)."""
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((rows, width))
    y = x.sum(axis=1) + 0.1 * generator.standard_normal(rows)
    columns = [f"a{i}" for i in range(width)]
    data = [(*map(float, row), float(label)) for row, label in zip(x, y, strict=True)]
    schema = ", ".join(f"{c} double" for c in [*columns, "y"])
    return spark.createDataFrame(data, schema).repartition(partitions)


# (rows, width, kind of the columns, partitions, ranks, batch size, dtype), drawn once at random.
EXAMPLES = [
    (97, 3, "scalars", 3, 2, 8, torch.float32),
    (64, 4, "array", 2, 2, 16, torch.float64),
    (5, 2, "vector", 4, 2, 4, torch.float32),
    (120, 5, "mixed", 1, 1, 32, torch.float64),
    (33, 4, "vector", 2, 2, 64, torch.float32),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e[0]} rows {e[2]}")
def test_fit_equals_one_process(
    spark: SparkSession, store: Store, example: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, width, kind, partitions, ranks, batch_size, dtype = example
    plain = numbers(spark, rows, width, partitions)
    names = [f"a{i}" for i in range(width)]
    if kind == "scalars":
        df, features = plain, names
    elif kind == "array":
        df, features = plain.select(F.array(*names).alias("x"), "y"), ["x"]
    elif kind == "vector":
        df, features = plain.select(array_to_vector(F.array(*names)).alias("x"), "y"), ["x"]
    else:
        rest = F.array(*names[1:])
        df = plain.select("a0", array_to_vector(rest).alias("x"), "y")
        features = ["a0", "x"]
    model = mlp(width, dtype=dtype)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fitted = estimator(
        model,
        store,
        feature_cols=features,
        batch_size=batch_size,
        epochs=2,
        num_proc=ranks,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    ).fit(df)
    assert capfd.readouterr().out == ""  # verbose=0
    expected = one_process(
        model, store, features, size=ranks, batch_size=batch_size, lr=0.05, seed=3, epochs=2
    )
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert_same_weights(fitted.getModel(), expected, tolerance)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])  # the caller's module is as it was
    assert [r["rows"] for r in fitted.history] == [rows, rows]
    assert set(fitted.timings) == {"materialize", "launch", "train"}
    found = [r.y__output for r in fitted.transform(df).select("y__output").collect()]
    assert len(found) == rows


class Shares(nn.Module):
    """Two outputs from two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.layer = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x) + self.embedding(ids)
        return hidden, hidden.sum(dim=1)


def test_several_inputs_labels_weights_validation_and_metrics(
    spark: SparkSession, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    data = [
        (float(a), float(b), int(i), int(i % 3), float(a + b), float(w), bool(v))
        for a, b, i, w, v in zip(
            *generator.standard_normal((2, 60)),
            generator.integers(0, 4, 60),
            generator.random(60),
            generator.random(60) < 0.3,
            strict=True,
        )
    ]
    df = spark.createDataFrame(
        data, "a double, b double, id int, kind int, total double, w double, held_out boolean"
    )
    seen: list[dict[str, Any]] = []
    fitted = TorchEstimator(
        model=Shares(),
        optimizer=torch.optim.Adam,
        loss=[nn.CrossEntropyLoss(), nn.functional.mse_loss],
        loss_weights=[0.7, 0.3],
        feature_cols=["a", "b", "id"],
        inputs={"x": ["a", "b"], "ids": "id"},
        label_cols=["kind", "total"],
        sample_weight_col="w",
        validation="held_out",
        metrics={"size": lambda output, label: output.abs().mean()},
        batch_size=10,
        epochs=3,
        num_proc=2,
        random_seed=0,
        store=store,
        progress=seen.append,
    ).fit(df)
    keys = {"loss", "kind_size", "total_size", "val_loss", "val_kind_size", "val_total_size"}
    assert keys <= set(fitted.history[0])
    assert seen == fitted.history
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 3
    assert re.fullmatch(r"epoch 1/3  loss \d.*  val_loss .*  [\d,]+ rows/s", lines[0])
    held_out = sum(row[-1] for row in data)
    assert fitted.history[0]["rows"] == 60 - held_out
    row = fitted.transform(df).first()
    assert len(row.kind__output) == 3
    assert isinstance(row.total__output, float)


def test_an_interrupted_run_goes_on_where_it_stopped(spark: SparkSession, store: Store) -> None:
    df = numbers(spark, 40, 3, 2).select(F.array("a0", "a1", "a2").alias("x"), "y")
    model = mlp(3)
    options = {"optimizer": torch.optim.Adam, "keep_data": True, "data_key": "d"}
    whole = estimator(model, store, epochs=3, **options).fit(df)
    estimator(model, store, epochs=2, run_id="mine", **options).fit(df)
    resumed = estimator(model, store, epochs=3, run_id="mine", **options).fit(df)
    for name, value in whole.getModel().state_dict().items():
        assert torch.equal(value, resumed.getModel().state_dict()[name])
    assert [r["epoch"] for r in resumed.history] == [1, 2, 3]
    assert Checkpoints(store, "runs/mine").latest_epoch() == 3


def test_cross_validation_and_param_maps(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

    df = numbers(spark, 40, 2, 2).select(F.array("a0", "a1").alias("x"), "y")
    est = estimator(
        mlp(2), store, predictionCol="prediction", num_proc=1, optimizer=torch.optim.SGD
    )
    est.setOptimizer(torch.optim.Adam)
    grid = ParamGridBuilder().addGrid(est.epochs, [2]).build()
    cv = CrossValidator(
        estimator=est,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y"),
        numFolds=2,
        parallelism=2,
    )
    best = cv.fit(df)
    assert len(best.avgMetrics) == 1
    assert all(np.isfinite(best.avgMetrics))
    assert best.bestModel.uid == est.uid
    best.write().overwrite().save(str(tmp_path / "cv"))
    loaded = CrossValidatorModel.load(str(tmp_path / "cv"))
    assert loaded.bestModel.transform(df).collect() == best.bestModel.transform(df).collect()
    assert threading.active_count() < 20


def test_fit_leaves_no_process(spark: SparkSession) -> None:
    assert wait_for_no_trainers() == set()
