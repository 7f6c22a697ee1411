"""Daemon of Spark's Python workers with torch already imported.

To use it, set `spark.python.daemon.module=sparkhvd.python_daemon`.

Spark forks its Python workers from a daemon and ends those that are idle for a minute. Behind pyspark's own daemon each worker that
computes rows for `transform` imports torch, 1.6 s of CPU; behind this one it has torch. The daemon holds torch's memory until the
session ends. Spark reads the setting when a session starts. Every executor needs the package.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

# Modules of a worker that computes rows for `transform`.
_MODULES = ("torch", "pyspark.worker", "sparkhvd.estimator.transform.worker")


def _can_fork() -> bool:
    """Import the modules, and check that no thread has started.

    A lock that another thread holds would stay locked in a fork.
    """
    # jemalloc, a part of pyarrow, would start a thread.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # noqa: TID251
    try:
        for name in _MODULES:
            importlib.import_module(name)
        return len(os.listdir("/proc/self/task")) == 1
    except Exception:  # noqa: BLE001 - other workers need no working torch; a system without /proc does not name threads
        return False


def _reseed() -> None:
    """Give a worker random numbers of its own, as if it had imported numpy."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def main() -> None:
    """Import what workers need, then do what pyspark's daemon does."""
    # Spark sets it to the CPUs of a task. With more than one, numpy starts threads when it is imported.
    is_single = os.environ.get("OMP_NUM_THREADS") == "1"  # noqa: TID251
    if not (is_single and _can_fork()):
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    from pyspark.daemon import manager

    os.register_at_fork(after_in_child=_reseed)
    # A worker collects garbage after each task. The collector would write to, and so copy, all objects of torch.
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
