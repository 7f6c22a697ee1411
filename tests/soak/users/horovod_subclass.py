"""Subclasses of Horovod's Lightning estimator and its model, written for Horovod: hooks, Params, backends, columns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as pl
import numpy as np
import torch
from PIL import Image
from pyspark import keyword_only
from pyspark.ml.param import Param, Params
from torch import nn

import sparkhvd

sparkhvd.install_as_horovod()

import horovod.torch  # noqa: E402 - after the alias
from horovod.spark.common.backend import SparkBackend  # noqa: E402 - after the alias
from horovod.spark.common.store import LocalStore  # noqa: E402
from horovod.spark.lightning import TorchEstimator, TorchModel  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SIDE = 8


class OwnBackend(SparkBackend):  # type: ignore[misc]  # untyped
    """Runs ranks itself, and records its calls."""

    asked = 0

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        type(self).asked += 1
        import horovod.spark

        full = {**(self._env or {}), **(env or {}), "OF_THE_BACKEND": "yes"}
        return horovod.spark.run(
            fn, args=args, kwargs=kwargs, num_proc=self._num_proc, env=full, **self._kwargs
        )

    def num_processes(self) -> int:
        return self._num_proc


class Pictures(pl.LightningModule):  # type: ignore[misc]  # untyped
    def __init__(self, image_col: str, label_col: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image_col, self.label_col = image_col, label_col
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 2))

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Any:
        import os

        assert isinstance(batch, dict)
        assert os.environ["OF_THE_BACKEND"] == "yes"
        assert batch[self.image_col].dtype == torch.float32
        assert batch[self.image_col].shape[1:] == (3, SIDE, SIDE)
        loss = nn.functional.cross_entropy(
            self(batch[self.image_col]), batch[self.label_col].long()
        )
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        scores = self(batch[self.image_col])
        self.log("val_right", (scores.argmax(1) == batch[self.label_col]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def opened(path: str) -> Any:
    with Image.open(path) as picture:
        values = np.asarray(picture.convert("RGB"), np.float32) / 255 - 0.5
    return values.transpose(2, 0, 1)


class Columns(Params):
    image_col = Param(Params._dummy(), "image_col", "column of paths")
    label_col = Param(Params._dummy(), "label_col", "column of classes")
    prediction_col = Param(Params._dummy(), "prediction_col", "column of predictions")

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(image_col="image", label_col="label", prediction_col="prediction")

    def getImageCol(self) -> str:  # noqa: N802
        return self.getOrDefault(self.image_col)

    def getPredictionCol(self) -> str:  # noqa: N802
        return self.getOrDefault(self.prediction_col)

    def setPredictionCol(self, value: str) -> Any:  # noqa: N802
        return self._set(prediction_col=value)

    def getLabelCol(self) -> str:  # noqa: N802
        return self.getOrDefault(self.label_col)


class Classifier(TorchEstimator, Columns):  # type: ignore[misc]  # untyped
    backbone = Param(Params._dummy(), "backbone", "name of a network")

    @keyword_only  # type: ignore[misc]  # untyped
    def __init__(
        self,
        *,
        backbone: Any = None,
        num_proc: Any = None,
        backend: Any = None,
        store: Any = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        metrics: Any = None,
        epochs: int = 1,
        batch_size: int = 32,
        verbose: int = 1,
        validation: Any = None,
        callbacks: Any = None,
        run_id: Any = None,
        num_gpus: Any = None,
        mp_start_method: Any = None,
        image_col: str = "image",
        label_col: str = "label",
    ) -> None:
        super().__init__()
        self._setDefault(
            backbone=None,
            num_proc=None,
            backend=None,
            store=None,
            optimizer=None,
            loss=None,
            loss_constructors=None,
            metrics=[],
            callbacks=[],
            feature_cols=["image"],
            label_cols=["label"],
            use_gpu=True,
            num_gpus=None,
            mp_start_method=None,
            terminate_on_nan=False,
            data_module=None,
            loader_num_epochs=None,
            profiler=None,
            debug_data_loader=False,
            train_async_data_loader_queue_size=None,
            val_async_data_loader_queue_size=None,
            reader_pool_type="thread",
            inmemory_cache_all=False,
            shuffle=True,
            partitions_per_process=10,
            train_reader_num_workers=2,
            logger=None,
            log_every_n_steps=50,
            trainer_args=None,
        )
        self._set(**self._input_kwargs)
        self.setFeatureCols([self.getImageCol()])
        self.setLabelCols([self.getLabelCol()])
        self.model_made = False

    def _get_or_create_backend(self) -> Any:
        return self.getBackend() or OwnBackend(self.getNumProc(), verbose=self.getVerbose())

    def _fit(self, dataset: Any) -> Any:
        column = self.getImageCol()

        def transformed(row: dict[str, Any]) -> dict[str, Any]:
            row[column] = opened(row[column])
            return row

        self.setModel(Pictures(column, self.getLabelCol()))
        self.setInputShapes([[-1, 3, SIDE, SIDE]])
        self.setTransformationFn(transformed)
        self.setTransformationEditFields([(column, np.float32, (3, SIDE, SIDE), False)])
        self.setTransformationRemovedFields([])
        self.model_made = True
        return super()._fit(dataset)

    def get_model_class(self) -> Any:
        return ClassifierModel

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: Any, metadata: Any
    ) -> dict[str, Any]:
        return {
            "history": history,
            "model": model,
            "optimizer": optimizer,
            "input_shapes": self.getInputShapes(),
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getLoss(),
            "loss_constructors": self.getLossConstructors(),
            "label_col": self.getLabelCol(),
            "image_col": self.getImageCol(),
        }


class ClassifierModel(TorchModel, Columns):  # type: ignore[misc]  # untyped
    @keyword_only  # type: ignore[misc]  # untyped
    def __init__(
        self,
        *,
        history: Any = None,
        model: Any = None,
        input_shapes: Any = None,
        optimizer: Any = None,
        run_id: Any = None,
        _metadata: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        label_col: str = "label",
        image_col: str = "image",
    ) -> None:
        super().__init__()
        self._setDefault(
            optimizer=None,
            loss=None,
            loss_constructors=None,
            input_shapes=None,
            feature_columns=["image"],
            label_columns=["label"],
            outputCols=["output"],
        )
        self.setParams(**self._input_kwargs)

    @keyword_only  # type: ignore[misc]  # untyped
    def setParams(self, **_: Any) -> Any:  # noqa: N802
        return self._set(**self._input_kwargs)

    def get_prediction_fn(self) -> Any:
        column = self.getImageCol()

        def predict(model: Any, row: dict[str, Any]) -> Any:
            with torch.no_grad():
                return model(torch.from_numpy(opened(row[column]))[None])

        return predict

    def _transform(self, df: DataFrame) -> DataFrame:
        from pyspark.sql.functions import col, udf
        from pyspark.sql.types import DoubleType

        self.setFeatureColumns([self.getImageCol()])
        self.setLabelColoumns([self.getLabelCol()])
        output = super()._transform(df)
        best = udf(lambda scores: float(np.argmax(scores)), DoubleType())
        return output.withColumn(self.getPredictionCol(), best(col(self.getOutputCols()[0])))


WORDS = 6


class BareBackend:
    """Has only the required methods of a backend."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        import horovod.spark

        return horovod.spark.run(fn, args=args, kwargs=kwargs, num_proc=self.size, env=env)

    def num_processes(self) -> int:
        return self.size


