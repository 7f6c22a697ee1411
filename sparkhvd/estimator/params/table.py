"""Table of Params, with a row of facts for each Param.

A row is one call of `param`. The rows define keyword arguments with their types, getters and setters, Spark ML's and
Horovod's other names, defaults, checks, `explainParams`, the options of a fit, its fingerprint and the values for the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml.param import Param, Params

from sparkhvd.estimator.params.converters import ACCEPTED, CONVERTED, Converter

# Function that checks a value and returns "" or the end of an error sentence, such as "it must be at least 1".
Check = Callable[[Any], str]

# Groups of keyword arguments, in the order of signatures.
GROUPS = ("model", "data", "training", "cluster")

# Effect of a `train_fn` on a Param: it is ignored, or it applies only to the estimator's optimizer.
NOT_SEEN = "not seen"
OF_THE_OPTIMIZER = "of the optimizer"


@dataclass(frozen=True, kw_only=True)
class ParamRow:
    """Facts of a Param besides its name, type converter and doc.

    Attributes:
        accepts: Python type of accepted values, for type checkers.
        holds: Python type of the value after conversion.
        default: default value; None for no default.
        group: one of `GROUPS`; "" for a name kept for compatibility.
        check: check of the value on the driver before any job.
        fingerprint: True if two fits must have the same value so that one can resume the other.
        to_ranks: True if the value is passed to the ranks unchanged, as the field of `TrainSpec` with the same name.
        in_conf: True if the session's conf may set the Param, as `spark.sparkhvd.<name>`.
        train_fn: how the Param works with a `train_fn`: `NOT_SEEN`, `OF_THE_OPTIMIZER`, or "" as usual.
        aliases: Spark ML's and Horovod's names: keyword arguments, attributes (for a ParamGridBuilder) and accessors.
        accessors: names X of Horovod's accessors getX and setX that differ from the Param's name.
        stands_for: (name, value) of another Param that is set if this Param is True.
        no_effect: what to do instead of using this Param, which has no effect; "" for other Params.
        refused: error message (after the Param's name) for using this Param; "" for other Params.
    """

    accepts: str
    holds: str
    default: object = None
    group: str = ""
    check: Check | None = None
    fingerprint: bool = False
    to_ranks: bool = False
    in_conf: bool = False
    train_fn: str = ""
    aliases: Sequence[str] = ()
    accessors: Sequence[str] = ()
    stands_for: tuple[str, object] | None = None
    no_effect: str = ""
    refused: str = ""

    @property
    def is_option(self) -> bool:
        """True if the Param has an effect under its own name."""
        return not (self.no_effect or self.refused or self.stands_for)


# Name of the class in pickles of earlier versions.
Row = ParamRow


class TableParam(Param[Any]):
    """Param with its row of the table."""

    row: ParamRow

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name


def param(convert: Converter, doc: str, *, annotation: str = "", **facts: Any) -> TableParam:
    """Declare a Param with its row. The name of the class attribute becomes the Param's name.

    Args:
        convert: function that converts the given value, or raises TypeError.
        doc: description for `explainParams`.
        annotation: Python type of the value, if the converter has none.
        facts: other fields of `ParamRow`.
    """
    made = TableParam(Params._dummy(), "", doc, typeConverter=convert)
    accepts = annotation or ACCEPTED.get(convert, "Any")
    made.row = ParamRow(accepts=accepts, holds=CONVERTED.get(convert, accepts), **facts)
    return made


def rows_of(cls: type) -> dict[str, ParamRow]:
    """Collect a class's Param rows by name, bases first, without Params replaced by a subclass."""
    rows = {}
    for base in reversed(cls.__mro__):
        rows.update({v.name: v.row for v in vars(base).values() if isinstance(v, TableParam)})
    return {n: row for n, row in rows.items() if isinstance(getattr(cls, n, None), TableParam)}


def at_least(least: float) -> Check:
    """Make a check for a minimum."""
    return lambda value: "" if value >= least else f"it must be at least {least:g}"


def above(bound: float) -> Check:
    """Make a check for a number above a bound. NaN fails."""
    return lambda value: "" if value > bound else f"it must be more than {bound:g}"


def one_of(*choices: str) -> Check:
    """Make a check that a value is one of the choices."""
    listed = ", ".join(map(repr, choices))
    return lambda value: "" if value in choices else f"it must be one of {listed}"


# ----------------------------------------------------------------------------------------------------
# Values of Params as explanations show them.


def short_repr(value: object, limit: int = 80) -> str:
    """Show a value on one short line: a module by class and size, an optimizer by class, a function by name."""
    if isinstance(value, type):
        return f"<{value.__module__}.{value.__qualname__}>"
    if hasattr(value, "parameters") and hasattr(value, "state_dict"):
        # A lazy module's parameters have no size yet.
        count = sum(0 if hasattr(p, "materialize") else p.numel() for p in value.parameters())
        return f"<{type(value).__name__}: {count:,} parameters>"
    if hasattr(value, "param_groups"):
        groups = len(value.param_groups)
        return f"<{type(value).__name__}: {groups} parameter group{'s' * (groups != 1)}>"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<{value.__module__}.{value.__qualname__}>"
    end = "..."
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k!r}: {short_repr(v, limit)}" for k, v in value.items()) + "}"
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        text = "[" + ", ".join(short_repr(v, limit) for v in value) + "]"
        end = f"... ({len(value)} in all)"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - len(end)] + end
