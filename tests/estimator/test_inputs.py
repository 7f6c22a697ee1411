"""All kinds of input through a real fit and transform, with a second DataFrame for validation."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F  # noqa: N812 - everyone's name
from pyspark.sql import types as T  # noqa: N812 - everyone's name
from torch import Tensor, nn

from sparkhvd import InvalidArgumentError, Store
from sparkhvd.estimator import Callback, pad
from tests.estimator.fits import estimator, mlp
from tests.harness.by_value import by_value
from tests.harness.processes import peak_bytes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


DIMENSIONS = 10_000_000
SIDE = 4
LOOKUP = {"low": 0, "high": 1}
# The first value alone would make it integers.
SCALES = {"low": 0, "high": 0.5}
IMAGES = 1000
BATCH = 100
# Limit of a rank, including torch. A dense batch of the sparse column would take BATCH * DIMENSIONS * 4 bytes: 4 GB.
MEMORY_BYTES = 1 << 30


class WithinMemory(Callback):
    """Fails the fit if a rank exceeds its memory limit at any time."""

    def on_train_end(self, ctx: Any, history: list[dict[str, Any]]) -> None:
        peak = peak_bytes()
        if peak > MEMORY_BYTES:
            raise MemoryError(f"rank {ctx.rank} has had {peak:,} bytes")


def png(pixels: np.ndarray) -> bytes:
    """Draw a grey PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width = pixels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(raw))
        + chunk(b"IEND", b"")
    )


def pixels_of(data: bytes) -> np.ndarray:
    """Return the picture of `png` as floats from 0 to 1 of shape (1, height, width)."""
    width, height = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT") + 4
    raw = np.frombuffer(zlib.decompress(data[start:]), np.uint8).reshape(height, width + 1)
    return raw[None, :, 1:] / 255


