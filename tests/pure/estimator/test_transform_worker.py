"""The trial of a model on two rows of zeros: which errors are certain, and which only the ranks can judge."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd import InvalidArgumentError
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.training.modules.output_widths import output_widths

COLUMN = Column("x", "vector", "float32", (4,), "vector", "float32")


def widths(model: nn.Module) -> list[int] | None:
    inputs = bind_inputs(model, DataSchema((COLUMN,), ()))
    return output_widths(model.eval(), inputs, [COLUMN])


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(x)
        return result


def test_the_widths_of_all_outputs() -> None:
    assert widths(nn.Linear(4, 3)) == [3]
    assert widths(Calls(lambda x: (x, x.sum(1), x.reshape(2, 2, 2)))) == [4, 1, 4]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 1),
        nn.Linear(4, 1).double(),
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(3, 1, 1)),
        nn.Embedding(3, 2),
        nn.LayerNorm(5),
        nn.BatchNorm1d(3),
        nn.LSTM(3, 2),
        Calls(lambda x: x + torch.zeros(3)),
        Calls(lambda x: torch.cat([x, torch.zeros(3, 1)], 1)),
        Calls(lambda x: x.reshape(3, 3)),
        Calls(lambda x: x.sum(2)),
        Calls(lambda: None),  # type: ignore[misc, arg-type]  # takes no argument
        Calls(lambda x: x.sum()),
        Calls(lambda x: "no tensor"),
    ],
)
def test_a_model_that_no_rank_could_run_is_an_error(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidArgumentError, match=r"^model[:.]"):
            widths(model)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x * hvd.rank(), "NotInitializedError"),
        (lambda x: hvd.allreduce(x), "NotInitializedError"),
        (lambda x: torch.load("/of/the/executors/table.pt"), "FileNotFoundError"),
        (lambda x: x.to("cuda") if torch.version.cuda else x.to("meta").item(), "RuntimeError"),
        (lambda x: __import__("of_the_executors"), "ModuleNotFoundError"),
    ],
)
def test_a_forward_that_only_ranks_could_run_is_a_warning(
    function: Callable[[Tensor], Any], says: str
) -> None:
    with pytest.warns(UserWarning, match=rf"forward failed .*{says}.*only ranks have"):
        assert widths(Calls(function)) is None
