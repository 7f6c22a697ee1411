"""Results of ranks through Spark, in portions within `spark.driver.maxResultSize`.

Spark ends a job whose tasks return more, when all ranks have finished, and their results are lost. So the rows of a
stage stay on the executors' disks (`persist`) until the driver has them: outcomes and small results arrive with the
stage itself, the rest through further jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkhvd.arrow_buffers import binary_array, int32_array
from sparkhvd.errors import RankError
from sparkhvd.runner.outcomes import CHUNK_BYTES, Outcome, OutcomeKind, chunks, describe, embed
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.types import StructType


LIMIT_KEY = "spark.driver.maxResultSize"
_DEFAULT_LIMIT = 1 << 30
# The row with this part number holds the outcome; parts 0, 1, ... are the result.
OUTCOME_PART = -1
_SIZE = re.compile(r"(\d+)\s*([kmgtp]?)b?")
# Bytes that Spark counts for a task in addition to its rows, mainly accumulators.
_TASK_BYTES = 16 << 10
_LEAST_PIECE_BYTES = 64 << 10


@dataclass(frozen=True)
class ResultChunks:
    """Sizes of the pieces of results.

    Attributes:
        num_bytes: of a piece.
        at_once: most pieces per job; None for any number.
    """

    num_bytes: int = CHUNK_BYTES
    at_once: int | None = None


def pieces_for(conf: Mapping[str, str], size: int) -> ResultChunks:
    """Fit the results of `size` ranks into Spark's limit."""
    match = _SIZE.fullmatch(conf.get(LIMIT_KEY, "").strip().lower())
    limit = int(match[1]) << 10 * " kmgtp".index(match[2] or " ") if match else _DEFAULT_LIMIT
    if not limit:  # 0 means no limit in Spark
        return ResultChunks()
    # Use half of it: Spark's form of the rows is larger.
    room = limit // 2 - size * _TASK_BYTES
    num_bytes = min(CHUNK_BYTES, max(_LEAST_PIECE_BYTES, room))
    return ResultChunks(num_bytes, max(1, room // num_bytes))


def row_schema() -> StructType:
    """Schema of `rows_of`. Spark's JVM would take 7 ms per launch to parse it as text."""
    from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

    columns = {"rank": IntegerType(), "part": IntegerType(), "data": BinaryType()}
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def rows_of(rank: int, outcome: Outcome, result: bytes, num_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a successful rank: its outcome, then its result in pieces of at most `num_bytes`."""
    import pyarrow as pa

    outcome = replace(outcome, num_parts=-(-len(result) // num_bytes))
    parts = [(OUTCOME_PART, outcome.to_json().encode())]
    for part, data in itertools.chain(parts, enumerate(chunks(result, num_bytes))):
        columns = [int32_array(rank), int32_array(part), binary_array(data)]
        yield pa.RecordBatch.from_arrays(columns, names=["rank", "part", "data"])


def collect(
    shim: SparkShim,
    stage: DataFrame,
    pieces: ResultChunks,
    size: int,
    tag: str,
    description: str,
    interrupt: Callable[[], None] | None,
) -> list[Row]:
    """Collect all rows of a stage of ranks.

    Args:
        shim: session.
        stage: of `row_schema`.
        pieces: that its tasks yield.
        size: number of ranks.
        tag: of the job in which the ranks run; see `is_of_rest` for the others.
        description: of the jobs in Spark's UI.
        interrupt: called at Ctrl-C before the ranks' job is cancelled.
    """
    if pieces.at_once is None:
        return shim.collect(stage, tag, description, interrupt)
    with _kept(stage) as kept:
        first = kept.where(f"part < {pieces.at_once // size}")
        rows = shim.collect(first, tag, description, interrupt)
        for wanted in _rest(rows, pieces.at_once):
            rows += shim.collect(kept.where(wanted), _tag_of_rest(tag), f"{description}, results")
        return rows


def is_of_rest(tags: str | None, tag: str) -> bool:
    """Whether Spark repeats this task for the rows of a finished rank, lost with an executor.

    Args:
        tags: of the task's job, as Spark has them.
        tag: of the ranks' job.
    """
    return _tag_of_rest(tag) in (tags or "")


def lost(rank: int, size: int, attempt: int, job_id: str) -> RankError:
    """Make the error for a result lost with its executor."""
    message = "it had ended, and its result was on an executor that is gone"
    outcome = Outcome(rank, OutcomeKind.LOST, "", attempt, "lost", message=message, job_id=job_id)
    return RankError(f"{describe(outcome, size)}\n{embed(outcome)}", rank=rank, exit="lost")


def _tag_of_rest(tag: str) -> str:
    return f"{tag}-results"


@contextlib.contextmanager
def _kept(stage: DataFrame) -> Iterator[DataFrame]:
    """Keep the rows of a stage on the executors' disks inside the block."""
    from pyspark import StorageLevel

    kept = stage.persist(StorageLevel.DISK_ONLY)
    try:
        yield kept
    finally:
        with contextlib.suppress(Exception):  # the application may have ended
            kept.unpersist()


def _rest(rows: Sequence[Any], at_once: int) -> Iterator[str]:
    """Yield a condition for the missing rows of each further job."""
    found = {(row["rank"], row["part"]) for row in rows}
    missing = [
        (row["rank"], part)
        for row in rows
        if row["part"] == OUTCOME_PART
        for part in range(Outcome.from_json(bytes(row["data"]).decode()).num_parts)
        if (row["rank"], part) not in found
    ]
    missing.sort()
    for start in range(0, len(missing), at_once):
        parts: dict[int, list[int]] = {}
        for rank, part in missing[start : start + at_once]:
            parts.setdefault(rank, []).append(part)
        yield " or ".join(
            f"(rank = {rank} and part between {of_rank[0]} and {of_rank[-1]})"
            for rank, of_rank in parts.items()
        )
