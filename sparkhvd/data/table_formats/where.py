"""Filters of rows, with SQL's meaning for nulls; NaN counts as null in comparisons.

A filter is SQL text of comparisons, IN, BETWEEN, IS NULL, AND, OR and NOT, or tuples as in `filters` of pandas. It selects rows exactly by
pyarrow; the libraries of the formats only leave out files by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkhvd.data.parquet.dataset import RowFilter
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression

Value: TypeAlias = "int | float | str | bool"
Where: TypeAlias = "str | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]"


@dataclass(frozen=True)
class Test:
    """Comparison of a column.

    Attributes:
        column: name.
        op: "=", "!=", "<", "<=", ">", ">=", "in" or "null".
        values: one, for "in" any number, for "null" none.
    """

    column: str
    op: str
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Joined:
    """Conditions joined by "and" or "or", or one negated by "not"."""

    op: str
    parts: tuple[Condition, ...]


Condition: TypeAlias = "Test | Joined"

_NEGATED = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_ALIASES = {"==": "=", "<>": "!="}
# Conditions inside each other: more is no filter that a person writes, and recursion has a limit.
_MOST_DEPTH = 50
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<text>'(?:[^']|'')*')|(?P<quoted>`[^`]+`|"[^"]+")|(?P<name>[^\W\d]\w*(?:\.\w+)*)|(?P<op><=|>=|<>|!=|==|[=<>(),]))""",
    re.VERBOSE,
)


def parse(where: Where) -> Condition:
    """Return the condition of a filter.

    Raises:
        InvalidArgumentError: it is neither such SQL nor such tuples.
    """
    if isinstance(where, str):
        return _Parser(where).parse()
    try:
        parts: list[Any] = list(where)
        if parts and all(isinstance(part, tuple) for part in parts):
            parts = [parts]  # one conjunction
        return _joined("or", [_joined("and", [_of_tuple(each) for each in part]) for part in parts])
    except (TypeError, ValueError) as e:
        raise _refused(where, str(e)) from None


def row_filter(condition: Condition, schema: pa.Schema, name: str) -> RowFilter:
    """Return the filter of rows of a table.

    Args:
        condition: the filter.
        schema: of the table.
        name: of the table, for the message.

    Raises:
        InvalidArgumentError: the table lacks a column of the filter, or a value does not fit its column.
    """
    columns = tuple(dict.fromkeys(test.column for test in _tests(condition)))
    for column in columns:
        if schema.get_field_index(column) < 0:
            raise InvalidArgumentError(
                f"where={text_of(condition)!r}: {name} has no column {column!r}. Its columns are {', '.join(schema.names)}."
            )
    types = {column: schema.field(column).type for column in columns}
    return RowFilter(columns, _expression(condition, types), text_of(condition))


def text_of(condition: Condition) -> str:
    """Return a condition as SQL, equal for equal conditions; double quotes around columns."""
    if isinstance(condition, Joined):
        if condition.op == "not":
            return f"NOT ({text_of(condition.parts[0])})"
        return f" {condition.op.upper()} ".join(f"({text_of(part)})" for part in condition.parts)
    column = '"' + condition.column + '"'
    if condition.op == "null":
        return f"{column} IS NULL"
    values = ", ".join(map(_literal, condition.values))
    return (
        f"{column} IN ({values})" if condition.op == "in" else f"{column} {condition.op} {values}"
    )


def columns_of(condition: Condition) -> set[str]:
    """Return the names of the columns that a condition reads."""
    return {test.column for test in _tests(condition)}


