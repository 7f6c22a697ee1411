"""Sources of `TorchEstimator.fit_on_parquet(path)`: check options, find files, add petastorm's decoders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkhvd.data.parquet.dataset import ParquetDataset, open_dataset, store_of
from sparkhvd.data.parquet.petastorm import UNISCHEMA_KEY, codec_decoders
from sparkhvd.data.source import ParquetFiles
from sparkhvd.data.store.remote import RemoteStore
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.estimator.fitting.inputs import FitSources
from sparkhvd.spark import is_connect, is_dataframe

if TYPE_CHECKING:
    from pyspark.ml.param import Param
    from pyspark.sql import SparkSession

    from sparkhvd.estimator.params.generated import FitOptions


# Horovod's folder of training data in a store; an index is appended after a dot.
_HOROVOD_TRAINING = "intermediate_train_data"
_HOROVOD_VALIDATION = "intermediate_val_data"

PathLike = str | os.PathLike[str]
ParamMap = dict["Param[Any]", Any]


@dataclass(frozen=True)
class DataPaths:
    """Arguments of `fit_on_parquet` that locate data.

    Attributes:
        path: training data; None means the data that Horovod's estimator wrote below the store.
        validation_path: data to validate with, or None.
        storage_options: credentials and other options for both paths.
        dataset_idx: Horovod's index of the data below the store, or None.
    """

    path: PathLike | None
    validation_path: PathLike | None
    storage_options: Mapping[str, Any] | None
    dataset_idx: int | None


def split_arguments(
    path: PathLike | Mapping[Any, Any] | Sequence[Any] | None,
    params: Mapping[Any, Any] | Sequence[Any] | None,
    name: str = "fit_on_parquet",
) -> tuple[PathLike | None, list[ParamMap], bool]:
    """Split the arguments into path, param maps, and whether the maps are a list.

    Horovod passes params first.

    Raises:
        InvalidArgumentError: params are given twice or are not param maps.
    """
    if path is not None and not isinstance(path, (str, os.PathLike)):
        if params is not None:
            raise InvalidArgumentError(
                f"{name}: path is {path!r:.100}, but params are given, too. Give a path, then params."
            )
        path, params = None, path
    is_list = isinstance(params, (list, tuple))
    maps = list(params) if isinstance(params, (list, tuple)) else [params]
    if not all(isinstance(each, Mapping) for each in maps if each is not None):
        raise InvalidArgumentError(
            f"{name}: params is {params!r:.100}. Give a dict of Params, or a list of such dicts. For several files, give the path "
            "of their folder."
        )
    return path, [dict(each or {}) for each in maps], is_list


def open_sources(
    options: FitOptions, places: DataPaths, spark: SparkSession
) -> tuple[FitSources, dict[str, Any] | None]:
    """Find the files and return the sources of the fit and its decoders, including petastorm's.

    Args:
        options: of the fit.
        places: locations of the data.
        spark: the session whose tasks become ranks.

    Raises:
        InvalidArgumentError: a Param applies only to materialized data, two Params conflict, or there are no Parquet
            files.
    """
    check_options(options, "fit_on_parquet")
    if options.validation and places.validation_path is not None:
        raise InvalidArgumentError(
            f"validation is {options.validation!r} and validation_path is {places.validation_path!r}, but each chooses the validation "
            "rows. Give only one of them."
        )
    training_store, validation_store = _locate(options, places)
    training = open_dataset(reachable(spark, training_store))
    validation = None
    if validation_store is not None:
        validation = ParquetFiles(open_dataset(reachable(spark, validation_store)), spark)
    names = [*(options.feature_cols or []), *(options.label_cols or [])]
    decoders = options.decoders or {}
    if options.reader == "petastorm":
        decoders = codec_decoders(training.metadata, names, decoders)
    else:
        _refuse_encoded(training, [name for name in names if name not in decoders])
    split = options.validation if validation is None else None
    assert not is_dataframe(split)  # refused above
    return FitSources(ParquetFiles(training, spark), validation, split), decoders or None


def check_options(options: FitOptions, name: str) -> None:
    """Reject Params for materialized data, and a DataFrame of validation rows.

    Spark would have to write that DataFrame first. `name` is the caller's name.
    """
    for param in ("data_key", "keep_data", "num_partitions", "group_col"):
        if getattr(options, param):
            raise InvalidArgumentError(
                f"{param} is {getattr(options, param)!r}, but it only affects data that fit(df) writes, and {name} reads existing "
                f"files. Clear it: estimator.clear(estimator.{param})."
            )
    if is_dataframe(options.validation):
        given = "validation_path=<Parquet>, " if name == "fit_on_parquet" else ""
        raise InvalidArgumentError(
            f"validation is a DataFrame, which Spark would have to write first, but {name} runs no job over data. Give "
            f"{given}a fraction or a column."
        )


def _locate(options: FitOptions, places: DataPaths) -> tuple[Store, Store | None]:
    """Make the store of the training data, and of separate validation files if they are given."""
    index, validation_path = places.dataset_idx, places.validation_path
    storage = places.storage_options
    validation = store_of(validation_path, storage) if validation_path is not None else None
    if places.path is not None:
        if index is not None:
            raise InvalidArgumentError(
                f"dataset_idx is {index}, which chooses data below the store, but path is {places.path!r}. Give only one of them."
            )
        return store_of(places.path, storage), validation
    store = options.store
    if store is None:
        raise InvalidArgumentError(
            "fit_on_parquet: path is not given, and no store is given from which data could be read. Give the path of a Parquet "
            "file or folder."
        )
    store = store if isinstance(store, Store) else Store.create(store)
    suffix = "" if index is None else f".{index}"
    if validation is None and options.validation:
        validation = store.below(_HOROVOD_VALIDATION + suffix)
    return store.below(_HOROVOD_TRAINING + suffix), validation


def reachable(spark: SparkSession, store: Store) -> Store:
    """Choose how this process reaches a data set: directly, or through tasks of a Connect session.

    A Connect client may see no files there, or other files under the same name. It uses direct access if it lists the
    same files as an executor, with equal sizes and times. The check writes nothing.
    """
    if not is_connect(spark):
        return store
    remote = RemoteStore(store.direct, spark)
    try:
        listed_by_executor = remote.files()
    except FileNotFoundError:
        return remote
    try:
        is_seen = store.direct.files() == listed_by_executor
    except OSError:
        is_seen = False
    return store.direct if is_seen else remote


def _refuse_encoded(dataset: ParquetDataset, names: Sequence[str]) -> None:
    """Reject columns encoded by petastorm, and explain how to read them."""
    if UNISCHEMA_KEY not in dataset.metadata:
        return
    encoded = [
        f.name for f in dataset.schema if f.name in names and f.dataType.typeName() == "binary"
    ]
    if encoded:
        raise InvalidArgumentError(
            f"fit_on_parquet({dataset.url!r}): the data were written by petastorm, and {listed(map(repr, encoded))} "
            f"{'are' if len(encoded) > 1 else 'is'} encoded. Give reader='petastorm', or your own decoders."
        )
