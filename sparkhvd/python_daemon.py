"""Daemon of Spark's Python workers with torch already imported.

To use it, set `spark.python.daemon.module=sparkhvd.python_daemon`.

Spark forks its Python workers from a daemon and ends those that are idle for a minute. Behind pyspark's own daemon each worker that
computes rows for `transform` imports torch, 1.6 s of CPU; behind this one it has torch. The daemon holds torch's memory until the
session ends. Spark reads the setting when a session starts. Every executor needs the package.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

# Modules of a worker that computes rows for `transform`.
_MODULES = ("torch", "pyspark.worker", "sparkhvd.estimator.transform.worker")


def main() -> None:
    """Import what workers need, then do what pyspark's daemon does."""
    # pyarrow would start a thread of jemalloc, which it does not use by default.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # noqa: TID251
    can_fork = False
    with contextlib.suppress(Exception):  # other workers need no working torch
        for name in _MODULES:
            importlib.import_module(name)
        # A lock that another thread holds would stay locked in a fork. Without /proc the threads are unknown.
        can_fork = len(os.listdir("/proc/self/task")) == 1
    if not can_fork:
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    from pyspark.daemon import manager

    # A worker collects garbage after each task. The collector would write to, and so copy, all objects of torch.
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
