"""Curves of a fit in a notebook, redrawn after each epoch."""

from __future__ import annotations

import functools
import io
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.report.charts import is_logarithmic
from sparkhvd.observe.report.page import measures, number, paired

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST_COLUMNS = 3


class LivePlot:
    """Callback for `progress=` that draws training and validation curves in a notebook.

    Each fit has its own figure, replaced after each epoch. Outside a notebook, or without matplotlib, it does nothing.

        TorchEstimator(..., progress=sparkhvd.LivePlot())

    Args:
        names: losses, metrics or other keys of the records, without "val_", such as ["loss", "rows_per_s"]; None draws
            all losses and metrics.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        if isinstance(names, str):
            raise InvalidArgumentError(
                f"LivePlot({names!r}): names must be a list, such as [{names!r}]."
            )
        self._names = None if names is None else list(names)
        self._records: list[dict[str, Any]] = []
        self._display_id = ""

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Draw the curves up to this epoch."""
        if self._records and number(record.get("epoch")) <= number(self._records[-1].get("epoch")):
            self._records, self._display_id = [], ""  # a new fit has begun
        self._records.append(dict(record))
        if (shown := _notebook()) is None:
            return
        names = measured(self._records) if self._names is None else self._names
        if not names:
            return
        try:
            figure = draw_curves(self._records, names)
        except ImportError:
            return
        is_new = not self._display_id
        self._display_id = self._display_id or uuid.uuid4().hex
        image = shown.Image(_picture(figure))
        shown.display(image, display_id=self._display_id, update=not is_new)


def _notebook() -> Any:
    """Find the module `IPython.display` in a Jupyter kernel, or return None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    if getattr(ipython and ipython.get_ipython(), "kernel", None) is None:
        return None
    return ipython.display


def measured(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the losses, metrics and logged numbers of records, without "val_"."""
    return [*paired(measures({"history": records}))]


def draw_curves(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    """Draw training and validation curves over the epochs, one plot per name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    columns = min(_MOST_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    epochs = [number(r.get("epoch", i + 1)) for i, r in enumerate(records)]
    known = dict.fromkeys(key for record in records for key in record)
    # Without markers, a single epoch would not be visible.
    marker = "." if len(records) <= 30 else ""
    for index, name in enumerate(names):
        axes, shown = figure.add_subplot(rows, columns, index + 1), []
        keys = paired([k for k in known if k in (name, f"train_{name}", f"val_{name}")])
        pair = keys.get(name) or next(iter(keys.values()), ())
        for key, label in zip(pair, ("training", "validation"), strict=False):
            if key:
                values = [number(r.get(key)) for r in records]
                axes.plot(epochs, values, marker=marker, label=label)
                shown += values
        axes.set(title=name, xlabel="epoch")
        axes.locator_params(axis="x", integer=True)
        if is_logarithmic(shown):  # the report decides the scale in the same way
            axes.set_yscale("log")
        if axes.get_lines():
            axes.legend()
    # Let a notebook show the figure; without this it does so only after `%matplotlib inline`.
    figure._repr_png_ = functools.partial(_picture, figure)  # type: ignore[attr-defined]
    return figure


def _picture(figure: Figure) -> bytes:
    """Draw a figure as a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
