"""`KerasEstimator`: a model of Keras, trained on a DataFrame by Keras' own `fit` on ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml.util import MLWriter

import sparkhvd.torch as hvd
from sparkhvd.data.columns.binding import model_dtype
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.dataset import Dataset
from sparkhvd.data.reading.source import open_source
from sparkhvd.data.reuse import prepare
from sparkhvd.data.store.default import default_store
from sparkhvd.estimator.base import RankEstimator
from sparkhvd.estimator.fitting.progress import report_skipped
from sparkhvd.estimator.params.base import with_signature
from sparkhvd.estimator.saving.persistence import EstimatorWriter
from sparkhvd.keras.meaning import link_of
from sparkhvd.keras.model import KerasModel
from sparkhvd.keras.network import CompiledNetwork, Network
from sparkhvd.keras.params import KerasParams
from sparkhvd.keras.training import Order, train
from sparkhvd.runner import run
from sparkhvd.sessions import check_dataframe
from sparkhvd.training.user_code.transformations import (
    Transformations,
    flat_columns,
    resolve_transformations,
    transformed_by,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["KerasEstimator"]


@with_signature
class KerasEstimator(KerasParams, RankEstimator[KerasModel]):
    """Estimator of a model of Keras 3: Keras' `fit` on ranks of Spark, over rows that the driver has written into the store.

        estimator = KerasEstimator(
            model=model, optimizer=keras.optimizers.Adam(0.001), loss="mse", feature_cols=["x"], label_cols=["y"], epochs=10, num_proc=2)
        fitted = estimator.fit(df)  # KerasModel

    Every row comes once per epoch over all ranks. The gradient of a step is the mean of all its rows, also of a last one whose ranks have
    unequally many; metrics are those of all rows. The learning rate is used as given, and the model is not modified. Arguments and their
    meaning: `explainParams()`.
    """

    def __init__(self, *positional: object, **keywords: Any) -> None:
        super().__init__()
        self._set_keywords(positional, keywords)

    def _fit(self, dataset: DataFrame) -> KerasModel:
        """Train on a DataFrame; Spark's `fit` calls it.

        Raises:
            InvalidArgumentError: a Param or column is wrong, before any job.
            RankError: a rank failed.
        """
        check_dataframe("fit", dataset)
        self._check_values()
        compiling = self._compiling()
        transformations = resolve_transformations(
            self._get("transformation_fn"), self._get("batch_transform_fn")
        )
        network = Network(self._get("model"), self._get("custom_objects"))
        data = self._prepare(dataset, network, transformations)
        order = Order(network=network, dataset=data.rows, **compiling, **self._training(data))
        found = run(
            train,
            args=(order,),
            num_proc=self._get("num_proc"),
            spark=dataset.sparkSession,
            env={**(self._get("backend_env") or {}), "KERAS_BACKEND": "torch"},
            verbose=self._get("verbose"),
            settings=self._get("settings"),
            max_retries=self._get("max_retries"),
            start_timeout=self._get("start_timeout"),
            use_gpu=self._get("use_gpu"),
        )
        assert found[0] is not None  # rank 0's
        return self._model(order, data, *found[0])

    def _columns(self) -> tuple[list[str], list[str], str | None]:
        """Return the columns of features, of labels, and that of weights."""
        return self._get("feature_cols"), self._get("label_cols"), self._get("sample_weight_col")

    def _prepare(
        self, df: DataFrame, network: Network, transformations: Transformations
    ) -> _FitData:
        """Write the columns into the store, or find them there; run the user's functions on the first rows."""
        features, labels, weight = self._columns()
        functions = RowFunctions(self._get("decoders") or {})
        store = default_store(df.sparkSession, self._get("store"))
        schema = check_schema(
            df.schema,
            feature_cols=list(
                dict.fromkeys([*features, *labels, *([] if weight is None else [weight])])
            ),
            label_cols=[],
            validation=self._get("validation"),
            model_dtype="float32",
            feature_dtypes=self._get("feature_dtypes"),
            decoders=functions.decoders,
            handle_invalid=self._get("handle_invalid"),
        )
        made = prepare(
            df,
            schema,
            store,
            data_key=self._get("data_key"),
            keep_data=self._get("keep_data"),
            num_partitions=self._get("num_partitions"),
            scope=self._scope,
        )
        skipped = made.manifest.num_skipped
        rows = {"training": (skipped, skipped + made.manifest.num_rows)}
        report_skipped(rows, self._get("verbose"))
        rows_in_store = Dataset(store, made.data_dir)
        seen = made.manifest.schema
        if not functions.decoders and not transformations:
            return _FitData(rows_in_store, seen, functions, transformations, None)
        with open_source(store, made.manifest) as source:
            names = functions.needs_example(seen)
            if names:
                seen = functions.with_decoded(seen, source.read(names, source.examples(1)))
            if not transformations:
                return _FitData(rows_in_store, seen, functions, transformations, None)
            transformed = transformed_by(
                transformations,
                source,
                _by_role(seen, features, labels, weight),
                functions,
                inputs=None,
                model_dtype=model_dtype(network),
            )
        return _FitData(rows_in_store, seen, functions, transformations, transformed)

    def _training(self, data: _FitData) -> dict[str, Any]:
        """Return what ranks train by."""
        get = self._get
        return {
            "columns": self._columns(),
            "transformed": None
            if data.transformed is None
            else (data.transformations, data.transformed),
            "reading": {
                "decoders": data.functions.decoders,
                "num_workers": get("num_workers"),
            },
            "val_num_workers": get("val_reader_num_workers") or get("num_workers"),
            "learning_rate": get("learning_rate"),
            "distributing": {
                "compression": get("gradient_compression") or hvd.Compression.none,
                "backward_passes_per_step": get("backward_passes_per_step"),
            },
            "batch_size": get("batch_size"),
            "val_batch_size": get("val_batch_size") or get("batch_size"),
            "epochs": get("epochs"),
            "callbacks": list(get("callbacks") or ()),
            "checkpoint": get("checkpoint_callback"),
            "shuffle": get("shuffle"),
            "seed": get("random_seed"),
            "verbose": 2 if get("verbose") else 0,  # 1 is a bar, which needs a terminal
            "run_id": get("run_id"),
        }

    def _model(
        self,
        order: Order,
        data: _FitData,
        values: Sequence[torch.Tensor],
        history: list[dict[str, float]],
    ) -> KerasModel:
        """Make the model of trained variables, with this estimator's uid and its Params."""
        trained = copy.deepcopy(order.network)
        with torch.no_grad():
            for variable, value in zip(trained.variables, values, strict=True):
                variable.copy_(value)
        features, labels, _ = self._columns()
        loss = order.compiling.get("loss") or (order.compiled or {}).get("loss")
        outputs: Sequence[Any] = getattr(trained.model, "outputs", None) or ()
        links = [link_of(loss, outputs[0].shape)] if len(outputs) == 1 else None
        model = KerasModel.from_module(
            trained.eval(),
            link=links,
            history=history,
            run_id=order.run_id,
            feature_cols=features,
            label_cols=labels,
            input_shapes=[[-1, *shape] for shape in data.shapes(features)],
        )
        model._resetUid(self.uid)
        self._copyValues(model)
        if model._get("use_gpu"):  # of the ranks; a task of transform may have none
            model.clear(model.use_gpu)
        model._set(store=data.rows.store)
        return model

    def write(self) -> MLWriter:
        """Return a writer: `estimator.write().overwrite().save(path)`."""
        that = self.copy()
        if (model := self._get("model")) is not None:
            # Keras' own pickle knows no classes of the user's layers.
            that._paramMap[that.model] = CompiledNetwork(model, self._get("custom_objects"))
        return EstimatorWriter(that)


@dataclass(frozen=True)
class _FitData:
    """The data of a fit.

    Attributes:
        rows: in the store.
        schema: their columns, with shape and dtype of decoded ones.
        functions: the user's decoders.
        transformations: the user's functions on rows.
        transformed: the columns that these return; None where there are none.
    """

    rows: Dataset
    schema: DataSchema
    functions: RowFunctions
    transformations: Transformations
    transformed: DataSchema | None

    def shapes(self, features: Sequence[str]) -> list[tuple[int, ...]]:
        """List the shapes of rows of features, as a DataFrame of `transform` can hold them."""
        columns = [self.schema.column(name) for name in features]
        if self.transformed is not None:
            columns = list(flat_columns(self.transformed.features, columns))
        return [tuple(column.row_shape or ()) or (1,) for column in columns]


def _by_role(
    schema: DataSchema, features: Sequence[str], labels: Sequence[str], weight: str | None
) -> DataSchema:
    """Return the columns by what they are to the training."""
    return DataSchema(
        tuple(schema.column(name) for name in features),
        tuple(schema.column(name) for name in labels),
        None if weight is None else schema.column(weight),
        schema.validation,
    )
