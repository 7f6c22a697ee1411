"""`TorchModel`: a trained module as a Spark ML transformer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Model
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql.types import DoubleType, StructField, StructType

from sparkhvd.data.arrow_limits import warn_of_large_batches
from sparkhvd.data.columns import heads
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import RAW_TYPES, Column
from sparkhvd.data.store.default import default_store
from sparkhvd.data.vectors import split_vectors, vector_columns
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.param_table import with_signature
from sparkhvd.estimator.params import PredictParams
from sparkhvd.estimator.saving.persistence import ModelReader, ModelWriter
from sparkhvd.estimator.transform.worker import Output, PredictSpec
from sparkhvd.runner.gpu.profiles import profile_to_share_gpus
from sparkhvd.runner.payload import kept_carried
from sparkhvd.runner.pickling import dumps
from sparkhvd.spark import SparkShim
from sparkhvd.training.modules.architecture import tensors_of
from sparkhvd.training.modules.fitted import Fitted
from sparkhvd.training.modules.output_widths import output_widths
from sparkhvd.training.modules.weights import Weights, store_weights

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame
    from typing_extensions import Unpack

    from sparkhvd.estimator.keywords import ModelKeywords

__all__ = ["TorchModel"]


@with_signature
class TorchModel(PredictParams, Model, MLWritable, MLReadable["TorchModel"]):
    """A trained model. `transform` adds the model's outputs to a DataFrame.

    By default one column `<label>__output` per label: a double where the output has one element per row, else an
    ML vector; never rounded. `predictionCol` adds a double (the most likely class, or the value),
    `probabilityCol` and `rawPredictionCol` vectors. An empty name leaves a column out.

    Attributes:
        history: one record per epoch: epoch, loss, metrics, val_..., rows, seconds, rows_per_s, data_wait_s (seconds
            in which rank 0 waited for batches), lr.
        timings: seconds of the fit's phases: materialize, launch, train.
    """

    def __init__(self, *positional: Any, **keywords: Unpack[ModelKeywords]) -> None:
        super().__init__()
        self._fitted: Fitted | None = None
        self._set_keywords(positional, keywords)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch."""
        return [dict(record) for record in self._require_fitted().history]

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the fit's phases: materialize, launch, train."""
        return dict(self._require_fitted().timings)

    def getModel(self) -> torch.nn.Module:  # noqa: N802 - Horovod's name
        """A copy of the trained module, in eval mode."""
        return copy.deepcopy(self._require_fitted().module).eval()

    # -- Horovod's names -----------------------------------------------------------------------------

    def setModel(self, module: torch.nn.Module) -> TorchModel:  # noqa: N802
        """Predict with a copy of another module that takes the same columns; returns this object.

        Raises:
            InvalidArgumentError: its outputs have another number or width (not checked if a column is collated).
        """
        fitted = self._require_fitted()
        if not isinstance(module, torch.nn.Module):
            raise InvalidArgumentError(f"setModel({module!r:.200}): give a torch.nn.Module.")
        own = copy.deepcopy(module).eval()
        # What a collate function makes is known only when there are rows.
        is_known = not any(c.is_collated for c in fitted.columns)
        found = output_widths(own, fitted.inputs, fitted.columns) if is_known else None
        widths = fitted.widths if found is None else tuple(found)
        if fitted.widths and widths != fitted.widths:
            raise InvalidArgumentError(
                f"setModel: the module's outputs have {widths} elements per row; those of the trained one have "
                f"{fitted.widths}. Give a module with the same outputs, or fit it."
            )
        self._fitted = replace(fitted, module=own, widths=widths)
        return self

    def getHistory(self) -> list[dict[str, Any]]:  # noqa: N802
        """The same as `history`."""
        return self.history

    def setHistory(self, history: Sequence[Mapping[str, Any]]) -> TorchModel:  # noqa: N802
        """Replace the records of the epochs; returns this object."""
        records = [dict(record) for record in history]
        self._fitted = replace(self._require_fitted(), history=records)
        return self

    def getRunId(self) -> str:  # noqa: N802
        """Name of the run in the store: what `keep_checkpoints` lets stay of it is under `runs/<run_id>`."""
        return self._require_fitted().run_id

    def setRunId(self, run_id: str) -> TorchModel:  # noqa: N802
        """Say another name of the run; nothing in the store is renamed. Returns this object."""
        self._fitted = replace(self._require_fitted(), run_id=run_id)
        return self

    def getFeatureColumns(self) -> list[str]:  # noqa: N802
        """The columns that `transform` reads: `feature_cols`, or those of the training."""
        return self._sources(self._require_fitted())

    def getLabelColumns(self) -> list[str]:  # noqa: N802
        """The labels after which output columns are named: `label_cols`, or those of the training."""
        return list(self._get("label_cols") or self._require_fitted().labels)

    # -- transform -----------------------------------------------------------------------------------

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the output columns; starts no Spark job. Rows and all other columns stay as they are.

        The model sees the columns only when rows are computed: filter and select before, because Spark cannot move
        either through a Python function.
        """
        fitted = self._require_fitted()
        if not fitted.widths:
            raise InvalidArgumentError(
                "transform: the outputs of the model are not known, because its forward ran on two rows of zeros neither on the "
                "driver nor, after training, on the ranks. getModel() gives the trained module; give one whose forward runs "
                "without ranks to setModel."
            )
        outputs = self._outputs(fitted, dataset)
        _check_passing(dataset)
        self._warn_of_large_batches(fitted, dataset)
        spec = PredictSpec(
            shell=fitted.shell,
            weights=self._weights(fitted, dataset.sparkSession),
            columns=fitted.inputs.with_casts(self._columns(fitted, dataset)),
            sources=tuple(dataset.columns.index(name) for name in self._sources(fitted)),
            names=tuple(dataset.columns),
            inputs=fitted.inputs,
            links=fitted.links,
            outputs=outputs,
            output_fn=self._get("output_fn"),
            functions=self._row_functions(fitted),
            use_gpu=self._get("use_gpu"),
        )

        is_vector = vector_columns(dataset.schema)
        # Pickled here, so that a large model is not written to a file with each call; see `payload`.
        shim = SparkShim(dataset.sparkSession)
        spec_bytes = kept_carried(shim, dumps(spec))
        fields = [
            *dataset.schema.fields,
            *(
                StructField(o.name, VectorUDT() if o.is_vector else DoubleType(), nullable=False)
                for o in outputs
            ),
        ]
        # Spark looks up what it sends and receives by name, and stumbles over dots and names that are there twice.
        plain = [f"c{i}" for i in range(len(fields))]
        schema = StructType(
            [
                StructField(name, f.dataType, f.nullable, f.metadata)
                for name, f in zip(plain, fields, strict=True)
            ]
        )
        sent: DataFrame = split_vectors(dataset.toDF(*plain[: len(dataset.columns)]), is_vector)
        task = _transform_task(spec_bytes, is_vector)
        computed = sent.mapInArrow(task, schema, **self._resources(shim))
        return computed.toDF(*[f.name for f in fields])

    def _warn_of_large_batches(self, fitted: Fitted, dataset: DataFrame) -> None:
        pairs = zip(self._sources(fitted), fitted.columns, strict=True)
        kinds = ("array", "vector")
        known = {n: c.num_elements for n, c in pairs if c.kind in kinds and c.shape is not None}
        warn_of_large_batches(dataset, known)

    def _resources(self, shim: SparkShim) -> dict[str, Any]:
        """What the stage asks Spark for: a share of a GPU, where tasks can have one and get none by themselves."""
        profile = None if self._get("use_gpu") is False else profile_to_share_gpus(shim)
        return {} if profile is None else {"profile": profile}

    def _require_fitted(self) -> Fitted:
        if self._fitted is None:
            raise InvalidArgumentError(
                "TorchModel has no trained module. It comes from TorchEstimator.fit or TorchModel.load."
            )
        return self._fitted

    def _sources(self, fitted: Fitted) -> list[str]:
        """The DataFrame's columns, in the order of the training columns."""
        names = self._get("feature_cols") or [c.name for c in fitted.columns]
        if len(names) != len(fitted.columns):
            raise InvalidArgumentError(
                f"feature_cols has {len(names)} columns; the model was trained with {len(fitted.columns)}: "
                f"{', '.join(repr(c.name) for c in fitted.columns)}."
            )
        return list(names)

    def _columns(self, fitted: Fitted, dataset: DataFrame) -> tuple[Column, ...]:
        """The training columns as this DataFrame has them: an array may stand for a vector."""
        sources = self._sources(fitted)
        pairs = list(zip(sources, fitted.columns, strict=True))
        policy = self._get("handle_invalid") or "error"
        if isinstance(policy, Mapping):
            # By the name here, else by that in training; labels are not looked at.
            policy = {
                name: policy.get(name, policy.get(c.name))
                for name, c in pairs
                if name in policy or (c.name in policy and c.name not in sources)
            }
        self._check_untransformed(pairs, dataset)
        found = check_schema(
            dataset.schema,
            feature_cols=sources,
            label_cols=[],
            feature_dtypes={name: c.tensor_dtype for name, c in pairs if c.tensor_dtype},
            decoders=[name for name, c in pairs if c.has_decoder],
            collated=[name for name, c in pairs if c.is_collated],
            handle_invalid=policy,
        ).features
        for here, trained in zip(found, fitted.columns, strict=True):
            if _layout(here) != _layout(trained) or (here.kind, trained.kind) == (
                "array",
                "sparse",
            ):
                raise InvalidArgumentError(
                    f"transform: column {here.name!r} is of type {here.source}; the model was trained with "
                    f"{trained.source}."
                )
            width = _width(dataset.schema[here.name])
            if width is not None and trained.shape is not None and width != trained.num_elements:
                raise InvalidArgumentError(
                    f"transform: column {here.name!r} has {width} elements per row, as its metadata say; the model "
                    f"was trained with {trained.num_elements}."
                )
        return tuple(
            replace(
                trained,
                kind=_kind_here(here, trained),
                source=here.source,
                is_sparse=trained.kind == "sparse",
                invalid=here.invalid,
            )
            for here, trained in zip(found, fitted.columns, strict=True)
        )

    def _check_untransformed(self, pairs: Sequence[tuple[str, Column]], dataset: DataFrame) -> None:
        """Refuse what a decoder reads where the model gets what a transformation made of it."""
        decoders = self._get("decoders") or {}
        for name, trained in pairs:
            if trained.source not in ("transformation_fn", "batch_transform_fn"):
                continue
            found = next((f for f in dataset.schema.fields if f.name == name), None)
            if found is None or trained.name not in decoders:
                continue
            if type(found.dataType).__name__ in RAW_TYPES:
                shape = list(trained.shape or ())
                raise InvalidArgumentError(
                    f"transform: column {name!r} is of type {found.dataType.simpleString()}. In training {trained.source} "
                    f"changed what decoders[{trained.name!r}] gave, and transform calls no transformations. Give a column "
                    f"of numbers as the model gets them: {shape} per row, {trained.tensor_dtype}."
                )

    def _row_functions(self, fitted: Fitted) -> RowFunctions:
        """The user's functions by the names of the training columns."""
        given = RowFunctions(self._get("decoders") or {}, self._get("collate_fn") or {})
        needed = {
            "decoders": [c.name for c in fitted.columns if c.has_decoder],
            "collate_fn": [c.name for c in fitted.columns if c.is_collated],
        }
        for param, functions in (("decoders", given.decoders), ("collate_fn", given.collate)):
            missing = [name for name in needed[param] if name not in functions]
            if missing:
                raise InvalidArgumentError(
                    f"transform: the model was trained with {param} for {', '.join(map(repr, missing))}, which it has "
                    f"no longer. Set {param} again."
                )
        return RowFunctions(
            {name: given.decoders[name] for name in needed["decoders"]},
            {name: given.collate[name] for name in needed["collate_fn"]},
        )

    def _outputs(self, fitted: Fitted, dataset: DataFrame) -> tuple[Output, ...]:
        """The columns to add."""
        names = self._get("outputCols")
        if names is None:
            names = [f"{label}__output" for label in self._get("label_cols") or fitted.labels]
        if len(names) != len(fitted.widths):
            raise InvalidArgumentError(
                f"outputCols has {len(names)} names ({names}); the model has {len(fitted.widths)} outputs."
            )
        outputs = [
            Output(name, "output", i, is_vector=width > 1)
            for i, (name, width) in enumerate(zip(names, fitted.widths, strict=True))
            if name
        ]
        outputs += self._spark_outputs(fitted)
        conf = dataset.sparkSession.conf
        minds_case = (conf.get("spark.sql.caseSensitive", "false") or "").lower() == "true"
        existing = {n if minds_case else n.lower(): n for n in dataset.columns}
        for output in outputs:
            key = output.name if minds_case else output.name.lower()
            if key in existing:
                other = f" as {existing[key]!r}" if existing[key] != output.name else ""
                raise InvalidArgumentError(
                    f"transform would add column {output.name!r}, which exists already{other}. Drop it first, or "
                    "set another name (outputCols, predictionCol, probabilityCol, rawPredictionCol)."
                )
            existing[key] = output.name
        return tuple(outputs)

    def _spark_outputs(self, fitted: Fitted) -> list[Output]:
        wanted = {
            "predictionCol": "prediction",
            "probabilityCol": "probability",
            "rawPredictionCol": "raw",
        }
        outputs = []
        for param, kind in wanted.items():
            name = self._get(param)
            if not name:
                continue
            if len(fitted.widths) > 1:
                raise InvalidArgumentError(
                    f"{param} is {name!r}, and the model has {len(fitted.widths)} outputs, so it is not clear which "
                    "is meant. Use outputCols."
                )
            has_probability = (
                fitted.links[0] != heads.IDENTITY or self._get("output_fn") is not None
            )
            if kind == "probability" and not has_probability:
                raise InvalidArgumentError(
                    f"probabilityCol is {name!r}, and the loss of the training does not say how probabilities "
                    "follow from outputs. Set output_fn to a function from an output to (rows, classes) "
                    "probabilities."
                )
            outputs.append(Output(name, kind, 0, is_vector=kind != "prediction"))
        return outputs

    def _weights(self, fitted: Fitted, spark: Any) -> Weights:
        """Small weights for the closure, large ones as a file of the store, written once."""
        if fitted.weights.data is not None:
            return fitted.weights
        store = default_store(spark, self._get("store"))
        return store_weights(tensors_of(fitted.module), fitted.weights.sha256, store)

    # -- save and load -------------------------------------------------------------------------------

    def write(self) -> MLWriter:
        """A writer: `model.write().overwrite().save(path)`."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[TorchModel]:
        """A reader: `TorchModel.read().load(path)`."""
        return ModelReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False) -> TorchModel:
        """Load a saved model.

        Args:
            path: what was given to `save`.
            trust: the file may run code. Needed for modules with classes that are not of `torch.nn`, and with torch before
                2.10. Without it the model has no store: on a cluster, one with more than 64 MiB of weights then
                needs `setStore`, or the conf `spark.sparkhvd.store`, before it transforms.

        Raises:
            UntrustedError: the file holds code and nobody trusts it.
        """
        loaded: TorchModel = ModelReader(cls, trusted=trust).load(path)
        return loaded


def _transform_task(
    spec: Any, is_vector: Sequence[bool]
) -> Callable[[Iterator[RecordBatch]], Iterator[RecordBatch]]:
    """Return the function for `mapInArrow`, by whose name Spark's UI knows the step.

    It refers to plain data alone, so that it can look at its process before it imports torch.
    """

    def sparkhvd_transform(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        from sparkhvd.runner.preflight import check_worker

        check_worker()
        from sparkhvd.data.vectors import join_vectors
        from sparkhvd.estimator.transform.gpu import task_gpus
        from sparkhvd.estimator.transform.worker import load_spec, predict

        joined = (join_vectors(batch, is_vector) for batch in batches)
        return predict(load_spec(spec), joined, task_gpus())

    return sparkhvd_transform


# Spark's types that it sends to no Python function, whatever the function does with them.
_NOT_SENT = ("CalendarIntervalType", "YearMonthIntervalType", "NullType", "VariantType")


def _check_passing(dataset: DataFrame) -> None:
    """Refuse columns that cannot pass through a Python function, also where the model does not look at them."""
    for column in dataset.schema.fields:
        if any(type(part).__name__ in _NOT_SENT for part in _parts(column.dataType)):
            raise InvalidArgumentError(
                f"transform: column {column.name!r} is of type {column.dataType.simpleString()}, which Spark cannot send "
                "through a Python function. Drop it before, or cast it (for example to string) and back."
            )


def _parts(data_type: Any) -> Iterator[Any]:
    """A Spark type and all types inside it."""
    yield data_type
    inside = [getattr(data_type, n, None) for n in ("elementType", "keyType", "valueType")]
    for part in [*inside, *(f.dataType for f in getattr(data_type, "fields", ()))]:
        if part is not None:
            yield from _parts(part)


def _layout(column: Column) -> str:
    """Kinds that can stand for each other have one layout: an array may stand for a vector."""
    names = {"vector": "rows", "array": "rows", "sparse": "rows"}
    return names.get(column.kind, column.kind)


def _kind_here(here: Column, trained: Column) -> str:
    """How this DataFrame's values are read: as they are, but a vector as sparse if it was so in training."""
    return trained.kind if here.kind == "vector" and trained.kind == "sparse" else here.kind


def _width(column: StructField) -> int | None:
    """Elements per row of a vector, where Spark ML wrote them down."""
    attributes = (column.metadata or {}).get("ml_attr", {})
    if not isinstance(column.dataType, VectorUDT) or not isinstance(attributes, Mapping):
        return None
    if "num_attrs" in attributes:
        return int(attributes["num_attrs"])
    groups = attributes.get("attrs")
    return sum(len(group) for group in groups.values()) if groups else None
