"""Batches of a rank as Lightning's trainer takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkhvd.data.columns.binding import model_dtype
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.train_fn import Loader, TrainFnContext
from sparkhvd.training.types import TensorBatch

__all__ = ["Batches", "RowFunction", "encoded"]

# Batches that are on their way through a row function.
_AHEAD = 2


def encoded(value: str | bytes) -> Any:
    """Return the bytes of a text or binary value as numbers: a decoder, for columns whose values a row function gets."""
    data = value.encode() if isinstance(value, str) else value
    return np.frombuffer(data, np.uint8)


@dataclass(frozen=True, kw_only=True)
class RowFunction:
    """Function of the user's on a row's values by column, which is run in threads, ahead of the training.

    Attributes:
        function: a dict of one row's values in, the same out; numbers are numpy's, in the types of the columns.
        fields: name, numpy type, shape and whether it may be missing, of fields that it changes or adds.
        removed: fields of its result that no batch has.
        texts: columns whose values are text.
        binaries: columns whose values are bytes.
        num_workers: threads.
    """

    function: Callable[[dict[str, Any]], Mapping[str, Any]]
    fields: Sequence[tuple[str, Any, Any, bool]] = ()
    removed: Sequence[str] = ()
    texts: frozenset[str] = frozenset()
    binaries: frozenset[str] = frozenset()
    num_workers: int = field(default=1)

    def row(self, batch: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Return the function's result for a row of a batch, with the types that `fields` says."""
        given = {name: self._value(name, column[number]) for name, column in batch.items()}
        result = dict(self.function(given))
        for name in self.removed:
            result.pop(name, None)
        for name, dtype, *_ in self.fields:
            if result.get(name) is not None and not isinstance(dtype, str):
                result[name] = np.asarray(result[name], dtype)
        return result

    def _value(self, name: str, value: Any) -> Any:
        array = value.numpy() if isinstance(value, Tensor) else value
        if name in self.texts:
            return array.tobytes().decode()
        if name in self.binaries:
            return array.tobytes()
        return array[()] if isinstance(array, np.ndarray) and array.ndim == 0 else array

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Stack rows: tensors where all are arrays or numbers of one shape, else lists."""
        return {name: _stacked([row[name] for row in rows]) for name in rows[0]}

    def cast(
        self, made: Mapping[str, Any], given: Mapping[str, Any], wanted: Mapping[str, torch.dtype]
    ) -> dict[str, Any]:
        """Give numbers the types that the model takes, but for those of `fields`.

        Args:
            made: fields of a batch, as the function returned them.
            given: fields as the function got them.
            wanted: types of the columns' tensors by name; that of other fields of float64 is under "".

        Raises:
            InvalidArgumentError: a number is out of the range of its type, or not whole.
        """
        kept = {name for name, dtype, *_ in self.fields if not isinstance(dtype, str)}
        result = dict(made)
        for name, value in made.items():
            if not isinstance(value, Tensor) or name in kept:
                continue
            column = given.get(name)
            if isinstance(column, Tensor) and value.dtype == column.dtype:
                result[name] = _cast(name, value, wanted.get(name, value.dtype))
            elif value.dtype == torch.float64:
                result[name] = _cast(name, value, wanted[""])
        return result


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    if isinstance(values[0], (str, bytes)) or values[0] is None:
        return values
    return torch.from_numpy(np.stack(values))


def _cast(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    made = value.to(dtype)
    if dtype.is_floating_point:
        fits = int(made.isinf().sum()) == int(value.isinf().sum())
    else:
        fits = not value.is_floating_point() or torch.equal(made.to(value.dtype), value)
    if not fits:
        shown = str(dtype).removeprefix("torch.")
        raise InvalidArgumentError(
            f"transformation_fn returned {name!r} with numbers that {shown} cannot hold, and the model takes it as {shown}. Return others, or "
            "name the field and its type in transformation_edit_fields."
        )
    return made


class Batches:
    """Batches of a loader, as a dict by column or a tuple; every rank has equally many.

    A rank without rows in a step gets one of its rows again, or one of zeros: `TrainFnContext.loss_weight` is 0 then.
    """

    def __init__(
        self,
        loader: Loader,
        ctx: TrainFnContext,
        columns: Sequence[str] | None,
        function: RowFunction | None,
    ) -> None:
        """Take batches of a loader.

        Args:
            loader: of the rank.
            ctx: of the run.
            columns: of the tuple that a batch is; None for a dict.
            function: on rows; None: batches are as the loader has them.
        """
        self._loader, self._ctx = loader, ctx
        self._columns, self._function = columns, function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        last: dict[str, Any] | None = None
        for begin, batch in self._through_function():
            begin()
            if self._ctx.num_rows:
                last = batch
            else:
                batch = _first_row(last or batch)
            yield batch if self._columns is None else tuple(batch[n] for n in self._columns)

    def _through_function(self) -> Iterator[tuple[Callable[[], None], TensorBatch]]:
        function = self._function
        if function is None:
            yield from self._loader.ahead()
            return
        floating: torch.dtype = getattr(torch, model_dtype(self._ctx.model))
        wanted = {**self._loader.dtypes, "": floating}
        running: deque[tuple[Callable[[], None], TensorBatch, list[Future[Any]]]] = deque()
        with ThreadPoolExecutor(function.num_workers, "sparkhvd-rows") as pool:
            try:
                for begin, batch in self._loader.ahead(as_stored=True):
                    count = len(next(iter(batch.values())))
                    rows = [pool.submit(function.row, batch, number) for number in range(count)]
                    running.append((begin, batch, rows))
                    if len(running) > _AHEAD:
                        yield self._finished(function, wanted, *running.popleft())
                while running:
                    yield self._finished(function, wanted, *running.popleft())
            finally:
                pool.shutdown(cancel_futures=True)

    def _finished(
        self,
        function: RowFunction,
        wanted: Mapping[str, torch.dtype],
        begin: Callable[[], None],
        batch: TensorBatch,
        rows: list[Future[Any]],
    ) -> tuple[Callable[[], None], TensorBatch]:
        results = [each.result() for each in rows]
        made = function.batch(results) if results else batch
        made = function.cast(made, batch, wanted)
        return begin, {n: _moved(value, self._ctx.device) for n, value in made.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _first_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of one row, of zeros where there is none; values of collate functions that are no tensors or lists stay whole."""
    return {name: _first(value) for name, value in batch.items()}


def _first(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value[:1] if len(value) else value.new_zeros((1, *value.shape[1:]))
    return value[:1] if isinstance(value, list) else value
