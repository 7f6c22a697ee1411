"""A case trained by the estimator: `fit` on a Spark session, or a rank's loop without Spark."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import types as T  # noqa: N812 - Spark's own short name
from torch import nn

from sparkhvd import TorchEstimator, TorchModel
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.reuse import PreparedData
from sparkhvd.data.store.store import Store
from sparkhvd.engine.engine import Engine
from sparkhvd.estimator import Callback
from sparkhvd.estimator.fitting.cluster import Cluster
from sparkhvd.estimator.fitting.inputs import FitData, FitSources
from sparkhvd.estimator.fitting.request import FitRequest, check_program
from sparkhvd.estimator.fitting.runs import Run
from sparkhvd.estimator.fitting.train_spec import build_train_spec, initialized
from sparkhvd.settings import JobSettings, Settings
from sparkhvd.torch.context import use_engine
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.resume import finish
from sparkhvd.training.modules.copies import copy_with
from sparkhvd.training.program import store_program
from sparkhvd.training.train import train
from tests.corpus.case import BATCH, EPOCHS, ROWS, SEED, Case, Data
from tests.corpus.plain import Trained, evaluate
from tests.harness.ranks import run_ranks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RUN_DIR, DATA_DIR = "runs/corpus", "data/k/corpus"


def estimator(case: Case, *, size: int = 1, **changes: Any) -> TorchEstimator:
    """Make the estimator of a case, as a user would write it."""
    data = case.data
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "num_proc": size,
        "shuffle": False,
        "random_seed": SEED,
        "verbose": 0,
        "max_retries": 0,
        "label_cols": list(data.labels) or None,
        **case.options,
    }
    if data.by_name:
        options["inputs"] = {name: name for name in data.features}
    else:
        options["feature_cols"] = list(data.features)
        if not (data.is_joined or data.is_dict):
            options["input_shapes"] = [[-1, *v.shape[1:]] for v in data.features.values()]
    loss = case.made_loss()
    if loss is not None:
        options |= {"pairs_rows": False, "loss": loss, **case.options}
    options["model"] = model = case.model if case.is_function else case.module()
    if case.has_own_optimizer:
        assert isinstance(model, nn.Module)
        options["optimizer"] = case.make_optimizer(model.parameters())
    elif case.loop is None or case.optimizer is not None:
        options["optimizer"] = case.make_optimizer
    if case.scheduler is not None:
        options["lr_scheduler"] = case.scheduler
        options["lr_scheduler_interval"] = "step" if case.is_per_step else "epoch"
    for name in ("step", "loop"):
        if (function := getattr(case, name)) is not None:
            options["train_step" if name == "step" else "train_fn"] = function
    options |= changes
    return TorchEstimator(**{n: v for n, v in options.items() if v is not None})


# ----------------------------------------------------------------------------------------------------
# On a Spark session.


def dataframe(spark: SparkSession, data: Data) -> DataFrame:
    """Make the rows of a case, in one partition."""
    columns = {
        name: _column(values, flat=not data.by_name) for name, values in data.columns.items()
    }
    return spark.createDataFrame(pa.table(columns)).coalesce(1)


def _column(values: np.ndarray, *, flat: bool) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    if flat:
        values = values.reshape(len(values), -1)
    return pa.array(values.tolist(), type=pa.list_(_element(values)))


def _element(values: np.ndarray) -> pa.DataType:
    element = pa.from_numpy_dtype(values.dtype)
    for _ in range(values.ndim - 2):
        element = pa.list_(element)
    return element


def result_of(case: Case, fitted: TorchModel) -> Trained:
    """Return the result that `fit` has trained, computed without Spark."""
    module = fitted.getModel()
    return Trained(_state(module), evaluate(case, module))


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    # Cloned, because a forward may change them, like a quantizer's observer.
    tensors = {n: v for n, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    return {n: v.detach().clone() for n, v in tensors.items()}


def transformed(fitted: TorchModel, df: DataFrame) -> list[np.ndarray]:
    """Return the outputs in the columns of transform, in order, each (ROWS, numbers per row)."""
    found = fitted.transform(df)
    meanings = {"prediction", "probability", "rawPrediction"}
    names = [n for n in found.columns if n not in df.columns and n not in meanings]
    rows = found.select(*names).collect()
    return [np.array([_numbers(row[n]) for row in rows]) for n in names]


def _numbers(value: Any) -> list[float]:
    return [value] if isinstance(value, float) else list(value.toArray())


class KillOnce(Callback):
    """Kills its rank in the second epoch, in the first attempt."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def on_step_end(self, ctx: Any, loss: Any) -> None:
        del loss
        if (
            ctx.epoch == EPOCHS
            and ctx.step % (ROWS // BATCH) == 3
            and not os.path.exists(self.marker)
        ):
            with open(self.marker, "w"):
                os.kill(os.getpid(), signal.SIGKILL)


# ----------------------------------------------------------------------------------------------------
# Without Spark: checked by the estimator, trained by ranks that are threads.


class Rows:
    """Source of rows of which the estimator needs only the types."""

    name = "DataFrame"

    def __init__(self, data: Data) -> None:
        kinds = {"float32": T.FloatType, "int64": T.LongType, "bool": T.BooleanType}
        columns = []
        for name, values in data.columns.items():
            kind: T.DataType = kinds[str(values.dtype)]()
            for _ in range(values.ndim - 1 if data.by_name else min(1, values.ndim - 1)):
                kind = T.ArrayType(kind)
            columns.append(T.StructField(name, kind))
        self.schema = T.StructType(columns)


def train_on_ranks(case: Case, folder: Path, *, size: int = 1) -> Trained:
    """Train by `check_program`, the spec of a fit and its ranks' loop."""
    store = Store.create(str(folder))
    store.write_bytes("keep", b"")
    checked = check_program(estimator(case, size=size)._options(), FitSources(Rows(case.data)))
    request = FitRequest(
        **vars(checked),
        shim=None,
        store=store,
        cluster=Cluster(size, 0, None, 0, JobSettings(Settings())),
        seed=SEED,
        run=Run(store, RUN_DIR),
        held=None,
        num_checkpoints=1,
        short_steps=False,
    )
    data = _write(store, case.data, checked.schema)
    request = initialized(request, data)
    spec, _ = build_train_spec(request, data)
    weights = store_program(store, RUN_DIR, request.pickled, request.options.model)
    spec = replace(spec, program_weights=weights)

    def rank(engine: Engine) -> None:
        del engine
        torch.set_num_threads(1)  # of this thread
        train(spec)

    run_ranks(size, rank, using=use_engine, deadline_s=100)
    checkpoints = Checkpoints(store, RUN_DIR)
    trained = checkpoints.load_start(checkpoints.path(EPOCHS)).result
    module = copy_with(request.program.model, trained.model)
    finish(module, trained, [])
    return Trained(_state(module), evaluate(case, module))


def _write(store: Store, data: Data, schema: DataSchema) -> FitData:
    """Write the rows as the tasks of a fit do. All values of a column have one shape."""
    known = {
        n: v if data.by_name or v.ndim == 1 else v.reshape(len(v), -1)
        for n, v in data.columns.items()
    }
    features, labels = (
        tuple(replace(c, shape=known[c.name].shape[1:]) for c in columns)
        for columns in (schema.features, schema.labels)
    )
    schema = replace(schema, features=features, labels=labels)
    values = {c.name: known[c.name].astype(c.dtype) for c in schema.columns}
    file = write_packed(store, f"{DATA_DIR}/part-0.parquet", schema.columns, values)
    manifest = Manifest((file,), schema, ROWS)
    manifest.save(store, DATA_DIR)
    return FitData(PreparedData(manifest, DATA_DIR, reused=False, seconds=0.0), None, schema)
