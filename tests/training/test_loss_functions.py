"""Losses of rows with sample weights: functions that take `reduction`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.loss_functions import resolve_losses

pytestmark = pytest.mark.pure


class OwnModule(nn.Module):
    def forward(self, output: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
        return F.l1_loss(output, label, reduction=reduction)


def of_any_names(output: Tensor, label: Tensor, **options: Any) -> Tensor:
    return F.l1_loss(output, label, **options)


@pytest.mark.parametrize(
    "loss",
    [nn.L1Loss(), F.l1_loss, functools.partial(F.l1_loss), OwnModule(), of_any_names],
    ids=["module of torch", "function of torch", "partial", "module of one's own", "any names"],
)
def test_loss_returns_a_value_for_each_row(loss: object) -> None:
    (resolved,), _ = resolve_losses(loss, 1, per_row=True)
    values: Any = resolved(torch.tensor([1.0, 2.0]), torch.zeros(2))
    assert values.tolist() == [1.0, 2.0]


class WithoutReduction(nn.Module):
    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return (output - label).abs().mean()


@pytest.mark.parametrize("loss", [WithoutReduction(), lambda output, label: output.mean()])
def test_a_loss_without_a_reduction_argument_raises(loss: object) -> None:
    with pytest.raises(
        InvalidArgumentError, match="has no argument 'reduction'. Give a torch.nn lo"
    ):
        resolve_losses(loss, 1, per_row=True)
