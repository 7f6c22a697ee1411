"""Horovod's `horovod.spark.common.util`: helpers of its data path, which sparkhvd has in other places."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["prepare_data"]


def prepare_data(*args: object, **kwargs: object) -> NoReturn:
    """Refuse.

    Raises:
        NotImplementedError: always.
    """
    del args, kwargs
    raise NotImplementedError(
        "horovod.spark.common.util.prepare_data is of Horovod's data path. Use sparkhvd.data.prepare(df, store), whose loaders any rank can "
        "read."
    )
