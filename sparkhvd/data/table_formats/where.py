"""Filters of rows, with SQL's meaning for nulls. Comparisons treat NaN as null.

A filter is SQL text of comparisons, IN, BETWEEN, IS NULL, AND, OR and NOT, or tuples as in `filters` of pandas. pyarrow
selects the rows exactly; the libraries of the formats use the filter only to leave out files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Context, Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkhvd.data.parquet.dataset import RowFilter
from sparkhvd.errors import InvalidArgumentError, listed

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression

Value: TypeAlias = "int | float | str | bool | Decimal"
Where: TypeAlias = "str | Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]"


@dataclass(frozen=True)
class Test:
    """Comparison of a column.

    Attributes:
        column: name of the column.
        op: "=", "!=", "<", "<=", ">", ">=", "in" or "null".
        values: one value; for "in" any number of values, for "null" no value.
    """

    column: str
    op: str
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Joined:
    """Conditions joined by "and" or "or", or one condition negated by "not"."""

    op: str
    parts: tuple[Condition, ...]


Condition: TypeAlias = "Test | Joined"

_NEGATED = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_ALIASES = {"==": "=", "<>": "!="}
# Limits on the depth and number of conditions, because recursion has a limit; filters that people write are far below.
_MOST_DEPTH, _MOST_CONDITIONS = 100, 10_000
# Limit on the values that a library compares to leave out files; with more it is slow, or recurses too deeply.
_MOST_PRUNED = 200
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<text>'(?:[^']|'')*')|(?P<quoted>`(?:[^`]|``)+`|"(?:[^"]|"")+")|(?P<name>[^\W\d]\w*(?:\.\w+)*)|(?P<op><=|>=|<>|!=|==|[=<>(),]))""",
    re.VERBOSE,
)


def parse(where: Where) -> Condition:
    """Parse a filter from SQL or tuples.

    Raises:
        InvalidArgumentError: the filter is neither valid SQL nor valid tuples.
    """
    if isinstance(where, str):
        return _checked(_Parser(where).parse(), where)
    try:
        parts: list[Any] = list(where)
        if parts and all(isinstance(part, tuple) for part in parts):
            parts = [parts]  # a flat list of tuples is one conjunction
        made = _joined("or", [_joined("and", [_of_tuple(each) for each in part]) for part in parts])
        return _checked(made, where)
    except (TypeError, ValueError) as e:
        raise _refused(where, str(e)) from None


def row_filter(condition: Condition, schema: pa.Schema, name: str) -> RowFilter:
    """Make the filter of a table's rows from a condition.

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
                f"where={text_of(condition)!r}: {name} has no column {column!r}. Its columns are {listed(schema.names)}."
            )
    types = {column: schema.field(column).type for column in columns}
    return RowFilter(columns, _expression(condition, types), text_of(condition))


def text_of(condition: Condition) -> str:
    """Format a condition as SQL with double-quoted columns. Equal conditions give equal text."""
    if isinstance(condition, Joined):
        if condition.op == "not":
            return f"NOT ({text_of(condition.parts[0])})"
        return f" {condition.op.upper()} ".join(f"({text_of(part)})" for part in condition.parts)
    column = '"' + condition.column.replace('"', '""') + '"'
    if condition.op == "null":
        return f"{column} IS NULL"
    values = ", ".join(map(_literal, condition.values))
    return (
        f"{column} IN ({values})" if condition.op == "in" else f"{column} {condition.op} {values}"
    )


def columns_of(condition: Condition) -> set[str]:
    return {test.column for test in _tests(condition)}


def null_columns_of(condition: Condition) -> set[str]:
    """Collect the columns tested with IS NULL in a condition."""
    return {test.column for test in _tests(condition) if test.op == "null"}


def for_pruning(condition: Condition, types: Mapping[str, pa.DataType]) -> Condition | None:
    """Convert the values of a condition to the types of their columns, or return None if a library cannot compare them exactly.

    A library would round a value that the type cannot hold, and so might leave out files with rows of the condition.
    """
    if sum(max(1, len(test.values)) for test in _tests(condition)) > _MOST_PRUNED:
        return None

    def made(each: Condition) -> Condition:
        if isinstance(each, Joined):
            return replace(each, parts=tuple(made(part) for part in each.parts))
        kind = types[each.column]
        values = tuple(_exact(value, kind, each.column) for value in each.values)
        # Libraries compare a decimal as a float, which holds only 15 digits.
        if None in values or (pa.types.is_decimal(kind) and kind.precision > 15):
            raise _InexactError
        return replace(each, values=values)

    try:
        return made(condition)
    except _InexactError:
        return None


class _InexactError(Exception):
    """Error for a value without exact equivalent in its column's type."""


