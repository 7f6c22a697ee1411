"""The table of Params: a row of facts for each, and everything that follows from it.

A row is one call of `param`. Keyword arguments with their types, getters and setters, Spark ML's and Horovod's other names, defaults, checks,
`explainParams`, what a run that goes on must share and what the ranks get all follow from it.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.param import Param, Params

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.param_types import ANNOTATIONS

__all__ = [
    "NOT_SEEN",
    "OF_THE_OPTIMIZER",
    "Row",
    "TableParam",
    "TorchParams",
    "above",
    "accessors",
    "at_least",
    "one_of",
    "param",
    "rows_of",
    "short_repr",
    "with_signature",
]

T = TypeVar("T", bound=type)
# Gives what is wrong with a value, as the rest of a sentence, or "".
Check = Callable[[Any], str]

# What a `train_fn` makes of a Param: it has no effect; it has one only if the estimator has an optimizer.
NOT_SEEN = "not seen"
OF_THE_OPTIMIZER = "of the optimizer"


@dataclass(frozen=True)
class Row:
    """Facts of a Param besides its name, type converter and doc.

    Attributes:
        annotation: its Python type, for type checkers.
        default: its value where none is set; None: it has none.
        group: "model", "data", "training" or "cluster".
        check: of its value, on the driver before any job.
        fingerprint: two fits must have the same value so that one can go on where the other stopped.
        to_ranks: the ranks get the value as it is, as the field of `TrainSpec` with this name.
        train_fn: what a `train_fn` makes of it: `NOT_SEEN`, `OF_THE_OPTIMIZER`, or "" for its usual effect.
        aliases: Spark ML's and Horovod's names: keyword arguments, attributes (for a ParamGridBuilder) and accessors.
        accessors: Horovod's accessors whose names do not follow from the Param's: getX and setX for each.
        no_effect: a Param of Horovod that has no effect: what to do instead.
    """

    annotation: str
    default: Any = None
    group: str = ""
    check: Check | None = None
    fingerprint: bool = False
    to_ranks: bool = False
    train_fn: str = ""
    aliases: tuple[str, ...] = ()
    accessors: tuple[str, ...] = ()
    no_effect: str = ""


class TableParam(Param[Any]):
    """A Param with its row of the table."""

    row: Row

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name


def param(
    convert: Callable[[Any], Any], doc: str, *, annotation: str = "", **facts: Any
) -> TableParam:
    """Make a Param with its row; its name is that of the class's attribute.

    Args:
        convert: makes its value of what was given; raises TypeError.
        doc: for `explainParams`.
        annotation: its Python type; the converter's if it is not given.
        facts: the other fields of `Row`.
    """
    made = TableParam(Params._dummy(), "", doc, typeConverter=convert)
    made.row = Row(annotation or ANNOTATIONS.get(convert, "Any"), **facts)
    return made


def rows_of(cls: type) -> dict[str, Row]:
    """The rows of a class's Params by name, its bases' first."""
    found = {}
    for base in reversed(cls.__mro__):
        found.update({v.name: v.row for v in vars(base).values() if isinstance(v, TableParam)})
    return found


def at_least(least: int) -> Check:
    """Make the check of a number that has a least value."""
    return lambda value: "" if value >= least else f"it must be at least {least}"


def above(bound: float) -> Check:
    """Make the check of a number that must be more than a bound; NaN is not."""
    return lambda value: "" if value > bound else f"it must be more than {bound:g}"


def one_of(*choices: str) -> Check:
    """Make the check of a choice."""
    given = ", ".join(map(repr, choices))
    return lambda value: "" if value in choices else f"it must be one of {given}"


# Arguments of other estimators of Horovod -> what the error says.
ELSEWHERE = {
    "num_gpus": "It is of horovod.spark.lightning; give num_proc.",
    "logger": "It is of horovod.spark.lightning; progress= gets the record of each epoch.",
    "log_every_n_steps": "It is of horovod.spark.lightning; progress= gets the record of each epoch.",
    "loader_num_epochs": "It is of horovod.spark.lightning; every epoch reads each row once.",
    "profiler": "It is of horovod.spark.lightning; sparkhvd.Settings(timeline=...) writes a timeline.",
    "trainer_args": "It is of horovod.spark.lightning; each thing that a fit may do has an argument of its own.",
    "debug_data_loader": "It is of horovod.spark.lightning.",
    "train_async_data_loader_queue_size": "It is of horovod.spark.lightning; batches are always read ahead.",
    "val_async_data_loader_queue_size": "It is of horovod.spark.lightning; batches are always read ahead.",
    "custom_objects": "It is of horovod.spark.keras.",
    "checkpoint_callback": "It is of horovod.spark.keras; a checkpoint is always written.",
    "backend_env": "It is of horovod.spark.keras; set variables in Spark's configuration (spark.executorEnv.NAME).",
}


# --- getters, setters and keyword arguments from the Params ---------------------------------------------------


def camel_case(name: str) -> str:
    """The name as it stands in getters and setters: "batch_size" -> "BatchSize", "outputCols" -> "OutputCols"."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _own_params(cls: type) -> list[TableParam]:
    return [value for value in vars(cls).values() if isinstance(value, TableParam)]


