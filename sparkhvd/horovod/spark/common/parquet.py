"""Data of a fit as plain Parquet in the store's folders, for data modules of the user and for `fit_on_parquet()`.

As in Horovod's `fit`, data sets are counted from 0 in a process, and each DataFrame is written once. A fit whose ranks read
packed data writes no Parquet; the DataFrame of the last such fit is kept and written on demand.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as sql

from sparkhvd.data.parquet.dataset import store_of
from sparkhvd.data.source import DataFrameSource
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.on_parquet import DataPaths, reachable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkhvd.estimator.fitting.inputs import FitSources

__all__ = ["find", "remember", "write"]

# Spark's own Hadoop registers the S3 file system only under this name.
_SPARKS_SCHEMES = {"s3": "s3a"}


@dataclass(frozen=True)
class _Wanted:
    """Description of a data set.

    Attributes:
        sources: of a fit.
        columns: needed by its ranks.
        seed: of a random split.
    """

    sources: FitSources
    columns: tuple[str, ...]
    seed: int | None

    def frames(self) -> tuple[DataFrame, DataFrame | None]:
        """Rows for training, and rows for validation or None."""
        training = _frame(self.sources.training)
        validation: DataFrame | None = None
        split = self.sources.split
        if self.sources.validation is not None:
            validation = _frame(self.sources.validation)
        elif isinstance(split, str):
            is_flag = training.schema[split].dataType.typeName() == "boolean"
            column = sql.col(f"`{split}`")
            held_out = sql.coalesce(column if is_flag else column > 0, sql.lit(False))
            training, validation = training.where(~held_out), training.where(held_out)
        elif split:
            training, validation = training.randomSplit([1.0 - split, split], seed=self.seed)
        return self._columns(training), None if validation is None else self._columns(validation)

    def _columns(self, df: DataFrame) -> DataFrame:
        """Select the columns, with vectors as arrays for any Parquet reader."""
        kinds = {field.name: type(field.dataType).__name__ for field in df.schema.fields}
        columns = {name: sql.col(f"`{name}`") for name in self.columns}
        return df.select(
            *(
                (vector_to_array(c) if kinds[n] == "VectorUDT" else c).alias(n)
                for n, c in columns.items()
            )
        )


def _frame(source: Any) -> DataFrame:
    assert isinstance(source, DataFrameSource)
    return source.df


@dataclass(frozen=True)
class _Written:
    """Data set in the store, with weak references to its DataFrames.

    The weak references keep deleted DataFrames apart from later DataFrames.
    """

    training: weakref.ref[DataFrame]
    validation: weakref.ref[DataFrame] | None
    facts: tuple[object, ...]

    @classmethod
    def of(cls, wanted: _Wanted) -> _Written:
        held_out = wanted.sources.validation
        return cls(
            weakref.ref(_frame(wanted.sources.training)),
            None if held_out is None else weakref.ref(_frame(held_out)),
            (wanted.columns, wanted.sources.split, wanted.seed),
        )

    def is_of(self, wanted: _Wanted) -> bool:
        """Whether the data set was written from these DataFrames."""
        other = _Written.of(wanted)
        pairs = ((self.training, other.training), (self.validation, other.validation))
        is_same = all((a and a()) is (b and b()) for a, b in pairs)
        return is_same and self.facts == other.facts


class _DataSets:
    """Data sets of this process below one folder of training data."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: list[_Written] = []
        self.last: _Wanted | None = None

    def write(self, wanted: _Wanted, store: Store) -> int:
        """Write a data set unless it exists and return its index."""
        with self._lock:
            for index, each in enumerate(self._written):
                if each.is_of(wanted):
                    return index
            index = len(self._written)
            for role, part in zip(("train", "val"), wanted.frames(), strict=True):
                if part is not None:
                    place = _sparks(store_of(_data_path(store, role, index)).url)
                    part.write.mode("overwrite").parquet(place)
            self._written.append(_Written.of(wanted))
            return index


_lock = threading.Lock()
_by_place: dict[str, _DataSets] = {}


def _sparks(url: str) -> str:
    scheme, colon, rest = url.partition("?")[0].partition(":")
    return f"{_SPARKS_SCHEMES.get(scheme, scheme)}{colon}{rest}"


def _of(store: Store) -> _DataSets:
    with _lock:
        return _by_place.setdefault(_data_path(store, "train", None), _DataSets())


def remember(store: Store, sources: FitSources, columns: Sequence[str], seed: int | None) -> None:
    """Keep the DataFrame of a fit instead of the last fit's DataFrame."""
    if isinstance(sources.training, DataFrameSource):
        _of(store).last = _Wanted(sources, tuple(columns), seed)


def write(store: Store, sources: FitSources, columns: Sequence[str], seed: int | None) -> DataPaths:
    """Write the data of a fit by one Spark job for each role, unless they exist, and return their places.

    Raises:
        Exception: of Spark, which cannot write there.
    """
    index = _of(store).write(_Wanted(sources, tuple(columns), seed), store)
    return _places(store, index, has_validation=sources.has_validation)


def find(
    store: Store, places: DataPaths, spark: SparkSession, *, has_validation: bool
) -> DataPaths:
    """Find the store's data for `fit_on_parquet`. Writes the data of the last fit if necessary.

    Raises:
        InvalidArgumentError: there are no data, or validation rows are required and the last fit had none.
    """
    index = places.dataset_idx
    is_asked = has_validation and places.validation_path is None
    found = _places(store, index, has_validation=has_validation)
    if not _is_there(store, found, spark):
        sets = _of(store)
        last = sets.last
        if last is not None and is_asked and not last.sources.has_validation:
            raise InvalidArgumentError(
                "fit_on_parquet: validation is given and path is not, so the data are those of the last fit of this process, which had no "
                "validation rows. Clear validation, call fit with it, or give paths."
            )
        written = None if last is None else sets.write(last, store)
        if written is None or index not in (None, written):
            raise InvalidArgumentError(
                f"fit_on_parquet: path is not given, there is no Parquet in {found.path}, and no fit of this process has used the store"
                f"{'' if written is None else f' as data set {index}'}. Write it there, df.write.parquet(store.get_train_data_path()), or give a path."
            )
        found = _places(store, written, has_validation=has_validation)
    options = places.storage_options or found.storage_options
    return replace(
        found,
        validation_path=places.validation_path or found.validation_path,
        storage_options=options,
    )


def _places(store: Store, index: int | None, *, has_validation: bool) -> DataPaths:
    held_out = _data_path(store, "val", index) if has_validation else None
    return DataPaths(
        _data_path(store, "train", index), held_out, store._place.options or None, None
    )


def _is_there(store: Store, places: DataPaths, spark: SparkSession) -> bool:
    assert places.path is not None
    place = reachable(spark, store_of(places.path, store._place.options))
    try:
        return any(file.path.endswith((".parquet", ".pq")) for file in place.files())
    except FileNotFoundError:
        return False


def _data_path(store: Store, role: str, idx: int | None) -> str:
    """Path of the data of a role, "train" or "val", named by the store or else by Horovod's convention."""
    asked = getattr(store, f"get_{role}_data_path", None)
    if asked is not None:
        return str(asked(idx))
    name = f"intermediate_{role}_data"
    return store.full_url(name if idx is None else f"{name}.{idx}")
