"""Tables behind servers on loopback: Delta and Iceberg on S3, and a REST catalog."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest

from sparkhvd.data.table_formats import storage
from sparkhvd.errors import InvalidArgumentError
from tests.harness import tables
from tests.harness.servers import S3, SECRET
from tests.harness.tables import catalog_of, plain_rows, rows_of

deltalake = pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

pytestmark = [pytest.mark.processes, pytest.mark.leaks("file systems keep their connections open")]


def rows(first: int, count: int) -> pa.Table:
    ids = np.arange(first, first + count)
    return pa.table({"id": ids, "x": ids * 0.5, "p": [f"p {i % 3}" for i in ids.tolist()]})


def test_delta_table_on_s3_is_read(s3: S3, tmp_path: Path) -> None:
    url = f"s3://bucket/delta-{time.monotonic_ns()}/a table"
    given = storage.for_delta(url, s3.options())
    assert given["AWS_ALLOW_HTTP"] == "true"
    deltalake.write_deltalake(url, rows(0, 30), storage_options=given, partition_by=["p"])
    deltalake.write_deltalake(url, rows(30, 9), storage_options=given, mode="append")
    columns = ["id", "x", "p"]
    every = plain_rows(pa.concat_tables([rows(0, 30), rows(30, 9)]), columns)
    options = {"storage_options": s3.options()}
    assert rows_of(url, columns, **options) == every
    assert rows_of(url, columns, version=0, **options) == plain_rows(rows(0, 30), columns)
    found = rows_of(url, columns, where="p = 'p 1' AND id > 10", **options)
    assert found == [row for row in every if row[2] == "p 1" and row[0] > 10]
    dataset, _ = tables.dataset_of(url, columns, **options)
    assert dataset.table is not None
    assert SECRET not in repr(dataset)
    with pytest.raises(InvalidArgumentError, match="not a Delta or Iceberg table"):
        rows_of(url + "-other", ["id"], **options)
    with pytest.raises(InvalidArgumentError, match="storage option 'background_writes'"):
        rows_of(url, ["id"], storage_options={**s3.options(), "background_writes": True})


def test_iceberg_table_on_s3_is_read(s3: S3, tmp_path: Path) -> None:
    from pyiceberg.catalog import load_catalog

    warehouse = f"s3://bucket/iceberg-{time.monotonic_ns()}"
    more = storage.for_iceberg(warehouse, s3.options())
    properties = {**catalog_of(tmp_path, warehouse=warehouse), **more}
    catalog = load_catalog(**properties)
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", schema=rows(0, 1).schema)
    table.append(rows(0, 30))
    table.append(rows(30, 9))
    columns = ["id", "x", "p"]
    expected = plain_rows(table.scan().to_arrow(), columns)
    # The files' options come from the catalog, or are the user's.
    assert rows_of("db.t", columns, catalog=properties) == expected
    plain = {n: v for n, v in properties.items() if n not in more}
    options = {"storage_options": s3.options()}
    assert rows_of("db.t", columns, catalog=plain, **options) == expected
    assert rows_of(table.metadata_location, columns, **options) == expected
    catalog.close()


class Rest(BaseHTTPRequestHandler):
    """The calls of Iceberg's REST protocol that a reader makes, served from another catalog."""

    catalog: Any = None

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/v1/")
        if path == "config":
            return self.answer(200, {"defaults": {}, "overrides": {}})
        _, namespace, _, name = map(unquote, path.split("/"))
        try:
            table = self.catalog.load_table(f"{namespace}.{name}")
        except Exception as e:
            error = {"message": str(e), "type": "NoSuchTableException", "code": 404}
            return self.answer(404, {"error": error})
        metadata = json.loads(table.metadata.model_dump_json())
        found = {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}
        return self.answer(200, found)

    def answer(self, status: int, values: object) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    from pyiceberg.catalog import load_catalog

    properties = catalog_of(tmp_path)
    catalog = load_catalog(properties.pop("name"), **properties)
    catalog.create_namespace("db")
    handler = type("Handler", (Rest,), {"catalog": catalog})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", catalog
        server.shutdown()
        thread.join()
    catalog.close()


def test_table_of_a_rest_catalog_is_read(rest: tuple[str, Any]) -> None:
    uri, catalog = rest
    table = catalog.create_table("db.t", schema=rows(0, 1).schema)
    table.append(rows(0, 30))
    first = table.current_snapshot().snapshot_id
    table.delete("id < 10")
    given = {"type": "rest", "uri": uri}
    columns = ["id", "x"]
    expected = plain_rows(table.scan().to_arrow(), columns)
    assert len(expected) == 20
    assert rows_of("db.t", columns, catalog=given) == expected
    assert len(rows_of("ice.db.t", columns, catalog=given, snapshot_id=first)) == 30
    with pytest.raises(InvalidArgumentError, match="the catalog has no table 'db.no'"):
        rows_of("db.no", ["id"], catalog=given)
