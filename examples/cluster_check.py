"""Whether ranks can run on a cluster, and what each of them has: a table, and a fit of two seconds through the store.

    python examples/cluster_check.py                                         on this machine
    spark-submit <your cluster's options> examples/cluster_check.py --num-proc 4 --store s3://bucket/folder

docs/clusters.md says what to look for on each kind of cluster. It ends with 0 if all is well; what is not is an error that says what to do.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import TorchRegressor

# What Hadoop's library needs of a process; the names are shown, and no values.
HADOOP = (
    *("HADOOP_TOKEN_FILE_LOCATION", "KRB5CCNAME", "CLASSPATH", "HADOOP_HOME", "HADOOP_CONF_DIR"),
    *("ARROW_LIBHDFS_DIR", "JAVA_HOME"),
)
MIB = 1 << 20
COLUMNS = ("rank", "host", "python", "torch", "threads", "memory", "/dev/shm", "64 MiB in")


def memory_limit() -> str:
    """Return the most memory that this container may have, JVM and ranks together."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).exists() else ""
        if text.isdigit() and int(text) < 1 << 60:
            return f"{int(text) // MIB:,} MiB"
    return "no limit"


def look() -> dict[str, Any]:
    """Look around on a rank, and reduce something with the others."""
    import sparkhvd.torch as hvd

    hvd.init()
    tensor = torch.ones(16 * MIB)
    hvd.allreduce_(tensor, op=hvd.Sum)  # the first call touches fresh memory
    begin = time.monotonic()
    hvd.allreduce_(tensor, op=hvd.Average)
    seconds = time.monotonic() - begin
    assert tensor[0].item() == hvd.size()
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").exists() else None
    values = (
        *(hvd.rank(), socket.gethostname(), ".".join(map(str, sys.version_info[:3]))),
        *(torch.__version__, torch.get_num_threads(), memory_limit()),
        f"{shm.f_frsize * shm.f_blocks // MIB:,} MiB" if shm else "none",
        f"{seconds * 1e3:.0f} ms",
    )
    return {"row": [str(value) for value in values], "has": [n for n in HADOOP if n in os.environ]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--num-proc", type=int, help="ranks; not given: all task slots")
    parser.add_argument("--store", help="a folder that driver and executors share, path or URL")
    options = parser.parse_args()
    builder = SparkSession.builder
    if "PYSPARK_GATEWAY_PORT" not in os.environ and "SPARK_REMOTE" not in os.environ:
        builder = builder.master("local[2]")  # not by spark-submit
    spark = builder.getOrCreate()
    ranks = sparkhvd.run(look, num_proc=options.num_proc, spark=spark)
    table = [list(COLUMNS), *(rank["row"] for rank in ranks)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(
        "variables of Hadoop on all ranks:",
        sorted(set.intersection(*(set(r["has"]) for r in ranks))),
    )
    df = spark.range(1_000).selectExpr("array(rand(1), rand(2)) AS features")
    df = df.selectExpr("*", "features[0] - features[1] AS label")
    fit = TorchRegressor(
        model=torch.nn.Linear(2, 1),
        optimizer="sgd",
        num_proc=len(ranks),
        store=options.store,
        verbose=0,
    ).fit(df)
    print(f"a fit through the store: loss {fit.history[-1]['loss']:.3f}, seconds {fit.timings}")
    print("all is well")


if __name__ == "__main__":
    main()
