"""Delta and Iceberg tables of tests: rows as this package and as the format's own library read them, and histories of changes."""

from __future__ import annotations

import json
import os
import random
import struct
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.parquet.dataset import ParquetDataset
from sparkhvd.data.parquet.manifest import KnownFooters, read_manifest
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.table_formats import where as filters
from sparkhvd.data.table_formats.table import open_table
from sparkhvd.data.table_formats.version import requested
from sparkhvd.errors import InvalidArgumentError

Row = tuple[Any, ...]

CATALOG = "tests"
# Stands for a null in the rows that are compared.
NULL = -999.0


def start_threads(folder: Path) -> None:
    """Write a Delta table, because deltalake's threads and their descriptors stay until the process ends."""
    import deltalake

    deltalake.write_deltalake(folder, pa.table({"x": [1]}))


def catalog_of(folder: Path, **properties: str) -> dict[str, str]:
    """Return the properties of an SQL catalog in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    warehouse = properties.pop("warehouse", f"file://{folder}/warehouse")
    return {
        "name": CATALOG,
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": warehouse,
        **properties,
    }


def dataset_of(
    table: str | os.PathLike[str], columns: Sequence[str], *, where: Any = None, **version: Any
) -> tuple[ParquetDataset, DataSchema]:
    """Return the files of a version and the columns of a fit. Nulls of numbers become `NULL`."""
    given = {name: version.pop(name, None) for name in ("catalog", "storage_options")}
    dataset = open_table(
        table,
        requested(**version),
        None,  # type: ignore[arg-type]  # only names without a catalog need a session
        where=where,
        **given,
    )
    text = {c for c in columns if is_text(dataset.arrow_schema, c)}
    schema = check_schema(
        dataset.schema,
        feature_cols=list(columns),
        label_cols=[],
        model_dtype="float64",
        handle_invalid={c: NULL for c in columns if c not in text} or "error",
        decoders=text,
        data_name="table",
    )
    return dataset, schema


def rows_of(
    table: str | os.PathLike[str],
    columns: Sequence[str],
    *,
    known: Callable[[ParquetDataset, DataSchema], KnownFooters] | None = None,
    **choice: Any,
) -> list[Row]:
    """Read the rows of a version as ranks do, sorted. Nulls are `NULL`."""
    dataset, schema = dataset_of(table, columns, **choice)
    try:
        manifest = read_manifest(dataset, schema, known and known(dataset, schema))
    except InvalidArgumentError as e:
        if "nothing to train on" in str(e):
            return []
        raise
    with ParquetSource(dataset.store, manifest) as source:
        read = source.read(list(columns))
        edges = source.block_edges
        assert edges[-1] == manifest.num_rows
        # In pieces of random rows, too.
        some = np.unique(np.random.default_rng(len(edges)).integers(0, manifest.num_rows, 7))
        part = source.read(list(columns), some)
    every = {c: values(read[c]) for c in columns}
    for c in columns:
        assert values(part[c]) == [every[c][i] for i in some], c
    return sorted(zip(*(every[c] for c in columns), strict=True), key=repr)


def is_text(schema: pa.Schema, column: str) -> bool:
    """Return True for a column of text."""
    kind = schema.field(column).type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def values(column: Any) -> list[Any]:
    """Return the values of a column as Python's."""
    if isinstance(column, np.ndarray):
        return list(map(float, column.tolist()))
    return [bytes(column.row(i)).decode() for i in range(len(column))]


def plain_rows(table: pa.Table, columns: Sequence[str]) -> list[Row]:
    """Return the rows of an Arrow table as `rows_of` does."""
    lists = [
        [
            v if isinstance(v, str) else NULL if v is None else float(v)
            for v in table.column(c).to_pylist()
        ]
        for c in columns
    ]
    return sorted(zip(*lists, strict=True), key=repr)


# ----------------------------------------------------------------------------------------------------
# Random histories: changes by the libraries, and every version compared with the format's own reader.