def of_iceberg(condition: Condition, types: Mapping[str, pa.DataType]) -> BooleanExpression:
    """Return an expression of pyiceberg that holds for at least the rows of the condition."""
    from pyiceberg import expressions as ice

    # Negation is moved to the comparisons: an Iceberg comparison is true or false for nulls, and its negation would drop some.
    def made(each: Condition, is_negated: bool) -> BooleanExpression:
        if isinstance(each, Joined):
            if each.op == "not":
                return made(each.parts[0], not is_negated)
            join = ice.And if (each.op == "and") != is_negated else ice.Or
            return join(*(made(part, is_negated) for part in each.parts))
        if each.op == "null":
            return ice.NotNull(each.column) if is_negated else ice.IsNull(each.column)
        kind = types[each.column]
        values = [_typed(value, kind, each.column) for value in each.values]
        if pa.types.is_float32(kind) and any(float(np.float32(v)) != v for v in values):
            return ice.AlwaysTrue()  # pyiceberg would round the value
        if each.op == "in":
            return ice.NotIn(each.column, values) if is_negated else ice.In(each.column, values)
        op = _NEGATED[each.op] if is_negated else each.op
        names = {"=": "EqualTo", "!=": "NotEqualTo", "<": "LessThan", "<=": "LessThanOrEqual"}
        names |= {">": "GreaterThan", ">=": "GreaterThanOrEqual"}
        expression: BooleanExpression = getattr(ice, names[op])(each.column, values[0])
        return expression

    return made(condition, False)


# -- pyarrow -----------------------------------------------------------------------------------------


def _expression(condition: Condition, types: Mapping[str, pa.DataType]) -> pc.Expression:
    if isinstance(condition, Joined):
        parts = [_expression(part, types) for part in condition.parts]
        if condition.op == "not":
            return ~parts[0]
        made = parts[0]
        for part in parts[1:]:
            made = (made & part) if condition.op == "and" else (made | part)  # Kleene's, as SQL's
        return made
    field, kind = pc.field(condition.column), types[condition.column]
    if condition.op == "null":
        return field.is_null()
    if pa.types.is_floating(kind):
        # Statistics of files leave NaN out, so a filter that selected it could not leave out files.
        field = pc.if_else(pc.is_nan(field), pc.scalar(pa.scalar(None, kind)), field)
    scalars = [_scalar(value, kind, condition.column) for value in condition.values]
    if condition.op == "in":  # not isin(), for which null is false: NOT IN would select it
        made = field == scalars[0]
        for scalar in scalars[1:]:
            made = made | (field == scalar)
        return made
    compare = {"=": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__"}
    compare[">="] = "__ge__"
    expression: pc.Expression = getattr(field, compare[condition.op])(scalars[0])
    return expression


def _scalar(value: Value, kind: pa.DataType, column: str) -> pa.Scalar:
    """Return a value in the type of its column; numbers compare as they are."""
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if is_number != (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
        pa.types.is_boolean(kind) != isinstance(value, bool)
    ):
        raise InvalidArgumentError(
            f"where: column {column!r} is {kind}, and is compared with {value!r}. Give a value of its type: text in single "
            "quotes, which are also the form of dates and timestamps, '2026-11-01'."
        )
    if is_number:  # not in the type of a float column: as in Spark, 0.1 there is more than 0.1
        return pa.scalar(value)
    try:
        scalar: pa.Scalar = pa.scalar(value).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise InvalidArgumentError(
            f"where: {value!r} is no value of column {column!r} ({kind}): {e}."
        ) from None
    return scalar


def _typed(value: Value, kind: pa.DataType, column: str) -> Any:
    scalar = _scalar(value, kind, column)
    return value if isinstance(value, str) and pa.types.is_temporal(kind) else scalar.as_py()


# -- text --------------------------------------------------------------------------------------------


def _literal(value: Value) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).upper() if isinstance(value, bool) else repr(value)


def _tests(condition: Condition) -> Iterator[Test]:
    if isinstance(condition, Test):
        yield condition
    else:
        for part in condition.parts:
            yield from _tests(part)


def _joined(op: str, parts: Sequence[Condition]) -> Condition:
    if not parts:
        raise ValueError("it is empty")
    return parts[0] if len(parts) == 1 else Joined(op, tuple(parts))


