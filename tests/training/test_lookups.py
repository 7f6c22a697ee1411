"""Lookups in embeddings beyond their tables: an error on the driver if it is certain, else on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.modules.lookups import check_lookups, naming_lookups

pytestmark = pytest.mark.pure

A = Column("a", "scalar", "int64", (), "bigint", "int64")
B = Column("b", "scalar", "int64", (), "bigint", "int64")
X = Column("x", "array", "float32", (3,), "array<double>", "float32")
WORDS = Column("words", "array", "int64", (4,), "array<int>", "int64")
ROWS = 10


class Model(nn.Module):
    """Looks up a function of its arguments."""

    def __init__(self, index: Callable[..., Tensor], table: nn.Module | None = None) -> None:
        super().__init__()
        self.index = index
        self.table = nn.Embedding(ROWS, 2) if table is None else table
        self.other = nn.Embedding(1000, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        looked: Tensor = self.table(self.index(a, b))
        return looked + self.other(b)


def checked(model: nn.Module, low: int, high: int, columns: Any = (A, B), **inputs: Any) -> None:
    schema = DataSchema(tuple(columns), ())
    ranges = {c.name: (0, 5) for c in columns if c.dtype == "int64"}
    ranges[columns[0].name] = (low, high)
    check_lookups(model, bind_inputs(model, schema, **inputs), columns, ranges, {})


SAYS = (
    "model: embedding 'table' has 10 rows, so its indices must be from 0 to 9, but column 'a', which "
    "it looks up, has values from 0 to 12 in the data. Give the embedding num_embeddings=13, or number the values"
    " from 0 without gaps."
)


@pytest.mark.parametrize(
    "model",
    [
        Model(lambda a, b: a),
        Model(lambda a, b: torch.stack([b, a], 1)[:, 1]),
        Model(lambda a, b: a, nn.EmbeddingBag(ROWS, 2)),
        Model(lambda a, b: a, nn.Embedding(ROWS, 2, padding_idx=0, max_norm=0.1)),
    ],
)
def test_error_names_a_column_beyond_its_embedding_before_training(model: nn.Module) -> None:
    if isinstance(model.table, nn.EmbeddingBag):
        model.index = lambda a, b: a[:, None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checked(model, 0, 9)
    with pytest.raises(InvalidArgumentError) as raised:
        checked(model, 0, 12)
    assert str(raised.value) == SAYS
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(
        InvalidArgumentError, match=r"from -1 to 9 in the data\. Number the values from 0\.$"
    ):
        checked(model, -1, 9)


class Fields(nn.Module):
    """A table per element of one joined argument."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 2) for n in (3, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], 1)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 2)
        self.places = nn.Embedding(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        mean: Tensor = (self.embed(words) + self.places(torch.arange(words.shape[1]))).mean(1)
        return mean


def test_error_names_joined_columns_and_arrays_beyond_an_embedding() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'tables\.0' has 3 rows.*column 'a', which"):
        checked(Fields(), 0, 3)
    checked(Fields(), 0, 2)
    with pytest.raises(InvalidArgumentError, match=r"'embed' has 10 rows.*column 'words', which"):
        checked(Tokens(), 0, 10, (WORDS,))
    ragged = Column("words", "ragged", "int64", (-1,), "array<int>", "int64", is_collated=True)
    inputs = bind_inputs(Tokens(), DataSchema((ragged,), ()))
    given = (inputs, (ragged,), {"words": (0, 10)}, {"words": np.zeros((2, 4), np.int64)})
    check_lookups(Tokens(), *given)  # the user's collate function may change the values
    with pytest.raises(InvalidArgumentError, match="column 'words'"):
        check_lookups(Tokens(), *given, padded=["words"])


@pytest.mark.parametrize(
    "index",
    [
        lambda a, b: a % ROWS,
        lambda a, b: a.clamp(max=ROWS - 1),
        lambda a, b: torch.where(a < ROWS, a, 0),
        lambda a, b: a - b,
        lambda a, b: a * (b > 0),
        lambda a, b: a // 2,
        lambda a, b: b,
        lambda a, b: 1 / 0,
    ],
)
def test_indices_changed_by_the_model_are_not_checked(index: Callable[..., Tensor]) -> None:
    checked(Model(index), 0, 12)


@pytest.mark.parametrize(
    "index",
    [
        lambda words, b: words[:, 0],
        lambda words, b: words[:, 1:],
        lambda words, b: torch.where(torch.arange(4) <= b[:, None], words, 0),
    ],
)
def test_index_arrays_used_only_in_part_are_not_checked(index: Callable[..., Tensor]) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, 2)

        def forward(self, words: Tensor, b: Tensor) -> Tensor:
            looked: Tensor = self.table(index(words, b))
            return looked

    checked(Part(), 0, 12, (WORDS, B))