class Everything(nn.Module):
    """Takes an image, a varying number of words, a sparse vector, a nested array and two words."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 1, SIDE)
        self.words = nn.Embedding(20, 1)
        self.wide = nn.Parameter(torch.zeros(8, 1))
        self.nested = nn.Linear(6, 1)
        self.level = nn.Embedding(2, 1)

    def forward(  # noqa: D102
        self,
        image: Tensor,
        words: Tensor,
        wide: Tensor,
        nested: Tensor,
        level: Tensor,
        scale: Tensor,
    ) -> Tensor:
        assert image.shape[1:] == (1, SIDE, SIDE)
        assert nested.shape[1:] == (2, 3)
        assert wide.shape == (len(image), DIMENSIONS)
        rows, columns = wide.indices()
        hashed = self.wide[columns % 8] * wide.values()[:, None]
        linear = torch.zeros(len(image), 1).index_add(0, rows, hashed)
        mean = self.words(words).mean(1) * (1 + scale[:, None])
        return (
            self.image(image).reshape(-1, 1)
            + linear
            + mean
            + self.nested(nested.flatten(1))
            + self.level(level)
        )


def frame(spark: SparkSession, count: int, seed: int) -> DataFrame:
    rng = np.random.default_rng(seed)
    rows = [
        (
            bytearray(png(rng.integers(0, 255, (SIDE, SIDE), dtype=np.uint8))),
            [int(w) for w in rng.integers(1, 20, rng.integers(1, 6))],
            Vectors.sparse(DIMENSIONS, {int(i): 1.0 for i in rng.integers(0, DIMENSIONS, 10)}),
            rng.random((2, 3)).tolist(),
            "high" if i % 2 else "low",
            "high" if i % 3 else "low",
            float(i % 2),
        )
        for i in range(count)
    ]
    schema = T.StructType(
        [
            T.StructField("image", T.BinaryType()),
            T.StructField("words", T.ArrayType(T.IntegerType())),
            T.StructField("wide", VectorUDT()),
            T.StructField("nested", T.ArrayType(T.ArrayType(T.DoubleType()))),
            T.StructField("level", T.StringType()),
            T.StructField("scale", T.StringType()),
            T.StructField("y", T.DoubleType()),
        ]
    )
    return spark.createDataFrame(rows, schema)


def test_model_trains_and_predicts_with_every_kind_of_input(
    spark: SparkSession, tmp_path: Path
) -> None:
    store = Store.create(tmp_path / "store")
    model = Everything()
    fit = estimator(
        model,
        store,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        feature_cols=["image", "words", "wide", "nested", "level", "scale"],
        decoders={"image": pixels_of, "level": LOOKUP, "scale": SCALES},
        collate_fn={"words": pad(0)},
        validation=frame(spark, 3, seed=1),
        num_workers=2,
        batch_size=BATCH,
        epochs=3,
        callbacks=[WithinMemory()],
    )
    df = frame(spark, IMAGES, seed=0)
    trained = fit.fit(df)
    assert trained.history[-1]["loss"] < trained.history[0]["loss"]
    assert all(np.isfinite(r["val_loss"]) for r in trained.history)
    assert store.data_directories() == []  # another fit might have other rows
    # The same rows through the module in plain PyTorch.
    rows = df.collect()
    module = trained.getModel()
    lengths = max(len(r.words) for r in rows)
    with torch.no_grad():
        expected = module(
            torch.tensor(np.stack([pixels_of(bytes(r.image)) for r in rows])).float(),
            torch.tensor([r.words + [0] * (lengths - len(r.words)) for r in rows]),
            torch.sparse_coo_tensor(
                np.array([(i, j) for i, r in enumerate(rows) for j in r.wide.indices]).T,
                np.concatenate([r.wide.values for r in rows]).astype(np.float32),
                (len(rows), DIMENSIONS),
                check_invariants=True,
            ).coalesce(),
            torch.tensor([r.nested for r in rows]),
            torch.tensor([LOOKUP[r.level] for r in rows]),
            torch.tensor([SCALES[r.scale] for r in rows]),
        )
    # `pad` fills up to the longest row of a batch, so one batch gives the result of one call.
    found = [r.y__output for r in trained.transform(df.coalesce(1)).select("y__output").collect()]
    np.testing.assert_allclose(found, expected.reshape(-1).numpy(), rtol=1e-4, atol=1e-5)
    # Without Spark, of the frame that it collects.
    alone = trained.local().predict(df.toPandas())["y__output"]
    np.testing.assert_allclose(alone, found, rtol=1e-4, atol=1e-5)
    few = df.limit(2)
    before = [r.y__output for r in trained.transform(few).collect()]
    after = [r.y__output for r in trained.setModel(Everything()).transform(few).collect()]
    assert before != after


def test_rows_with_nulls_are_skipped_or_filled(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [
        ([1.0, 2.0], 1.0),
        ([3.0, None], 2.0),
        (None, 3.0),
        ([5.0, 6.0], None),
        ([1.0, 1.0], 2.0),
    ]
    df = spark.createDataFrame(rows * 4, "x array<double>, y double").coalesce(2)
    model = estimator(
        mlp(2),
        Store.create(tmp_path / "store"),
        num_proc=1,
        handle_invalid="skip",
        verbose=1,
    ).fit(df)
    assert model.history[-1]["rows"] == 8
    said = "handle_invalid skipped 12 of 20 training rows with a null or an invalid number"
    assert capfd.readouterr().out.count(said) == 1
    # Transform reads only features.
    assert model.transform(df).count() == 12
    filled = model.copy().setHandleInvalid({"x": 0.0}).transform(df.filter("x IS NOT NULL"))
    assert filled.count() == 16
    assert filled.filter("x[1] IS NULL").count() == 4
    large = df.filter("y = 1.0").withColumn("k", F.lit(2**24 + 1))
    with pytest.raises(
        InvalidArgumentError, match="float32 cannot hold exactly, for example 1677721"
    ):
        estimator(mlp(3), num_proc=1, feature_cols=["x", "k"]).fit(large)
    with pytest.raises(
        InvalidArgumentError, match="All 4 rows of the DataFrame hold a null or an invalid number"
    ):
        estimator(mlp(2), num_proc=1, handle_invalid="skip").fit(df.filter("x IS NULL"))


class Heads(nn.Module):
    """Targets and classes of rows with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.targets, self.kinds = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(torch.cat([x.nan_to_num(), x.isnan().float()], 1)))
        return self.targets(hidden), self.kinds(hidden)


