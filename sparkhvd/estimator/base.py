"""Base class of estimators that launch ranks: copies, fits with several param maps, save and load."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pyspark.ml import Estimator
from pyspark.ml.base import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkhvd.data.reuse import ReuseScope
from sparkhvd.errors import InvalidArgumentError, RankError
from sparkhvd.estimator.fitting.cross_validation import FoldModels, models_kept
from sparkhvd.estimator.fitting.inputs import FitSources, dataframe_sources
from sparkhvd.estimator.fitting.on_parquet import DataPaths, PathLike, open_sources, split_arguments
from sparkhvd.estimator.fitting.on_table import TableChoice, open_table_source
from sparkhvd.estimator.fitting.runs import Folds
from sparkhvd.estimator.params.base import TorchParams
from sparkhvd.estimator.params.table import short_repr
from sparkhvd.estimator.saving.persistence import EstimatorReader, EstimatorWriter
from sparkhvd.observe.loggers.fanout import bound
from sparkhvd.spark import active_session, check_dataframe, check_session

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import Self

    from sparkhvd.data.table_formats.where import Where
    from sparkhvd.estimator.params.generated import FitOptions


M = TypeVar("M", bound=Model)


class RankEstimator(TorchParams, Estimator[M], MLWritable, MLReadable[Any]):
    """Base class of estimators that launch ranks.

    Subclasses must have the Params `run_id` and `data_key`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scope: ReuseScope | None = None  # the fits of a fitMultiple share it
        self._folds = Folds()  # copies of the estimator share it
        self._label = ""  # label of epoch lines

    def copy(self, extra: ParamMap | None = None) -> Self:
        """Copy the estimator with extra Params.

        The epoch lines of the copy's fits show these Params as a label.
        """
        that = super().copy(extra)
        names = {p.name: v for p, v in (extra or {}).items() if that.hasParam(p.name)}
        names.pop("run_id", None)
        given = ", ".join(f"{name}={short_repr(value)}" for name, value in names.items())
        that._label = ", ".join(filter(None, (self._label, given)))
        return that

    @overload
    def fit(self, dataset: DataFrame, params: ParamMap | None = ...) -> M: ...

    @overload
    def fit(self, dataset: DataFrame, params: list[ParamMap] | tuple[ParamMap]) -> list[M]: ...

    def fit(
        self,
        dataset: DataFrame,
        params: ParamMap | list[ParamMap] | tuple[ParamMap] | None = None,
    ) -> M | list[M]:
        """Train on a DataFrame and return when the ranks have finished.

        One Spark job writes the columns into the store, then all ranks train. A fit with the `run_id` of an interrupted
        run resumes from its last checkpoint.

        Args:
            dataset: rows with the columns that the Params name; classic Spark or Spark Connect.
            params: a param map that overrides Params of this fit, or a list of param maps for a list of models.

        Returns:
            The trained model, as a Spark ML transformer.

        Raises:
            InvalidArgumentError: a Param or column is wrong (before any job), or the data hold unusable values
                (before any rank starts).
            PreflightError: the cluster or the store cannot run this fit.
            RankError: a rank failed. The last checkpoint stays in the store, under `runs/<run_id>`, and a fit with this
                `run_id` resumes from it. If no `run_id` was given, a note on the error names the run. If several param
                maps were given, the error's attribute `models` holds the models trained before, by index.
        """
        try:
            if not isinstance(params, (list, tuple)):
                return super().fit(dataset, params)
            models: dict[int, M] = {}
            with models_kept(models):
                models.update(self.fitMultiple(dataset, params))
            return [models[index] for index in range(len(params))]
        # The driver's frames do not help with a rank's error or an argument error. The cause has frames of the user's
        # functions.
        except (RankError, InvalidArgumentError) as e:
            raise e.with_traceback(None) from e.__cause__

    def _fit(self, dataset: DataFrame) -> M:
        """Train on a DataFrame. Spark's `fit` calls this method."""
        check_dataframe("fit", dataset)
        if self._scope is None:  # not within a fold
            self._folds.end()
        return self._fit_sources(dataframe_sources(dataset, self._get("validation")))

    def fit_on_parquet(
        self,
        path: PathLike | Mapping[Any, Any] | Sequence[Any] | None = None,
        params: Mapping[Any, Any] | Sequence[Any] | None = None,
        *,
        validation_path: PathLike | None = None,
        storage_options: Mapping[str, Any] | None = None,
        dataset_idx: int | None = None,
        spark: SparkSession | None = None,
    ) -> M | list[M]:
        """Train on Parquet files in place: the ranks read the files, and Spark only starts the ranks.

        Supports columns of numbers, lists, ML vectors, decimals, binary and text (with decoders), and partition folders
        `column=value`.
        Every row is used once per epoch, for any layout of files and row groups. The files must not change during the
        fit.

        Without a path, as in Horovod, the data are read from the estimator's store: `intermediate_train_data`, and
        `intermediate_val_data` if `validation` is set.

        Args:
            path: a file, or a folder that is searched recursively, as a path or URL that the driver and all executors
                can read. A dict or list in its place is used as `params`.
            params: a param map to fit with, or a list of param maps for a list of models. With a list, the index of the
                map is appended to a `run_id`, as in `fitMultiple`.
            validation_path: rows to validate with, instead of `validation`.
            storage_options: credentials and other options for both paths, as for `Store.create`.
            dataset_idx: Horovod's index of the data in the store.
            spark: the session whose tasks become ranks; None means the active session.

        Raises:
            InvalidArgumentError: a Param or column is wrong, or the data cannot be used. The error is raised before any
                rank starts if footers or the first rows show the problem.
            RankError: a rank failed, or found unusable values; the message names file, column and count.
        """
        path, maps, is_list = split_arguments(path, params)
        places = DataPaths(path, validation_path, storage_options, dataset_idx)
        if is_list:
            data = (str(path), str(validation_path), dataset_idx)
            maps = self._with_run_ids(maps, data)
        session = active_session() if spark is None else spark
        check_session(session)

        def fitted(estimator: Self) -> M:
            sources, decoders = estimator._open_parquet(places, session)
            estimator._set(decoders=decoders)
            return estimator._fit_sources(sources)

        models: list[M] = self._fit_each(maps, fitted)
        return models if is_list else models[0]

    def fit_on_table(
        self,
        table: PathLike,
        params: Mapping[Any, Any] | Sequence[Any] | None = None,
        *,
        version: int | None = None,
        snapshot_id: int | None = None,
        ref: str | None = None,
        as_of: str | date | datetime | None = None,
        where: Where | None = None,
        catalog: object = None,
        storage_options: Mapping[str, Any] | None = None,
        incremental: bool = False,
        spark: SparkSession | None = None,
    ) -> M | list[M]:
        """Train on one version of a Delta or Iceberg table in place: ranks read its files, and Spark only starts them.

        The package deltalake or pyiceberg (`pip install 'sparkhvd[delta]'`, `'sparkhvd[iceberg]'`) reads the table's
        log on the driver; ranks read its Parquet files. Every row of the version is used once per epoch. Without a
        version, the fit uses the version that is newest at the moment of the call; later commits have no effect.

        Args:
            table: path or URL of the table's folder; of Iceberg also of a metadata file, or a name,
                "catalog.database.table".
            params: a param map to fit with, or a list of param maps for a list of models.
            version: number of a Delta table's version.
            snapshot_id: id of an Iceberg snapshot.
            ref: branch or tag of an Iceberg table.
            as_of: time in ISO 8601 (UTC without an offset): the version that was current then.
            where: rows to train on, as SQL ("label >= 0 AND country IN ('de', 'fr')") or tuples ([("label", ">=", 0)]).
            catalog: Iceberg catalog: an object of pyiceberg, a dict of properties, or a name in pyiceberg's
                configuration. None uses the session's configuration, then pyiceberg's.
            storage_options: credentials and other options, as for `Store.create`.
            incremental: read the footers only of files that no earlier fit with the same store has read.
            spark: the session whose tasks become ranks; None means the active session.

        Raises:
            InvalidArgumentError: the table or version does not exist, it needs a feature that cannot be read exactly, a
                Param or column is wrong, or the data cannot be used. The error is raised before any rank starts if
                footers or the first rows show the problem.
            RankError: a rank failed, or found unusable values; the message names file, column and count.
        """
        table_, maps, is_list = split_arguments(table, params, "fit_on_table")
        assert table_ is not None
        choice = TableChoice(
            table_, version, snapshot_id, ref, as_of, where, catalog, storage_options, incremental
        )
        if is_list:
            maps = self._with_run_ids(maps, (str(table), version, snapshot_id, ref, str(as_of)))
        session = active_session() if spark is None else spark
        check_session(session)

        def fitted(estimator: Self) -> M:
            return estimator._fit_sources(estimator._open_table(choice, session))

        models: list[M] = self._fit_each(maps, fitted)
        return models if is_list else models[0]

    def _fit_each(self, maps: Sequence[ParamMap], fit: Callable[[Self], M]) -> list[M]:
        """Fit a copy with each param map. An error carries the models trained before it."""
        models: dict[int, M] = {}
        with models_kept(models):
            for index, each in enumerate(maps):
                models[index] = fit(self.copy(each))
        return [*models.values()]

    def _open_table(self, choice: TableChoice, spark: SparkSession) -> FitSources:
        return open_table_source(self._options(), choice, spark)

    def _open_parquet(
        self, places: DataPaths, spark: SparkSession
    ) -> tuple[FitSources, dict[str, Any] | None]:
        """Make the sources of `fit_on_parquet`, and the decoders of the fit."""
        return open_sources(self._options(), places, spark)

    def _options(self) -> FitOptions:
        """Check the values of the Params and read them."""
        raise NotImplementedError

    def _fit_sources(self, sources: FitSources) -> M:
        """Train on sources of rows. Raises the same errors as `fit`."""
        raise NotImplementedError

    def fitMultiple(  # noqa: N802 - Spark's name
        self,
        dataset: DataFrame,
        paramMaps: Sequence[ParamMap],  # noqa: N803
    ) -> Iterator[tuple[int, M]]:
        """Fit with each param map on shared materialized data.

        Data without a plan key (see `reuse`) are deleted after the last model, or when the iterator is dropped.
        The index of the param map is appended to a `run_id`: `mine-0`, `mine-1`. For a second DataFrame with this
        run_id, as in the second fold of a CrossValidator, the run ids are `mine-fold2-0`, `mine-fold2-1`. `data_key` is
        not used, because a CrossValidator calls this method once per fold, with other rows each time.
        """
        check_dataframe("fit", dataset)
        shared = self.copy()
        shared.clear(shared.data_key)
        shared._scope = scope = ReuseScope()
        shared._label = self._folds.label()
        if self.hasParam("loggers") and (loggers := bound(self._get("loggers") or [])):
            shared._set(loggers=loggers)
        has_run_id = any(given.get(self.run_id, self._get("run_id")) for given in paramMaps)
        maps = self._with_run_ids(paramMaps, dataset.semanticHash() if has_run_id else 0)
        return FoldModels(Estimator.fitMultiple(shared, dataset, maps), len(maps), scope)

    def _with_run_ids(self, maps: Sequence[ParamMap], data: Hashable) -> list[ParamMap]:
        """Add a run id to each param map if a `run_id` is set.

        Calls with equal `data` belong to one fold.
        """
        run_ids = [given.get(self.run_id, self._get("run_id")) for given in maps]
        return [
            {**given, self.run_id: self._folds.name(run_id, data, index)} if run_id else given
            for index, (given, run_id) in enumerate(zip(maps, run_ids, strict=True))
        ]

    def write(self) -> MLWriter:
        """Create a writer: `estimator.write().overwrite().save(path)`."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Create a reader: `TorchEstimator.read().load(path)`."""
        return EstimatorReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False) -> Self:
        """Load a saved estimator, with `trust` as in `TorchModel.load`."""
        loaded: Self = EstimatorReader(cls, trusted=trust).load(path)
        return loaded
