"""Spark stage of a transform: the function for Spark's workers, and the DataFrame with its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import DoubleType, StructField, StructType

from sparkhvd import as_horovod
from sparkhvd.data.arrow_types import split_vectors, vector_columns
from sparkhvd.estimator.transform.worker import Output, PredictSpec
from sparkhvd.runner.gpu.decide import profile_to_share_gpus
from sparkhvd.runner.protocol import dumps, kept_carried
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import Broadcast
    from pyspark.sql import DataFrame


def add_outputs(df: DataFrame, spec: PredictSpec) -> DataFrame:
    """Add the output columns of a spec to a DataFrame; starts no Spark job.

    The stage requests a share of a GPU from Spark if tasks can have one and do not get one by default.
    """
    is_vector = vector_columns(df.schema)
    # Pickled here, so that a large model is not written to a file on each call; see `runner.protocol`.
    shim = SparkShim(df.sparkSession)
    carried = kept_carried(shim, dumps(spec))
    fields = [
        *df.schema.fields,
        *(_field(output, nullable=spec.functions.skips) for output in spec.outputs),
    ]
    # Spark looks up columns by name when it sends and receives them, and fails on dots and duplicate names.
    plain = [f"c{i}" for i in range(len(fields))]
    schema = StructType(
        [
            StructField(name, f.dataType, f.nullable, f.metadata)
            for name, f in zip(plain, fields, strict=True)
        ]
    )
    sent: DataFrame = split_vectors(df.toDF(*plain[: len(df.columns)]), is_vector)
    task = _task(carried, is_vector)
    profile = None if spec.use_gpu is False else profile_to_share_gpus(shim)
    if profile is None:  # the argument is absent before pyspark 4.0
        computed = sent.mapInArrow(task, schema)
    else:
        computed = sent.mapInArrow(task, schema, profile=profile)
    return computed.toDF(*[f.name for f in fields])


def _field(output: Output, *, nullable: bool) -> StructField:
    """Describe an output column, with the attributes that tell Spark ML's stages its width or classes."""
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
    """Make the function for `mapInArrow`; Spark's UI shows its name.

    It refers only to plain data, so that it can check its process before it imports torch.
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