def masked(output: Tensor, label: Tensor) -> Tensor:
    is_there = ~label.isnan()
    return ((output - label)[is_there] ** 2).mean()


def focal(output: Tensor, label: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(output, label, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def test_kept_nans_and_double_class_labels_equal_a_plain_loop(
    spark: SparkSession, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((24, 2)), rng.standard_normal((24, 2))
    x[::5, 0], t[::3, 1], t[1::7] = np.nan, np.nan, np.nan
    k = rng.integers(0, 3, 24)
    rows = [(a, b, float(c)) for a, b, c in zip(x.tolist(), t.tolist(), k, strict=True)]
    rows[2] = ([rows[2][0][0], None], *rows[2][1:])  # a null is a NaN then, too
    x[2, 1] = np.nan
    df = spark.createDataFrame(rows, "x array<double>, t array<double>, k double").coalesce(1)
    df.write.parquet(str(tmp_path / "rows"))
    torch.manual_seed(1)
    plain = Heads()
    fit = estimator(
        plain,
        Store.create(tmp_path / "store"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=[masked, focal],
        label_cols=["t", "k"],
        num_proc=1,
        epochs=2,
        shuffle=False,
        handle_invalid={"x": "keep", "t": "keep"},
    )
    fitted = [
        fit.copy().setValidation(df.limit(4).coalesce(1)).fit(df),
        fit.fit_on_parquet(tmp_path / "rows"),
    ]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    as_tensors = [torch.tensor(x).float(), torch.tensor(t).float(), torch.tensor(k)]
    for _ in range(2):
        for start in range(0, 24, 8):
            inputs, targets, classes = (each[start : start + 8] for each in as_tensors)
            first, second = plain(inputs)
            optimizer.zero_grad()
            (0.5 * masked(first, targets) + 0.5 * focal(second, classes)).backward()
            optimizer.step()
    for model in fitted:
        for name, value in plain.state_dict().items():
            assert torch.equal(model.getModel().state_dict()[name], value), name
    with torch.no_grad():
        first, second = plain(as_tensors[0])
        held_out = 0.5 * masked(first[:4], as_tensors[1][:4]) + 0.5 * focal(
            second[:4], as_tensors[2][:4]
        )
    assert fitted[0].history[-1]["val_loss"] == pytest.approx(float(held_out), rel=1e-6)
    found = [r.t__output.toArray() for r in fitted[0].transform(df).select("t__output").collect()]
    np.testing.assert_allclose(found, first.numpy(), rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match=r"give handle_invalid=\{'t': 'keep'\}"):
        fit.copy().setHandleInvalid({"x": "keep"}).fit(df)
    with pytest.raises(
        InvalidArgumentError, match="'k' .* not whole, but it is to be stored as int64"
    ):
        fit.fit(df.withColumn("k", F.col("k") / 2))


def test_validation_dataframe_must_match_the_training_dataframe(
    spark: SparkSession, tmp_path: Path
) -> None:
    store = Store.create(tmp_path / "store")
    df = spark.createDataFrame([([1.0, 2.0], 1.0)] * 4, "x array<double>, y double")
    for validation, message in (
        (df.drop("y"), "The DataFrame given as validation: label_cols[0] names column 'y'"),
        (
            df.select(F.lit(1.0).alias("x"), "y"),
            "The DataFrame given as validation has column 'x' of type double; in the training data it is array<double>.",
        ),
        (
            df.select(F.array(F.lit(1.0)).alias("x"), "y"),
            "The DataFrame given as validation has shape (1,) per row in column 'x', but the training data have (2,).",
        ),
        (df.filter("y > 5"), "The DataFrame given as validation: The DataFrame has no rows"),
    ):
        with pytest.raises(InvalidArgumentError) as failed:
            estimator(mlp(2), store, validation=validation).fit(df)
        assert str(failed.value).startswith(message)
