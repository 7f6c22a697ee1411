"""User functions on rows: decoders of single values, and collate functions of batches.

A decoder receives Spark's value of the row (`bytes`, `str`, or a numpy array) and returns a number or an array. A
collate function receives the rows of a batch as a list and returns an argument of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from sparkhvd.data.columns.images import BrokenImage, image
from sparkhvd.data.columns.ragged import Ragged, Rows, Values, take
from sparkhvd.data.columns.schema import Column, DataSchema, Shaped, dtype_name
from sparkhvd.data.columns.texts import tokenizer
from sparkhvd.errors import InvalidArgumentError, SparkhvdError

Array = npt.NDArray[Any]
Result = TypeVar("Result")
# A function of a value, or a mapping from values to numbers.
Decoder = Callable[..., object] | Mapping[Any, object]


@dataclass(frozen=True)
class pad:  # noqa: N801 - used as a function: collate_fn={"tokens": pad(0)}
    """Collate function that pads the rows of a batch with a value.

    Attributes:
        value: number that fills the entries after a row's end.
        length: entries of every padded row (longer rows are cut); None means the length of the batch's longest row.
    """

    value: float = 0
    length: int | None = None

    def __call__(self, rows: Sequence[Array]) -> Array:
        """Collate arrays (entries, ...) to an array (rows, length, ...)."""
        length = max(map(len, rows), default=0) if self.length is None else self.length
        first = np.asarray(rows[0])
        out = np.full((len(rows), length, *first.shape[1:]), self.value, first.dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row[:length]
        return out


@dataclass(frozen=True)
class RowFunctions:
    """User functions by column.

    Attributes:
        decoders: column -> function of a value, or a mapping from values to numbers.
        collate: column -> function of the list of a batch's rows.
    """

    decoders: Mapping[str, Decoder] = field(default_factory=dict)
    collate: Mapping[str, Callable[[list[Any]], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for param, functions in (("decoders", self.decoders), ("collate_fn", self.collate)):
            if not isinstance(functions, Mapping):
                raise InvalidArgumentError(
                    f"{param} is {functions!r:.100}. Give a dict from columns to functions."
                )
            for name, function in functions.items():
                is_lookup = param == "decoders" and isinstance(function, Mapping)
                if not callable(function) and not is_lookup:
                    raise InvalidArgumentError(
                        f"{param}[{name!r}] is {function!r:.100}; it must be a function."
                    )

    @property
    def skips(self) -> bool:
        """True if a decoder skips rows that it cannot decode."""
        return any(map(_skips, self.decoders.values()))

    def describe(self) -> dict[str, dict[str, str]]:
        """Describe the functions by name, to compare two runs."""

        def name(function: object) -> str:
            if isinstance(function, (Mapping, pad, image, tokenizer)):
                return repr(function)
            return str(getattr(function, "__qualname__", type(function).__name__))

        return {
            "decoders": {n: name(f) for n, f in self.decoders.items()},
            "collate_fn": {n: name(f) for n, f in self.collate.items()},
        }

    def needs_example(self, schema: DataSchema) -> list[str]:
        """List the columns that need an example row before the shape of a batch is known."""
        return [c.name for c in schema.columns if c.has_decoder or c.is_collated]

    def with_decoded(self, schema: DataSchema, values: Mapping[str, Values]) -> DataSchema:
        """Set shape and dtype of decoded columns from the first row of `values`."""

        def decoded(column: Column) -> Column:
            if not column.has_decoder or column.name not in values:
                return column
            function = self.decoders[column.name]
            # The first row may hold a broken image.
            if isinstance(function, image) and _skips(function):
                first = np.zeros(function.shape, function.dtype)
            else:
                first = self._decode_one(column, _raw(column, values[column.name], 0))
            dtype = self._decoded_dtype(column, first)
            is_floating = dtype.kind == "f"
            tensor = column.tensor_dtype
            if not column.is_explicit and not (is_floating and column.is_floating):
                tensor = dtype_name(dtype)
            return replace(column, decoded=first.shape, tensor_dtype=tensor)

        return DataSchema(
            tuple(decoded(c) for c in schema.features),
            tuple(decoded(c) for c in schema.labels),
            schema.sample_weight,
            schema.validation,
            schema.group,
        )

    def decode(
        self,
        columns: Sequence[Column],
        values: Mapping[str, Values],
    ) -> dict[str, Any]:
        """Run the decoders: each column becomes an array (rows, *decoded), or a list of rows to collate.

        Args:
            columns: those of `values`, as `with_decoded` described them.
            values: columns by name, as they are stored.

        Raises:
            InvalidArgumentError: a function raised, returned another shape or dtype than for the first row, or skipped
                all rows.
        """
        found = self.decode_usable(columns, values)
        if found.kept is not None and not len(found.kept):
            raise InvalidArgumentError(
                f"The first {len(found.broken)} rows are decoded to learn the shapes, but each of them has a broken image and is "
                f"skipped: {found.broken[0]}. Put a row with a complete image first."
            )
        return found.columns

    def decode_usable(self, columns: Sequence[Column], values: Mapping[str, Values]) -> Decoded:
        """Run the decoders like `decode`, and drop skipped rows from all columns."""
        return self.begin(columns, values)()

    def begin(
        self,
        columns: Sequence[Column],
        values: Mapping[str, Values],
        pool: ThreadPoolExecutor | None = None,
    ) -> Callable[[], Decoded]:
        """Start the decoders in threads and return a function that waits for the rows.

        The errors are as in `decode`.

        Args:
            columns: those of `values`, as `with_decoded` described them.
            values: columns by name, as they are stored; their memory must stay valid until the rows are returned.
            pool: threads that share the work; None decodes the rows now in this thread.
        """
        broken: dict[int, str] = {}
        begun = {c.name: self._begin_column(c, values[c.name], pool, broken) for c in columns}

        def finish() -> Decoded:
            made = {name: wait() for name, wait in begun.items()}
            if not broken:
                return Decoded(made)
            numbers = np.arange(len(next(iter(values.values()))))
            kept = np.setdiff1d(numbers, np.fromiter(broken, np.int64))
            usable = {
                name: [rows[n] for n in kept] if isinstance(rows, list) else take(rows, kept)
                for name, rows in made.items()
            }
            return Decoded(usable, kept, tuple(broken[n] for n in sorted(broken)))

        return finish

    def collate_batch(self, columns: Mapping[str, object]) -> dict[str, Any]:
        """Run the collate functions on the columns of one batch.

        Raises:
            InvalidArgumentError: a function raised.
        """
        return {
            name: self._collate(name, rows) if name in self.collate else rows
            for name, rows in columns.items()
        }

    # -- one column ----------------------------------------------------------------------------------

    def _begin_column(
        self,
        column: Column,
        values: Values,
        pool: ThreadPoolExecutor | None,
        broken: dict[int, str],
    ) -> Callable[[], Any]:
        # `pad` takes the stored rows; other collate functions take a list of rows.
        is_padded = isinstance(self.collate.get(column.name), pad) and column.kind == "ragged"
        if not column.has_decoder and (is_padded or not column.is_collated):
            return lambda: values
        count = len(values)
        if (
            isinstance(tokens := self.collate.get(column.name), tokenizer)
            and not column.has_decoder
        ):
            texts = [_raw(column, values, number) for number in range(count)]
            encoded = self._called(column.name, tokens.encode, texts)
            return lambda: encoded
        out: Any = [None] * count
        if not column.is_collated:
            assert column.decoded is not None
            out = np.empty((count, *column.decoded), column.row_dtype)
        # All threads share one iterator of row numbers, because one task per row would cost more.
        numbers = iter(range(count))
        if pool is None:
            self._fill(column, values, out, broken, numbers)
            return lambda: out
        threads = range(pool._max_workers)
        tasks = [pool.submit(self._fill, column, values, out, broken, numbers) for _ in threads]

        def finish() -> Any:
            for task in tasks:
                task.result()
            return out

        return finish

    def _fill(
        self,
        column: Column,
        values: Values,
        out: Any,
        broken: dict[int, str],
        numbers: Iterator[int],
    ) -> None:
        """Decode rows into `out`, and record skipped rows in `broken`."""
        into = _into(self.decoders.get(column.name), column)
        for number in numbers:
            raw: Any = _raw(column, values, number)
            try:
                if into is not None:
                    self._run(column, raw, into, out[number])
                else:
                    out[number] = self._row(column, raw)
            except _LeftOut as e:
                broken[number] = str(e)

    def _row(self, column: Column, raw: bytes | str | Array) -> Any:
        """Decode one row and return it unchanged without a decoder."""
        if not column.has_decoder:
            return raw
        row = self._decode_one(column, raw)
        if not column.is_collated:
            _check_row(column, row)
        elif row.dtype != column.row_dtype:
            row = row.astype(column.row_dtype)
        return row

    def _decode_one(self, column: Column, raw: bytes | str | Array) -> Array:
        function = self.decoders[column.name]
        call = function.__getitem__ if isinstance(function, Mapping) else function

        def made(raw: bytes | str | Array) -> tuple[object, Array]:
            value = call(raw)
            return value, np.asarray(value)

        value, array = self._run(column, raw, made)
        if array.dtype.kind not in "fiub":
            raise InvalidArgumentError(
                f"decoders[{column.name!r}] returned {value!r:.100}; it must return a number or a numpy array of numbers."
            )
        return array

    def _run(
        self,
        column: Column,
        raw: bytes | str | Array,
        call: Callable[..., Result],
        *arguments: Any,
    ) -> Result:
        """Call a decoding function, and name the column's decoder in its errors."""
        function = self.decoders[column.name]
        try:
            return call(raw, *arguments)
        except SparkhvdError:
            raise
        except Exception as e:
            # 300 characters show most paths completely.
            shown = f"a value of {len(raw)} bytes" if isinstance(raw, bytes) else f"{raw!r:.300}"
            if isinstance(e, BrokenImage) and _skips(function):
                raise _LeftOut(f"{column.name} {shown}: {e}") from e
            if isinstance(function, Mapping) and isinstance(e, KeyError):
                raise InvalidArgumentError(
                    f"decoders[{column.name!r}] is a dict of {len(function)} values without {shown}, which a row has. Add it, or "
                    "give a collections.defaultdict or a function that accepts any value."
                ) from e
            raise InvalidArgumentError(
                f"decoders[{column.name!r}] failed for {shown}: {type(e).__name__}: {e}"
            ) from e

    def _decoded_dtype(self, column: Column, first: Array) -> np.dtype[Any]:
        """Find the dtype of decoded rows: the first row's, or a mapping's common dtype."""
        function = self.decoders[column.name]
        if not isinstance(function, Mapping):
            return first.dtype
        values = [np.asarray(value).dtype for value in function.values()]
        return np.result_type(first.dtype, *(d for d in values if d.kind in "fiub"))

    def _collate(self, name: str, rows: object) -> object:
        function = self.collate[name]
        if isinstance(rows, Ragged) and isinstance(function, pad):
            return rows.padded(function.value, function.length)
        return self._called(name, function, rows)

    def _called(self, name: str, function: Callable[[Any], Any], rows: object) -> Any:
        """Call a user's function of a column's rows."""
        try:
            return function(rows)
        except SparkhvdError:
            raise
        except Exception as e:
            count = len(cast("list[Any]", rows))
            raise InvalidArgumentError(
                f"collate_fn[{name!r}] failed for a batch of {count} rows: {type(e).__name__}: {e}"
            ) from e


