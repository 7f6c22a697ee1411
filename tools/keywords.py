"""Write the types of keyword arguments of the estimator and its model from the table of Params.

    .venv/bin/python -m tools.keywords

`sparkhvd/estimator/keywords.py` is read by type checkers and editors alone; a test compares it with the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparkhvd.estimator.param_table import rows_of
from sparkhvd.estimator.params import PredictParams, TrainParams

FILE = Path(__file__).resolve().parents[1] / "sparkhvd" / "estimator" / "keywords.py"
CLASSES = {"ModelKeywords": PredictParams, "EstimatorKeywords": TrainParams}

_KEYWORDS = '''"""Types of keyword arguments, for type checkers. Written by `python -m tools.keywords` from the table of Params."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from pyspark.sql import DataFrame
from torch import nn
from torch.optim import Optimizer

from sparkhvd.data.store.store import Store
from sparkhvd.settings import Settings
from sparkhvd.training.user_code.callbacks import Callback

__all__ = [{names}]
'''


def source(classes: Mapping[str, type] = CLASSES) -> str:
    """Give Python source with a `TypedDict` of the keyword arguments of each class, by its name there."""
    parts = [_KEYWORDS.replace("{names}", ", ".join(f'"{name}"' for name in sorted(classes)))]
    for name, cls in classes.items():
        rows = {n: row for n, row in rows_of(cls).items() if not row.no_effect}
        lines = [
            f"\n\nclass {name}(TypedDict, total=False):",
            f'    """Of `{cls.__name__}`, by group."""',
        ]
        for group in ("model", "data", "training", "cluster"):
            members = {n: row for n, row in rows.items() if row.group == group}
            if members:
                lines += ["", f"    # {group}"]
            for n, row in members.items():
                lines += [f"    {n}: {row.annotation} | None"]
        lines += ["", "    # other names"]
        for row in rows.values():
            lines += [f"    {alias}: {row.annotation} | None" for alias in row.aliases]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    FILE.write_text(source())
