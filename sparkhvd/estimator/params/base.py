"""Derive accessors, keyword arguments, checks, explanations and options from the table of Params."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pyspark.ml.param import Param, Params

from sparkhvd.data.store.moved import StoreWithRuns
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.table import GROUPS, ParamRow, TableParam, rows_of, short_repr

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T", bound=type)
Options = TypeVar("Options", bound="DataclassInstance")


def camel_case(name: str) -> str:
    """Convert a Param's name for getters and setters: "batch_size" -> "BatchSize", "outputCols" -> "OutputCols"."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


# Row for a Param that is not in the table.
_PLAIN = ParamRow(accepts="Any", holds="Any")


def _own_params(cls: type) -> list[TableParam]:
    return [value for value in vars(cls).values() if isinstance(value, TableParam)]


def accessors(cls: T) -> T:
    """Add `getX()` and `setX(value)` to a class for each of its own Params.

    `setX` returns the object. Horovod's and Spark's names of these Params also get accessors, and a Spark name is also
    an attribute that refers to the Param. If Spark's Param is one column and this Param is a list, Spark's getter
    returns the column.
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


def _accessors(cls: type, param: TableParam, camel: str, *, is_alias: bool = False) -> None:
    name = param.name

    def get(self: TorchParams) -> object:
        value = self._get(name)
        return value[0] if is_alias and isinstance(value, list) and len(value) == 1 else value

    def put(self: TorchParams, value: object) -> TorchParams:
        if value is None:
            self.clear(self.getParam(name))
            return self
        self._set(**{name: value})
        return self

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
    """Base of estimator and model: sets Params by keyword, checks them and explains them."""

    if TYPE_CHECKING:  # a decorator makes the accessors from the Params

        def __getattr__(self, name: str) -> Any: ...

    # Defaults of a class that override the defaults of the table.
    _other_defaults: ClassVar[Mapping[str, object]] = {}
    # True if files that this process has saved are loaded without trust, see `saving.trust`.
    _trusts_own_files: ClassVar[bool] = False
    # Class with which a saved store is loaded.
    _store_class: ClassVar[type[StoreWithRuns]] = StoreWithRuns
    # Params whose defaults count as set.
    _as_if_set: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        defaults = {name: row.default for name, row in rows_of(type(self)).items()}
        defaults.update(self._other_defaults)
        self._setDefault(**{name: value for name, value in defaults.items() if value is not None})

    def __setattr__(self, name: str, value: object) -> None:
        """Reject an assignment to a Param in any spelling. Params are set by methods."""
        is_attribute = name.startswith("_") or isinstance(value, Param) or hasattr(Params, name)
        if not is_attribute and (param := self._close_param(name)):
            raise AttributeError(
                f"{type(self).__name__}.{name} = ...: {param!r} is a Param. Call set{camel_case(param)}(...), or give "
                f"{type(self).__name__}({param}=...)."
            )
        super().__setattr__(name, value)

    @classmethod
    def _close_param(cls, name: str) -> str:
        """Find the Param for a misspelled name such as "batchSize", or "" without a match."""
        names = {}
        for param, row in rows_of(cls).items():
            names.update({_plain(spelling): param for spelling in (param, *row.aliases)})
        close = difflib.get_close_matches(_plain(name), names, n=1, cutoff=0.85)
        return names[close[0]] if close else ""

    @classmethod
    def _row(cls, name: str) -> ParamRow:
        """Find the row of a Param, or an empty row for a Param of a user's subclass."""
        return getattr(getattr(cls, name, None), "row", _PLAIN)

    def _check_values(self) -> None:
        """Check the set and default values of the Params.

        Raises:
            InvalidArgumentError: a value is out of range, cannot be used here, or contradicts another value.
        """
        for name, row in rows_of(type(self)).items():
            value = self._get(name)
            if row.refused and value is not None:
                raise InvalidArgumentError(f"{name} {row.refused}.")
            if row.stands_for and value:
                self._check_switch(name, *row.stands_for)
            if row.check is not None and value is not None and (problem := row.check(value)):
                raise InvalidArgumentError(f"{name} is {value!r}; {problem}.")

    def _check_switch(self, name: str, target: str, value: object) -> None:
        """Reject `name`=True if the Param `target` is set to another value than it means. It may override a default."""
        other = self._get(target)
        if not self.hasDefault(target) and other not in (None, value):
            raise InvalidArgumentError(
                f"{target} is {other!r}, but {name} is True, which means {target}={value!r}. Give only one of them."
            )

    def _read_options(self, options: type[Options]) -> Options:
        """Read the Params into a frozen dataclass. Params without a field are ignored."""
        known = {each.name for each in fields(options)}
        rows = rows_of(type(self)).items()
        values = {n: self._get(n) for n, row in rows if row.is_option and n in known}
        for name, row in rows_of(type(self)).items():
            if row.stands_for and self._get(name):
                target, value = row.stands_for
                values[target] = value
        values["explicit"] = frozenset(p.name for p in self._paramMap) | self._as_if_set
        return options(**values)

    def _set_keywords(self, positional: Sequence[object], keywords: Mapping[str, object]) -> None:
        """Set Params from keyword arguments. None means "not given" and clears a Param.

        Raises:
            TypeError: an argument is positional, unknown, or given under two names.
        """
        if positional:
            raise TypeError(
                f"{type(self).__name__}() takes only keyword arguments, but got {short_repr(positional[0])} without "
                f"a name. Write for example {type(self).__name__}({self._example()}=...)."
            )
        values: dict[str, object] = {}
        for given, value in keywords.items():
            name = self._param_name(given)
            if value is not None and values.get(name) is not None:
                other = next(n for n in keywords if n != given and self._param_name(n) == name)
                raise TypeError(
                    f"{type(self).__name__}(): {other!r} and {given!r} are names of the same param, {name!r}. Give only one of them."
                )
            if value is not None or name not in values:
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

    def setParams(self, *positional: object, **keywords: object) -> Any:  # noqa: N802 - Spark's name
        """Set several Params by keyword (None clears a Param), and return this object."""
        self._set_keywords(positional, keywords)
        return self

    def explainParams(self) -> str:  # noqa: N802 - Spark's name
        """Explain each Param on a line, except unset Params of Horovod without effect."""
        shown = [p for p in self.params if not self._row(p.name).no_effect or self.isSet(p)]
        return "\n".join(self.explainParam(p) for p in shown)

    def explainParam(self, param: str | Param[Any]) -> str:  # noqa: N802 - Spark's name
        """Explain a Param on one line: name, meaning, default and current value (of a model only its size)."""
        resolved = self._resolveParam(param)
        values = []
        if resolved in self._defaultParamMap:
            values.append(f"default: {short_repr(self._defaultParamMap[resolved])}")
        if resolved in self._paramMap:
            values.append(f"current: {short_repr(self._paramMap[resolved])}")
        return f"{resolved.name}: {resolved.doc} ({', '.join(values) or 'undefined'})"

    def _set(self, **values: object) -> Any:
        """Set Params. None clears a Param, also in a param map."""
        for name in [name for name, value in values.items() if value is None]:
            self.clear(self.getParam(name))
        return super()._set(**{n: value for n, value in values.items() if value is not None})

    def _get(self, name: str) -> Any:
        """Read a Param's value or default, or return None without either."""
        return self.getOrDefault(name) if self.isDefined(name) else None


