"""Horovod's `horovod.spark.common.util`: helpers of its data path, which sparkhvd has in other places."""

from __future__ import annotations

from typing import NoReturn

__all__: list[str] = []


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}. It is part of Horovod's data path; sparkhvd.data.prepare() writes a DataFrame for "
        "ranks, and sparkhvd.data.load() opens it."
    )
