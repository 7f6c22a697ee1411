"""Compare rows of Iceberg tables that Spark wrote with the ranks' rows: `read_iceberg <warehouse> <results>`, in the main environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.harness.tables import NULL, rows_of


def main(warehouse: str, results: str) -> None:
    expected = json.loads(Path(results).read_text())
    database = Path(warehouse) / "db"
    for name, table, columns, version in (
        ("first", "t", ["id", "x", "p"], {"snapshot_id": expected["snapshots"][0]}),
        ("second", "t", ["id", "x", "p"], {"snapshot_id": expected["snapshots"][1]}),
        ("t", "t", ["id", "x", "p"], {"snapshot_id": expected["snapshots"][2]}),
        ("b1", "t", ["id", "x", "p"], {"snapshot_id": expected["snapshots"][3]}),
        ("first", "t", ["id", "x", "p"], {"ref": "first"}),
        ("v3", "v3", ["id", "z", "p", "x"], {}),
    ):
        found = rows_of(database / table, columns, **version)
        rows = [tuple(_plain(value) for value in row) for row in expected[name]]
        assert found == sorted(rows, key=repr), (name, len(found), len(rows))
        every: Any = [row for row in rows if row[0] >= 20 and row[2] != "p1"]
        where = "id >= 20 AND NOT p = 'p1'"
        assert rows_of(database / table, columns, where=where, **version) == sorted(every, key=repr)
    print("EQUAL")


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else NULL if value is None else float(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
