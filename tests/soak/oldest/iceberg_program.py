"""Program of `test_iceberg.py`: Iceberg tables that Spark writes, and reuse of data by their snapshots. Prints a JSON object."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from sparkhvd import Store
from sparkhvd.data import reuse
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reuse import PreparedData, prepare


def session(jars: str, warehouse: Path) -> SparkSession:
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars)
    catalog = "spark.sql.catalog.ice"
    extensions = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.extensions": extensions,
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "hadoop",
        f"{catalog}.warehouse": str(warehouse),
        "spark.sql.shuffle.partitions": "2",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def write(spark: SparkSession) -> list[int]:
    """Write tables with deletes, and return the snapshots of the first."""
    merge = ", ".join(
        f"'write.{each}.mode'='merge-on-read'" for each in ("delete", "update", "merge")
    )
    spark.sql(
        "CREATE TABLE ice.db.t (id bigint, x double, p string) USING iceberg PARTITIONED BY (bucket(2, id)) "
        f"TBLPROPERTIES ('format-version'='2', {merge})"
    )
    rows = "SELECT id, id * 0.5D AS x, concat('p', id % 3) AS p FROM range({}, {})"
    spark.sql(f"INSERT INTO ice.db.t {rows.format(0, 100)}")
    spark.sql("DELETE FROM ice.db.t WHERE id % 7 = 0")
    spark.sql("UPDATE ice.db.t SET x = -1 WHERE id % 10 = 3")
    spark.sql("ALTER TABLE ice.db.t CREATE BRANCH b1")
    spark.sql(f"INSERT INTO ice.db.t.branch_b1 {rows.format(1000, 1003)}")
    spark.sql("ALTER TABLE ice.db.t CREATE TAG first AS OF VERSION " + str(snapshots(spark)[0]))
    spark.sql(
        f"CREATE TABLE ice.db.v3 USING iceberg TBLPROPERTIES ('format-version'='3', {merge}) AS {rows.format(0, 1000)}"
    )
    spark.sql("DELETE FROM ice.db.v3 WHERE id % 10 = 3")
    spark.sql("DELETE FROM ice.db.v3 WHERE id % 10 = 4")
    spark.sql("ALTER TABLE ice.db.v3 RENAME COLUMN x TO z")
    spark.sql("ALTER TABLE ice.db.v3 ADD COLUMN x bigint")
    spark.sql("INSERT INTO ice.db.v3 VALUES (5000, 1.0, 'q', 7)")
    return snapshots(spark)


def snapshots(spark: SparkSession) -> list[int]:
    found = spark.sql("SELECT snapshot_id FROM ice.db.t.snapshots ORDER BY committed_at").collect()
    return [row.snapshot_id for row in found]


def main(jars: str, folder: str) -> None:
    root = Path(folder)
    spark = session(jars, root / "warehouse")
    ids = write(spark)
    expected: dict[str, Any] = {"snapshots": ids}
    for name, query in {
        "t": "SELECT id, x, p FROM ice.db.t",
        "first": f"SELECT id, x, p FROM ice.db.t VERSION AS OF {ids[0]}",
        "second": f"SELECT id, x, p FROM ice.db.t VERSION AS OF {ids[1]}",
        "b1": "SELECT id, x, p FROM ice.db.t.branch_b1",
        "v3": "SELECT id, z, p, x FROM ice.db.v3",
    }.items():
        expected[name] = [list(row) for row in spark.sql(query).collect()]
    store = Store.create(root / "store")

    def prepared(df: DataFrame, columns: list[str] | None = None) -> PreparedData:
        schema = check_schema(df.schema, feature_cols=columns or ["id", "x"], label_cols=[])
        return prepare(df, schema, store)

    reused: list[Any] = []
    seconds: list[float] = []

    def check(name: str, df: DataFrame, is_reused: bool, snapshot: int | None, rows: int) -> None:
        began = time.perf_counter()
        data = prepared(df)
        seconds.append(time.perf_counter() - began if data.reused else 0.0)
        versions = [table.version for table in data.manifest.tables]
        right = data.reused == is_reused and versions == ([snapshot] if snapshot else [])
        reused.append(
            [name, right and data.manifest.num_rows == rows, data.reason, data.reused, versions]
        )

    table, current = "ice.db.t", len(expected["t"])
    head, path = ids[2], str(root / "warehouse" / "db" / "t")
    travel = spark.read.option("snapshot-id", ids[0])
    check("a table", spark.table(table), False, head, current)
    check("the same table", spark.table(table), True, head, current)
    check("by SQL, another plan", spark.sql(f"SELECT * FROM {table}"), False, head, current)
    check("by its path", spark.read.format("iceberg").load(path), False, head, current)
    check("by its path again", spark.read.format("iceberg").load(path), True, head, current)
    check("an option's snapshot", travel.table(table), False, ids[0], 100)
    check("the same snapshot", travel.table(table), True, ids[0], 100)
    check(
        "SQL's snapshot",
        spark.sql(f"SELECT * FROM {table} VERSION AS OF {ids[0]}"),
        False,
        ids[0],
        100,
    )
    check(
        "a tag of the snapshot",
        spark.sql(f"SELECT * FROM {table} VERSION AS OF 'first'"),
        True,
        ids[0],
        100,
    )
    check("a branch", spark.table(f"{table}.branch_b1"), False, ids[3], current + 3)
    check("the same branch", spark.table(f"{table}.branch_b1"), True, ids[3], current + 3)
    check(
        "a filter",
        spark.table(table).where("id < 50"),
        False,
        head,
        0 + sum(r[0] < 50 for r in expected["t"]),
    )
    spark.sql(f"INSERT INTO {table}.branch_b1 VALUES (2000, 1.0, 'z')")
    check(
        "a branch with a row more",
        spark.table(f"{table}.branch_b1"),
        False,
        snapshots(spark)[-1],
        current + 4,
    )
    check("the table still", spark.table(table), True, head, current)
    spark.sql(f"ALTER TABLE {table} DROP COLUMN x")
    spark.sql(f"ALTER TABLE {table} ADD COLUMN x double")
    spark.sql(f"INSERT INTO {table} VALUES (3000, 'z', 1.0)")
    spark.sql(f"DELETE FROM {table} WHERE id < 3000")
    check("another column of the name", spark.table(table), False, snapshots(spark)[-1], 1)
    metadata = spark.sql(f"SELECT snapshot_id AS id, 1.0D AS x FROM {table}.snapshots")
    check("a table of metadata", metadata, False, None, metadata.count())
    join = spark.sql(
        f"SELECT a.id, b.x FROM {table} a CROSS JOIN ice.db.v3 b WHERE b.x IS NOT NULL"
    )
    both = prepared(join.selectExpr("id", "double(x) x"))
    reused.append(["two tables", len(both.manifest.tables) == 2, both.reason, both.reused, []])
    # A version that is committed between the key and the job.
    write_columns = reuse.materialize

    def committing(*given: Any, **more: Any) -> Manifest:
        spark.sql(f"INSERT INTO {table} VALUES (4000, 'z', 1.0D)")
        return write_columns(*given, **more)

    fresh = spark.table(table).where("id > 0")
    reuse.materialize = committing
    raced = prepared(fresh)
    reuse.materialize = write_columns
    reused.append(
        ["a commit meanwhile", raced.manifest.tables == (), raced.reason, raced.reused, []]
    )
    after = prepared(spark.table(table).where("id > 0"))
    is_new = [t.version for t in after.manifest.tables] == [snapshots(spark)[-1]]
    right = is_new and after.manifest.num_rows == 2 and not after.reused
    reused.append(["the version after it", right, after.reason, after.reused, []])
    print("RESULT " + json.dumps({**expected, "reused": reused, "seconds": max(seconds)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