def accessors(cls: T) -> T:
    """Give a class `getX()` and `setX(value)` for each Param that it declares; `setX` returns the object.

    Horovod's and Spark's names of these Params get theirs too; a name of Spark's is also an attribute that is the
    Param. Where Spark has one column and the Param a list, Spark's getter gives the one column.
    """
    for param in _own_params(cls):
        _accessors(cls, param, camel_case(param.name))
        for other in param.row.accessors:
            _accessors(cls, param, other)
        for alias in param.row.aliases:
            _accessors(cls, param, camel_case(alias), is_alias=True)
            doc = f"Another name of the Param `{param.name}`."
            setattr(cls, alias, property(operator.attrgetter(param.name), doc=doc))
    return cls


def _accessors(cls: type, param: Param[Any], camel: str, *, is_alias: bool = False) -> None:
    name = param.name

    def get(self: Any) -> Any:
        value = self._get(name)
        return value[0] if is_alias and isinstance(value, list) and len(value) == 1 else value

    def put(self: Any, value: Any) -> Any:
        if value is None:
            self.clear(self.getParam(name))
            return self
        return self._set(**{name: value})

    for prefix, function, doc in (
        ("get", get, f"The value of `{name}`, or None: {param.doc}."),
        ("set", put, f"Set `{name}` (None clears it): {param.doc}. Returns this object."),
    ):
        function.__name__ = f"{prefix}{camel}"
        function.__qualname__ = f"{cls.__name__}.{function.__name__}"
        function.__doc__ = doc
        if not hasattr(cls, function.__name__):
            setattr(cls, function.__name__, function)