class Texts(pl.LightningModule):  # type: ignore[misc]  # untyped
    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate = rate
        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Any) -> Any:
        return self.head(self.words(input_ids).mean(1))

    def training_step(self, batch: Any, _: int) -> Any:
        assert set(batch) == {"input_ids", "labels"}, set(batch)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        loss = nn.functional.cross_entropy(self(batch["input_ids"]), batch["labels"])
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


def tokens(text: str) -> Any:
    numbers = [sum(map(ord, word)) % 63 + 1 for word in text.split()][:WORDS]
    return np.array(numbers + [0] * (WORDS - len(numbers)))


class TextClassifier(TorchEstimator):  # type: ignore[misc]  # untyped
    # The estimator has a Param of this name too, and refuses it for a LightningModule.
    learning_rate = Param(Params._dummy(), "learning_rate", "of the module's optimizer")

    def _fit(self, dataset: Any) -> Any:
        def transformed(row: dict[str, Any]) -> dict[str, Any]:
            assert isinstance(row["text"], str)
            return {**row, "input_ids": tokens(row["text"]), "labels": row["label"]}

        self.setModel(Texts(self.getOrDefault("learning_rate")))
        self.setTransformationFn(transformed)
        self.setTransformationEditFields(
            [("input_ids", np.int64, (WORDS,), False), ("labels", np.int64, (), False)]
        )
        self.setTransformationRemovedFields(["text", "label"])
        return super()._fit(dataset)

    def get_model_class(self) -> Any:
        return TextModel