def _of_tuple(given: tuple[str, str, Any]) -> Condition:
    column, op, value = given
    op = " ".join(_ALIASES.get(op, op).lower().split())
    values = tuple(value) if op in ("in", "not in") else (value,)
    if value is None and op in ("=", "!=", "is", "is not"):
        test = Test(column, "null")
        return test if op in ("=", "is") else Joined("not", (test,))
    if not isinstance(column, str) or not all(isinstance(v, (int, float, str)) for v in values):
        raise ValueError(f"{given!r} is no column, comparison and value")
    if op in ("in", "not in"):
        if not values:
            raise ValueError(f"{given!r} has no values")
        test = Test(column, "in", values)
        return test if op == "in" else Joined("not", (test,))
    if op not in _NEGATED:
        raise ValueError(f"{op!r} is no comparison")
    return Test(column, op, values)


def _refused(where: object, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"where={where!r:.200}: {problem}. Give comparisons of columns with values, joined by AND, OR and NOT, as in "
        "\"label >= 0 AND country IN ('de', 'fr')\", or tuples as in pandas, [('label', '>=', 0)]."
    )


class _Parser:
    """Recursive descent over the tokens of a filter."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                raise _refused(text, f"{text[at:].strip()[:20]!r} is not understood")
            self._tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            at = match.end()
        self._at = self._depth = 0

    def parse(self) -> Condition:
        made = self._or()
        if self._at < len(self._tokens):
            raise self._error("the end")
        return made

    def _or(self) -> Condition:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise _refused(self._text, f"more than {_MOST_DEPTH} conditions inside each other")
        parts = [self._and()]
        while self._takes("or"):
            parts.append(self._and())
        self._depth -= 1
        return _joined("or", parts)

    def _and(self) -> Condition:
        parts = [self._not()]
        while self._takes("and"):
            parts.append(self._not())
        return _joined("and", parts)

    def _not(self) -> Condition:
        is_negated = False
        while self._takes("not"):
            is_negated = not is_negated
        if self._takes("("):
            inner = self._or()
            self._expect(")")
        else:
            inner = self._test()
        return Joined("not", (inner,)) if is_negated else inner

    def _test(self) -> Condition:
        kind, text = self._next("a column")
        if kind not in ("name", "quoted"):
            raise self._error("a column", back=1)
        column = text[1:-1] if kind == "quoted" else text
        if self._takes("is"):
            is_negated = self._takes("not")
            self._expect("null")
            return _negated(Test(column, "null"), is_negated)
        is_negated = self._takes("not")
        if self._takes("in"):
            self._expect("(")
            values = [self._value()]
            while self._takes(","):
                values.append(self._value())
            self._expect(")")
            return _negated(Test(column, "in", tuple(values)), is_negated)
        if self._takes("between"):
            low = Test(column, ">=", (self._value(),))
            self._expect("and")
            return _negated(Joined("and", (low, Test(column, "<=", (self._value(),)))), is_negated)
        kind, text = self._next("a comparison")
        op = _ALIASES.get(text, text)
        if is_negated or op not in _NEGATED:
            raise self._error("a comparison", back=1)
        return Test(column, op, (self._value(),))

    def _value(self) -> Value:
        kind, text = self._next("a value")
        if kind == "name" and text.lower() in ("date", "timestamp"):
            kind, text = self._next("a value")
        if kind == "number":
            return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
        if kind == "text":
            return text[1:-1].replace("''", "'")
        if kind == "name" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise self._error("a value", back=1)

    def _next(self, wanted: str) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise self._error(wanted)
        self._at += 1
        return self._tokens[self._at - 1]

    def _takes(self, text: str) -> bool:
        if self._at < len(self._tokens):
            kind, found = self._tokens[self._at]
            if kind in ("name", "op") and found.lower() == text:
                self._at += 1
                return True
        return False

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise self._error(text.upper())

    def _error(self, wanted: str, back: int = 0) -> InvalidArgumentError:
        at = self._at - back
        found = repr(self._tokens[at][1]) if at < len(self._tokens) else "the end"
        return _refused(self._text, f"{wanted} is expected, and {found} is there")


def _negated(condition: Condition, is_negated: bool) -> Condition:
    return Joined("not", (condition,)) if is_negated else condition
