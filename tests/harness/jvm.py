"""Options of the tests' JVMs, which live for seconds and spend most of them on loading and compiling classes.

`python -m tests.harness.jvm` runs typical work of tests in a JVM and archives its loaded classes for this
Python environment, whose pyspark they belong to. On two cores, with the options and the archive, a local session with some
jobs took 0.6 of its time and one of local-cluster 0.5. The JVM ignores an archive of another Java or Spark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHIVE = Path(sys.prefix, "spark-classes.jsa")
# The first compiler and the simplest collector, because threads of the others take cores from the test.
SMALL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def environment() -> dict[str, str]:
    """Return the variables that give these options to drivers, their executors, and daemons of a standalone cluster."""
    options = SMALL
    if ARCHIVE.exists():
        options += f" -XX:SharedArchiveFile={ARCHIVE} -Xlog:cds=off -Xlog:cds+dynamic=off"
    return {
        "SPARK_SUBMIT_OPTS": f'{options} -Dspark.executor.defaultJavaOptions="{options}"',
        "SPARK_DAEMON_JAVA_OPTS": options,
    }


# Typical work of tests. One JVM, two contexts: the second one has a master, a worker and executors.
_PROGRAM = """
import sys, tempfile
import pandas as pd
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

def session(master, **conf):
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for key, value in {"spark.sql.shuffle.partitions": "2", **conf}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()

def meet(rows):
    BarrierTaskContext.get().barrier()
    return rows

connect = {"spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin", "spark.connect.grpc.binding.port": "0"}
spark = session("local[2]", **connect)
df = spark.createDataFrame(pd.DataFrame({"x": range(10)})).selectExpr("x", "array(double(1), double(x)) as a", "x % 3 as k")
with tempfile.TemporaryDirectory() as folder:
    df.repartition(3).write.parquet(f"{folder}/p")
    read = spark.read.parquet(f"{folder}/p")
    read.mapInPandas(lambda rows: rows, read.schema).groupBy("k").count().orderBy("k").toPandas()
    read.select("a").mapInArrow(lambda rows: rows, "a array<double>").collect()
    spark.range(2, numPartitions=2).mapInPandas(meet, "id long", barrier=True).collect()
spark.sparkContext.parallelize(range(4), 2).barrier().mapPartitions(meet).collect()
spark.stop()
spark = session("local-cluster[1,1,1024]")
spark.range(4).mapInPandas(lambda rows: rows, "id long").count()
spark.stop()
"""


def make_archive() -> None:
    """Write the archive. It only makes starts faster, so a failure is printed and ignored."""
    with tempfile.TemporaryDirectory(dir=ARCHIVE.parent) as folder:
        new = Path(folder, ARCHIVE.name)
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            cwd=folder,
            env={
                **os.environ,
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "SPARK_SUBMIT_OPTS": f"{SMALL} -XX:ArchiveClassesAtExit={new}",
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if ended.returncode == 0 and new.exists():
            new.replace(ARCHIVE)
        else:
            ARCHIVE.unlink(missing_ok=True)
            print(f"No archive of Spark's classes (exit {ended.returncode}): {ended.stderr[-500:]}")


if __name__ == "__main__":
    make_archive()
