"""Kinds of Databricks' compute on which ranks can run."""

from __future__ import annotations

import os

from sparkhvd.errors import PreflightError

__all__ = ["check_databricks", "databricks_runtime"]


def databricks_runtime() -> str:
    """Return the version of Databricks' runtime; "" elsewhere."""
    return os.environ.get("DATABRICKS_RUNTIME_VERSION", "")  # noqa: TID251 - Databricks' own


def check_databricks(is_connect: bool) -> None:
    """Refuse Databricks' standard and serverless compute, where user code is kept apart from the cluster.

    Both give a program on Databricks a session of Spark Connect; dedicated compute gives a classic one. Databricks does not offer its
    runtimes for machine learning, nor GPUs, on standard compute.

    Args:
        is_connect: whether the session is one of Spark Connect.

    Raises:
        PreflightError: the program runs there.
    """
    runtime = databricks_runtime()
    if runtime and is_connect:
        kind = "serverless" if runtime.startswith("client.") else "in standard access mode"
        raise PreflightError(
            f"This Databricks compute is {kind} (runtime {runtime}), where tasks may not connect to each other. "
            "Attach the notebook or job to a cluster in dedicated access mode, with a fixed number of workers."
        )