@dataclass(frozen=True)
class Decoded:
    """Decoded rows.

    Attributes:
        columns: by name.
        kept: ascending numbers of the kept rows; None means all.
        broken: value and error of each skipped row.
    """

    columns: dict[str, Any]
    kept: Rows | None = None
    broken: tuple[str, ...] = ()


def _into(function: Decoder | None, column: Column) -> Callable[..., None] | None:
    """Find a function to decode directly into a batch's memory, or None if the decoder cannot."""
    if not isinstance(function, image) or column.is_collated or function.shape != column.decoded:
        return None
    return function.into if column.row_dtype == function.dtype else None


class _LeftOut(Exception):
    """Raised for a row skipped by its decoder."""


def _skips(function: Decoder) -> bool:
    function = function.function if isinstance(function, Shaped) else function
    return isinstance(function, image) and function.broken == "skip"


def _raw(column: Column, values: Values, number: int) -> bytes | str | Array:
    """Convert a row for the user's function: to bytes, text, or a copy as an array."""
    assert isinstance(values, Ragged)
    row = values.row(number)
    if column.kind == "binary":
        return row.tobytes()
    if column.kind == "string":
        return row.tobytes().decode()
    return row.copy()  # the function may write to it


def _check_row(column: Column, row: Array) -> None:
    """Raise InvalidArgumentError unless a decoded row has the shape and dtype of the first row."""
    fits = column.is_explicit or np.can_cast(row.dtype, column.row_dtype, "same_kind")
    if row.shape != column.decoded or not fits:
        raise InvalidArgumentError(
            f"decoders[{column.name!r}] returned {row.dtype} of shape {row.shape} for a row; for the first row it "
            f"returned shape {column.decoded}, stored as {column.row_dtype}. Return one shape and dtype, or give "
            f"collate_fn={{{column.name!r}: ...}} for rows that differ."
        )
