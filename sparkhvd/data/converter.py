"""petastorm's names for a prepared data set: `make_spark_converter(df).make_torch_dataloader(...)`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from sparkhvd.data.dataset import Dataset, prepare
from sparkhvd.data.loader import Loader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["SparkDatasetConverter", "make_spark_converter"]

# Of petastorm's reader: how many threads or rows it works with, which the loader decides by itself.
_WITHOUT_MEANING = frozenset(
    {
        *("workers_count", "shuffling_queue_capacity", "reader_pool_type", "results_queue_size"),
        *("shuffle_row_drop_partitions", "cache_type", "cache_location", "cache_size_limit"),
        *("cache_row_size_estimate", "cache_extra_settings", "hdfs_driver", "inmemory_cache_all"),
        "convert_early_to_numpy",
    }
)


class SparkDatasetConverter:
    """Prepared data with petastorm's methods; picklable.

    Attributes:
        dataset: the rows.
        dataset_size: their number.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.dataset_size = len(dataset)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.dataset_size

    @contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        *,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        seed: int | None = None,
        shuffle_row_groups: bool = True,
        **others: object,
    ) -> Iterator[Epochs]:
        """Give the batches of one shard, dicts of tensors by column; as a context manager.

        Args:
            batch_size: rows.
            num_epochs: None = without end.
            cur_shard: rank; None = the launcher's.
            shard_count: number of ranks; likewise.
            seed: of the order.
            shuffle_row_groups: permute the rows of each epoch; not only groups of them.
            **others: petastorm's that have no meaning here are ignored with a warning.

        Raises:
            InvalidArgumentError: an argument is not known, or asks for what the loader does not do.
        """
        if unknown := sorted(set(others) - _WITHOUT_MEANING):
            raise InvalidArgumentError(
                f"make_torch_dataloader: {', '.join(unknown)} is not supported. Transform the batches in the loop, or the columns before "
                "make_spark_converter()."
            )
        if given := sorted(name for name, value in others.items() if value is not None):
            warnings.warn(
                f"make_torch_dataloader: {', '.join(given)} has no meaning here and is ignored.",
                stacklevel=3,
            )
        options: dict[str, Any] = {"shuffle": shuffle_row_groups, "seed": seed or 0}
        with self.dataset.loader(cur_shard, shard_count, batch_size, **options) as loader:
            yield Epochs(loader, num_epochs)

    def delete(self) -> None:
        """Delete the files."""
        self.dataset.delete()


class Epochs:
    """Batches of several epochs, one after the other.

    Args:
        loader: of one epoch at a time.
        num_epochs: None = without end.
    """

    def __init__(self, loader: Loader, num_epochs: int | None) -> None:
        self.loader = loader
        self._num_epochs = num_epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches."""
        end = None if self._num_epochs is None else self.loader.epoch + self._num_epochs
        while len(self.loader) and self.loader.epoch != end:
            yield from self.loader


def make_spark_converter(
    df: DataFrame,
    parquet_row_group_size_bytes: int | None = None,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
    *,
    store: Store | str | PathLike[str] | None = None,
) -> SparkDatasetConverter:
    """Prepare a DataFrame, as petastorm's function of that name.

    Args:
        df: classic or Connect.
        parquet_row_group_size_bytes: ignored: the files have groups that are read best.
        compression_codec: ignored: the files are not compressed, so that they can be read by row.
        dtype: of floating columns; None = float64.
        store: see `prepare`; petastorm's conf of a cache folder is not read.
    """
    if parquet_row_group_size_bytes is not None or compression_codec is not None:
        warnings.warn(
            "make_spark_converter: parquet_row_group_size_bytes and compression_codec have no meaning here and are ignored.",
            stacklevel=2,
        )
    return SparkDatasetConverter(prepare(df, store, dtype=dtype or "float64"))
