"""Daemon of Spark's Python workers that imports torch once: `python -m tests.harness.warm_daemon pyspark.worker`.

Workers are forks of their daemon, and Spark replaces a worker whose task has failed, was cancelled or did not read all of its rows. With
pyspark's own daemon each worker imports torch again, which takes seconds of CPU. Only the shared `local[2]` session
has this daemon.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

MODULE = "tests.harness.warm_daemon"
# Modules for transform, for tasks that launch ranks, and for tasks that write data.
USEFUL_MODULES = (
    "pandas",
    "torch",
    "sparkhvd.estimator.transform.worker",
    "sparkhvd.runner.task",
    "sparkhvd.data.materialize",
)

# Spark has a daemon for each set of variables. Workers of RDDs, which only pickle rows, use a daemon without this.
OF_SQL = "SPARK_SIMPLIFIED_TRACEBACK"

if __name__ == "__main__":
    from pyspark.daemon import manager

    for name in USEFUL_MODULES if OF_SQL in os.environ else ():
        with contextlib.suppress(ImportError):  # a test has a Python without this package
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # as sparkhvd.python_daemon
    manager()
