"""Horovod's `horovod.spark`.

Each module imports only those above it:

    common     backends and stores, and what the estimators share
    torch      the estimator of PyTorch modules
    lightning  the estimator of LightningModules
    keras      the estimator of models of Keras 3
    elastic    a number of ranks that changes, which is not on Spark in this version
"""

from __future__ import annotations

from typing import Any, NoReturn

from sparkhvd.runner import run

__all__ = ["run", "run_elastic"]


def run_elastic(fn: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: the number of ranks does not change on Spark in this version.

    Raises:
        NotImplementedError: always.
    """
    del fn, args, kwargs
    raise NotImplementedError(
        "horovod.spark.run_elastic: the number of ranks does not change on Spark in this version of sparkhvd. Use horovod.spark.run, whose "
        "estimators go on from their last checkpoint when a rank is lost, or start a script with sparkhvdrun --min-np."
    )