class TextModel(TorchModel):  # type: ignore[misc]  # untyped
    def get_prediction_fn(self) -> Any:
        (column,) = self.getFeatureColumns()

        def predict(model: Any, row: dict[str, Any]) -> Any:
            with torch.no_grad():
                return model(torch.from_numpy(tokens(row[column]))[None])

        return predict


def pictures(spark: SparkSession, folder: Path) -> DataFrame:
    """Dark or bright pictures by their paths."""
    folder.mkdir()
    rows = []
    for number in range(40):
        label = number % 2
        values = np.random.default_rng(number).integers(0, 100, (SIDE, SIDE, 3)) + 150 * label
        path = str(folder / f"{number}.png")
        Image.fromarray(values.astype(np.uint8)).save(path)
        rows.append((path, label, number % 5 == 0))
    return spark.createDataFrame(rows, ["image", "label", "held_out"])


def fit_pictures(spark: SparkSession, folder: Path) -> None:
    df = pictures(spark, folder / "pictures")
    store = LocalStore(str(folder / "store"))
    asked = OwnBackend.asked
    estimator = Classifier(
        backbone="none", num_proc=2, store=store, epochs=6, batch_size=4, validation="held_out"
    )
    model = estimator.fit(df)
    assert estimator.model_made
    assert OwnBackend.asked == asked + 1
    assert isinstance(model, ClassifierModel)
    assert len(model.getHistory()) == 6
    assert model.getOrDefault("history") == model.getHistory()
    assert model.getOrDefault("_metadata")["image"]["spark_data_type"].__name__ == "StringType"
    assert store.exists(store.get_run_path(model.getRunId()))
    found = model.transform(df).select("label", "prediction", "output").collect()
    assert len(found[0].output) == 2
    assert sum(row.label == row.prediction for row in found) > 35, found


def fit_texts(spark: SparkSession, folder: Path) -> None:
    rows = [(f"{'good fine' if n % 2 else 'bad poor'} thing {n}", n % 2) for n in range(40)]
    df = spark.createDataFrame(rows, ["text", "label"])
    estimator = TextClassifier(
        backend=BareBackend(2),
        store=LocalStore(str(folder / "store")),
        feature_cols=["text"],
        label_cols=["label"],
        batch_size=4,
        epochs=4,
        outputCols=["scores"],
        train_steps_per_epoch=5,
        gradient_compression=horovod.torch.Compression.fp16,
        metrics=[],
        trainer_args={"gradient_clip_val": 10.0},
    )
    estimator._set(learning_rate=0.02)
    assert estimator.getCallbacks() == []
    assert estimator.getPartitionsPerProcess() == 10
    assert estimator.getReaderPoolType() == "thread"
    assert estimator.getUseGpu() is True
    for name in ("num_proc", "validation", "run_id", "loader_num_epochs"):
        assert estimator.getOrDefault(name) is None
    model = estimator.fit(df)
    assert isinstance(model, TextModel)
    assert model.getOutputCols() == ["scores"]
    (name,) = model.getOutputCols()
    logs = folder / "store" / "runs" / model.getRunId() / "logs"
    assert list(logs.rglob("metrics.csv")) + list(logs.rglob("events.*"))
    found = model.transform(df).select("label", name).collect()
    assert sum(int(np.argmax(row[1])) == row.label for row in found) > 35, found
