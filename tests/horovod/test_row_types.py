"""Types that `transformation_fn` gets for columns of every type, and of the tensors after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from torch import nn

from sparkhvd.horovod.spark.torch import TorchEstimator
from tests.harness.by_value import by_value

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

# By Spark type: the type in a row, and the dtype of the batch.
TYPES = {
    "boolean": ("bool", "bool"),
    "tinyint": ("int8", "int64"),
    "smallint": ("int16", "int64"),
    "int": ("int32", "int64"),
    "bigint": ("int64", "int64"),
    "float": ("float32", "float32"),
    "double": ("float64", "float32"),
    "decimal(12,3)": ("float64", "float32"),
    "array<boolean>": ("array bool", "bool"),
    "array<int>": ("array int32", "int64"),
    "array<bigint>": ("array int64", "int64"),
    "array<float>": ("array float32", "float32"),
    "array<double>": ("array float64", "float32"),
    "array<decimal(9,2)>": ("array float64", "float32"),
    "array<array<double>>": ("array float64", "float32"),
    "vector": ("array float64", "float32"),
}
# Neither float32 nor float16 can hold it, so a conversion to them changes the value.
EXACT = 1 / 3


def named(kind: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in kind)


def rows(spark: SparkSession) -> DataFrame:
    df = spark.range(8).selectExpr("id", f"id + {EXACT}D AS number")
    for kind in TYPES:
        depth, element = kind.count("array<"), kind.replace("array<", "").rstrip(">")
        value = f"CAST(number AS {'double' if kind == 'vector' else element})"
        for _ in range(depth or int(kind == "vector")):
            value = f"array({value}, {value})"
        df = df.selectExpr("*", f"{value} AS {named(kind)}")
    df = df.withColumn("vector", array_to_vector(col("vector")))
    return df.selectExpr(
        "*",
        "CAST(id % 2 AS double) AS label",
        "number AS weight",
        "CAST(id AS string) AS text",
        "CAST(CAST(id AS string) AS binary) AS bytes",
    )


def shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}"
    return value.dtype.name if isinstance(value, np.generic) else type(value).__name__


class Noting:
    """Records the types of a row, makes a class from the label, and adds its own fields."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        kinds = {name: shown(value) for name, value in row.items()}
        (self.folder / "row.json").write_text(json.dumps(kinds))
        assert float(row["double"]) % 1 == pytest.approx(EXACT, abs=1e-14)
        return {
            **row,
            "label": torch.tensor(row["label"], dtype=int),  # type: ignore[arg-type]
            "double": row["double"] * 2,
            "made": row["vector"] + 1,
            "declared": row["vector"] + 1,
        }


def note_batch(folder: Path, batch: dict[str, Any]) -> None:
    kinds = {
        name: str(value.dtype).removeprefix("torch.") if torch.is_tensor(value) else "list"
        for name, value in batch.items()
    }
    (folder / "batch.json").write_text(json.dumps(kinds))


def step(folder: Path, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    note_batch(folder, batch)
    scores = model(batch["vector"])
    return nn.functional.cross_entropy(scores, batch["label"])


class FirstTwo(nn.Module):
    """Takes all columns as one tensor, and uses its first two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x[:, :2])


def classes(folder: Path) -> nn.Module:
    import lightning

    class Classes(lightning.LightningModule):  # type: ignore[misc,name-defined]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return step(folder, self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Classes()


def common(folder: Path) -> dict[str, Any]:
    return {
        "feature_cols": [named(kind) for kind in TYPES],
        "label_cols": ["label"],
        "sample_weight_col": "weight",
        "transformation_fn": Noting(folder),
        "num_proc": 1,
        "batch_size": 4,
        "epochs": 1,
        "store": str(folder / "store"),
        "verbose": 0,
    }


def found(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    row, batch = (json.loads((folder / f"{part}.json").read_text()) for part in ("row", "batch"))
    return row, batch


def test_rows_have_column_types_and_batches_have_model_types(
    spark: SparkSession, tmp_path: Path
) -> None:
    model = FirstTwo()
    TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_step=lambda model, batch, ctx: step(tmp_path, model, batch),
        **common(tmp_path),
    ).fit(rows(spark))
    row, batch = found(tmp_path)
    wanted = {named(kind): types for kind, types in TYPES.items()}
    assert row == {**{n: t[0] for n, t in wanted.items()}, "label": "float64", "weight": "float64"}
    assert batch == {**{n: t[1] for n, t in wanted.items()}, "label": "int64", "weight": "float32"}


@pytest.fixture(scope="module")
def lightning() -> None:
    """Load Lightning before the leak check, because it sets an environment variable."""
    pytest.importorskip("lightning", reason="Lightning is not installed")


@pytest.mark.usefixtures("lightning")
def test_lightning_rows_have_column_types_and_batches_have_model_types(
    spark: SparkSession, tmp_path: Path
) -> None:
    from sparkhvd.horovod.spark.lightning import TorchEstimator

    given = common(tmp_path)
    given["feature_cols"] = [*given["feature_cols"], "text", "bytes"]
    model = TorchEstimator(
        model=classes(tmp_path),
        transformation_edit_fields=[("declared", np.float64, None, False)],
        **given,
    ).fit(rows(spark))
    # `transform` does not call the function: a column has the model's input type.
    dtypes = {c.name: c.dtype for c in model._fitted.columns}
    assert [dtypes[name] for name in ("int", "double", "vector")] == ["int64", "float32", "float32"]
    row, batch = found(tmp_path)
    wanted = {named(kind): types for kind, types in TYPES.items()}
    others = {"label": "float64", "weight": "float64", "text": "str", "bytes": "bytes"}
    assert row == {**{n: t[0] for n, t in wanted.items()}, **others}
    others = {"label": "int64", "weight": "float32", "text": "list", "bytes": "list"}
    others |= {"made": "float32", "declared": "float64"}
    assert batch == {**{n: t[1] for n, t in wanted.items()}, **others}