class Shifted(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input % self.num_embeddings)


def test_custom_embeddings_are_not_checked() -> None:
    checked(Model(lambda a, b: a, Shifted(ROWS, 2)), 0, 12)
    checked(nn.Linear(2, 1), 0, 12)


# --- on a rank --------------------------------------------------------------------------------------------------


def failed(model: nn.Module, *arguments: Any, **columns: Any) -> str:
    with pytest.raises(InvalidArgumentError) as raised, naming_lookups(model, columns):
        model(*arguments)
    assert isinstance(raised.value.__cause__, (IndexError, RuntimeError))
    return str(raised.value)


def test_lookup_error_names_embedding_index_and_columns() -> None:
    a, b = torch.tensor([3, 11]), torch.tensor([0, 4])
    columns = {"a": a.numpy(), "b": b.numpy(), "y": np.ones(2), "text": ["one", "two"]}
    says = failed(Model(lambda a, b: a), a, b, **columns)
    assert says == (
        "model or loss raised IndexError: index out of range in self. Embedding 'table' has 10 rows, and the model looks up index 11. Of the columns of "
        "the batch 'a' (from 3 to 11 in this batch) holds it."
    )
    says = failed(Model(lambda a, b: a + b), a, b, **columns)
    assert says.endswith(
        "index 15. No column of the batch contains this index, so the model computes it."
    )
    bag = Model(lambda a, b: a[:, None], nn.EmbeddingBag(ROWS, 2))
    assert "Embedding 'table' has 10 rows, and the model looks up index 11." in failed(
        bag, a, b, **columns
    )
    words = Ragged.from_lengths(np.array([1, -1, 2]), np.array([1, 2]))
    says = failed(Tokens(), torch.tensor([[1, 0, 0, 0], [-1, 2, 0, 0]]), words=words)
    assert says.endswith(
        "index -1. Of the columns of the batch 'words' (from -1 to 2 in this batch) holds it."
    )


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, 2))
        self.inner = nn.ParameterDict({"w": nn.Parameter(torch.zeros(ROWS, 2))})

    def forward(self, a: Tensor) -> Tensor:
        return F.embedding(a, self.inner["w"])


def test_functional_embedding_error_names_its_parameter() -> None:
    assert "Embedding 'inner.w' has 10 rows" in failed(Functional(), torch.tensor([10]))


def test_errors_other_than_lookups_are_unchanged() -> None:
    for error in (
        IndexError("list index out of range"),
        RuntimeError("size mismatch"),
        KeyError("a"),
    ):
        with pytest.raises(type(error)) as raised, naming_lookups(Functional(), {}):
            raise error
        assert raised.value is error
    with pytest.raises(IndexError), naming_lookups(Functional(), {"x": np.ones(3)}):
        torch.zeros(3)[torch.tensor([5])]


@pytest.mark.parametrize(
    "operation",
    [
        lambda k: F.cross_entropy(torch.zeros(2, 3), k),
        lambda k: torch.zeros(2, 3).gather(1, k[:, None]),
        lambda k: F.one_hot(k, 3),
        lambda k: torch.zeros(3)[k],
    ],
)
def test_other_index_errors_list_integer_columns_of_the_batch(operation: Any) -> None:
    k = torch.tensor([1, 7])
    columns = {"k": k.numpy(), "x": np.ones(2), "text": ["a", "b"]}
    with pytest.raises(InvalidArgumentError) as raised, naming_lookups(Tokens(), columns):
        operation(k)
    assert str(raised.value).startswith("model or loss raised ")
    assert str(raised.value).endswith(" Integers of this batch: 'k' from 1 to 7.")


def test_gpu_errors_list_integers_and_embedding_tables() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be")
    columns = {"k": np.array([1, 7])}
    with pytest.raises(InvalidArgumentError) as raised, naming_lookups(Tokens(), columns):
        raise error
    assert str(raised.value) == (
        "model or loss raised RuntimeError: CUDA error: device-side assert triggered. Integers of this batch: 'k' from 1 to 7. "
        "Embeddings: 'embed' has 10 rows, 'places' has 4 rows."
    )
