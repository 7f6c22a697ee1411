"""Data sets for any training loop: the driver prepares a DataFrame once, and processes of any launcher read it.

Ownership: kept data stay until `Dataset.delete()` or `Store.clean()`; other data are deleted when the process that
prepared them ends.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from sparkhvd import topology
from sparkhvd.data.columns.binding import Argument
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.decoders import Decoder, RowFunctions
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.manifest import MANIFEST_NAME, Manifest
from sparkhvd.data.ownership import remove
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.reading.sampler import Stage
from sparkhvd.data.reading.subset import SUBSETS
from sparkhvd.data.reuse import prepare as materialized
from sparkhvd.data.store.store import Store
from sparkhvd.data.store.temporary import default_store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.launchers.environment import place_in
from sparkhvd.torch import context
from sparkhvd.wire import rebuild

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Dataset:
    """Picklable handle of prepared rows in a store, for use in any process.

    Attributes:
        store: store of the data; pickled with its options.
        path: folder of the data in the store, for `load`.
        files: store of existing files that are read in place; None if the files are in `path`.
    """

    store: Store
    path: str
    files: Store | None = None

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Manifest with the files, the number of rows and the columns.

        Raises:
            StoreError: the data set was deleted.
        """
        try:
            return Manifest.load(self.store, self.path)
        except FileNotFoundError as e:
            raise StoreError(
                f"The data set {self.path!r} in {self.store.url} does not exist any more: it was deleted by a call, or when the process "
                "that made it ended. Call prepare() again."
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
        return self.manifest.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "path": self.path, "files": self.files}

    def loader(
        self, rank: int | None = None, size: int | None = None, batch_size: int = 32, **options: Any
    ) -> Loader:
        """Make a loader of one rank's batches. See `Loader`.

        Args:
            rank: of this process; None = from its launcher, `hvd` or torch.distributed.
            size: number of ranks; likewise.
            batch_size: rows per rank and step.
            **options: of `Loader`.
        """
        return Loader(self, rank, size, batch_size, **options)

    def delete(self) -> None:
        """Delete the files. They must have no readers."""
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
    """Write a DataFrame's columns into a store as packed Parquet, or find the data of an equal DataFrame.

    Args:
        df: classic or Connect.
        store: visible to all readers; None = the store in `spark.sparkhvd.store`, or on a local master a temporary
            folder.
        columns: names of columns; None = all except the validation column.
        dtype: of floating columns, as tensors and in the files. Integers become int64, booleans bool.
        dtypes: column -> another dtype.
        validation: boolean or numeric column; True or above 0 marks validation rows (`Loader(subset=...)`).
        decoded: columns, also of text and bytes, whose values the loader's `decoders` convert to arrays.
        collated: columns whose rows a function in the loader's `collate` converts to a batch.
        sparse_cols: vectors that become sparse tensors; None = those of more than 65,536 dimensions.
        handle_invalid: "error", "skip" (rows with a null or an invalid number), "keep" (NaN and infinity unchanged, a
            null as NaN), or a dict from columns to these words or to a number that replaces nulls and invalid numbers.
        data_key: the user's promise that data with this key are equal; None = the plan decides.
        num_partitions: maximum of files; None = as many as `df` has partitions.
        keep: keep the data when this process ends; None = keep them if a store is given.

    Raises:
        InvalidArgumentError: a column is missing, has a type that cannot become a tensor, or holds unusable values.
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
                "loader a function for it, decoders={...}; or convert it to numbers first, or leave it out of columns=[...]."
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
    """Open a data set written by `prepare`.

    Args:
        store: store of the data.
        path: folder of the data in the store, as in `Dataset.path`.

    Raises:
        InvalidArgumentError: there is no such data set.
    """
    place = store if isinstance(store, Store) else Store.create(store)
    if not place.exists(f"{path}/{MANIFEST_NAME}"):
        raise InvalidArgumentError(
            f"There is no data set {path!r} in {place.url}. Give the path of a Dataset from prepare(). Dataset.delete() deletes "
            "the data, and so does the end of the process that made them, unless it keeps them."
        )
    return Dataset(place, path)


# ----------------------------------------------------------------------------------------------------
# Batches of a data set for one rank, as torch's `IterableDataset`.
# The rows of all ranks at a step equal the rows of one process with the same global batch size. So the order is the
# same for any number of ranks, and an epoch resumes at any row, also with another number of ranks. (If the data exceed
# `shuffle_bytes`, each rank reads its own part; another number of ranks divides the remaining rows into new parts.)
# Threads: the reader prefetches in one thread. Several workers of a `DataLoader` are refused: each would read all rows.


def place() -> tuple[int, int]:
    """Find rank and size of this process, or (0, 1) if unknown.

    The sources are `hvd`, else torch.distributed, else the launcher.

    Raises:
        InvalidArgumentError: two launchers contradict each other.
    """
    if context.is_initialized():
        engine = context.context().engine
        return engine.rank, engine.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    known = topology.context() or place_in(os.environ, os.getppid())  # noqa: TID251 - the launcher's
    return (0, 1) if known is None else (known.rank, known.size)


def _check_whole(name: str, value: Any, least: int | None = None) -> None:
    """Reject an argument unless it is a whole number of at least the minimum."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise InvalidArgumentError(
            f"loader: {name} is {value!r:.100}; it must be a whole number{bound}."
        )


