"""From a DataFrame to packed Parquet files and their manifest, in one pass; and when to reuse them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkhvd.estimator.manifest import Manifest
from sparkhvd.estimator.schema import DataSchema
from sparkhvd.estimator.store import Store

__all__ = ["PreparedData", "materialize", "prepare", "renew_leases"]


@dataclass(frozen=True)
class PreparedData:
    """Data that ranks can read.

    Attributes:
        manifest: the files, the row count and the schema with shapes.
        data_dir: where they are, relative to the store.
        reused: whether an earlier materialization served.
        seconds: how long it took to have them.
        reason: why they were or were not reused, for the user.
    """

    manifest: Manifest
    data_dir: str
    reused: bool
    seconds: float
    reason: str = ""


def materialize(
    df: Any, schema: DataSchema, store: Store, data_dir: str, *, num_partitions: int | None = None
) -> Manifest:
    """Write the columns of `schema` as packed Parquet files and return their manifest.

    One Spark job, one pass; every check that needs the values happens in it. Rows are ordered by partition
    index and position in the partition. The manifest is written last; if anything fails, the files are removed.

    Args:
        df: the DataFrame, classic or Connect.
        schema: what `check_schema` returned.
        store: where to write; the executors must see it.
        data_dir: folder in the store.
        num_partitions: coalesce to at most this many partitions first; None leaves them.

    Raises:
        InvalidArgumentError: the data hold nulls, NaN, rows of different lengths or numbers that the stored type
            cannot hold (each column is named with its count), or there are no rows.
    """
    raise NotImplementedError


def prepare(
    df: Any,
    schema: DataSchema,
    store: Store,
    *,
    app_id: str,
    data_key: str | None = None,
    keep_data: bool = False,
    num_partitions: int | None = None,
) -> PreparedData:
    """Materialize `df`, or reuse what the same plan over the same files gave before.

    Args:
        df: the DataFrame.
        schema: what `check_schema` returned.
        store: where the data live.
        app_id: the Spark application; its data are deleted when this process ends.
        data_key: the user's word that data of this key (and these columns) are the same; None lets the plan decide.
        keep_data: leave the data in the store until `Store.clean()`.
        num_partitions: see `materialize`.
    """
    raise NotImplementedError


def renew_leases() -> None:
    """Tell other applications that this one still lives; call it now and then during a long fit. Cheap."""
