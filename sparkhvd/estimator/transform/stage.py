"""Spark stage of a transform: a function in Spark's Python workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import DoubleType, StructField, StructType

from sparkhvd import as_horovod
from sparkhvd.data.arrow_types import plain_names, split_vectors, vector_columns
from sparkhvd.estimator.transform.worker import Output, PredictSpec
from sparkhvd.runner.gpu.decide import profile_to_share_gpus
from sparkhvd.runner.protocol import dumps, kept_carried
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import Broadcast
    from pyspark.sql import DataFrame


def add_outputs(df: DataFrame, spec: PredictSpec) -> DataFrame:
    """Add the output columns of a spec to a DataFrame, without a Spark job.

    The stage requests a share of a GPU from Spark if the cluster has GPUs and tasks do not get one by default.
    """
    is_vector = vector_columns(df.schema)
    # The spec is pickled here and kept, so that a large model is not written to a file by each call; see
    # `runner.protocol`.
    shim = SparkShim(df.sparkSession)
    carried = kept_carried(shim, dumps(spec))
    fields = [
        *df.schema.fields,
        *(_field(output, nullable=spec.functions.skips) for output in spec.outputs),
    ]
    names = [f.name for f in fields]
    plain = plain_names(names, is_vector)
    schema = StructType(
        [
            StructField(name, f.dataType, f.nullable, f.metadata)
            for name, f in zip(plain, fields, strict=True)
        ]
    )
    sent = df if plain == names else df.toDF(*plain[: len(df.columns)])
    sent = split_vectors(sent, is_vector)
    task = _task(carried, is_vector)
    profile = None if spec.use_gpu is False else profile_to_share_gpus(shim)
    if profile is None:  # pyspark before 4.0 does not have the argument `profile`
        computed = sent.mapInArrow(task, schema)
    else:
        computed = sent.mapInArrow(task, schema, profile=profile)
    return computed if plain == names else computed.toDF(*names)


def _field(output: Output, *, nullable: bool) -> StructField:
    """Describe an output column, with metadata about its width or classes for Spark ML's stages."""
    attributes: dict[str, object] = {}
    if output.size and output.is_vector:
        attributes = {"num_attrs": output.size}
    elif output.size > 1:
        attributes = {"type": "nominal", "num_vals": output.size}
    metadata = {"ml_attr": attributes} if attributes else None
    kind = VectorUDT() if output.is_vector else DoubleType()
    return StructField(output.name, kind, nullable=nullable, metadata=metadata)


def _task(
    spec: bytes | Broadcast[bytes], is_vector: Sequence[bool]
) -> Callable[[Iterator[RecordBatch]], Iterator[RecordBatch]]:
    """Make the function for `mapInArrow`. Spark's UI shows its name.

    The function refers only to plain data, so that it can check its process before it imports torch.
    """
    is_as_horovod = as_horovod.is_installed()

    def sparkhvd_transform(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        from sparkhvd.runner.preflight import enter_worker

        enter_worker(is_as_horovod=is_as_horovod)
        from sparkhvd.data.arrow_types import join_vectors
        from sparkhvd.estimator.transform.worker import load_spec, predict, task_gpus

        joined = (join_vectors(batch, is_vector) for batch in batches)
        return predict(load_spec(spec), joined, task_gpus())

    return sparkhvd_transform
