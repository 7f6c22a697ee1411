"""Errors for embedding indices out of range, with the column of the index.

If possible they are raised before ranks start.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import InputBinding
from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.manifest import Range
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.fitted import zeros
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.types import Columns

Ranges = Mapping[str, Range]
_KINDS = (nn.Embedding, nn.EmbeddingBag)
# Limit of checked columns, because each check runs the model twice.
_MOST_CANDIDATES = 8
_FORWARDS = tuple(kind.forward for kind in _KINDS)


def _tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Find the embeddings of a model by name, except subclasses with another `forward`.

    Another `forward` may change the indices.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _KINDS) and type(module).forward in _FORWARDS
    }


# ----------------------------------------------------------------------------------------------------
# On the driver: the model runs on rows of the smallest, and on rows of the largest values of its columns. If an
# embedding's index has as many elements equal to a column's smallest value in the first run, and to its largest value
# in the second, as the column has elements, whatever the other columns hold, then the model looks up the column
# unchanged. Only such a column is refused. An index that is a part of an array is not checked, because the part need
# not contain the extreme values.


@dataclass(frozen=True)
class _Lookup:
    """A call of an embedding.

    Attributes:
        name: name of the embedding.
        num_rows: number of rows of its table.
        indices: the looked-up indices, flat, on the CPU.
    """

    name: str
    num_rows: int
    indices: Tensor


@dataclass(frozen=True)
class _Beyond:
    """Out-of-range elements of a lookup's index.

    Attributes:
        call: number of the lookup in a run.
        least, most: their values in the two runs.
    """

    call: int
    least: int
    most: int


def check_lookups(
    model: nn.Module,
    inputs: InputBinding,
    columns: Sequence[Column],
    ranges: Ranges,
    examples: Columns,
    padded: Collection[str] = (),
) -> None:
    """Raise an error if an embedding looks up a column with values out of its range. The model is not changed.

    Args:
        model: the user's model.
        inputs: binding of columns to its arguments.
        columns: feature columns with their shapes.
        ranges: smallest and largest value of columns of integers.
        examples: collated columns, for two rows.
        padded: the collated columns whose values reach the model unchanged.

    Raises:
        InvalidArgumentError: the model certainly looks up an index that is out of range.
    """
    own = {
        c.name: ranges[c.name]
        for c in columns
        if c.name in ranges and (not c.is_collated or c.name in padded)
    }
    sizes = [table.num_embeddings for table in _tables(model).values()]
    if not sizes or all(low >= 0 and high < min(sizes) for low, high in own.values()):
        return
    try:
        trial = _Trial(model, inputs, columns, examples, own)
        found = next(trial.beyond(), None)
    except Exception:  # noqa: BLE001 - such rows may not suit the model; the ranks name the error of a real batch
        return
    if found is not None:
        lookup, name = found
        raise InvalidArgumentError(f"model: {_text(lookup.name, lookup.num_rows, name, own[name])}")


def _text(table: str, num_rows: int, column: str, range_: Range) -> str:
    low, high = range_
    remedy = (
        f"Give the embedding num_embeddings={high + 1}, or number the values from 0 without gaps."
    )
    if low < 0:
        remedy = "Number the values from 0."
    return (
        f"embedding {table!r} has {num_rows} rows, so its indices must be from 0 to {num_rows - 1}, but column {column!r}, which it looks "
        f"up, has values from {low} to {high} in the data. {remedy}"
    )


class _Trial:
    """Runs a copy of a model on rows with the smallest or largest values of its columns."""

    def __init__(
        self,
        model: nn.Module,
        inputs: InputBinding,
        columns: Sequence[Column],
        examples: Columns,
        ranges: Ranges,
    ) -> None:
        self._model = in_mode(light_copy(model), is_training=False)
        self._inputs = inputs
        self._columns = columns
        self._examples = examples
        self._ranges = ranges
        self._seen: list[_Lookup] = []
        for name, table in _tables(self._model).items():
            table.max_norm = None  # would rescale rows of the user's weights
            table.register_forward_pre_hook(
                self._hook(name, table.num_embeddings), with_kwargs=True
            )

    def beyond(self) -> Iterator[tuple[_Lookup, str]]:
        """Yield lookups with an index out of range, each with its column."""
        least, most = self._run(()), self._run(self._ranges)
        if [each.indices.shape for each in least] != [each.indices.shape for each in most]:
            return
        calls = list(enumerate(zip(least, most, strict=True)))
        candidates = (
            (call, found, column) for call in calls for found, column in self._candidates(*call)
        )
        for (_, (lookup, _)), found, column in itertools.islice(candidates, _MOST_CANDIDATES):
            if self._is_from(found, column):
                yield lookup, column

    def _candidates(
        self, call: int, lookups: tuple[_Lookup, _Lookup]
    ) -> Iterator[tuple[_Beyond, str]]:
        """Yield out-of-range values, with the columns of the same smallest and largest values."""
        least, most = (each.indices for each in lookups)
        is_beyond = (least < 0) | (most >= lookups[0].num_rows)
        ends = zip(least[is_beyond].tolist(), most[is_beyond].tolist(), strict=True)
        for low, high in dict.fromkeys(ends):
            found = _Beyond(call, low, high)
            yield from ((found, c) for c, range_ in self._ranges.items() if range_ == (low, high))

    def _is_from(self, found: _Beyond, column: str) -> bool:
        """Whether an index contains all elements of a column, whatever the other columns hold."""
        others = self._ranges.keys() - {column}
        alone, without = (self._run(each)[found.call].indices for each in ({column}, others))
        num_elements: int = next(
            self._rows(c, True).size for c in self._columns if c.name == column
        )
        return int(((alone == found.most) & (without == found.least)).sum()) >= num_elements

    def _run(self, largest: Collection[str]) -> list[_Lookup]:
        """Run the model with the largest values of some columns and the smallest of the others, and return its lookups."""
        self._seen = []
        rows = {c.name: self._rows(c, c.name in largest) for c in self._columns}
        arguments, keywords = self._inputs.apply(rows)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model(*arguments, **keywords)
        return self._seen

    def _rows(self, column: Column, is_largest: bool) -> Any:
        example = self._examples.get(column.name)
        if column.name not in self._ranges:
            return zeros(column) if example is None else example
        value = self._ranges[column.name][is_largest]
        return np.full_like(zeros(column) if example is None else example, value)

    def _hook(self, name: str, num_rows: int) -> Any:
        def look(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            index: Tensor = args[0] if args else kwargs["input"]
            self._seen.append(_Lookup(name, num_rows, index.detach().reshape(-1).clone()))
            within = index.clamp(0, num_rows - 1)
            return ((within, *args[1:]), kwargs) if args else (args, {**kwargs, "input": within})

        return look


# ----------------------------------------------------------------------------------------------------
# On a rank: the stack frames of torch's error hold the table and the index of the failed lookup.

# Torch's messages for `Embedding` and `EmbeddingBag` on the CPU.
_LOOKUP = re.compile(r"index out of range in self|Index \d+ of input takes value")
# Messages of other operations with indices, such as a loss of classes, and of all such operations on a GPU.
_INDEX = re.compile(
    r"Target -?\d+ is out of bounds|ndex -?\d+ is out of bounds|Class values must be|device-side assert"
)
_FILE = torch.nn.functional.__file__


@contextmanager
def naming_lookups(model: nn.Module, columns: Columns) -> Iterator[None]:
    """Add embedding, index and columns to torch's error about an index out of range.

    Raises:
        InvalidArgumentError: an index in the block was out of range.
    """
    try:
        yield
    except (IndexError, RuntimeError) as e:
        if text := index_problem(e, model, columns):
            raise InvalidArgumentError(
                f"model or loss raised {type(e).__name__}: {str(e).splitlines()[0].rstrip('.')}. {text}"
            ) from e
        raise


def is_lookup(error: Exception) -> bool:
    """Check whether an error of torch is about an index out of range."""
    return any(each.search(str(error)) for each in (_LOOKUP, _INDEX))


def index_problem(error: IndexError | RuntimeError, model: nn.Module, columns: Columns) -> str:
    """Describe the out-of-range index of an error, or return "" for other errors.

    Args:
        error: the error that torch raised.
        model: the model, whose embedding may have raised it.
        columns: the batch, by column.
    """
    if _LOOKUP.search(str(error)) and (frame := _frame_of(error)) is not None:
        return _lookup_text(frame.f_locals["input"], frame.f_locals["weight"], model, columns)
    if not _INDEX.search(str(error)):
        return ""
    tables = [f"{n!r} has {t.num_embeddings} rows" for n, t in _tables(model).items()]
    whole = [n for n, values in columns.items() if _is_whole(_flat(values))]
    integers = listed(f"{n!r} from {_ends(columns[n])}" for n in whole)
    found = [f"Integers of this batch: {integers}."] if whole else []
    # On a GPU the operation is unknown.
    if tables and "device-side" in str(error):
        found.append(f"Embeddings: {', '.join(tables)}.")
    return " ".join(found)


def _lookup_text(index: Tensor, weight: Tensor, model: nn.Module, columns: Columns) -> str:
    name = next((n for n, p in model.named_parameters() if p is weight), "")
    low, high = int(index.min()), int(index.max())
    value = low if low < 0 else high
    table = f"Embedding {name.removesuffix('.weight')!r}" if name else "An embedding"
    holding = [n for n, values in columns.items() if _holds(values, value)]
    where = "No column of the batch contains this index, so the model computes it"
    if holding:
        ends = listed(f"{n!r} (from {_ends(columns[n])} in this batch)" for n in holding)
        where = f"Of the columns of the batch {ends} hold{'s' * (len(holding) == 1)} it"
    return f"{table} has {len(weight)} rows, and the model looks up index {value}. {where}."


def _frame_of(error: BaseException) -> FrameType | None:
    """Find the frame of torch's embedding function, or return None."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename == _FILE and code.co_name in ("embedding", "embedding_bag"):
            found = traceback.tb_frame
        traceback = traceback.tb_next
    return found


def _flat(values: object) -> np.ndarray[Any, Any] | None:
    if isinstance(values, Ragged):
        values = values.gathered()
    if isinstance(values, Tensor) and values.layout == torch.strided:
        values = values.numpy()
    return values if isinstance(values, np.ndarray) and values.size else None


def _is_whole(flat: np.ndarray[Any, Any] | None) -> bool:
    return flat is not None and flat.dtype.kind in "iu"


def _holds(values: object, value: int) -> bool:
    flat = _flat(values)
    return flat is not None and bool((flat == value).any())


def _ends(values: object) -> str:
    flat = _flat(values)
    assert flat is not None
    return f"{flat.min()} to {flat.max()}"