def _names(columns: Sequence[str]) -> list[str]:
    """Reject text, an empty list and repeated names."""
    names = [columns] if isinstance(columns, str) else list(columns)
    if isinstance(columns, str) or not names or len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"loader: columns is {columns!r:.100}; it must be a list of names, each once, such as columns={names[:1] or ['x']!r}."
        )
    return names


def _rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Check rank and size, or find this process's if both are None."""
    if (rank is None) != (size is None):
        raise InvalidArgumentError(
            f"loader: rank is {rank} and size {size}. Give both, or leave both out to use the launcher's."
        )
    if rank is None or size is None:
        return place()
    _check_whole("size", size, least=1)
    _check_whole("rank", rank)
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"loader: rank is {rank} and size {size}; expected 0 <= rank < size."
        )
    return rank, size


def _check_fraction(schema: DataSchema, validation: float | None) -> None:
    """Reject an invalid fraction, or a fraction for data with marked validation rows."""
    if validation is None:
        return
    is_number = isinstance(validation, (int, float)) and not isinstance(validation, bool)
    if not is_number or not 0 <= validation < 1:
        raise InvalidArgumentError(
            f"loader: validation is {validation!r:.100}; it must be a fraction of at least 0 and less than 1."
        )
    if schema.validation is not None:
        raise InvalidArgumentError(
            f"loader: validation is {validation!r}, and column {schema.validation.name!r} of the data marks validation rows. Leave "
            "validation out, or prepare the data without the column."
        )


def _known_subset(schema: DataSchema, subset: str | None, validation: float | None) -> str:
    """Check the subset. None means "train" if there are validation rows, else "all"."""
    has_validation = schema.validation is not None or bool(validation)
    if subset is None:
        return "train" if has_validation else "all"
    if subset not in SUBSETS:
        raise InvalidArgumentError(
            f"loader: subset is {subset!r}; it must be one of {', '.join(map(repr, SUBSETS))}."
        )
    if subset == "validation" and not has_validation:
        raise InvalidArgumentError(
            "loader: subset is 'validation', but the data have no validation column. Call prepare(validation=<column>), or give the "
            "loader a fraction: validation=0.2."
        )
    return subset


def _check_columns(schema: DataSchema, names: Sequence[str], functions: RowFunctions) -> None:
    """Reject missing columns, and columns without their required decoder."""
    for name in names:
        if schema.column(name).has_decoder and name not in functions.decoders:
            raise InvalidArgumentError(
                f"loader: column {name!r} was prepared for a decoder, but none is given. Give decoders={{{name!r}: <function>}}, or "
                "leave it out of columns."
            )
    for name in (*functions.decoders, *functions.collate):
        schema.column(name)


