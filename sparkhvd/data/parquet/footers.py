"""Facts in the footers of a data set: row groups, nulls and sizes; and types that do not go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkhvd.data.arrow_types import num_leaves, spark_type
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.parquet.dataset import ParquetDataset, read_footer
from sparkhvd.data.store.listing import StoredFile
from sparkhvd.data.store.remote_store import RemoteStore
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType

__all__ = ["Footer", "read_footers"]

# Footers are read by so many threads: an object store answers in some ten milliseconds.
_THREADS = 16


@dataclass(frozen=True)
class Footer:
    """Facts in the footer of one file.

    Attributes:
        row_groups: rows of each.
        nulls: by column, rows that are null, where the footer tells.
        num_bytes: by column, bytes before compression.
    """

    row_groups: tuple[int, ...]
    nulls: Mapping[str, int]
    num_bytes: Mapping[str, int]


def read_footers(dataset: ParquetDataset, columns: Sequence[Column]) -> list[Footer]:
    """Read all footers, by threads, or in one Spark task where this process does not see the files.

    Raises:
        InvalidArgumentError: a file lacks a column or has it in another type than the first file.
    """
    if isinstance(dataset.store, RemoteStore):
        answers, _ = dataset.store.ask(_read_in_task, dataset, columns)
        return [Footer(tuple(f["row_groups"]), f["nulls"], f["num_bytes"]) for f in answers]
    with ThreadPoolExecutor(_THREADS, "sparkhvd-footers") as pool:
        return list(pool.map(lambda f: _read(dataset, f, columns), dataset.files))


def _read_in_task(
    store: Store, dataset: ParquetDataset, columns: Sequence[Column]
) -> Iterator[list[dict[str, Any]]]:
    yield [asdict(f) for f in read_footers(replace(dataset, store=store), columns)]


def _read(dataset: ParquetDataset, file: StoredFile, columns: Sequence[Column]) -> Footer:
    metadata, schema = read_footer(dataset.store, file)
    # pyarrow makes a new object at every call, in time that follows the number of columns.
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    if not sum(rows):  # a writer that saw no value may have given a column any type
        return Footer(rows, {}, {})
    _check_types(dataset, file, schema, columns)
    leaves_of, first_leaf = {}, 0
    for field in schema:
        leaves_of[field.name] = range(first_leaf, first_leaf + num_leaves(field.type))
        first_leaf += num_leaves(field.type)
    nulls, sizes = {}, {}
    for column in columns:
        leaves = leaves_of[column.name]
        chunks = [group.column(leaf) for group in groups for leaf in leaves]
        sizes[column.name] = sum(chunk.total_uncompressed_size for chunk in chunks)
        # Inside lists and structs a null of the leaf may be an empty list.
        if len(leaves) == 1 and metadata.schema.column(leaves[0]).max_definition_level == 1:
            statistics = [chunk.statistics for chunk in chunks]
            counts = [s.null_count for s in statistics if s is not None and s.has_null_count]
            nulls[column.name] = 0 if column.source.startswith("array") else sum(counts)
    return Footer(rows, nulls, sizes)


def _check_types(
    dataset: ParquetDataset, file: StoredFile, schema: pa.Schema, columns: Sequence[Column]
) -> None:
    """Refuse a file whose columns mean something else than the first file's; numbers may be wider or narrower."""
    if schema.equals(dataset.arrow_schema):
        return
    where = f"fit_on_parquet({dataset.url!r})"
    first = dataset.schema_path
    for column in columns:
        fields = [f for f in schema if f.name == column.name]
        if len(fields) != 1:
            raise InvalidArgumentError(
                f"{where}: {file.path!r} has column {column.name!r} {len(fields)} times, and {first!r} once. All files must "
                "have the columns of the fit."
            )
        theirs, ours = fields[0].type, dataset.arrow_schema.field(column.name).type
        if _family(spark_type(theirs)) != _family(spark_type(ours)):
            raise InvalidArgumentError(
                f"{where}: column {column.name!r} is {theirs} in {file.path!r} and {ours} in {first!r}. Write the files with "
                "one type."
            )


_FAMILIES = {
    **dict.fromkeys(("ByteType", "ShortType", "IntegerType", "LongType"), "integer"),
    **dict.fromkeys(("FloatType", "DoubleType", "DecimalType"), "floating"),
}


def _family(kind: DataType) -> str:
    """Return the name of the types whose values mean the same."""
    name = type(kind).__name__
    element = getattr(kind, "elementType", None)
    return _FAMILIES.get(name, name) if element is None else f"array of {_family(element)}"
