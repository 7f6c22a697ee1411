"""Data sets written by petastorm, in an environment that has it (`make test-oldest`): pyspark 3.5, pyarrow 14, numpy 1.26."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

petastorm = pytest.importorskip("petastorm", reason="runs where petastorm is: make test-oldest")

from petastorm.codecs import (  # noqa: E402 - after importorskip
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NdarrayCodec,
    ScalarCodec,
)
from petastorm.etl.dataset_metadata import materialize_dataset  # noqa: E402
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row  # noqa: E402
from pyspark.sql import types as T  # noqa: E402, N812 - everyone's name

from sparkhvd import InvalidArgumentError, Store  # noqa: E402
from sparkhvd.estimator import pad  # noqa: E402
from tests.estimator.fits import estimator  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Importing torch and OpenCV in every process of Spark takes long on a busy machine.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

ROWS = 37
SIDE = 6


def schema() -> Any:
    return Unischema(
        "Things",
        [
            UnischemaField("id", np.int64, (), ScalarCodec(T.LongType()), False),
            UnischemaField("y", np.float64, (), ScalarCodec(T.DoubleType()), False),
            UnischemaField("weight", np.float64, (), ScalarCodec(T.DoubleType()), False),
            UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
            UnischemaField("packed", np.float64, (4,), CompressedNdarrayCodec(), False),
            UnischemaField("any", np.int64, (None,), NdarrayCodec(), False),
            UnischemaField("image", np.uint8, (SIDE, SIDE, 3), CompressedImageCodec("png"), False),
        ],
    )


def row(number: int) -> dict[str, Any]:
    generator = np.random.default_rng(number)
    return {
        "id": np.int64(number),
        "y": np.float64(number % 7),
        "weight": np.float64(number / 2),
        "matrix": generator.standard_normal((2, 3)).astype(np.float32),
        "packed": generator.standard_normal(4),
        "any": np.arange(1 + number % 3, dtype=np.int64),
        "image": generator.integers(0, 255, (SIDE, SIDE, 3)).astype(np.uint8),
    }


@pytest.fixture(scope="module")
def encoded(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with a Unischema, written by petastorm."""
    folder = tmp_path_factory.mktemp("petastorm") / "data"
    things = schema()
    with materialize_dataset(spark, folder.as_uri(), things, row_group_size_mb=1):
        rows = [dict_to_spark_row(things, row(number)) for number in range(ROWS)]
        frame = spark.createDataFrame(rows, things.as_spark_schema())
        frame.repartition(3).write.parquet(folder.as_uri())
    return folder


class Everything(nn.Module):
    """Checks that its inputs equal the row, and predicts from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6 + 4 + 1 + 3 + 1, 1)

    def forward(  # noqa: D102
        self,
        number: torch.Tensor,
        matrix: torch.Tensor,
        packed: torch.Tensor,
        any: torch.Tensor,  # noqa: A002 - the column's name
        image: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        if not number.any():  # the driver's trial on zeros
            return self.head(torch.zeros(len(number), 15))
        for at, one in enumerate(number.tolist()):
            expected = row(one)
            assert torch.equal(matrix[at], torch.from_numpy(expected["matrix"]))
            assert torch.equal(packed[at], torch.from_numpy(expected["packed"]).float())
            assert torch.equal(image[at], torch.from_numpy(expected["image"]))
            assert any[at].sum() == expected["any"].sum()
            assert weight[at] == one / 2
        means = image.float().mean((1, 2))
        parts = [
            matrix.flatten(1),
            packed,
            any.float().sum(1, keepdim=True),
            means,
            weight[:, None],
        ]
        return self.head(torch.cat(parts, 1))


COLUMNS = ["id", "matrix", "packed", "any", "image", "weight"]


def test_petastorm_codecs_are_decoded_for_fit_and_transform(
    spark: SparkSession, encoded: Path, tmp_path: Path
) -> None:
    fit = estimator(
        Everything(),
        Store.create(tmp_path / "store"),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-6),
        feature_cols=COLUMNS,
        inputs={"number": "id", **{name: name for name in COLUMNS[1:]}},
        reader="petastorm",
        collate_fn={"any": pad(0)},
        batch_size=5,
        validation=0.2,
        epochs=2,
    )
    trained = fit.fit_on_parquet(encoded)
    assert [record["rows"] for record in trained.getHistory()] == [30, 30]
    # Spark sees the same bytes, and the model has kept the codecs.
    found = trained.transform(spark.read.parquet(str(encoded))).collect()
    assert sorted(r["id"] for r in found) == list(range(ROWS))
    assert all(np.isfinite(r["y__output"]) for r in found)


def test_user_decoder_runs_after_the_petastorm_codec(
    spark: SparkSession, encoded: Path, tmp_path: Path
) -> None:
    fit = estimator(
        nn.Linear(SIDE * SIDE * 3, 1),
        Store.create(tmp_path / "store"),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        feature_cols=["image"],
        reader="petastorm",
        decoders={"image": lambda pixels: pixels.astype(np.float32) / 255},
        num_proc=1,
    )
    trained = fit.fit_on_parquet(encoded.as_uri())
    first = row(0)["image"].astype(np.float32) / 255
    data = spark.read.parquet(str(encoded)).where("id = 0")
    (found,) = trained.transform(data).collect()
    with torch.no_grad():
        expected = trained.getModel()(torch.from_numpy(first.reshape(1, -1)))
    assert found["y__output"] == pytest.approx(float(expected), rel=1e-5)


def test_error_for_encoded_columns_names_the_petastorm_reader(
    spark: SparkSession, encoded: Path
) -> None:
    fit = estimator(nn.Linear(6, 1), feature_cols=["matrix", "id"])
    with pytest.raises(InvalidArgumentError, match="'matrix' is encoded. Give reader='petastorm'"):
        fit.fit_on_parquet(encoded)


def test_petastorm_reader_reads_parquet_without_unischema(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.range(40).selectExpr("array(id, id * 2.0) AS x", "cast(id AS double) AS y")
    frame.repartition(2).write.parquet(str(tmp_path / "plain"))
    fit = estimator(
        nn.Linear(2, 1),
        Store.create(tmp_path / "store"),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-5),
        reader="petastorm",
        num_proc=1,
    )
    assert fit.fit_on_parquet(tmp_path / "plain").getHistory()[0]["rows"] == 40


def test_fit_and_transform_work_with_petastorm_installed(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The environment has the oldest supported pyspark, pyarrow and numpy."""
    frame = spark.range(40).selectExpr("array(id / 40, 1.0D) AS x", "cast(id AS double) AS y")
    fit = estimator(
        nn.Linear(2, 1),
        Store.create(tmp_path / "store"),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-2),
        validation=0.25,
    )
    trained = fit.fit(frame)
    assert trained.getHistory()[0]["rows"] == 30
    assert trained.transform(frame).count() == 40
    with pytest.raises(InvalidArgumentError, match=r"Give the data set to fit_on_parquet\(path\)"):
        fit.copy({fit.reader: "petastorm"}).fit(frame)
