"""Data sets for any training loop: a DataFrame prepared once on the driver, read by any process of any launcher.

Ownership: data that are kept stay until `Dataset.delete()` or `Store.clean()`; others go with the process that has prepared them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.loader import Loader
from sparkhvd.data.manifest import MANIFEST_NAME, Manifest
from sparkhvd.data.ownership import remove
from sparkhvd.data.reuse import prepare as materialized
from sparkhvd.data.store.default import default_store
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Dataset", "load", "prepare"]


@dataclass(frozen=True)
class Dataset:
    """Rows in a store, for readers in any process; picklable.

    Attributes:
        store: holds the files; pickled with its options.
        path: folder of the data in the store, for `load`.
        files: store of files that were there before and are read where they are; None if the folder has them.
    """

    store: Store
    path: str
    files: Store | None = None

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Files, number of rows, and columns.

        Raises:
            StoreError: the data set was deleted.
        """
        try:
            return Manifest.load(self.store, self.path)
        except FileNotFoundError as e:
            raise StoreError(
                f"The data set {self.path!r} in {self.store.url} is not there any more: it was deleted, or went with the process that "
                "made it. Call prepare() again."
            ) from e

    @property
    def schema(self) -> DataSchema:
        """Columns with their types and shapes."""
        return self.manifest.schema

    @property
    def columns(self) -> list[str]:
        """Names of the columns of a batch."""
        return [column.name for column in self.schema.features]

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.manifest.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "path": self.path, "files": self.files}

    def loader(
        self, rank: int | None = None, size: int | None = None, batch_size: int = 32, **options: Any
    ) -> Loader:
        """Return batches of one rank; see `Loader`.

        Args:
            rank: of this process; None = the one that its launcher, `hvd` or torch.distributed tells.
            size: number of ranks; likewise.
            batch_size: rows per rank and step.
            **options: of `Loader`.
        """
        return Loader(self, rank, size, batch_size, **options)

    def delete(self) -> None:
        """Delete the files. Nothing may read them any more."""
        remove(self.store, self.path)


def prepare(
    df: DataFrame,
    store: Store | str | PathLike[str] | None = None,
    *,
    columns: Sequence[str] | None = None,
    dtype: str = "float32",
    dtypes: Mapping[str, object] | None = None,
    validation: str | None = None,
    decoded: Collection[str] = (),
    collated: Collection[str] = (),
    sparse_cols: Sequence[str] | None = None,
    handle_invalid: str | Mapping[str, object] = "error",
    data_key: str | None = None,
    num_partitions: int | None = None,
    keep: bool | None = None,
) -> Dataset:
    """Write a DataFrame's columns into a store as packed Parquet, or find what an equal DataFrame gave before.

    Args:
        df: classic or Connect.
        store: that all readers see; None = the one of `spark.sparkhvd.store`, or on a local master a temporary folder.
        columns: names; None = all but the validation column.
        dtype: of floating columns, as tensors and in the files. Integers become int64, booleans bool.
        dtypes: others, by column.
        validation: boolean or numeric column; True or above 0 marks validation rows (`Loader(subset=...)`).
        decoded: columns whose values, also text and bytes, functions of the loader turn into arrays.
        collated: columns whose rows a function of the loader turns into a batch.
        sparse_cols: vectors that become sparse tensors; None = those of more than 65,536 dimensions.
        handle_invalid: "error", "skip" (rows with a null or an invalid number), or by column these or a value to fill in.
        data_key: the user's word that data of this key are the same; None = the plan decides.
        num_partitions: files at most; None = as many as `df` has partitions.
        keep: leave the data when this process ends; None = if a store is given.

    Raises:
        InvalidArgumentError: a column is missing, or of a type that cannot become a tensor; values cannot be used.
        StoreError: the store cannot be written.
    """
    names = list(df.columns) if columns is None else list(columns)
    if columns is None and validation is not None:
        names = [name for name in names if name != validation]
    functions, texts = {*decoded, *collated}, ("string", "varchar", "char", "binary")
    for field in df.schema.fields:
        kind = field.dataType.simpleString()
        if field.name in names and field.name not in functions and kind.startswith(texts):
            raise InvalidArgumentError(
                f"prepare: column {field.name!r} is of type {kind}, which cannot become a tensor. Name it in decoded=[...] and give the "
                "loader a function for it, decoders={...}; or make numbers of it first, or leave it out of columns=[...]."
            )
    place = default_store(df.sparkSession, store)
    schema = check_schema(
        df.schema,
        feature_cols=names,
        features_name="columns",
        label_cols=[],
        validation=validation,
        model_dtype=dtype,
        feature_dtypes=dtypes,
        decoders=decoded,
        collated=collated,
        sparse_cols=sparse_cols,
        handle_invalid=handle_invalid,
    )
    made = materialized(
        df,
        schema,
        place,
        data_key=data_key,
        num_partitions=num_partitions,
        keep_data=store is not None if keep is None else keep,
    )
    return Dataset(place, made.data_dir)


def load(store: Store | str | PathLike[str], path: str) -> Dataset:
    """Open a data set that `prepare` has written.

    Args:
        store: where it is.
        path: its folder there, `Dataset.path`.

    Raises:
        InvalidArgumentError: there is no such data set.
    """
    place = store if isinstance(store, Store) else Store.create(store)
    if not place.exists(f"{path}/{MANIFEST_NAME}"):
        raise InvalidArgumentError(
            f"There is no data set {path!r} in {place.url}. Give the path of what prepare() returned; it goes with "
            "Dataset.delete(), or with the process that made it, if that did not keep it."
        )
    return Dataset(place, path)
