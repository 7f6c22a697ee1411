"""Versions of Delta and Iceberg tables: the rows that the format's own library reads, or an early error."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkhvd import TorchEstimator
from sparkhvd.data.manifest import TableVersion, packed_rows, unpacked_rows
from sparkhvd.data.parquet.manifest import KnownFooters, read_manifest
from sparkhvd.data.parquet.source import ParquetSource
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.locks import dump_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.data.table_formats import delta, iceberg
from sparkhvd.data.table_formats import where as filters
from sparkhvd.data.table_formats.table import open_table
from sparkhvd.data.table_formats.version import VersionRequest, requested
from sparkhvd.errors import InvalidArgumentError, UntrustedError
from sparkhvd.estimator.fitting.on_table import TableChoice, open_table_source
from sparkhvd.estimator.saving import recipe as recipes
from tests.harness import tables
from tests.harness.plans import batch_rows
from tests.harness.soak import amount
from tests.harness.tables import catalog_of, plain_rows, rows_of

pytestmark = pytest.mark.pure

deltalake = pytest.importorskip("deltalake")
pyiceberg = pytest.importorskip("pyiceberg")


@pytest.fixture(scope="module", autouse=True)
def threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    tables.start_threads(tmp_path_factory.mktemp("threads"))


def rows(first: int, count: int, **more: Any) -> pa.Table:
    ids = np.arange(first, first + count)
    return pa.table(
        {"id": ids, "x": ids * 0.5, "p": [f"p {i % 3}/é" for i in ids.tolist()], **more}
    )


def delta_rows(folder: Path, columns: list[str], version: int | None = None) -> list[tables.Row]:
    table = deltalake.DeltaTable(folder, version=version)
    found = pa.RecordBatchReader.from_stream(table.scan(columns=columns)).read_all()
    return plain_rows(found, columns)


# -- Delta -------------------------------------------------------------------------------------------


def test_every_version_of_a_delta_table_has_deltalake_rows(tmp_path: Path) -> None:
    folder = tmp_path / "a table"
    deltalake.write_deltalake(folder, rows(0, 30), partition_by=["p"])
    deltalake.write_deltalake(folder, rows(30, 10), mode="append")
    deltalake.DeltaTable(folder).delete("id % 7 = 0")
    deltalake.write_deltalake(
        folder, rows(40, 5, new=pa.array([1, None, 3, 4, 5])), mode="append", schema_mode="merge"
    )
    deltalake.DeltaTable(folder).update(updates={"x": "x + 1000"}, predicate="id > 20")
    deltalake.DeltaTable(folder).optimize.compact()
    deltalake.DeltaTable(folder).create_checkpoint()
    newest = deltalake.DeltaTable(folder).version()
    assert newest >= 4
    for version in range(newest + 1):
        columns = ["id", "x", "p"] + (["new"] if version >= 3 else [])
        assert rows_of(folder, columns, version=version) == delta_rows(folder, columns, version)
    assert rows_of(folder, ["id", "p"]) == delta_rows(folder, ["id", "p"])
    history = {h["version"]: h["timestamp"] for h in deltalake.DeltaTable(folder).history()}
    moment = datetime.fromtimestamp(history[1] / 1000, timezone.utc)
    assert rows_of(folder, ["id"], as_of=moment) == delta_rows(folder, ["id"], 1)


def test_as_of_uses_commit_times_instead_of_file_times(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    for part in range(4):
        deltalake.write_deltalake(folder, rows(part, 1), mode="append")
        time.sleep(0.002)
    times = [h["timestamp"] for h in reversed(deltalake.DeltaTable(folder).history())]
    log = folder / "_delta_log"
    for file in log.iterdir():  # as a copy of the table
        os.utime(file)
    for version, committed in enumerate(times):
        moment = datetime.fromtimestamp(committed / 1000, timezone.utc)
        dataset, _ = tables.dataset_of(folder, ["id"], as_of=moment)
        assert dataset.table is not None
        assert dataset.table.version.version == version
        found = dataset.table.version.committed
        assert datetime.fromisoformat(found).timestamp() * 1000 == pytest.approx(committed, abs=0.1)
    commit = log / f"{1:020d}.json"
    lines = [line for line in commit.read_text().splitlines() if "commitInfo" not in line]
    commit.write_text("\n".join(lines))
    moment = datetime.fromtimestamp(times[2] / 1000, timezone.utc)
    assert len(rows_of(folder, ["id"], as_of=moment)) == 3
    with pytest.raises(InvalidArgumentError, match=r"no commit time of version 1.*Give version="):
        rows_of(folder, ["id"], as_of=datetime.fromtimestamp(times[1] / 1000, timezone.utc))


EVERY_TYPE = pa.schema(
    [
        ("i", pa.int32()),
        ("l", pa.int64()),
        ("f", pa.float32()),
        ("g", pa.float64()),
        ("d", pa.decimal128(10, 1)),
        ("e", pa.decimal128(38, 10)),
        ("z", pa.timestamp("us", "UTC")),
    ]
)
# Filters, and the rows among 1, 2, 3 that they select: values that the column's type cannot represent, and exact ones.
EVERY_LITERAL = {
    "i > 1.5": [2, 3],
    "i != 2.5": [1, 2, 3],
    "NOT i BETWEEN 1.2 AND 2.2": [1, 3],
    "i < 99999999999999999999": [1, 2, 3],
    "i IN (1.0, 2.5, 3)": [1, 3],
    "l > 9007199254740994.0": [3],
    "l = 9007199254740993.0": [],
    "l >= 9007199254740993": [1, 2, 3],
    "f > 0.1": [1, 2, 3],
    "NOT f = 0.1": [1, 2, 3],
    "f < 1e300": [1, 2, 3],
    "f = 0.25": [],
    "g = 0.1": [1],
    "g > 9007199254740993": [],
    "d > 0.15": [2, 3],
    "d > 0.05": [1, 2, 3],
    "d != 0.24": [1, 2, 3],
    "d <= 0.25": [1, 2],
    "d > 0": [1, 2, 3],
    "d < 1e300": [1, 2, 3],
    "d IN (0.1, 0.15)": [1],
    "e > 0": [1, 2, 3],
    "e = 0.2": [2],
    "z >= '2020-01-02'": [2, 3],
    "z > '2020-01-02T05:00:00'": [3],
    "z <= '2020-01-02T10:00:00+05:00'": [1, 2],
}


def every_type(number: int) -> pa.Table:
    moment = datetime(2020, 1, number, 5, tzinfo=timezone.utc)
    tenth = Decimal(number) / 10
    row = {"i": number, "l": number + 2**53, "f": number / 10, "g": number / 10}
    return pa.Table.from_pylist([{**row, "d": tenth, "e": tenth, "z": moment}], EVERY_TYPE)


def test_out_of_range_filter_values_skip_no_delta_file(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        deltalake.write_deltalake(tmp_path / "t", every_type(number), mode="append")
    for where, kept in EVERY_LITERAL.items():
        found = [row[0] for row in rows_of(tmp_path / "t", ["i"], where=where)]
        assert found == kept, where
    names = pa.table({"p": ["", None, "a"], "id": [0, 1, 2]})
    deltalake.write_deltalake(tmp_path / "u", names, partition_by=["p"])
    assert rows_of(tmp_path / "u", ["id"], where="p IS NULL") == [(0.0,), (1.0,)]
    assert rows_of(tmp_path / "u", ["id"], where="p IS NOT NULL") == [(2.0,)]


def test_digests_differ_for_tables_with_different_rows(tmp_path: Path) -> None:
    found = set()
    for number in (1, 2, 3):
        deltalake.write_deltalake(tmp_path / f"{number}", every_type(number))
        found.add(read_manifest(*tables.dataset_of(tmp_path / f"{number}", ["i"])).digest)
    assert len(found) == 3
    again = read_manifest(*tables.dataset_of(tmp_path / "3", ["i"])).digest
    assert again in found


def mapped_table(folder: Path, mode: str, features: list[str] | None = None) -> None:
    """Write a Delta table with deletion vectors and column mapping, by the protocol."""
    (folder / "xx yy").mkdir(parents=True)
    ids = {b"PARQUET:field_id": b"1"}
    kind = pa.schema([pa.field("col-a", pa.int64(), metadata=ids), pa.field("col-b", pa.float64())])
    first, second = folder / "xx yy" / "1.parquet", folder / "2.parquet"
    columns = {"col-a": np.arange(50), "col-b": np.arange(50) * 0.25}
    pq.write_table(pa.table(columns, schema=kind), first, row_group_size=7)
    pq.write_table(pa.table({"col-a": np.arange(100, 105)}), second)
    fields = [("x", "long", 1, "col-a"), ("my y", "double", 2, "col-b"), ("p", "string", 3, "c")]
    schema = [
        {
            "name": name,
            "type": kind,
            "nullable": True,
            "metadata": {
                "delta.columnMapping.id": number,
                "delta.columnMapping.physicalName": stored,
            },
        }
        for name, kind, number, stored in [*fields, ("new", "integer", 4, "col-new")]
    ]
    features = ["deletionVectors", "columnMapping", *(features or [])]
    names = {"readerFeatures": features, "writerFeatures": features}
    vector = tables.delta_vector(folder, "deletion_vector.bin", [0, 3, 6, 7, 13, 49])

    def add(path: Path, value: str | None, **more: Any) -> dict[str, Any]:
        quoted = str(path.relative_to(folder)).replace(" ", "%20")
        facts = {"path": quoted, "partitionValues": {"c": value}, "size": path.stat().st_size}
        facts["stats"] = json.dumps({"numRecords": pq.read_metadata(path).num_rows})
        return {"add": {**facts, "modificationTime": 0, "dataChange": True, **more}}

    configuration = {"delta.columnMapping.mode": mode, "delta.enableDeletionVectors": "true"}
    tables.write_delta_log(
        folder,
        0,
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **names}},
        {
            "metaData": {
                "id": str(uuid.uuid4()),
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": schema}),
                "partitionColumns": ["p"],
                "configuration": {**configuration, "delta.columnMapping.maxColumnId": "4"},
                "createdTime": 0,
            }
        },
        add(first, "u", deletionVector=vector),
        add(second, "v v"),
    )


def test_delta_deletion_vectors_and_column_mapping_are_applied(tmp_path: Path) -> None:
    mapped_table(tmp_path / "t", "name")
    columns = ["x", "my y", "p", "new"]
    found = rows_of(tmp_path / "t", columns)
    assert found == delta_rows(tmp_path / "t", columns)
    assert len(found) == 50 - 6 + 5
    assert len(rows_of(tmp_path / "t", columns, where="`my y` >= 10 AND p = 'u'")) == 9
    assert [row[0] for row in rows_of(tmp_path / "t", ["x", "p"], where="p = 'v v'")] == [
        100.0 + i for i in range(5)
    ]


def test_error_names_an_unsupported_table_feature(tmp_path: Path) -> None:
    mapped_table(tmp_path / "t", "name", ["variantType"])
    with pytest.raises(InvalidArgumentError, match=r"variantType.*fit\(spark\.table\("):
        rows_of(tmp_path / "t", ["x"])
    mapped_table(tmp_path / "u", "name", ["fromTheFuture"])
    with pytest.raises(InvalidArgumentError, match=r"fromTheFuture.*fit\(spark\.table\("):
        rows_of(tmp_path / "u", ["x"])


def test_vacuumed_versions_and_missing_tables_raise_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    deltalake.write_deltalake(folder, rows(0, 10))
    deltalake.write_deltalake(folder, rows(10, 10), mode="overwrite")
    table = deltalake.DeltaTable(folder)
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert len(rows_of(folder, ["id"])) == 10
    with pytest.raises(InvalidArgumentError, match="version 0 of .*vacuumed.*newer version"):
        rows_of(folder, ["id"], version=0)
    with pytest.raises(
        InvalidArgumentError, match="version=7 does not exist; the newest version is"
    ):
        rows_of(folder, ["id"], version=7)
    with pytest.raises(InvalidArgumentError, match="before the first version in the log"):
        rows_of(folder, ["id"], as_of="2001-01-01")
    with pytest.raises(InvalidArgumentError, match="this is a Delta table.*version="):
        rows_of(folder, ["id"], snapshot_id=1)
    with pytest.raises(InvalidArgumentError, match="moved.*fit_on_parquet"):
        rows_of(tmp_path / "moved", ["id"])
    (folder / "sub").mkdir()
    with pytest.raises(InvalidArgumentError, match="part of a Delta table"):
        rows_of(folder / "sub", ["id"])


def test_error_names_the_pip_extra_of_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltalake.write_deltalake(tmp_path / "t", rows(0, 3))
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'sparkhvd\[delta\]'"):
        rows_of(tmp_path / "t", ["id"])
    monkeypatch.setitem(sys.modules, "pyiceberg.table", None)
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    for table, catalog in (("/x/metadata/v1.metadata.json", None), ("db.t", {"type": "rest"})):
        with pytest.raises(InvalidArgumentError, match=r"pip install 'sparkhvd\[iceberg\]'"):
            rows_of(table, ["id"], catalog=catalog)


# -- Iceberg -----------------------------------------------------------------------------------------


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Any]:
    from pyiceberg.catalog import load_catalog

    properties = catalog_of(tmp_path / "ice")
    loaded = load_catalog(properties.pop("name"), **properties)
    loaded.create_namespace("db")
    yield loaded
    loaded.close()


def iceberg_rows(table: Any, columns: list[str], **scan: Any) -> list[tables.Row]:
    return plain_rows(table.scan(**scan).to_arrow(), columns)


@pytest.mark.parametrize("version", ["1", "2"])
def test_every_iceberg_snapshot_has_pyiceberg_rows(catalog: Any, version: str) -> None:
    from pyiceberg.transforms import BucketTransform, IdentityTransform
    from pyiceberg.types import LongType

    schema = rows(0, 1).schema.set(0, pa.field("id", pa.int32()))
    table = catalog.create_table("db.t", schema=schema, properties={"format-version": version})
    table.append(rows(0, 30).cast(schema))
    with table.update_spec() as spec:
        spec.add_field("p", IdentityTransform())
        spec.add_field("id", BucketTransform(2))
    table.append(rows(30, 10).cast(schema))
    table.delete("id < 5")
    with table.update_schema() as change:
        change.update_column("id", LongType())
        change.rename_column("x", "z")
    with table.update_schema() as change:
        change.add_column("x", LongType())  # the old name has a new meaning
    more = rows(40, 6).rename_columns(["id", "z", "p"]).append_column("x", pa.array(range(6)))
    table.append(more)
    with table.update_schema() as change:
        change.delete_column("x")
    table.append(more.drop_columns(["x"]))
    table.manage_snapshots().create_tag(table.history()[0].snapshot_id, "first").commit()
    for snapshot in table.snapshots():
        names = table.scan(snapshot_id=snapshot.snapshot_id).projection().column_names
        found = rows_of("db.t", names, catalog=catalog, snapshot_id=snapshot.snapshot_id)
        assert found == iceberg_rows(table, names, snapshot_id=snapshot.snapshot_id)
    columns = ["id", "z", "p"]
    for where in ("id >= 35", "z IS NULL", "p = 'p 0/é' AND NOT id > 20", "p != 'p 1/é'"):
        every = table.scan().to_arrow()
        kept = every.filter(filters.row_filter(filters.parse(where), every.schema, "t").expression)
        found = rows_of("db.t", columns, catalog=catalog, where=where)
        assert found == plain_rows(kept, columns), where
    assert len(rows_of("db.t", ["id"], catalog=catalog, ref="first")) == 30
    second = table.snapshots()[1].timestamp_ms / 1000
    moment = datetime.fromtimestamp(second, timezone.utc)
    assert len(rows_of("db.t", ["id"], catalog=catalog, as_of=moment)) == 40
    # A filter at an older snapshot, whose name means another column now.
    first = table.snapshots()[0].snapshot_id
    found = rows_of("db.t", ["id"], catalog=catalog, snapshot_id=first, where="x < 5")
    assert [row[0] for row in found] == [float(i) for i in range(10)]


def test_out_of_range_filter_values_skip_no_iceberg_file(catalog: Any) -> None:
    table = catalog.create_table("db.t", schema=EVERY_TYPE)
    for number in (1, 2, 3):
        table.append(every_type(number))
    for where, kept in EVERY_LITERAL.items():
        found = [row[0] for row in rows_of("db.t", ["i"], where=where, catalog=catalog)]
        assert found == kept, where


def test_newest_iceberg_version_uses_the_current_columns(catalog: Any) -> None:
    from pyiceberg.types import DoubleType

    table = catalog.create_table(
        "db.t", schema=pa.schema([("x", pa.float64()), ("y", pa.float64())])
    )
    table.append(pa.table({"x": [1.0, 2.0], "y": [5.0, 6.0]}))
    first = table.current_snapshot().snapshot_id
    with table.update_schema() as change:
        change.delete_column("x")
    with table.update_schema() as change:
        change.rename_column("y", "z")
        change.add_column("x", DoubleType())  # the old name has a new meaning
    columns = ["x", "z"]
    assert rows_of("db.t", columns, catalog=catalog) == iceberg_rows(table, columns)
    assert rows_of("db.t", columns, catalog=catalog, where="x IS NULL AND z > 5") == [
        (tables.NULL, 6.0)
    ]
    assert rows_of("db.t", ["x", "y"], catalog=catalog, snapshot_id=first) == [(1, 5), (2, 6)]
    dataset, _ = tables.dataset_of("db.t", columns, catalog=catalog)
    assert dataset.table is not None
    seen = dataset.table.version
    with table.update_schema() as change:
        change.delete_column("x")
    request = VersionRequest(snapshot_id=seen.version, schema_id=seen.schema_id)
    again = open_table(seen.source, request, None)  # type: ignore[arg-type]  # no session for a path
    assert again.arrow_schema.names == dataset.arrow_schema.names


@pytest.mark.parametrize("kind", ["parquet", "puffin"])
def test_iceberg_position_deletes_and_deletion_vectors_are_applied(catalog: Any, kind: str) -> None:
    table = catalog.create_table("db.t", schema=rows(0, 1).schema)
    table.append(rows(0, 1000))
    table.append(rows(1000, 10))
    files = sorted(task.file.file_path for task in table.scan().plan_files())
    deletes = {files[0]: [0, 3, 4], files[1]: [1, 9]}
    state = tables.iceberg_deletes(table.metadata_location, deletes, kind)
    from pyiceberg.table import StaticTable

    columns = ["id", "x", "p"]
    expected = iceberg_rows(StaticTable.from_metadata(state), columns)
    assert len(expected) == 1005
    assert rows_of(state, columns) == expected
    assert rows_of(state, columns, where="id >= 1000") == [r for r in expected if r[0] >= 1000]


def test_iceberg_equality_deletes_raise_before_rows_are_read(catalog: Any) -> None:
    table = catalog.create_table("db.t", schema=rows(0, 1).schema)
    table.append(rows(0, 10))
    state = tables.iceberg_deletes(table.metadata_location, {"any": [1]}, "equality")
    with pytest.raises(InvalidArgumentError, match=r"equality deletes, which pyiceberg .*spark\.t"):
        rows_of(state, ["id"])


def test_wrong_iceberg_arguments_raise_a_clear_error(catalog: Any, tmp_path: Path) -> None:
    table = catalog.create_table("db.t", schema=rows(0, 1).schema)
    with pytest.raises(InvalidArgumentError, match="the table has no snapshot and so no rows"):
        rows_of("db.t", ["id"], catalog=catalog)
    table.append(rows(0, 10))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: rows_of("db.t", ["id"], catalog=catalog, snapshot_id=5), "expired.*newest snaps"),
        (lambda: rows_of("db.t", ["id"], catalog=catalog, ref="no"), "branches and tags are main"),
        (lambda: rows_of("db.t", ["id"], catalog=catalog, version=5), "this is an Iceberg table"),
        (lambda: rows_of("db.no", ["id"], catalog=catalog), "the catalog has no table 'db.no'"),
        (lambda: rows_of(table.location(), ["id"]), "belongs to a catalog.*metadata.json"),
        (lambda: rows_of("db.t", ["id"], catalog=catalog, where="no = 1"), "has no column 'no'"),
        (lambda: requested(version=1, ref="x"), "version and ref are given"),
        (lambda: requested(version=-1), "Give a whole number from 0"),
        (lambda: requested(version=2**64), "version is 18446744073709551616. Give a whole number"),
        (
            lambda: requested(snapshot_id=10**400),
            r"snapshot_id is 1000.*number from 0 to 2\*\*63 - 1",
        ),
        (lambda: requested(as_of="yesterday"), "as_of is 'yesterday'"),
    ]
    for call, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            call()
    folder = Path(table.location().removeprefix("file://"))
    folder.rename(tmp_path / "moved")
    with pytest.raises(InvalidArgumentError, match="moved|cannot be used"):
        rows_of("db.t", ["id"], catalog=catalog)
    moved = max((tmp_path / "moved" / "metadata").glob("*.metadata.json"))
    with pytest.raises(InvalidArgumentError, match="absolute paths"):
        rows_of(moved, ["id"])


# -- random histories --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(amount(2, 800)))
def test_every_version_of_a_random_table_history_is_read_right(tmp_path: Path, seed: int) -> None:
    assert tables.random_history(seed, tmp_path, steps=5).num_checked >= 10


# -- incremental, and over ranks ---------------------------------------------------------------------


def test_only_footers_of_new_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = tmp_path / "t", Store.create(tmp_path / "store")
    for part in range(20):
        deltalake.write_deltalake(folder, rows(100 * part, 100), mode="append")
    read: list[int] = []

    def known(dataset: Any, schema: Any) -> KnownFooters:
        found = KnownFooters(store, dataset, schema)
        monkeypatch.setattr(found, "put", lambda *a: (read.append(found.num_read), put(found, *a)))
        return found

    put = KnownFooters.put
    columns = ["id", "x"]

    def check(*, expected: int, **choice: Any) -> None:
        read.clear()
        found = rows_of(folder, columns, known=known, **choice)
        assert found == rows_of(folder, columns, **choice)
        assert read == [expected]

    check(expected=20)
    check(expected=0)
    deltalake.write_deltalake(folder, rows(2000, 10), mode="append")
    check(expected=1)  # of 2,010 rows 10 are new
    check(expected=21, where="id > 30")  # other rows of the same files
    check(expected=0, where="id > 30")
    deltalake.DeltaTable(folder).delete("id = 1005")
    check(expected=1)
    for each in (tmp_path / "store" / "tables").rglob("*.json"):  # damaged: read again
        each.write_bytes(each.read_bytes()[:-40])
    check(expected=21)
    deltalake.write_deltalake(
        folder, rows(0, 5, new=pa.array(range(5))), mode="append", schema_mode="merge"
    )
    check(expected=22)  # other columns of the table


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_read_every_undeleted_row_once(tmp_path: Path, ranks: int) -> None:
    mapped_table(tmp_path / "t", "id")
    dataset, schema = tables.dataset_of(tmp_path / "t", ["x"])
    manifest = read_manifest(dataset, schema)
    seen: list[float] = []
    for rank in range(ranks):
        with Reader(dataset.store, manifest, rank=rank, size=ranks, batch_size=4, seed=1) as reader:
            plan = reader.plan(0)
            with ParquetSource(dataset.store, manifest) as source:
                for step in range(plan.num_steps):
                    numbers = np.sort(batch_rows(plan, rank, step))
                    seen += source.read(["x"], numbers)["x"].tolist()
    assert sorted(seen) == sorted(row[0] for row in delta_rows(tmp_path / "t", ["x"]))


def test_vacuumed_files_with_known_footers_raise(tmp_path: Path) -> None:
    folder, store = tmp_path / "t", Store.create(tmp_path / "store")
    deltalake.write_deltalake(folder, rows(0, 10))
    deltalake.write_deltalake(folder, rows(10, 10), mode="append")

    def known(dataset: Any, schema: Any) -> KnownFooters:
        return KnownFooters(store, dataset, schema)

    assert len(rows_of(folder, ["id"], known=known)) == 20
    deltalake.DeltaTable(folder).delete("id < 10")
    deltalake.DeltaTable(folder).vacuum(0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(InvalidArgumentError, match="version 1 of .*vacuumed.*newer version"):
        rows_of(folder, ["id"], version=1, known=known)


# -- recipes and secrets ------------------------------------------------------------------------------


def recipe_of(table: TableVersion, losses: tuple[float, ...] = ()) -> recipes.Recipe:
    return recipes.Recipe(table, 1, 1, recipes.this_environment(), "", losses, {})


@pytest.mark.parametrize("key", ["", "\n", "00" * 31, "00" * 33, "zz" * 32])
def test_missing_or_malformed_key_opens_no_recipe(tmp_path: Path, key: str) -> None:
    run = Store.create(tmp_path / "run")
    facts = {"format": 1, **asdict(recipe_of(TableVersion("delta", "t", "t", "u", 1)))}
    run.write_bytes(recipes.PARAMS_NAME, b"")
    seal = recipes._mac(facts, b"")
    run.write_bytes(recipes.RECIPE_NAME, dump_sealed({**facts, "hmac": seal}))
    with pytest.raises(
        UntrustedError, match="elastic.*own model" if not key.strip() else "is invalid"
    ):
        recipes.load_recipe(run, key=key)


class Trained:
    """Stand-in for a model."""

    def __init__(self, module: torch.nn.Module, *losses: float) -> None:
        self.history: list[dict[str, Any]] = [{"loss": loss} for loss in losses]
        self.training_data: dict[str, Any] = {}
        self._module = module

    def getModel(self) -> torch.nn.Module:  # noqa: N802 - Spark's form
        return self._module


def test_equal_tensors_of_any_layout_have_equal_digests() -> None:
    one, two = torch.eye(2), torch.eye(2) * 2
    dense = torch.ones(2, dtype=torch.complex64)
    for make in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc):
        found = recipes._digests({"a": make(one), "b": make(two), "c": make(one.clone())})
        assert found["a"] == found["c"] != found["b"]
    found = recipes._digests({"a": dense.conj(), "b": dense.conj().resolve_conj()})
    assert found["a"] == found["b"]
    assert recipes._digests(
        {"a": torch.ones(2, dtype=torch.complex64).imag, "b": torch._neg_view(one)}
    )
    nan = recipe_of(TableVersion("delta", "t", "t", "u", 1), (float("nan"), 1.0))
    assert recipes._first_difference(nan, Trained(torch.nn.Identity(), float("nan"), 1.0)) == ""
    assert "epoch 2" in recipes._first_difference(
        nan, Trained(torch.nn.Identity(), float("nan"), 2)
    )


def test_fit_succeeds_although_its_recipe_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any, **options: Any) -> str:
        raise OSError("the disk is full")

    monkeypatch.setattr("sparkhvd.estimator.estimator.write_recipe", fails)
    fitted = SimpleNamespace(data={"tables": [{"source": "t"}]})
    request: Any = SimpleNamespace(
        num_checkpoints=1,
        run=SimpleNamespace(start_from=None, run_dir="runs/a"),
        cluster=SimpleNamespace(least=None, num_proc=1),
        store=None,
        seed=1,
    )
    model: Any = SimpleNamespace(_require_fitted=lambda: fitted)
    with pytest.warns(UserWarning, match="'runs/a' was not written: OSError: the disk is full"):
        TorchEstimator(model=torch.nn.Identity())._write_recipe(request, model)


class Fitter:
    """Stand-in for an estimator: it opens tables, and does not train."""

    num_fits = 0

    def _open_table(self, choice: TableChoice, spark: Any) -> Any:
        options: Any = TorchEstimator(model=torch.nn.Identity(), loss="mse", feature_cols=["x"])
        return open_table_source(options._options(), choice, spark)

    def _fit_sources(self, sources: Any) -> Trained:
        self.num_fits += 1
        return Trained(torch.nn.Identity())


def test_reproduce_refuses_another_table_before_the_fit(
    tmp_path: Path, catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reproduced(table: TableVersion, **options: Any) -> int:
        fitter = Fitter()
        monkeypatch.setattr(recipes, "load_recipe", lambda *a, **k: (recipe_of(table), fitter))
        session: Any = None
        recipes.reproduce(Store(str(tmp_path)), session, **options)
        return fitter.num_fits

    deltalake.write_deltalake(tmp_path / "t", rows(0, 3))
    dataset, _ = tables.dataset_of(tmp_path / "t", ["x"])
    assert dataset.table is not None
    assert reproduced(dataset.table.version) == 1
    with pytest.raises(InvalidArgumentError, match="now holds another table: its id is"):
        reproduced(replace(dataset.table.version, uuid="another"))
    # The catalog deletes metadata files of earlier states, and keeps their snapshots.
    kept = {"write.metadata.delete-after-commit.enabled": "true"}
    kept["write.metadata.previous-versions-max"] = "1"
    table = catalog.create_table("db.t", schema=rows(0, 1).schema, properties=kept)
    table.append(rows(0, 3))
    dataset, _ = tables.dataset_of("db.t", ["x"], catalog=catalog)
    assert dataset.table is not None
    for first in (3, 6, 9):
        table.append(rows(first, 3))
    assert reproduced(dataset.table.version, catalog=catalog) == 1


@pytest.mark.parametrize(
    ("table", "catalog"),
    [
        ("db.t", {"type": "rest", "uri": "http://u:SECRET@localhost:1/?token=SECRET"}),
        ("db.t", {"type": "rest", "uri": "http://localhost:1/", "credential": "a:SECRET"}),
        ("db.t", {"uri": "SECRET"}),
        ("db.t", {"type": "sql", "uri": "postgresql+x://u:SECRET@h/db", "name": "c"}),
    ],
)
def test_table_errors_contain_no_secret(table: str, catalog: Any) -> None:
    with pytest.raises(InvalidArgumentError) as found:
        rows_of(table, ["id"], catalog=catalog)
    assert found.value.__suppress_context__
    assert "SECRET" not in "".join(traceback.format_exception(found.value))


def test_metadata_location_is_passed_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.table import StaticTable

    def fails(location: str, properties: dict[str, str]) -> None:
        assert location == "s3://b/a b/v1.metadata.json"
        assert properties["s3.access-key-id"] == "AKIA"
        raise ValueError(f"{properties}")

    monkeypatch.setattr(StaticTable, "from_metadata", fails)
    with pytest.raises(InvalidArgumentError) as found:
        iceberg.load_files("s3://AKIA:SECRET@b/a%20b/v1.metadata.json?region=x", "t", None)
    assert "SECRET" not in str(found.value)
    assert found.value.__suppress_context__


def test_common_root_of_iceberg_files_is_found() -> None:
    root = iceberg._common_root
    assert root(["s3://b/t/a.parquet", "s3a://b/t/p/b.parquet"]) == (
        "s3://b/t",
        ["a.parquet", "p/b.parquet"],
    )
    assert root(["s3://b/w//t/a.parquet", "s3://b/w//t/b.parquet"])[0] == "s3://b/w//t"
    assert root(["s3://b/a b.parquet"]) == ("s3://b/", ["a b.parquet"])
    assert root(["file:///t//a", "/t/u/../b"]) == ("/t", ["a", "b"])
    for other in ("s3://b/t/b.parquet", "s3://b/t//u/b.parquet"):
        with pytest.raises(InvalidArgumentError, match="'//' in their keys"):
            root(["s3://b/t//v/a.parquet", other])
    with pytest.raises(InvalidArgumentError, match="no common folder"):
        root(["file:///x/a.parquet", "file:///y/a.parquet"])
    with pytest.raises(InvalidArgumentError, match="several file systems"):
        root(["s3://b/a.parquet", "s3://c/a.parquet"])


def test_special_folder_names_work_and_foreign_deletion_vectors_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("qu?ery", "a+b", "sp ace"):
        deltalake.write_deltalake(tmp_path / folder / "t", rows(0, 6), partition_by=["p"])
        dataset, _ = tables.dataset_of(tmp_path / folder / "t", ["id"])
        assert len(rows_of(tmp_path / folder / "t", ["id"], where="p = 'p 1/é'")) == 2
        assert dataset.table is not None
        assert len(rows_of(dataset.table.version.source, ["id"])) == 6
    mapped_table(tmp_path / "t", "name")
    table = deltalake.DeltaTable(tmp_path / "t")
    with pytest.raises(InvalidArgumentError, match=r"'xx yy/1.parquet', which is not a file"):
        delta._deleted(table, "t", pa.table({"path": ["2.parquet"]}), ())
    for name, mask in (("deleted", [True] * 50 + [False]), ("kept", [True] * 51)):
        both = {"xx yy/1.parquet": lambda mask=mask: np.array(mask)}
        monkeypatch.setattr(delta, "_deleted", lambda *a, both=both: both)
        if name == "kept":
            assert len(rows_of(tmp_path / "t", ["x"])) == 55
            continue
        with pytest.raises(InvalidArgumentError, match="rows beyond the 50 rows of"):
            rows_of(tmp_path / "t", ["x"])


def typed_table(folder: Path, kind: str, *parts: pa.Table) -> None:
    """Write a Delta table of a column c, and of x, from files as Spark or a type widening leaves them."""
    folder.mkdir()
    features = {"readerFeatures": ["typeWidening"], "writerFeatures": ["typeWidening"]}
    columns = [("x", "double"), ("c", kind)]
    fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in columns]
    adds = []
    for number, part in enumerate(parts):
        path = folder / f"{number}.parquet"
        pq.write_table(part, path, use_deprecated_int96_timestamps=True)
        facts = {"path": path.name, "partitionValues": {}, "size": path.stat().st_size}
        adds.append({"add": {**facts, "modificationTime": 0, "dataChange": True}})
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {},
        "createdTime": 0,
    }
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    tables.write_delta_log(folder, 0, {"protocol": protocol}, {"metaData": metadata}, *adds)


def test_int96_timestamps_are_filtered_and_widened_columns_raise(tmp_path: Path) -> None:
    moments = [datetime(year, 1, 1) for year in (1, 2020, 9999)]  # noqa: DTZ001 - UTC in the table
    part = pa.table({"x": [1.0, 2.0, 3.0], "c": pa.array(moments, pa.timestamp("us"))})
    typed_table(tmp_path / "t", "timestamp", part)
    for where, kept in {"c >= '9999-01-01'": [3], "c < '2000-01-01T00:00:00Z'": [1]}.items():
        assert [row[0] for row in rows_of(tmp_path / "t", ["x"], where=where)] == kept
    parts = [
        pa.table({"x": [1.0], "c": pa.array([5], pa.int32())}),
        pa.table({"x": [2.0], "c": pa.array([Decimal("1.5")], pa.decimal128(12, 1))}),
    ]
    typed_table(tmp_path / "u", "decimal(12,1)", *parts)
    assert [row[0] for row in rows_of(tmp_path / "u", ["x"], where="c > 1.5")] == [1]
    with pytest.raises(InvalidArgumentError, match=r"log changed the type.*fit\(spark\.table"):
        rows_of(tmp_path / "u", ["x", "c"])


def test_filter_that_pyiceberg_cannot_plan_reads_every_file(
    catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.table import DataScan

    table = catalog.create_table("db.t", schema=rows(0, 1).schema)
    table.append(rows(0, 10))
    plan = DataScan.plan_files

    def fails(scan: Any) -> Any:
        if "GreaterThan" in repr(scan.row_filter):
            raise TypeError("no such literal")
        return plan(scan)

    monkeypatch.setattr(DataScan, "plan_files", fails)
    assert rows_of("db.t", ["id"], catalog=catalog, where="id > 7") == [(8.0,), (9.0,)]


# -- filters and masks -------------------------------------------------------------------------------


def test_filters_select_rows_like_sql() -> None:
    table = pa.table(
        {
            "a": pa.array([1, 2, None, 4], pa.int32()),
            "b": ["x", None, "it's", "y"],
            "d": pa.array([0, 1, 20000, None], pa.date32()),
            "f": pa.array([0.1, 1.5, None, 2], pa.float32()),
            "c c": [True, False, None, True],
        }
    )
    for text, kept in {
        "a > 1": [1, 3],
        "NOT a > 1": [0],
        "a IN (1, 2) OR b = 'it''s'": [0, 1, 2],
        "a NOT IN (1, 2)": [3],
        "d >= DATE '1970-01-02'": [1, 2],
        "f BETWEEN 0.05 AND 1.5": [0, 1],
        "f > 0.1": [0, 1, 3],  # as in Spark: the nearest float is more
        "a != 1.5": [0, 1, 3],
        "b IS NOT NULL AND NOT (a = 1 OR a = 4)": [],
        "`c c` = TRUE": [0, 3],
    }.items():
        condition = filters.parse(text)
        found = filters.row_filter(condition, table.schema, "t")
        numbered = table.append_column("n", pa.array(range(4)))
        assert numbered.filter(found.expression).column("n").to_pylist() == kept, text
        assert filters.parse(found.text) == condition
    pandas = [[("a", ">", 1), ("b", "in", ["y"])], [("a", "==", None)]]
    assert filters.text_of(filters.parse(pandas)) == (
        """(("a" > 1) AND ("b" IN ('y'))) OR ("a" IS NULL)"""
    )


def test_files_with_nan_are_skipped_only_if_no_row_matches(tmp_path: Path) -> None:
    for part in ([1.0, np.nan], [1.0, 1.0], [3.0, np.nan], [np.nan, np.nan]):
        values = pa.table({"x": part, "id": [len(part)] * 2})
        deltalake.write_deltalake(tmp_path / "t", values, mode="append")
    for where, count in {"x != 1": 1, "NOT x < 2": 1, "x >= 1": 4, "NOT x IN (3)": 3}.items():
        assert len(rows_of(tmp_path / "t", ["id"], where=where)) == count, where
    moments = [datetime(2026, 11, day, tzinfo=timezone.utc) for day in (1, 2, 3)]
    for number, moment in enumerate(moments):
        at = pa.array([moment], pa.timestamp("us", "UTC"))
        part = pa.table({"at": at, "day": at.cast(pa.date32()), "id": [number]})
        deltalake.write_deltalake(tmp_path / "u", part, mode="append")
    for where, ids in {
        "at >= '2026-11-02T00:00:00Z'": [1.0, 2.0],
        "at < TIMESTAMP '2026-11-02T01:00:00+01:00'": [0.0],
        "day BETWEEN DATE '2026-11-01' AND '2026-11-02'": [0.0, 1.0],
    }.items():
        assert [row[0] for row in rows_of(tmp_path / "u", ["id"], where=where)] == ids, where


def test_filters_with_thousands_of_values_work_and_more_raise() -> None:
    table = pa.table({"x": pa.array([1, None, 9_999, 20_000])})

    def kept(where: Any) -> list[Any]:
        found = filters.row_filter(filters.parse(where), table.schema, "t")
        return list(table.filter(found.expression).column("x").to_pylist())

    assert kept([("x", "in", range(10_000))]) == [1, 9_999]
    assert kept([("x", "not in", range(10_000))]) == [20_000]
    assert kept(" OR ".join(f"x = {i}" for i in range(5_000))) == [1]
    with pytest.raises(InvalidArgumentError, match="10,001 conditions.*One IN"):
        filters.parse([[("x", "=", i)] for i in range(10_000)])
    values = pa.table({"f": pa.array([0.0, -0.0, None, np.nan])})
    found = filters.row_filter(filters.parse("f IN (0, 7)"), values.schema, "t")
    assert values.filter(found.expression).num_rows == 2


def test_filter_survives_conversion_to_text() -> None:
    deep = "x = 1"
    for _ in range(30):
        deep = f"y = 2 AND (z = 3 OR NOT ({deep}))"
    for where in (
        [("x", ">", np.float64(0.5)), ("y", "in", [np.int64(5), np.float32(0.5)])],
        [('a"b`c', "=", "it's")],
        'NOT ("a""b" = 1 OR `c``d` IS NULL)',
        deep,
    ):
        condition = filters.parse(where)
        assert filters.parse(filters.text_of(condition)) == condition


@pytest.mark.parametrize(
    "where",
    [
        "x = 1e400",
        [("x", "<", float("nan"))],
        [("x", 5, 1)],
        [("x", "in", "abc")],
        "x = " + "9" * 5000,
    ],
)
def test_filter_values_without_a_text_form_are_refused(where: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="where="):
        filters.parse(where)


@pytest.mark.parametrize(
    "where",
    ["a >", "a ! 1", "a IN ()", "(a = 1", "a = 1 2", "", "a LIKE 'x'", [("a", "?", 1)], [], 5],
)
def test_malformed_filters_are_refused(where: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="where="):
        filters.parse(where)
    with pytest.raises(InvalidArgumentError, match="are nested more than"):
        filters.parse("(" * 500 + "a = 1" + ")" * 500)


def test_row_masks_of_wrong_size_are_refused() -> None:
    mask = np.random.default_rng(0).random(1003) < 0.3
    text = packed_rows(mask)
    assert (unpacked_rows(text, 1003) == mask).all()
    for damaged, count in ((text, 1011), (text, 900), ("?", 1003), (text[:-4], 1003)):
        with pytest.raises(ValueError, match="mask"):
            unpacked_rows(damaged, count)
    with pytest.raises(ValueError, match="mask"):  # a small text of many rows
        unpacked_rows(packed_rows(np.zeros(10_000_000, np.bool_)), 8)