def of_iceberg(condition: Condition, types: Mapping[str, pa.DataType]) -> BooleanExpression:
    """Make a pyiceberg expression, true for all rows of the condition and perhaps for others."""
    from pyiceberg import expressions as ice

    # Negation is moved into the comparisons. In Iceberg a comparison with null is not null but true or false, so
    # negating it could drop files with rows of the condition.
    def made(each: Condition, is_negated: bool) -> BooleanExpression:
        if isinstance(each, Joined):
            if each.op == "not":
                return made(each.parts[0], not is_negated)
            join = ice.And if (each.op == "and") != is_negated else ice.Or
            return join(*(made(part, is_negated) for part in each.parts))
        if each.op == "null":
            return ice.NotNull(each.column) if is_negated else ice.IsNull(each.column)
        values = [_exact(value, types[each.column], each.column) for value in each.values]
        if None in values:
            # This comparison must not drop files, because pyiceberg would round the value or fail.
            return ice.AlwaysTrue()
        if each.op == "in":
            return ice.NotIn(each.column, values) if is_negated else ice.In(each.column, values)
        op = _NEGATED[each.op] if is_negated else each.op
        names = {"=": "EqualTo", "!=": "NotEqualTo", "<": "LessThan", "<=": "LessThanOrEqual"}
        names |= {">": "GreaterThan", ">=": "GreaterThanOrEqual"}
        expression: BooleanExpression = getattr(ice, names[op])(each.column, values[0])
        return expression

    if sum(max(1, len(test.values)) for test in _tests(condition)) > _MOST_PRUNED:
        return ice.AlwaysTrue()
    return made(condition, False)


# -- pyarrow -----------------------------------------------------------------------------------------


def _expression(condition: Condition, types: Mapping[str, pa.DataType]) -> pc.Expression:
    if isinstance(condition, Joined):
        parts = [_expression(part, types) for part in condition.parts]
        if condition.op == "not":
            return ~parts[0]
        while (
            len(parts) > 1
        ):  # a balanced tree, because pyarrow recurses; its operators treat nulls as SQL does
            pairs = zip(parts[::2], parts[1::2], strict=False)
            joined = [a & b if condition.op == "and" else a | b for a, b in pairs]
            parts = joined + parts[len(parts) - len(parts) % 2 :]
        return parts[0]
    field, kind = pc.field(condition.column), types[condition.column]
    if condition.op == "null":
        return field.is_null()
    if pa.types.is_floating(kind):
        # NaN counts as null. Statistics of files do not include NaN, so a filter that selects it could not leave out
        # files.
        field = pc.if_else(pc.is_nan(field), pc.scalar(pa.scalar(None, kind)), field)
    if condition.op == "in":
        found = [_value_in(value, kind, condition.column) for value in condition.values]
        exact = [value for value in found if value is not None]
        if 0.0 in exact and pa.types.is_floating(kind):
            exact.append(-0.0)  # isin() treats -0.0 and 0.0 as different values
        return _unless_null(field, field.isin(pa.array(exact, kind)))
    return _compared(field, condition, kind)


