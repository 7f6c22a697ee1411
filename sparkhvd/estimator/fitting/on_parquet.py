"""`TorchEstimator.fit_on_parquet(path)`: training on Parquet that is there, with no Spark job over the data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkhvd.data.parquet.discover import ParquetDataset, open_dataset, store_of
from sparkhvd.data.parquet.petastorm import UNISCHEMA_KEY, codec_decoders
from sparkhvd.data.store.remote_store import RemoteStore
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.inputs import ParquetTable
from sparkhvd.spark import SparkShim, active_session, is_dataframe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkhvd.estimator.model import TorchModel

__all__ = ["FitOnParquet"]

# Where Horovod's estimator keeps the data of a store; an index follows after a dot.
_HOROVOD_TRAINING = "intermediate_train_data"
_HOROVOD_VALIDATION = "intermediate_val_data"

PathLike = str | os.PathLike[str]


class FitOnParquet:
    """The part of an estimator that trains on files."""

    if TYPE_CHECKING:  # of the estimator

        def copy(self, extra: Any = None) -> Any: ...  # noqa: D102

    def fit_on_parquet(
        self,
        path: PathLike | Mapping[Any, Any] | Sequence[Any] | None = None,
        params: Mapping[Any, Any] | Sequence[Any] | None = None,
        *,
        validation_path: PathLike | None = None,
        storage_options: Mapping[str, Any] | None = None,
        dataset_idx: int | None = None,
        spark: SparkSession | None = None,
    ) -> TorchModel | list[TorchModel]:
        """Train on Parquet files as they are: the ranks read them, and Spark only starts the ranks.

        Columns of numbers, lists, ML vectors, decimals, binary and text (with decoders), and folders `column=value`. Every row
        comes once per epoch, whatever files and row groups there are. Nobody may change the files during the fit.

        Horovod's call without a path reads the data below the estimator's store: `intermediate_train_data`, and with
        `validation` set `intermediate_val_data`.

        Args:
            path: a file, or a folder with files and folders in it, as a path or URL that the driver and all executors
                can read. A dict or list here is taken as `params`.
            params: a param map to fit with, or a list of them, which gives a list of models. A `run_id` then gets the
                index of the map, as in `fitMultiple`.
            validation_path: rows to validate with, instead of `validation`.
            storage_options: credentials and such for both paths, as for `Store.create`.
            dataset_idx: Horovod's index of the data in the store.
            spark: the session whose tasks become ranks; None means the active one.

        Raises:
            InvalidArgumentError: a param or column is wrong, or the data cannot be used (before any rank starts, where footers
                or the first rows tell).
            RankError: a rank failed, or found values that cannot be used; the message names file, column and count.
        """
        if isinstance(path, (Mapping, list, tuple)):
            if params is not None:
                raise InvalidArgumentError(
                    f"fit_on_parquet: path is {path!r:.100}, and params are given too. Give a path, then params."
                )
            path, params = None, path
        maps = list(params) if isinstance(params, (list, tuple)) else [params]
        if not all(one is None or isinstance(one, Mapping) for one in maps):
            raise InvalidArgumentError(
                f"fit_on_parquet: params is {params!r:.100}. Give a dict of Params, or a list of such dicts; and one path: of several "
                "files that of their folder."
            )
        if isinstance(params, (list, tuple)):
            again: dict[str, Any] = {
                "validation_path": validation_path,
                "storage_options": storage_options,
                "dataset_idx": dataset_idx,
                "spark": spark,
            }
            mixed_in: Any = self  # TorchEstimator
            data = (str(path), str(validation_path), dataset_idx)
            named = mixed_in._with_run_ids([one or {} for one in params], data)
            return [self.fit_on_parquet(path, one, **again) for one in named]  # type: ignore[misc]  # one model per map
        session = active_session() if spark is None else spark
        SparkShim(session)
        estimator = self.copy(params)
        _check(estimator, validation_path)
        places = _Places(path, validation_path, storage_options, dataset_idx)
        here, own = _locate(estimator, places)
        training = open_dataset(seen_by(session, here))
        validation = open_dataset(seen_by(session, own)) if own is not None else None
        names = [*(estimator._get("feature_cols") or []), *(estimator._get("label_cols") or [])]
        decoders = estimator._get("decoders") or {}
        if estimator.getOrDefault("reader") == "petastorm":
            estimator._set(decoders=codec_decoders(training.metadata, names, decoders))
        else:
            _hint(training, [name for name in names if name not in decoders])
        if validation is not None:
            estimator._set(validation=ParquetTable(validation, session))
        model: TorchModel = estimator._fit(ParquetTable(training, session))
        return model


@dataclass(frozen=True)
class _Places:
    """The arguments that say where data are."""

    path: Any
    validation_path: Any
    storage_options: Mapping[str, Any] | None
    dataset_idx: int | None


def _check(estimator: Any, validation_path: Any) -> None:
    """Refuse params that are about materialized data."""
    for name in ("data_key", "keep_data"):
        if estimator._get(name):
            raise InvalidArgumentError(
                f"{name} is {estimator._get(name)!r}; it is about data that fit(df) writes, and fit_on_parquet reads the files as "
                f"they are. Clear it: estimator.clear(estimator.{name})."
            )
    validation = estimator._get("validation")
    if is_dataframe(validation):
        raise InvalidArgumentError(
            "validation is a DataFrame, which Spark would have to write first, and fit_on_parquet runs no job over data. Give "
            "validation_path=<Parquet>, a fraction or a column."
        )
    if validation and validation_path is not None:
        raise InvalidArgumentError(
            f"validation is {validation!r} and validation_path is {validation_path!r}; both say which rows validate. Give one."
        )


def seen_by(spark: Any, store: Store) -> Store:
    """The place of a data set as the process of this session reaches it: itself, or through tasks of a Connect session.

    A Connect client may see nothing there, or other files under the same name. Nothing is written to tell: it sees the
    data if it lists the same files as an executor, with their sizes and times.
    """
    if not SparkShim(spark).is_connect:
        return store
    remote = RemoteStore(store.direct, spark)
    try:
        theirs = remote.files()
    except FileNotFoundError:
        return remote
    try:
        is_seen = store.direct.files() == theirs
    except OSError:
        is_seen = False
    return store.direct if is_seen else remote


def _locate(estimator: Any, places: _Places) -> tuple[Store, Store | None]:
    """Where the training data are, and the validation data if they are files of their own."""
    options, index = places.storage_options, places.dataset_idx
    if places.path is not None:
        if index is not None:
            raise InvalidArgumentError(
                f"dataset_idx is {index}, which counts data below the store, and path is {places.path!r}. Give one."
            )
        held_out = places.validation_path
        own = store_of(held_out, options) if held_out is not None else None
        return store_of(places.path, options), own
    store = estimator._get("store")
    if store is None:
        raise InvalidArgumentError(
            "fit_on_parquet: path is not given, and there is no store whose data could be meant. Give the path of a Parquet "
            "file or folder."
        )
    store = store if isinstance(store, Store) else Store.create(store)
    end = "" if index is None else f".{index}"
    training = store.below(_HOROVOD_TRAINING + end)
    if places.validation_path is not None:
        return training, store_of(places.validation_path, options)
    is_split = bool(estimator._get("validation"))
    return training, store.below(_HOROVOD_VALIDATION + end) if is_split else None


def _hint(dataset: ParquetDataset, names: Sequence[str]) -> None:
    """Say how columns that petastorm has encoded can be read."""
    if UNISCHEMA_KEY not in dataset.metadata:
        return
    encoded = [
        f.name for f in dataset.schema if f.name in names and f.dataType.typeName() == "binary"
    ]
    if encoded:
        raise InvalidArgumentError(
            f"fit_on_parquet({dataset.url!r}): the data were written by petastorm, and {', '.join(map(repr, encoded))} "
            f"{'are' if len(encoded) > 1 else 'is'} encoded. Give reader='petastorm', or decoders of your own."
        )
