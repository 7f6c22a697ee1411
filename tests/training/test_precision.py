"""Mixed precision: which parts compute in 16 bits, and the loss scale that all ranks share."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd.data.store.store import Store
from sparkhvd.training.early_stopping import EarlyStopping, Monitor
from tests.training.ranks import (
    REMEMBERED,
    Case,
    assert_close,
    linear,
    remember,
)

pytestmark = pytest.mark.pure


class Sees(nn.Module):
    """A layer that keeps the dtype in which it computed, as a buffer that checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("bits", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        self.bits.fill_(8 * output.element_size())
        return output


def squared(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    assert output.dtype == label.dtype == torch.float32  # labels are not rounded
    # So small that its gradients times the initial scale are no larger than float16 holds: no step is skipped.
    return SMALL * (output - label).square().mean()


SMALL = 1e-3


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("precision", "bits", "tolerance"),
    [("32", 32, 1e-6), ("bf16-mixed", 16, 2e-3), ("16-mixed", 16, 2e-4)],
)
def test_forward_computes_in_16_bits_and_weights_stay_in_32(
    tmp_path: Path, precision: str, bits: int, tolerance: float, accumulate: int
) -> None:
    seed = secrets.randbits(32)
    print(f"data_seed={seed}")
    model = Sees()
    case = Case(
        Store.create(tmp_path),
        model,
        torch.optim.SGD(model.parameters(), lr=0.02 / SMALL),
        loss=squared,
        rows=75,
        data_seed=seed,
        options={
            "batch_size": 8,
            "accumulate": accumulate,
            "epochs": 2,
            "precision": precision,
        },
    )
    case.train(2)
    weights, expected = case.weights(2), case.reference(2, 2)[1]
    assert int(weights["bits"]) == bits
    assert {w.dtype for n, w in weights.items() if n != "bits"} == {torch.float32}
    assert_close(weights, expected, tolerance)


def steep(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return 1000 * (output - label).square().mean()


def per_step(optimizer: Any) -> Any:
    remember(optimizer)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)


def overflowing(store: Store, **options: Any) -> Case:
    """Make a fit whose first gradients overflow float16, until the scale has come down."""
    model = linear()
    return Case(
        store,
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=steep,
        rows=90,
        lr_scheduler=per_step,
        options={
            "batch_size": 8,
            "epochs": 4,
            "precision": "16-mixed",
            "lr_scheduler_interval": "step",
            **options,
        },
    )


def test_ranks_skip_the_same_steps_and_a_resumed_run_keeps_the_scale(tmp_path: Path) -> None:
    whole = overflowing(Store.create(tmp_path / "whole"))
    history = whole.train(2).history
    REMEMBERED.assert_alike(2)
    assert history[-1]["loss"] < history[0]["loss"]
    last = whole.checkpoint(4)
    skipped = int(torch.tensor(65536.0 / last.scaler["scale"]).log2())
    assert skipped > 0
    steps = 4 * 6
    # The schedule and Adam count the steps that were made.
    assert last.scheduler["last_epoch"] == steps - skipped
    assert int(last.optimizer["state"][0]["step"]) == steps - skipped

    parts = overflowing(Store.create(tmp_path / "parts"))
    parts.train(2, early_stopping=EarlyStopping(Monitor(), 1, min_delta=1e9))  # ends after 2 epochs
    parts.train(2)
    assert parts.checkpoint(4).scaler == last.scaler
    for name, value in whole.weights(4).items():
        assert torch.equal(value, parts.weights(4)[name]), name


def test_clipping_uses_unscaled_gradients(tmp_path: Path) -> None:
    model = linear()
    case = Case(
        Store.create(tmp_path),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1 / SMALL),
        loss=squared,
        options={"epochs": 1, "precision": "16-mixed", "gradient_clip_norm": 0.5 * SMALL},
    )
    case.train(2)
    assert_close(case.weights(1), case.reference(2, 1)[0], 2e-4)


def test_first_step_may_leave_a_rank_without_rows(tmp_path: Path) -> None:
    model = linear()
    case = Case(
        Store.create(tmp_path),
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        rows=3,
        loss=squared,
        options={"batch_size": 4, "precision": "16-mixed"},
    )
    case.train(2)
    expected = case.reference(2, 1)[0]
    expected.pop("loss")
    assert_close(case.weights(1), expected, 2e-4)