def _plain(name: str) -> str:
    """Normalize a name so that different spellings of it become equal."""
    return name.replace("_", "").lower()


def with_signature(cls: T) -> T:
    """Set a signature with the class's own arguments and its Params by group, for `help()` and editors.

    Params without effect are omitted.
    """
    shown = {n: r for n, r in rows_of(cls).items() if not (r.no_effect or r.refused)}
    order = {group: number for number, group in enumerate((*GROUPS, ""))}
    names = sorted(shown, key=lambda name: order[shown[name].group])
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(cls).parameters.values()
    own = [
        p
        for p in parameters
        if p.kind is keyword and not p.name.startswith("_") and p.name not in rows_of(cls)
    ]
    cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by inspect.signature
        own + [inspect.Parameter(name, keyword, default=None) for name in names]
    )
    return cls


# ----------------------------------------------------------------------------------------------------
# Arguments of Horovod's other estimators that are unknown here -> hint for the error message.

ELSEWHERE = {
    "num_gpus": "It is of horovod.spark.lightning; give num_proc.",
    "logger": "It is of horovod.spark.lightning; progress= gets the record of each epoch.",
    "log_every_n_steps": "It is of horovod.spark.lightning; progress= gets the record of each epoch.",
    "loader_num_epochs": "It is of horovod.spark.lightning; every epoch reads each row once.",
    "profiler": "It is of horovod.spark.lightning; sparkhvd.Settings(timeline=...) writes a timeline.",
    "trainer_args": "It is of horovod.spark.lightning; give the estimator's own arguments instead.",
    "debug_data_loader": "It is of horovod.spark.lightning.",
    "train_async_data_loader_queue_size": "It is of horovod.spark.lightning; batches are always read ahead.",
    "val_async_data_loader_queue_size": "It is of horovod.spark.lightning; batches are always read ahead.",
    "custom_objects": "It is of horovod.spark.keras.",
    "checkpoint_callback": "It is of horovod.spark.keras; a checkpoint is always written.",
    "backend_env": "It is of horovod.spark.keras; set variables in Spark's configuration (spark.executorEnv.NAME).",
}