def _compared(field: pc.Expression, test: Test, kind: pa.DataType) -> pc.Expression:
    """Build the comparison. Round down a value that the column's type cannot represent."""
    value = test.values[0]
    exact = _value_in(value, kind, test.column)
    if exact is not None:
        scalar = pa.scalar(exact, kind)
        compare = {"=": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__"}
        compare[">="] = "__ge__"
        expression: pc.Expression = getattr(field, compare[test.op])(scalar)
        return expression
    if test.op in ("=", "!="):
        return _unless_null(field, pc.scalar(test.op == "!="))
    below = _floor(value, kind)
    if below is None:
        return _unless_null(field, pc.scalar(test.op[0] == ">"))
    scalar = pa.scalar(below, kind)
    return field > scalar if test.op[0] == ">" else field <= scalar


def _unless_null(field: pc.Expression, otherwise: pc.Expression) -> pc.Expression:
    return pc.if_else(field.is_null(), pc.scalar(pa.scalar(None, pa.bool_())), otherwise)


def _floor(value: Any, kind: pa.DataType) -> int | float | Decimal | None:
    """Find the type's largest number <= the value, or None if all its numbers are greater.

    The exact number counts: 0.1 is less than the nearest float32. For a decimal column the number's text counts.
    """
    if pa.types.is_integer(kind):
        bits = kind.bit_width - pa.types.is_signed_integer(kind)
        least = -(2**bits) if pa.types.is_signed_integer(kind) else 0
        whole = math.floor(value)
        return None if whole < least else min(whole, 2**bits - 1)
    if pa.types.is_decimal(kind):
        number = _decimal(value)
        most = Decimal(10**kind.precision - 1).scaleb(-kind.scale, Context(prec=100))
        if not -most <= number <= most:
            return most if number > most else None
        return number.quantize(Decimal(1).scaleb(-kind.scale), ROUND_FLOOR, Context(prec=100))
    make: Callable[[Any], Any] = np.float32 if pa.types.is_float32(kind) else np.float64
    try:
        with np.errstate(over="ignore"):
            found = make(value)
    except OverflowError:  # the int is too large for a float
        found = make(math.copysign(math.inf, value))
    return float(np.nextafter(found, make(-math.inf)) if float(found) > value else found)


def _decimal(value: Any) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _value_in(value: Value, kind: pa.DataType, column: str) -> Any:
    """Convert a value to its column's type, or return None if the type has no equal number."""
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if is_number != (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
        pa.types.is_boolean(kind) != isinstance(value, bool)
    ):
        raise InvalidArgumentError(
            f"where: column {column!r} is {kind}, but is compared with {value!r}. Give a value of the column's type. Text, dates and "
            "timestamps are written in single quotes, such as '2026-11-01'."
        )
    if is_number:
        below = _floor(value, kind)
        return below if below == (_decimal(value) if pa.types.is_decimal(kind) else value) else None
    try:
        return _scalar(value, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise InvalidArgumentError(
            f"where: {value!r} is not a value of column {column!r} ({kind}): {e}. Give a value of the column's type; write dates and "
            "times in ISO 8601, such as '2026-11-01T12:00:00'."
        ) from None


def _scalar(value: Value, kind: pa.DataType) -> pa.Scalar:
    scalar = pa.scalar(value)
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return scalar.cast(kind)
    try:
        return scalar.cast(kind)
    except pa.ArrowInvalid:  # a time without an offset is in UTC
        return scalar.cast(pa.timestamp(kind.unit)).cast(pa.timestamp(kind.unit, "UTC")).cast(kind)


def _exact(value: Value, kind: pa.DataType, column: str) -> Any:
    """Convert a value to the form for both libraries, dates and times as text, or return None if the type cannot hold it."""
    found = _value_in(value, kind, column)
    if not isinstance(found, pa.Scalar):
        return found
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        found = found.cast(pa.timestamp(kind.unit, "UTC"))
    plain = found.as_py()
    return plain.isoformat() if pa.types.is_temporal(kind) else plain


# -- text --------------------------------------------------------------------------------------------


def _literal(value: Value) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value).upper() if isinstance(value, bool) else repr(value)


def _tests(condition: Condition) -> Iterator[Test]:
    if isinstance(condition, Test):
        yield condition
    else:
        for part in condition.parts:
            yield from _tests(part)


def _checked(condition: Condition, where: object) -> Condition:
    """Reject a condition too large or too deep to evaluate."""
    level, count, depth = [condition], 0, 0
    while level:
        count, depth = count + len(level), depth + 1
        level = [part for each in level if isinstance(each, Joined) for part in each.parts]
    if count > _MOST_CONDITIONS:
        raise _refused(
            where,
            f"it has {count:,} conditions; at most {_MOST_CONDITIONS:,} are allowed. One IN takes any number of values",
        )
    if depth > _MOST_DEPTH:
        raise _refused(where, f"conditions are nested more than {_MOST_DEPTH} deep")
    return condition


def _joined(op: str, parts: Sequence[Condition]) -> Condition:
    if not parts:
        raise ValueError("the filter is empty")
    return parts[0] if len(parts) == 1 else Joined(op, tuple(parts))


def _of_tuple(given: tuple[str, str, Any]) -> Condition:
    column, op, value = given
    if not isinstance(column, str) or not column or not isinstance(op, str):
        raise ValueError(f"{given!r}: column and comparison must be nonempty texts")
    op = " ".join(_ALIASES.get(op, op).lower().split())
    if op in ("in", "not in") and isinstance(value, str):
        raise ValueError(f"{given!r} has text where a list of values is needed")
    values = tuple(map(_plain, value if op in ("in", "not in") else (value,)))
    if value is None and op in ("=", "!=", "is", "is not"):
        test = Test(column, "null")
        return test if op in ("=", "is") else Joined("not", (test,))
    if not all(isinstance(v, (int, float, str)) for v in values):
        raise ValueError(f"{given!r}: only a number or a text can be compared")
    if op in ("in", "not in"):
        if not values:
            raise ValueError(f"{given!r} has no values")
        test = Test(column, "in", values)
        return test if op == "in" else Joined("not", (test,))
    if op not in _NEGATED:
        raise ValueError(f"{op!r} is not a comparison")
    return Test(column, op, values)


def _plain(value: Any) -> Any:
    """Convert a number of NumPy to a Python number, and reject NaN and infinity.

    SQL cannot write NaN and infinity.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(
            f"{plain!r} is not a finite number, and only finite numbers can be compared"
        )
    return str(plain) if isinstance(plain, str) else plain


def _refused(where: object, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"where={where!r:.200}: {problem}. Give comparisons of columns with values, joined by AND, OR and NOT, as in "
        "\"label >= 0 AND country IN ('de', 'fr')\", or tuples as in pandas, [('label', '>=', 0)]."
    )


class _Parser:
    """Recursive-descent parser of SQL filters."""

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
            raise _refused(self._text, f"conditions are nested more than {_MOST_DEPTH} deep")
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
        column = text[1:-1].replace(text[0] * 2, text[0]) if kind == "quoted" else text
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
            try:
                number: Value = _plain(
                    int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
                )
            except ValueError as e:
                raise _refused(self._text, str(e)) from None
            return number
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
        return _refused(self._text, f"{wanted} is expected, but {found} was found")


def _negated(condition: Condition, is_negated: bool) -> Condition:
    return Joined("not", (condition,)) if is_negated else condition
