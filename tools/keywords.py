"""Write the types of the estimator's and its model's keyword arguments, and of their options, from the table of Params.

    .venv/bin/python -m tools.keywords

Type checkers and editors read the keywords. The options hold the values of one fit or transform. A test compares the
file with the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkhvd.estimator.params.groups import PredictParams, TrainParams
from sparkhvd.estimator.params.table import GROUPS, ParamRow, rows_of

FILE = Path(__file__).resolve().parents[1] / "sparkhvd" / "estimator" / "params" / "generated.py"
KEYWORDS = {"ModelKeywords": PredictParams, "EstimatorKeywords": TrainParams}
OPTIONS = {"PredictOptions": PredictParams, "FitOptions": TrainParams}

_HEADER = '''"""Types of keyword arguments, and values of one fit or transform.

Written by `python -m tools.keywords` from the table of Params.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

# For type checkers only: workers of a transform load this module too, and must not load `sparkhvd.torch`.
if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from torch import nn
    from torch.optim import Optimizer

    from sparkhvd.data.store.store import Store
    from sparkhvd.observe.loggers.base import Logger
    from sparkhvd.settings import Settings
    from sparkhvd.training.user_code.callbacks import Callback
'''


def source() -> str:
    """Generate the source of the file."""
    return _HEADER + keyword_types() + option_types()


def keyword_types(classes: Mapping[str, type] = KEYWORDS) -> str:
    """Generate a `TypedDict` for the keyword arguments of each class, named by its key."""
    parts = []
    for name, cls in classes.items():
        rows = {n: r for n, r in rows_of(cls).items() if not (r.no_effect or r.refused)}
        lines = [
            f"\n\nclass {name}(TypedDict, total=False):",
            f'    """Keyword arguments of `{cls.__name__}`, by group."""',
        ]
        for group in GROUPS:
            members = [f"    {n}: {r.accepts} | None" for n, r in rows.items() if r.group == group]
            lines += ["", f"    # {group}", *members] if members else []
        lines += ["", "    # other names"]
        lines += [f"    {n}: {r.accepts} | None" for n, r in rows.items() if r.stands_for]
        for row in rows.values():
            lines += [f"    {alias}: {row.accepts} | None" for alias in row.aliases]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def option_types(classes: Mapping[str, type] = OPTIONS) -> str:
    """Generate a dataclass for the Params of each class, named by its key.

    The first dataclass is the base of the others.
    """
    parts = []
    base, *_ = classes
    known: set[str] = set()
    for name, cls in classes.items():
        bases = "" if name == base else f"({base})"
        lines = [
            "\n\n@dataclass(frozen=True, kw_only=True)",
            f"class {name}{bases}:",
            f'    """Values of `{cls.__name__}`, by group, or None if unset."""',
        ]
        if name == base:
            lines += [
                "",
                "    explicit: frozenset[str] = frozenset()  # names of those that were set",
            ]
        rows = {n: r for n, r in rows_of(cls).items() if r.is_option and n not in known}
        for group in GROUPS:
            fields = list(_fields({n: r for n, r in rows.items() if r.group == group}))
            lines += ["", f"    # {group}", *fields] if fields else []
        known |= rows.keys()
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def _fields(rows: Mapping[str, ParamRow]) -> Iterator[str]:
    for name, row in rows.items():
        if row.default is None:
            yield f"    {name}: {row.holds} | None = None"
        elif isinstance(row.default, list):
            yield f"    {name}: {row.holds} = field(default_factory=list)"
        else:
            yield f"    {name}: {row.holds} = {_literal(row.default)}"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    FILE.write_text(source())