_LIMITS = (
    "id >= 20",
    "id < 50 AND NOT p = 'p1'",
    "x IS NULL OR x > 10",
    "p IN ('p0', 'p2')",
    "id != 7",
)


class History:
    """Changes of a table in a random order: columns id, x, p, and others that are added and removed.

    Attributes:
        steps: names of the changes so far.
        num_checked: versions and filters compared.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.steps: list[str] = []
        self.num_checked = 0
        self._next = 0
        self._extra: list[str] = []

    def run(self, steps: int) -> History:
        """Make changes. After each, compare a version with the format's own reader, and compare all versions at the end."""
        self.append()
        for _ in range(steps):
            change = self.random.choice(self.changes())
            self.steps.append(change.__name__)
            change()
            self.check(self.random.choice(self.versions()))
        for version in self.versions():
            self.check(version)
        return self

    def rows(self, count: int) -> pa.Table:
        """Make rows with all present columns. Some values are null."""
        ids = np.arange(self._next, self._next + count)
        self._next += count
        x = [
            None if self.random.random() < 0.2 else round(self.random.gauss(10, 9), 2) for _ in ids
        ]
        more = {n: [self.random.choice([None, 1, 2, 10**12]) for _ in ids] for n in self._extra}
        return pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "x": pa.array(x, pa.float64()),
                "p": [f"p{self.random.randrange(3)}" for _ in ids],
                **{name: pa.array(column, pa.int64()) for name, column in more.items()},
            }
        )

    def changes(self) -> list[Callable[[], None]]:
        """Return the possible changes."""
        raise NotImplementedError

    def versions(self) -> list[Any]:
        """Return the versions that can be read."""
        raise NotImplementedError

    def append(self) -> None:
        """Append rows."""
        raise NotImplementedError

    def check(self, version: Any) -> None:
        """Compare the rows of a version, with and without a filter."""
        raise NotImplementedError

    def compare(self, found: Callable[..., list[Row]], expected: pa.Table) -> None:
        """Compare what ranks read with rows of the format's own reader."""
        columns = [name for name in expected.column_names if self.random.random() < 0.9] or ["id"]
        assert found(columns) == plain_rows(expected, columns), self.steps
        where = self.random.choice(_LIMITS)
        condition = filters.parse(where)
        kept = expected.filter(filters.row_filter(condition, expected.schema, "t").expression)
        assert found(columns, where=where) == plain_rows(kept, columns), (self.steps, where)
        self.num_checked += 2


