"""Delta and Iceberg tables of tests: rows as this package and as the format's own library read them, and histories of changes."""

from __future__ import annotations

import json
import os
import random
import struct
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
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
from sparkhvd.data.table_formats.table import open_table
from sparkhvd.data.table_formats.version import requested
from sparkhvd.errors import InvalidArgumentError

Row = tuple[Any, ...]

CATALOG = "tests"
# Stands for a null in the rows that are compared.
NULL = -999.0


def start_threads(folder: Path) -> None:
    """Write a Delta table: deltalake's threads and their descriptors stay until the process ends."""
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
    """Return the files of a version and the columns of a fit; nulls of numbers become `NULL`."""
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
    """Read the rows of a version as ranks do, sorted; nulls are `NULL`."""
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
# What the libraries cannot write: files of the formats, made by their specifications.


def write_delta_log(folder: Path, version: int, *actions: Mapping[str, Any]) -> None:
    """Write a commit of a Delta table."""
    log = folder / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))


def delta_vector(folder: Path, name: str, positions: Sequence[int]) -> dict[str, Any]:
    """Write a deletion vector into a file; return its descriptor."""
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
    """Write a snapshot that deletes rows by position; return its metadata file.

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
