"""Loss that a model computes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkhvd.training.user_step import _loss_in

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("result", "num_rows", "expected"),
    [
        ((torch.tensor(2.0), torch.ones(3, 2)), 3, 2.0),
        ((torch.ones(3, 2), torch.tensor(2.0)), 3, 2.0),
        ((torch.ones(1, 1), torch.tensor(2.0)), 1, 2.0),
        ((torch.tensor([2.0]), torch.tensor(0.5)), 3, 2.0),  # a loss beside an accuracy
        ((torch.tensor(2.0), torch.tensor(0.5)), 1, 2.0),
        ((torch.ones(3, 2), torch.tensor(2.0), None), 3, 2.0),
    ],
)
def test_loss_of_an_output_tuple_is_its_first_or_only_scalar(
    result: tuple[Any, ...], num_rows: int, expected: float
) -> None:
    assert float(_loss_in(result, num_rows)) == expected  # type: ignore[arg-type]
