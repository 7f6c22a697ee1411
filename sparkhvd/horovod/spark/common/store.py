"""Horovod's `horovod.spark.common.store`: the store, which is sparkhvd's and opens every kind of place by its URL."""

from __future__ import annotations

from typing import NoReturn

from sparkhvd.estimator import Store

__all__ = ["Store"]

_KINDS = ("FilesystemStore", "LocalStore", "HDFSStore", "DBFSLocalStore")


def __getattr__(name: str) -> NoReturn:
    text = f"module {__name__!r} has no attribute {name!r}"
    if name in _KINDS:
        text += ". Use Store.create(path), which opens local folders, DBFS, HDFS and object stores alike"
    raise AttributeError(f"{text}.")
