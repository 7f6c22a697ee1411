"""Bounds on the Arrow batches that Spark sends to Python workers.

Spark reads the bound from the session's conf while a query runs (with adaptive execution more than once), so the conf
holds our bound for that time. Concurrent queries of the user get smaller batches with the same rows.

Threads: fits of one session may run at once. The first writes the conf, the last restores the user's value.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkhvd.data.columns.schema import DENSE_WIDTH, NUMERIC_TYPES
from sparkhvd.spark import session_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.conf import RuntimeConfig
    from pyspark.sql.types import DataType, StructType


# A batch exists about four times in a Python worker (as bytes, as Arrow, converted, and in the row group), and
# once in the JVM. Larger batches are no faster: 10,000 rows of 32 doubles have 2.5 MiB.
BATCH_BYTES = 32 << 20
BYTES_KEY = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORDS_KEY = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Warn above this size without a bound in bytes: the JVM holds the batch once for each task, a worker about four times.
_LARGE_BATCH_BYTES = 512 << 20
# Spark's default; more rows per batch gain nothing.
_MOST_RECORDS = 10_000
# Spark checks its bound in bytes after every row. If a list column ends in nulls (null arrays, or a vector sent as one
# struct), the check takes time in proportion to the batch's rows: 10,000 rows of vectors took four times as long as
# without it, 1,000 rows 1.6 times. So it is disabled if the types give the length of a row. Otherwise batches have few
# rows, at no measurable cost.
_NO_BYTES = 2**31 - 1
_FEW_RECORDS = 1000
# Assumed bytes of a value of unknown length, for Sparks without a bound in bytes.
_UNKNOWN_BYTES = 32 << 10


@contextlib.contextmanager
def bounded_batches(
    df: DataFrame, *, batch_bytes: int = BATCH_BYTES, knows_bytes: bool | None = None
) -> Iterator[None]:
    """Bound the Arrow batches of queries of `df`'s session to about `batch_bytes` inside the block.

    The bound on records becomes the number of `df`'s rows in that many bytes, if the user's is larger. If the types do
    not give the length of a row, Spark's bound in bytes is set, unless the user has set one. Before Spark 4.1, which
    has no such bound, these values count as 32 KiB. The conf is restored after the block.

    Args:
        df: the DataFrame whose columns are sent, classic or Connect.
        batch_bytes: bytes of a batch; a larger row is sent alone.
        knows_bytes: Spark has a bound in bytes; None detects it.
    """
    spark = df.sparkSession
    if knows_bytes is None:
        knows_bytes = bool(spark.conf.isModifiable(BYTES_KEY))
    known, num_unknown = arrow_row_bytes(df.schema)
    if num_unknown and knows_bytes:
        bounds = {BYTES_KEY: batch_bytes, RECORDS_KEY: _FEW_RECORDS}
    else:
        records = max(1, batch_bytes // max(1, known + num_unknown * _UNKNOWN_BYTES))
        bounds = {RECORDS_KEY: min(records, _MOST_RECORDS)}
        if knows_bytes:
            bounds[BYTES_KEY] = _NO_BYTES
    session = session_key(spark)
    with contextlib.ExitStack() as stack:
        for name, value in bounds.items():
            _bounds.enter((session, name), spark.conf, value)
            stack.callback(_bounds.leave, (session, name), spark.conf, value)
        yield


def warn_of_large_batches(df: DataFrame, elements: Mapping[str, int]) -> None:
    """Warn if Spark bounds batches only by their number of rows, and a batch of these rows would be large.

    The user computes the DataFrame later, outside of `bounded_batches`.

    Args:
        df: the DataFrame whose columns are sent, classic or Connect.
        elements: by column, numbers per row if the type does not give them.
    """
    conf = df.sparkSession.conf
    configured = int(conf.get(RECORDS_KEY, str(_MOST_RECORDS)) or _MOST_RECORDS)
    records = configured if configured > 0 else 2**31 - 1
    sizes = [
        size if size is not None else 8 * elements.get(f.name, 0)
        for f in df.schema.fields
        for size in [_value_bytes(f.dataType, f.metadata or {})]
    ]
    row_bytes = sum(sizes)
    if row_bytes * min(records, _MOST_RECORDS) <= _LARGE_BATCH_BYTES or conf.isModifiable(
        BYTES_KEY
    ):
        return
    warnings.warn(
        f"transform: a row has about {row_bytes >> 10} KiB, and before Spark 4.1 batches of rows to Python workers are bounded by "
        f"their number alone: {configured:,} rows are {row_bytes * records / 2**30:.1f} GiB for each task in the JVM, and several times that in "
        f"its worker. Set spark.conf.set({RECORDS_KEY!r}, {max(1, BATCH_BYTES // row_bytes)}) before the rows are computed.",
        stacklevel=2,
    )


def arrow_row_bytes(schema: StructType) -> tuple[int, int]:
    """Sum the bytes per row of the columns with a known size in Arrow, and count the other columns.

    A vector's length is in its column's metadata if a VectorAssembler wrote it.
    """
    sizes = [_value_bytes(f.dataType, f.metadata or {}) for f in schema.fields]
    return sum(s for s in sizes if s is not None), sum(s is None for s in sizes)


def _value_bytes(kind: DataType, metadata: Mapping[str, object]) -> int | None:
    name = type(kind).__name__
    if name == "VectorUDT":
        attributes = metadata.get("ml_attr")
        width = attributes.get("num_attrs") if isinstance(attributes, Mapping) else None
        # A wider vector is assumed to be sparse, so its size is unknown.
        return 16 + 8 * width if isinstance(width, int) and 0 < width <= DENSE_WIDTH else None
    # 16 bytes are the size of a decimal, the longest number.
    return 16 if name in NUMERIC_TYPES else None


@dataclass
class _Bound:
    """Bound in one conf while `bounded_batches` blocks are open.

    Attributes:
        users: the user's value, or None.
        written: our value; None if the user's was kept.
        wanted: the bounds of all open blocks.
    """

    users: str | None
    written: str | None = None
    wanted: list[int] = field(default_factory=list)

    def apply(self, conf: RuntimeConfig, name: str) -> None:
        """Write the smallest bound of all blocks and the user. A user's bound in bytes is kept."""
        if self.users is not None and name == BYTES_KEY:
            return
        bounds = list(self.wanted)
        if self.users is not None and int(self.users) > 0:  # Spark: 0 and less mean no bound
            bounds.append(int(self.users))
        value = str(min(bounds))
        if value not in (self.written, self.users):
            conf.set(name, value)
            self.written = value


class _Bounds:
    """Bounds in force, by session and name of the conf."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], _Bound] = {}

    def enter(self, key: tuple[str, str], conf: RuntimeConfig, value: int) -> None:
        with self._lock:
            bound = self._held.get(key)
            if bound is None:
                bound = self._held[key] = _Bound(conf.get(key[1], None))
            bound.wanted.append(value)
            try:
                bound.apply(conf, key[1])
            except BaseException:
                self._release(key, conf, value)  # `leave` will not be called
                raise

    def leave(self, key: tuple[str, str], conf: RuntimeConfig, value: int) -> None:
        with self._lock:
            self._release(key, conf, value)

    def _release(self, key: tuple[str, str], conf: RuntimeConfig, value: int) -> None:
        bound = self._held[key]
        bound.wanted.remove(value)
        if bound.wanted:
            return
        del self._held[key]
        if bound.written is None:
            return
        # If the session has ended, the query's own error explains it.
        with contextlib.suppress(Exception):
            if conf.get(key[1], None) != bound.written:
                return  # the user has set another value meanwhile
            if bound.users is None:
                conf.unset(key[1])
            else:
                conf.set(key[1], bound.users)


# One object holds the bounds of all sessions of the process.
_bounds = _Bounds()