class TorchParams(Params):
    """What estimator and model share: keyword arguments and readable explanations."""

    if TYPE_CHECKING:  # the accessors are made from the Params

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self) -> None:
        super().__init__()
        defaults = {name: row.default for name, row in rows_of(type(self)).items()}
        self._setDefault(**{name: value for name, value in defaults.items() if value is not None})

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what looks like setting a Param, which is a method's work in Spark ML."""
        if not name.startswith("_") and not isinstance(value, Param) and not hasattr(Params, name):
            known = [p.name for p in _own_params_of(type(self))]
            if name in known or (close := difflib.get_close_matches(name, known, n=1, cutoff=0.85)):
                found = name if name in known else close[0]
                raise AttributeError(
                    f"{type(self).__name__}.{name} = ...: {found!r} is a Param. Call set{camel_case(found)}(...), or give "
                    f"{type(self).__name__}({found}=...)."
                )
        super().__setattr__(name, value)

    @classmethod
    def _row(cls, name: str) -> Row:
        row: Row = getattr(cls, name).row
        return row

    def _check_values(self) -> None:
        """Check the values of the Params that are set, or have defaults.

        Raises:
            InvalidArgumentError: one is out of range.
        """
        for name, row in rows_of(type(self)).items():
            value = self._get(name)
            if row.check is not None and value is not None and (problem := row.check(value)):
                raise InvalidArgumentError(f"{name} is {value!r}; {problem}.")

    def _set_keywords(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Set Params from keyword arguments; None means "not given".

        Raises:
            TypeError: an argument is positional, unknown or given under two names.
        """
        if positional:
            raise TypeError(
                f"{type(self).__name__}() takes keyword arguments only, and got {short_repr(positional[0])} without "
                f"a name. Write for example {type(self).__name__}({self._example()}=...)."
            )
        values: dict[str, Any] = {}
        for given, value in keywords.items():
            name = self._param_name(given)
            if value is None:
                continue
            if name in values:
                other = next(n for n in keywords if n != given and self._param_name(n) == name)
                raise TypeError(
                    f"{type(self).__name__}(): {other!r} and {given!r} are names of the same param, {name!r}. Give one."
                )
            values[name] = value
        self._set(**values)

    def _param_name(self, given: str) -> str:
        names = [p.name for p in self.params]
        others = {camel_case(n)[:1].lower() + camel_case(n)[1:]: n for n in names}
        others.update({alias: n for n in names for alias in self._row(n).aliases})
        name = given if given in names else others.get(given, "")
        if name not in names:
            known = difflib.get_close_matches(given, names, n=1)
            hint = f" Did you mean {known[0]!r}?" if known else ""
            hint = f" {ELSEWHERE[given]}" if given in ELSEWHERE else hint
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument {given!r}.{hint}"
            )
        return name

    def _example(self) -> str:
        return "model" if self.hasParam("model") else "feature_cols"

    def setParams(self, *positional: Any, **keywords: Any) -> Any:  # noqa: N802 - Spark's name
        """Set several Params by keyword; returns this object."""
        self._set_keywords(positional, keywords)
        return self

    def explainParams(self) -> str:  # noqa: N802 - Spark's name
        """One line per Param; Horovod's Params without effect only where they are set."""
        shown = [p for p in self.params if not self._row(p.name).no_effect or self.isSet(p)]
        return "\n".join(self.explainParam(p) for p in shown)

    def explainParam(self, param: str | Param[Any]) -> str:  # noqa: N802 - Spark's name
        """Name, meaning, default and current value of a Param on one line; a model is shown by its size."""
        resolved = self._resolveParam(param)
        values = []
        if resolved in self._defaultParamMap:
            values.append(f"default: {short_repr(self._defaultParamMap[resolved])}")
        if resolved in self._paramMap:
            values.append(f"current: {short_repr(self._paramMap[resolved])}")
        return f"{resolved.name}: {resolved.doc} ({', '.join(values) or 'undefined'})"

    def _set(self, **values: Any) -> Any:
        """None clears a Param, also where it comes from a param map."""
        for name in [name for name, value in values.items() if value is None]:
            self.clear(self.getParam(name))
        return super()._set(**{n: value for n, value in values.items() if value is not None})

    def _get(self, name: str) -> Any:
        """The value of a Param, or None if it has none."""
        return self.getOrDefault(name) if self.isDefined(name) else None


def _own_params_of(cls: type) -> Iterable[TableParam]:
    return [value for base in cls.__mro__ for value in _own_params(base)]


def with_signature(cls: T) -> T:
    """Show a class's Params as its keyword arguments, for `help()` and editors."""
    params = [v for v in (getattr(cls, n) for n in dir(cls)) if isinstance(v, Param)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect.signature
        [inspect.Parameter(p.name, keyword, default=None) for p in params]
    )
    return cls


def short_repr(value: Any, limit: int = 80) -> str:
    """A value on one short line: a module by class and size, an optimizer by class, a function by name."""
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
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{k!r}: {short_repr(v, limit)}" for k, v in value.items()) + "}"
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        text = "[" + ", ".join(short_repr(v, limit) for v in value) + "]"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