def _check_caller(frame: FrameType | None) -> None:
    """Reject a DataLoader with its own collation, recognised by the caller's stack frame."""
    caller = None if frame is None else frame.f_locals.get("self")
    if type(caller).__name__ != "_IterableDatasetFetcher" or not getattr(
        caller, "auto_collation", False
    ):
        return
    if getattr(caller, "collate_fn", None) is default_collate:
        raise InvalidArgumentError(
            "DataLoader(loader) would collate the loader's batches again, with batch_size=1 by default, and so give each tensor one more "
            "dimension. Use the loader directly, or DataLoader(loader, batch_size=None)."
        )


# Options that decide the order of rows.
_ORDER = ("seed", "shuffle", "subset", "validation")


class Loader(IterableDataset[Any]):
    """Batches of one rank: a dict or a tuple of tensors.

    An iteration yields the rest of the current epoch; the following iteration yields the next epoch.
    A tensor has the shape (rows, *shape of the column); sparse vectors are COO tensors. Every rank has equally many
    steps, and every row is used once per epoch over all ranks.

    Attributes:
        dataset: the rows.
        rank: of this process.
        size: number of ranks.
        batch_size: rows per rank and step.
        epoch: of the next batches.
        num_broken: rows of this rank skipped by decoders since the epoch began.
        as_stored: True lets tensors keep the stored types of numbers; set it before the first batch.
    """

    as_stored = False

    def __init__(
        self,
        dataset: Dataset,
        rank: int | None = None,
        size: int | None = None,
        batch_size: int = 32,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        subset: str | None = None,
        validation: float | None = None,
        batch_format: str = "dict",
        columns: Sequence[str] | None = None,
        decoders: Mapping[str, Decoder] | None = None,
        collate: Mapping[str, Callable[[list[Any]], Any]] | None = None,
        num_workers: int = 1,
        pin_memory: bool = False,
        shuffle_bytes: int = 1 << 30,
        prefetch_bytes: int = 16 << 20,
    ) -> None:
        """Describe the batches. Nothing is read before the first iteration.

        Args:
            dataset: the rows.
            rank: of this process; None = from `hvd`, torch.distributed or the launcher.
            size: number of ranks; likewise.
            batch_size: rows per rank and step.
            shuffle: a new permutation each epoch; False = the order of the files.
            seed: decides the order, together with the epoch.
            drop_last: drop the last step if it is not full.
            subset: "all", "train" or "validation"; None = "train" if the data have validation rows, else "all".
            validation: fraction of validation rows, chosen by `seed`, of data without a validation column.
            batch_format: "dict", or "tuple": only the tensors, in the order of `columns`.
            columns: names of columns; None = all.
            decoders: column -> function of a value.
            collate: column -> function of a batch's rows.
            num_workers: threads that run decoders.
            pin_memory: put batches into page-locked memory. Needs CUDA.
            shuffle_bytes: data up to this size are held in memory.
            prefetch_bytes: bound on prefetched batches.

        Raises:
            InvalidArgumentError: an argument is out of range, names a column that does not exist, or only one of `rank`
                and `size` is given.
        """
        super().__init__()
        if batch_format not in ("dict", "tuple"):
            raise InvalidArgumentError(
                f"loader: batch_format is {batch_format!r}; it must be 'dict' or 'tuple'."
            )
        self.rank, self.size = _rank_and_size(rank, size)
        _check_whole("batch_size", batch_size, least=1)
        _check_whole("num_workers", num_workers, least=1)
        _check_whole("shuffle_bytes", shuffle_bytes, least=1)
        _check_whole("prefetch_bytes", prefetch_bytes, least=1)
        _check_whole("seed", seed)
        functions = RowFunctions(decoders or {}, collate or {})
        names = dataset.columns if columns is None else _names(columns)
        _check_columns(dataset.schema, names, functions)
        _check_fraction(dataset.schema, validation)
        self.dataset, self.batch_size = dataset, batch_size
        self._is_tuple = batch_format == "tuple"
        self._options: dict[str, Any] = {
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "subset": _known_subset(dataset.schema, subset, validation),
            "validation": validation,
            "columns": names,
            "functions": functions,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "shuffle_bytes": shuffle_bytes,
            "prefetch_bytes": prefetch_bytes,
        }
        self._arguments: dict[str, Argument] = {}
        self.epoch = 0
        # Earlier stages of the epoch, with other numbers of ranks or batch sizes, and the rows over all ranks since
        # then.
        self._before: tuple[Stage, ...] = ()
        self._handed_out = 0
        # `RowOrder.windows` of the rows returned so far in the epoch; None if unknown.
        self._windows: list[int] | None = None
        self.num_broken = 0
        self._reader: Reader | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch.

        Raises:
            InvalidArgumentError: a DataLoader would read rows several times, or collate batches.
        """
        frame = inspect.currentframe()
        _check_caller(None if frame is None else frame.f_back)
        worker = get_worker_info()
        if worker is not None:
            raise InvalidArgumentError(
                f"Each of {worker.num_workers} workers of this DataLoader would read all rows of the epoch, and this process's loader "
                "would not know their position. Use the loader directly, which reads ahead in its own thread, or "
                "DataLoader(loader, batch_size=None, num_workers=0)."
            )
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        reader = self._opened()
        self._check_windows(reader)
        width = self.size * self.batch_size
        start, rest = divmod(self._handed_out, width)
        if rest:  # with these sizes, no step ends at this row
            self._continue(self.size, self.batch_size)
            start = 0
        epoch, end, first_row = self.epoch, reader.num_rows, self._first_row
        if self._options["drop_last"]:
            end -= (end - first_row) % width
        if not self._handed_out:
            self.num_broken = 0
        for batch in reader.epoch(epoch, start, following=epoch + 1, before=self._before):
            self.num_broken += batch.num_broken
            self._handed_out += sum(batch.rows_per_rank)
            if first_row + self._handed_out == end:
                self.set_epoch(epoch + 1)
            tensors = {name: each.tensor(batch.columns) for name, each in self._arguments.items()}
            yield tuple(tensors.values()) if self._is_tuple else tensors
        self.set_epoch(epoch + 1)

    @property
    def _first_row(self) -> int:
        """Rows of the epoch's earlier stages over all ranks."""
        return sum(stage.rows for stage in self._before)

    def _continue(self, size: int, batch_size: int) -> None:
        """End the current stage: its rows were returned with this number of ranks and batch size."""
        if self._handed_out:
            self._before = (*self._before, Stage(size, batch_size, self._handed_out))
        self._handed_out = 0

    def _check_windows(self, reader: Reader) -> None:
        """Reject resuming an epoch if the reader has another row order than before."""
        has_begun = self._first_row + self._handed_out > 0
        began, now = self._windows if has_begun else None, reader.windows
        if began is not None and bool(began) != bool(now):
            where = ["in windows", "in memory"]
            raise InvalidArgumentError(
                f"The epoch began with data {where[not began]}, but this loader has them {where[not now]}. Use the same shuffle_bytes and "
                "columns as before, or call set_epoch to begin a whole epoch."
            )
        if began and began[:-1] != now[:-1]:
            raise InvalidArgumentError(
                f"The epoch began with {began[:-1]} rows per window and block, but this loader has {now[:-1]}. Use the same shuffle_bytes "
                "and columns as before, or call set_epoch to begin a whole epoch."
            )
        if began and began[-1] != now[-1]:
            raise InvalidArgumentError(
                f"The epoch began with drop_last={bool(began[-1])}, but this loader has drop_last={bool(now[-1])}. Use the same drop_last as "
                "before, or call set_epoch to begin a whole epoch."
            )
        self._windows = now

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return self._opened().num_steps

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration start an epoch from its first row."""
        self.epoch, self._before, self._handed_out = epoch, (), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, equal on all ranks after equally many steps."""
        row = self._first_row + self._handed_out
        order = {name: self._options[name] for name in _ORDER}
        ranks: dict[str, Any] = {
            "size": self.size,
            "batch_size": self.batch_size,
            "windows": self._windows,
        }
        if self._windows and self._before:
            ranks["before"] = [[s.size, s.batch_size, s.rows] for s in self._before]
        data = {"rows": len(self.dataset), "data": self.dataset.manifest.digest}
        return {"epoch": self.epoch, "row": row, **data, **order, **ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the position of another loader, of any rank, number of ranks and batch size.

        If the data exceed `shuffle_bytes`, both loaders need equal `shuffle_bytes`, columns and `drop_last`; the next
        iteration checks this. Data in groups also need the same number of ranks and batch size.

        Raises:
            InvalidArgumentError: the state is invalid, or belongs to other data or to another order of rows.
        """
        numbers = [state.get(name) for name in ("epoch", "row", "rows")]
        before = _stages(state.get("before", ()))
        sizes = state.get("size"), state.get("batch_size")
        is_valid = all(isinstance(each, int) and each >= 0 for each in numbers) and (
            sizes == (None, None) or all(isinstance(each, int) and each > 0 for each in sizes)
        )
        if before is None or not is_valid or state["row"] < sum(stage.rows for stage in before):
            raise InvalidArgumentError(
                f"load_state_dict: the state is {state!r:.200}. Give what state_dict() has returned."
            )
        own = {"rows": len(self.dataset), **{name: self._options[name] for name in _ORDER}}
        for name, value in own.items():
            if state.get(name, value) != value:
                raise InvalidArgumentError(
                    f"load_state_dict: the state has {name}={state[name]!r}, but this loader has {name}={value!r}. Load it with the "
                    "same data and the same order."
                )
        digest = self.dataset.manifest.digest
        if state.get("data", digest) != digest:
            raise InvalidArgumentError(
                f"load_state_dict: the state belongs to data with the digest {state['data']!r}, but {self.dataset.path!r} has the digest {digest!r}: "
                "other columns or values, or the same rows in other files. Load the state with the data that it was saved with. If only the "
                "files differ, remove 'data' from the state."
            )
        self.epoch, self._before, self._windows = state["epoch"], before, state.get("windows")
        self._handed_out = state["row"] - self._first_row
        if sizes != (self.size, self.batch_size):
            # States of earlier versions do not hold the windows, without which the stage cannot be continued.
            known = sizes if self._windows is not None else (0, 0)
            self._continue(known[0] or 0, known[1] or 0)

    def close(self) -> None:
        """Stop the thread and release files and memory. Another iteration opens them again."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}

    def _opened(self) -> Reader:
        if self._reader is None:
            data = self.dataset
            self._reader = Reader(
                data.files or data.store,
                data.manifest,
                rank=self.rank,
                size=self.size,
                batch_size=self.batch_size,
                **self._options,
            )
            # The reader knows the result types of decoders.
            self._arguments = {
                column.name: Argument(
                    None,
                    (column.name,),
                    column.row_dtype.name if self.as_stored else column.tensor_dtype,
                    None,
                    is_joined=False,
                    is_whole=column.is_collated,
                )
                for column in self._reader.columns
            }
        return self._reader


def _stages(given: object) -> tuple[Stage, ...] | None:
    """Parse the stages of a state, or return None if they are invalid."""
    try:
        stages = rebuild(tuple[tuple[int, int, int], ...], given)
    except ValueError:
        return None
    found = tuple(Stage(*each) for each in stages)
    return found if all(min(vars(s).values()) > 0 for s in found) else None


# ----------------------------------------------------------------------------------------------------
# petastorm's API for a prepared data set: `make_spark_converter(df).make_torch_dataloader(...)`.

# Options of petastorm's reader about threads and rows, which have no effect here: the loader decides these things.
_WITHOUT_MEANING = frozenset(
    {
        *("workers_count", "shuffling_queue_capacity", "reader_pool_type", "results_queue_size"),
        *("shuffle_row_drop_partitions", "cache_type", "cache_location", "cache_size_limit"),
        *("cache_row_size_estimate", "cache_extra_settings", "hdfs_driver", "inmemory_cache_all"),
        "convert_early_to_numpy",
    }
)


class SparkDatasetConverter:
    """Picklable handle of prepared data with petastorm's methods.

    Attributes:
        dataset: the rows.
        dataset_size: number of rows.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.dataset_size = len(dataset)

    def __len__(self) -> int:
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
        """Open one shard's batches (dicts from columns to tensors) as a context manager.

        Args:
            batch_size: rows per batch.
            num_epochs: None = endless.
            cur_shard: rank; None = the launcher's.
            shard_count: number of ranks; likewise.
            seed: of the order.
            shuffle_row_groups: permute the rows of each epoch; unlike in petastorm, single rows, not row groups.
            **others: other options of petastorm; known options without effect here give a warning.

        Raises:
            InvalidArgumentError: an argument is unknown, or requests an unsupported behaviour.
        """
        if unknown := sorted(set(others) - _WITHOUT_MEANING):
            raise InvalidArgumentError(
                f"make_torch_dataloader: {', '.join(unknown)} is not supported. Transform the batches in the loop, or the columns before "
                "make_spark_converter()."
            )
        if given := sorted(name for name, value in others.items() if value is not None):
            warnings.warn(
                f"make_torch_dataloader: {', '.join(given)} has no effect here and is ignored.",
                stacklevel=3,
            )
        options: dict[str, Any] = {"shuffle": shuffle_row_groups, "seed": seed or 0}
        with self.dataset.loader(cur_shard, shard_count, batch_size, **options) as loader:
            yield Epochs(loader, num_epochs)

    def delete(self) -> None:
        """Delete the files."""
        self.dataset.delete()


class Epochs:
    """Iterable of the batches of several epochs in sequence.

    Args:
        loader: of one epoch at a time.
        num_epochs: None = endless.
    """

    def __init__(self, loader: Loader, num_epochs: int | None) -> None:
        self.loader = loader
        self._num_epochs = num_epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
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
    """Prepare a DataFrame with the arguments of petastorm's function of the same name.

    Args:
        df: classic or Connect.
        parquet_row_group_size_bytes: ignored: the files have groups of the best size for reading.
        compression_codec: ignored: the files are not compressed, so that they can be read by row.
        dtype: of floating columns; None = float64.
        store: see `prepare`; petastorm's conf of a cache folder is not read.
    """
    if parquet_row_group_size_bytes is not None or compression_codec is not None:
        warnings.warn(
            "make_spark_converter: parquet_row_group_size_bytes and compression_codec have no effect here and are ignored.",
            stacklevel=2,
        )
    return SparkDatasetConverter(prepare(df, store, dtype=dtype or "float64"))


# ----------------------------------------------------------------------------------------------------
# Lightning's data module of a prepared data set.

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def data_module(dataset: Dataset, batch_size: int = 32, **options: Any) -> Any:
    """Make a `LightningDataModule` with loaders of training rows and marked validation rows.

    It has no validation loader if no column marks validation rows.

    Its state, in Lightning's checkpoints, is the position in the epoch.

    Args:
        dataset: the rows.
        batch_size: rows per rank and step.
        **options: options of `Loader`, except rank and size, which the trainer decides.

    Raises:
        InvalidArgumentError: Lightning is not installed.
    """

    class DataModule(_lightning().LightningDataModule):  # type: ignore[misc]  # of either package
        def __init__(self) -> None:
            super().__init__()
            self._training: Loader | None = None
            self._state: dict[str, int] | None = None
            if dataset.schema.validation is not None:
                self.val_dataloader = self._val_dataloader

        def train_dataloader(self) -> Loader:
            self._training = self._loader(**options)
            if self._state is not None:
                self._training.load_state_dict(self._state)
                self._state = None
            return self._training

        def _val_dataloader(self) -> Loader:
            return self._loader(**{**options, "subset": "validation", "shuffle": False})

        def _loader(self, **given: Any) -> Loader:
            ranks = (self.trainer.global_rank, self.trainer.world_size)
            return Loader(dataset, *ranks, batch_size, **given)

        def state_dict(self) -> dict[str, Any]:
            return {} if self._training is None else self._training.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self._state = state or None

        def teardown(self, stage: str) -> None:
            del stage
            if self._training is not None:
                self._training.close()

    return DataModule()


def _lightning() -> Any:
    for name in _LIGHTNING:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise InvalidArgumentError(
        f"data_module: neither of {' and '.join(_LIGHTNING)} is installed. Run `pip install lightning`, or give the loader to the "
        "trainer yourself."
    )
