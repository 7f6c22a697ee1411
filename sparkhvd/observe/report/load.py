"""Load of the ranks over the time of a training, as charts."""

from __future__ import annotations

import math

from sparkhvd.observe.report.charts import NUM_COLOURS, Series, lines
from sparkhvd.observe.report.document import Document, number

__all__ = ["load_charts"]

# Numbers of the load, in the order of their charts.
_TITLES = {
    "cpu_percent": "CPU of each rank, percent of one",
    "rss_megabytes": "memory of each rank, MB",
    "gpu_percent": "GPU of each rank, percent of the time",
    "gpu_megabytes": "memory of each rank's GPU, MB",
}


def load_charts(document: Document) -> list[tuple[str, str]]:
    """Return title and chart of each number that is known; of many ranks the first ones."""
    ranks = list(document.get("load") or ())[:NUM_COLOURS]
    began = min((number(t) for rank in ranks for t in rank["time"]), default=math.nan)
    charts = []
    for name, title in _TITLES.items():
        series = [
            Series(
                f"rank {index}",
                [number(t) - began for t in rank["time"]],
                [number(value) for value in rank[name]],
            )
            for index, rank in enumerate(ranks)
            if rank["time"]
        ]
        if series and (chart := lines(title, series, from_zero=True, axis="seconds")):
            charts.append((title, chart))
    return charts
