"""Models as ONNX files, run by onnxruntime: the columns of `transform`, for any number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxscript", reason="runs where ONNX is: make test-users")
onnxruntime = pytest.importorskip("onnxruntime", reason="runs where ONNX is: make test-users")

from sparkhvd import TorchClassifier, TorchModel  # noqa: E402 - after importorskip
from sparkhvd.errors import InvalidArgumentError  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
travels_by_value = by_value(__name__)
ROWS = 37


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rng = np.random.default_rng(1)
    x, small = rng.normal(size=(ROWS, 3)), rng.integers(0, 5, ROWS)
    rows = [
        (x[n].tolist(), float(x[n, 0] * 2), int(small[n]), float(small[n] % 3)) for n in range(ROWS)
    ]
    columns = "x array<double>, a double, ids bigint, label double"
    return spark.createDataFrame(rows, columns).coalesce(1).cache()


def computed(path: Path, inputs: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Run a file. Outputs of its first row, of its first two rows and of all rows must agree."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert {each.name for each in session.get_inputs()} == set(inputs)
    names = [each.name for each in session.get_outputs()]
    found = dict(zip(names, session.run(None, inputs), strict=True))
    for rows in (1, 2):
        some = session.run(None, {name: value[:rows] for name, value in inputs.items()})
        for name, value in zip(names, some, strict=True):
            np.testing.assert_allclose(value, found[name][:rows], rtol=1e-5, atol=1e-6)
    return found


def assert_as_transform(model: TorchModel, df: DataFrame, found: dict[str, Any]) -> None:
    table = model.transform(df)
    assert [name for name in table.columns if name not in df.columns] == list(found)
    rows = table.collect()
    for name, value in found.items():
        expected = np.array([np.asarray(getattr(r[name], "values", r[name])) for r in rows])
        assert value.shape == expected.shape
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def column(df: DataFrame, name: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.array([row[name] for row in df.collect()], dtype)


def test_onnx_classifier_gives_the_columns_of_transform(df: DataFrame, tmp_path: Path) -> None:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)
    )
    model = TorchClassifier(
        model=net,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        feature_cols=["x", "a"],
        labelCol="label",
        batch_size=8,
        num_proc=1,
        verbose=0,
        store=tmp_path / "store",
    ).fit(df)
    model.to_onnx(tmp_path / "model.onnx")
    joined = np.column_stack([column(df, "x", "float32"), column(df, "a", "float32")])
    found = computed(tmp_path / "model.onnx", {"input": joined})
    assert list(found) == ["rawPrediction", "probability", "prediction"]
    assert found["prediction"].dtype == np.int64
    assert_as_transform(model, df, found)
    model.setThresholds([0.1, 5.0, 5.0]).to_onnx(tmp_path / "model.onnx")
    assert_as_transform(model, df, computed(tmp_path / "model.onnx", {"input": joined}))

    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    assert session.get_modelmeta().custom_metadata_map == {"columns of input": "x, a"}
    assert session.get_inputs()[0].shape == ["batch", 4]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(3, 2), nn.Embedding(5, 2)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        both = self.linear(x) + self.embedding(ids)
        return {"both": both, "sum": both.sum(1)}


def test_onnx_export_of_an_unfitted_module_with_several_inputs_equals_transform(
    df: DataFrame, tmp_path: Path
) -> None:
    model = TorchModel.from_module(
        Two(),
        inputs={"ids": "ids", "x": "x"},
        input_shapes={"x": [3]},
        outputCols=["b", "s"],
    )
    with pytest.raises(InvalidArgumentError, match="Give dataset=, a DataFrame"):
        model.to_onnx(tmp_path / "two.onnx")
    model.to_onnx(f"file://{tmp_path}/exports/two.onnx", dataset=df)
    given = {"x": column(df, "x", "float32"), "ids": column(df, "ids", "int64")}
    assert_as_transform(model, df, computed(tmp_path / "exports" / "two.onnx", given))


def test_onnx_single_logit_gives_probabilities_of_two_classes(
    df: DataFrame, tmp_path: Path
) -> None:
    model = TorchModel.from_module(
        nn.Linear(3, 1),
        link="sigmoid",
        feature_cols=["x"],
        label_cols=["label"],
        input_shapes=[[3]],
    )
    model.to_onnx(tmp_path / "one.onnx", dataset=df)
    found = computed(tmp_path / "one.onnx", {"input": column(df, "x", "float32")})
    assert list(found) == ["label__output", "rawPrediction", "probability", "prediction"]
    assert_as_transform(model, df, found)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x[:, :1]


def test_module_that_torch_cannot_export_raises_a_clear_error(
    df: DataFrame, tmp_path: Path
) -> None:
    model = TorchModel.from_module(
        Branching(3, 1), feature_cols=["x"], label_cols=["y"], input_shapes=[[3]]
    )
    with pytest.raises(
        InvalidArgumentError, match=r"cannot export Branching: .*without branches on values"
    ):
        model.to_onnx(tmp_path / "branching.onnx", dataset=df)
    assert list(tmp_path.iterdir()) == []
