"""What a model tells of its training: history, summary, report, curves, importance of features."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.estimator.importance import Importance, permutation_importance
from sparkhvd.estimator.summary import TrainingSummary
from sparkhvd.observe.live_plot import draw_curves, measured
from sparkhvd.observe.report.document import JSON_NAME, Document, dumps, loads
from sparkhvd.observe.report.page import render
from sparkhvd.training.modules.fitted import Fitted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from pyspark.ml.evaluation import Evaluator
    from pyspark.sql import DataFrame

__all__ = ["Report", "Trained"]


class Report:
    """Report of a fit: a notebook shows it, `save` writes it.

    Attributes:
        document: the figures, see `sparkhvd.observe.report.document`.
        html: the page.
    """

    def __init__(self, document: Document) -> None:
        # Through JSON, so that it is what a file would give.
        self.document = loads(dumps(document), JSON_NAME)
        self.html = render(self.document)

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps its style from the notebook's."""
        return f'<iframe srcdoc="{escape(self.html)}" sandbox style="width:100%;height:800px;border:0"></iframe>'

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page to a file of this machine, over one that is there.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.html, encoding="utf-8")


class Trained:
    """Mixin of `TorchModel`: what it tells of its training."""

    if TYPE_CHECKING:

        def _require_fitted(self) -> Fitted: ...

        def _get(self, name: str) -> Any: ...

    @property
    def history(self) -> list[dict[str, Any]]:
        """Records of the epochs, in order."""
        return self._records()

    def _records(self) -> list[dict[str, Any]]:
        """Return `history`, which is a Param in the classes under Horovod's name."""
        return [dict(record) for record in self._require_fitted().history]

    def history_frame(self) -> pd.DataFrame:
        """Return `history` as a frame of pandas with a row per epoch, and their numbers as index."""
        import pandas as pd

        frame = pd.DataFrame(self._require_fitted().history)
        return frame.set_index("epoch") if "epoch" in frame else frame

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of the fit's phases: materialize, launch, train."""
        return dict(self._require_fitted().timings)

    @property
    def summary(self) -> TrainingSummary:
        """Summary of the training, with the names of Spark ML's summaries."""
        fitted = self._require_fitted()
        return TrainingSummary(self._records(), self.timings, fitted.run_id)

    def report(self) -> Report:
        """Return the report of the fit: curves, throughput, phases, waits, collectives, settings (docs/report.md).

        Of a model that was loaded it is read from the run's folder in the store; where that is not there, it has history and timings alone.
        """
        fitted = self._require_fitted()
        return Report(fitted.report or self._stored_report(fitted) or _short_document(fitted))

    def _stored_report(self, fitted: Fitted) -> Document:
        store = self._get("store")
        if not fitted.run_id or not hasattr(store, "read_bytes"):
            return {}
        path = f"runs/{fitted.run_id}/{JSON_NAME}"
        with contextlib.suppress(OSError, SparkhvdError):
            return loads(store.read_bytes(path), store.full_url(path))
        return {}

    def permutation_importance(
        self,
        dataset: DataFrame,
        evaluator: Evaluator,
        *,
        num_rows: int = 2000,
        repeats: int = 3,
        seed: int = 0,
    ) -> list[Importance]:
        """Tell how much worse the predictions are when one feature has the values of other rows; the greatest first.

        Each scalar column is a feature, and each element of a vector or list of numbers, which Spark ML's metadata may name. Correlated features share
        their importance.

        Args:
            dataset: rows with the columns that the model reads, and what the evaluator reads; best such that it was not trained with.
            evaluator: of Spark ML, such as `RegressionEvaluator(labelCol="y")`.
            num_rows: at most so many rows, chosen at random; the driver holds them.
            repeats: permutations of each feature.
            seed: of the choice and the permutations.

        Raises:
            InvalidArgumentError: there are fewer than two rows, or a number is too small.
        """
        columns = self._get("feature_cols") or [c.name for c in self._require_fitted().columns]
        transform = cast("Any", self).transform
        return permutation_importance(
            transform,
            columns,
            dataset,
            evaluator,
            num_rows=num_rows,
            repeats=repeats,
            seed=seed,
        )

    def plot(self, names: Sequence[str] | None = None) -> Figure:
        """Draw curves over the epochs with matplotlib, validation beside training.

        Args:
            names: losses, metrics or other keys of `history`, without "val_"; None: all losses and metrics.

        Returns:
            The figure, with one plot per name; a notebook shows it.

        Raises:
            InvalidArgumentError: matplotlib is not installed, there is no history, or it has no such key.
        """
        history = self._records()
        known = measured(history)
        chosen = known if names is None else list(names)
        keys = {key for record in history for key in record}
        if wrong := [n for n in chosen if not {n, f"train_{n}", f"val_{n}"} & keys]:
            raise InvalidArgumentError(
                f"plot: {wrong[0]!r} is not in the history, which has {', '.join(map(repr, known)) or 'nothing'}."
            )
        if not chosen:
            raise InvalidArgumentError("plot: the model has no history. It comes from a fit.")
        try:
            return draw_curves(history, chosen)
        except ImportError:
            raise InvalidArgumentError(
                "plot: matplotlib is not installed. pip install matplotlib, or look at model.report(), which needs none."
            ) from None


def _short_document(fitted: Fitted) -> Document:
    phases = [{"name": name, "seconds": seconds} for name, seconds in fitted.timings.items()]
    return {"run_id": fitted.run_id, "history": list(fitted.history), "phases": phases}
