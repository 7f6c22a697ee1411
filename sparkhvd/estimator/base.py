"""Base of the estimators whose fits are launches of ranks: copies, fits with several param maps, save and load."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pyspark.ml import Estimator
from pyspark.ml.base import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkhvd.data.reuse import Scope
from sparkhvd.errors import RankError
from sparkhvd.estimator.fitting.cross_validation import FoldModels
from sparkhvd.estimator.fitting.runs import Folds
from sparkhvd.estimator.params.base import TorchParams
from sparkhvd.estimator.params.explain import short_repr
from sparkhvd.estimator.saving.persistence import EstimatorReader, EstimatorWriter
from sparkhvd.sessions import check_dataframe

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from pyspark.sql import DataFrame
    from typing_extensions import Self

__all__ = ["RankEstimator"]

M = TypeVar("M", bound=Model)


class RankEstimator(TorchParams, Estimator[M], MLWritable, MLReadable[Any]):
    """Estimator that ranks train; a subclass has the Params `run_id` and `data_key`."""

    def __init__(self) -> None:
        super().__init__()
        self._scope: Scope | None = None  # what the fits of a fitMultiple share
        self._folds = Folds()  # copies have the same
        self._label = ""  # of epoch lines

    def copy(self, extra: ParamMap | None = None) -> Self:
        """Copy the estimator, with further Params; epoch lines of the copy's fits name these."""
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
        """Train on a DataFrame: write its columns into the store in one Spark job, then train on all ranks; the driver waits.

        A fit whose run stopped goes on from its last checkpoint if it is called again with the same `run_id`.

        Args:
            dataset: rows with the columns that the Params name; classic Spark or Spark Connect.
            params: a param map that overrides Params of this fit, or a list of them, which gives a list of models.

        Returns:
            The trained model, as a Spark ML transformer.

        Raises:
            InvalidArgumentError: a Param or column is wrong (before any job), or the data hold what cannot be used
                (before any rank starts).
            PreflightError: the cluster or the store cannot run this.
            RankError: a rank failed. The last checkpoint stays in the store, under `runs/<run_id>`; a fit with this
                `run_id` goes on from it. Without a `run_id` a note at the error names it.
        """
        try:
            return super().fit(dataset, params)
        except RankError as e:  # the frames of the driver say nothing about a rank
            raise e.with_traceback(None) from e.__cause__

    def fitMultiple(  # noqa: N802 - Spark's name
        self,
        dataset: DataFrame,
        paramMaps: Sequence[ParamMap],  # noqa: N803
    ) -> Iterator[tuple[int, M]]:
        """Fit with each of several param maps; they share the materialized data.

        Data that no plan names (see `reuse`) go when the last of the models is there, or the iterator is dropped.
        A `run_id` gets the index of the param map: `mine-0`, `mine-1`; with the second DataFrame and this run_id, as in
        the second fold of a CrossValidator, `mine-fold2-0`, `mine-fold2-1`. `data_key` is not used: a CrossValidator
        calls this once per fold, with other rows each time.
        """
        check_dataframe("fit", dataset)
        shared = self.copy()
        shared.clear(shared.data_key)
        shared._scope = scope = Scope()
        shared._label = self._folds.label()
        has_run_id = any(given.get(self.run_id, self._get("run_id")) for given in paramMaps)
        maps = self._with_run_ids(paramMaps, dataset.semanticHash() if has_run_id else 0)
        return FoldModels(Estimator.fitMultiple(shared, dataset, maps), len(maps), scope)

    def _with_run_ids(self, maps: Sequence[ParamMap], data: Hashable) -> list[ParamMap]:
        """Give each param map a run id, where one is set; equal `data` are one fold."""
        run_ids = [given.get(self.run_id, self._get("run_id")) for given in maps]
        return [
            {**given, self.run_id: self._folds.name(run_id, data, index)} if run_id else given
            for index, (given, run_id) in enumerate(zip(maps, run_ids, strict=True))
        ]

    def write(self) -> MLWriter:
        """Return a writer: `estimator.write().overwrite().save(path)`."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return a reader: `TorchEstimator.read().load(path)`."""
        return EstimatorReader(cls)

    @classmethod
    def load(cls, path: str, *, trust: bool = False) -> Self:
        """Load a saved estimator; `trust` as in `TorchModel.load`."""
        loaded: Self = EstimatorReader(cls, trusted=trust).load(path)
        return loaded