class DeltaHistory(History):
    """History of a Delta table."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.folder = folder / "a table"
        self._by = ["p"] if self.random.random() < 0.5 else None

    def changes(self) -> list[Callable[[], None]]:
        return [
            self.append,
            self.append,
            self.delete,
            self.update,
            self.merge,
            self.compact,
            self.evolve,
            self.overwrite,
            self.restore,
            self.checkpoint,
        ]

    def _table(self, version: int | None = None) -> Any:
        import deltalake

        return deltalake.DeltaTable(self.folder, version=version)

    def versions(self) -> list[Any]:
        return list(range(self._table().version() + 1))

    def append(self) -> None:
        import deltalake

        rows = self.rows(self.random.randrange(1, 40))
        deltalake.write_deltalake(
            self.folder, rows, mode="append", partition_by=self._by, schema_mode="merge"
        )

    def delete(self) -> None:
        self._table().delete(f"id % {self.random.randrange(2, 9)} = 1")

    def update(self) -> None:
        self._table().update(
            updates={"x": "x + 100"}, predicate=f"id % {self.random.randrange(2, 9)} = 0"
        )

    def merge(self) -> None:
        start = max(0, self._next - 20)
        source = self.rows(5)
        ids = list(range(start, start + 5))
        source = source.set_column(0, "id", pa.array(ids, pa.int64()))
        merger = self._table().merge(source, "t.id = s.id", source_alias="s", target_alias="t")
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def compact(self) -> None:
        self._table().optimize.compact()

    def evolve(self) -> None:
        self._extra.append(f"n{len(self._extra)}")
        self.append()

    def overwrite(self) -> None:
        import deltalake

        rows = self.rows(self.random.randrange(1, 30))
        deltalake.write_deltalake(
            self.folder, rows, mode="overwrite", partition_by=self._by, schema_mode="merge"
        )

    def restore(self) -> None:
        if earlier := self.versions()[:-1]:
            self._table().restore(self.random.choice(earlier))
        self._extra = [f.name for f in self._table().schema().fields if f.name[0] == "n"]

    def checkpoint(self) -> None:
        self._table().create_checkpoint()

    def check(self, version: Any) -> None:
        read = pa.RecordBatchReader.from_stream(self._table(version).scan()).read_all()
        # Views have no filters in pyarrow.
        expected = read.set_column(
            read.schema.get_field_index("p"), "p", read.column("p").cast(pa.string())
        )
        self.compare(partial(rows_of, self.folder, version=version), expected)


class IcebergHistory(History):
    """History of an Iceberg table in an SQL catalog, with deletes by position made by the specification."""

    def __init__(self, seed: int, folder: Path) -> None:
        from pyiceberg.catalog import load_catalog

        super().__init__(seed)
        catalog = load_catalog(**catalog_of(folder))
        catalog.create_namespace("db")
        version = str(self.random.choice([1, 2, 2]))
        schema = self.rows(1).schema
        self.catalog = catalog
        self.table = catalog.create_table("db.t", schema, properties={"format-version": version})

    def changes(self) -> list[Callable[[], None]]:
        return [
            self.append,
            self.append,
            self.delete,
            self.overwrite,
            self.upsert,
            self.add,
            self.rename,
            self.drop,
            self.partition,
            self.tag,
            self.rollback,
        ]

    def versions(self) -> list[Any]:
        return [snapshot.snapshot_id for snapshot in self.table.snapshots()]

    def _rows(self, count: int) -> pa.Table:
        """Make rows of the present schema. Columns other than id, x and p have new names."""
        rows = self.rows(count)
        made = {}
        for field in self.table.schema().as_arrow():
            known = field.name in rows.column_names
            values = rows.column(field.name) if known else pa.array([self._next] * count)
            made[field.name] = values.cast(field.type)
        return pa.table(made, schema=self.table.schema().as_arrow())

    def append(self) -> None:
        self.table.append(self._rows(self.random.randrange(1, 40)))

    def delete(self) -> None:
        self.table.delete(f"id < {self.random.randrange(0, max(1, self._next // 2))}")

    def overwrite(self) -> None:
        self.table.overwrite(self._rows(9), overwrite_filter=f"p == 'p{self.random.randrange(3)}'")

    def upsert(self) -> None:
        rows = self._rows(4)
        ids = pa.array(range(max(0, self._next - 12), max(0, self._next - 12) + 4), pa.int64())
        rows = rows.set_column(rows.schema.get_field_index("id"), rows.schema.field("id"), ids)
        self.table.delete(f"id in ({', '.join(map(str, ids.to_pylist()))})")
        self.table.append(rows)

    def add(self) -> None:
        from pyiceberg.types import LongType

        with self.table.update_schema() as change:
            change.add_column(f"n{len(self.steps)}", LongType())

    def _others(self) -> list[str]:
        return [f.name for f in self.table.schema().fields if f.name not in ("id", "x", "p")]

    def rename(self) -> None:
        if others := self._others():
            with self.table.update_schema() as change:
                change.rename_column(self.random.choice(others), f"r{len(self.steps)}")

    def drop(self) -> None:
        if others := self._others():
            with self.table.update_schema() as change:
                change.delete_column(self.random.choice(others))

    def partition(self) -> None:
        from pyiceberg.transforms import IdentityTransform, TruncateTransform

        if not self.table.spec().fields:
            with self.table.update_spec() as change:
                change.add_field(
                    "p", self.random.choice([IdentityTransform(), TruncateTransform(1)])
                )

    def tag(self) -> None:
        found = self.random.choice(self.versions())
        self.table.manage_snapshots().create_tag(found, f"t{len(self.steps)}").commit()

    def rollback(self) -> None:
        ancestors, found = [], self.table.current_snapshot()
        while found is not None:
            ancestors.append(found.snapshot_id)
            found = self.table.snapshot_by_id(found.parent_snapshot_id or -1)
        chosen = self.random.choice(ancestors)
        self.table.manage_snapshots().rollback_to_snapshot(chosen).commit()

    def check(self, version: Any) -> None:
        expected = self.table.scan(snapshot_id=version).to_arrow()
        read = partial(rows_of, "db.t", catalog=self.catalog, snapshot_id=version)
        self.compare(read, expected)
        if self.random.random() < 0.2:
            self._check_deletes(version)

    def _check_deletes(self, version: int) -> None:
        """Delete rows by position in the newest snapshot, beside the table, and compare that state."""
        from pyiceberg.table import StaticTable

        tasks = list(self.table.scan().plan_files())
        if not tasks or self.table.spec().fields or self.table.format_version < 2:
            return
        chosen = self.random.sample(tasks, min(2, len(tasks)))
        deletes = {
            task.file.file_path: self.random.sample(
                range(task.file.record_count), self.random.randrange(task.file.record_count)
            )
            or [0]
            for task in chosen
        }
        kind = self.random.choice(["parquet", "puffin"])
        state = iceberg_deletes(self.table.metadata_location, deletes, kind)
        self.compare(partial(rows_of, state), StaticTable.from_metadata(state).scan().to_arrow())


def random_history(seed: int, folder: Path, steps: int) -> History:
    """Run a history by its seed, of Delta or Iceberg."""
    kind = DeltaHistory if seed % 2 else IcebergHistory
    history = kind(seed, folder)
    try:
        return history.run(steps)
    except Exception as e:
        raise AssertionError(f"history {seed} ({kind.__name__}): {history.steps}: {e}") from e
    finally:
        if isinstance(history, IcebergHistory):
            history.catalog.close()


# ----------------------------------------------------------------------------------------------------
# Files that the libraries cannot write, made by the formats' specifications.


def write_delta_log(folder: Path, version: int, *actions: Mapping[str, Any]) -> None:
    """Write a commit of a Delta table."""
    log = folder / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))


def delta_vector(folder: Path, name: str, positions: Sequence[int]) -> dict[str, Any]:
    """Write a deletion vector into a file, and return its descriptor."""
    from pyroaring import BitMap

    payload = struct.pack("<iqi", 1681511377, 1, 0) + BitMap(positions).serialize()
    data = b"\x01" + struct.pack(">i", len(payload)) + payload
    (folder / name).write_bytes(data + struct.pack(">I", zlib.crc32(payload)))
    return {
        "storageType": "p",
        "pathOrInlineDv": f"file://{folder / name}",
        "offset": 1,
        "sizeInBytes": len(payload),
        "cardinality": len(positions),
    }


def iceberg_deletes(
    metadata_file: str, deletes: Mapping[str, Sequence[int]], kind: str = "parquet"
) -> str:
    """Write a snapshot that deletes rows by position, and return its metadata file.

    Args:
        metadata_file: of the state before.
        deletes: positions by the location of a data file.
        kind: "parquet" for position deletes, "puffin" for deletion vectors, "equality" for a file that claims such deletes.
    """
    from pyiceberg.io.pyarrow import PyArrowFileIO
    from pyiceberg.manifest import (
        DataFile,
        DataFileContent,
        FileFormat,
        ManifestContent,
        ManifestEntry,
        ManifestEntryStatus,
        ManifestWriterV2,
        write_manifest_list,
    )
    from pyiceberg.table import StaticTable
    from pyiceberg.typedef import Record

    class Deletes(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    table = StaticTable.from_metadata(metadata_file)
    io, before = PyArrowFileIO(), table.current_snapshot()
    snapshot_id = random.randrange(1, 2**62)
    folder = metadata_file.rpartition("/")[0]
    path = f"{folder}/{uuid.uuid4()}-deletes.{'puffin' if kind == 'puffin' else 'parquet'}"
    if kind == "puffin":
        data = _puffin(deletes)
    else:
        sink = pa.BufferOutputStream()
        pairs = [(file, at) for file, places in deletes.items() for at in sorted(places)]
        pq.write_table(
            pa.table(
                {
                    "file_path": [p[0] for p in pairs],
                    "pos": pa.array([p[1] for p in pairs], pa.int64()),
                }
            ),
            sink,
        )
        data = sink.getvalue().to_pybytes()
    with io.new_output(path).create() as file:
        file.write(data)
    sequence = table.metadata.last_sequence_number + 1
    spec = table.metadata.spec()
    equality = {"equality_ids": [1]} if kind == "equality" else {}
    entry = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES if equality else DataFileContent.POSITION_DELETES,
        file_path=path,
        file_format=FileFormat.PUFFIN if kind == "puffin" else FileFormat.PARQUET,
        partition=Record(),
        record_count=sum(map(len, deletes.values())),
        file_size_in_bytes=len(data),
        **equality,
    )
    manifest = f"{folder}/{uuid.uuid4()}-m0.avro"
    with Deletes(spec, table.schema(), io.new_output(manifest), snapshot_id, "deflate") as writer:
        writer.add_entry(
            ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED, snapshot_id=snapshot_id, data_file=entry
            )
        )
    listed = f"{folder}/snap-{snapshot_id}.avro"
    with write_manifest_list(
        2, io.new_output(listed), snapshot_id, before.snapshot_id, sequence, "deflate"
    ) as lists:
        lists.add_manifests([*before.manifests(io), writer.to_manifest_file()])
    state = json.loads(table.metadata.model_dump_json())
    moment = before.timestamp_ms + 1
    state["snapshots"].append(
        {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": before.snapshot_id,
            "sequence-number": sequence,
            "timestamp-ms": moment,
            "manifest-list": listed,
            "summary": {"operation": "delete"},
            "schema-id": state["current-schema-id"],
        }
    )
    state |= {
        "current-snapshot-id": snapshot_id,
        "last-sequence-number": sequence,
        "last-updated-ms": moment,
    }
    state["refs"] = {
        **state.get("refs", {}),
        "main": {"snapshot-id": snapshot_id, "type": "branch"},
    }
    state["snapshot-log"] = [
        *state.get("snapshot-log", []),
        {"snapshot-id": snapshot_id, "timestamp-ms": moment},
    ]
    if kind == "puffin":
        state |= {"format-version": 3, "next-row-id": 0}
    number = int(metadata_file.rpartition("/")[2].split("-")[0]) + 1
    after = f"{folder}/{number:05d}-{uuid.uuid4()}.metadata.json"
    with io.new_output(after).create() as file:
        file.write(json.dumps(state).encode())
    return after


def _puffin(deletes: Mapping[str, Sequence[int]]) -> bytes:
    from pyroaring import BitMap

    data, blobs = b"PFA1", []
    for path, positions in deletes.items():
        vector = struct.pack("<qi", 1, 0) + BitMap(positions).serialize()
        body = bytes.fromhex("d1d33964") + vector
        blob = struct.pack(">i", len(body)) + body + struct.pack(">I", zlib.crc32(body))
        blobs.append(
            {
                "type": "deletion-vector-v1",
                "fields": [],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": len(data),
                "length": len(blob),
                "properties": {"referenced-data-file": path, "cardinality": str(len(positions))},
            }
        )
        data += blob
    footer = json.dumps({"blobs": blobs}).encode()
    return data + b"PFA1" + footer + struct.pack("<i", len(footer)) + bytes(4) + b"PFA1"
