"""State of a resumed run besides weights: compression, extra states, buffers that change their size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.data.store.store import Store
from sparkhvd.estimator import Callback
from sparkhvd.torch.context import use_engine
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.harness.ranks import RanksFailed, run_ranks
from tests.harness.soak import left_to_soak
from tests.training.ranks import RUN_DIR, Case, without_times

pytestmark = pytest.mark.ranks

# 100 rows: 13 steps of two ranks per epoch.
OPTIONS = {"batch_size": 4, "epochs": 3, "checkpoint_interval_s": 1e-6}


class FailsAt(Callback):
    """Ends the run at a step, counted over all epochs, or at the first later step with a checkpoint inside an epoch."""

    step = 0
    inside: Checkpoints | None = None

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        if FailsAt.step == 0 or ctx.step < FailsAt.step:
            return
        if FailsAt.inside is None:
            raise ValueError("a loss")
        if ctx.rank == 0:
            time.sleep(0.02)  # checkpoints are written in parallel to the training
            if FailsAt.inside.latest_position() > (1, 0):
                raise ValueError("a loss")


def case(folder: Path, model: nn.Module, **fields: Any) -> Case:
    options = {**OPTIONS, **fields.pop("options", {})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    user = {"callbacks": [FailsAt()]}
    return Case(Store.create(folder), model, optimizer, options=options, user=user, **fields)


def assert_resumes_exactly(whole: Case, parts: Case, fails_at: int) -> None:
    """Assert that a run that fails at this step and resumes ends like an undisturbed run, bit by bit."""
    expected = whole.train(2)
    saved = Checkpoints(parts.store, RUN_DIR)
    # 13 steps per epoch: the 14th fails before anything of its epoch is saved.
    FailsAt.step, FailsAt.inside = fails_at, saved if fails_at > 14 else None
    try:
        with pytest.raises(RanksFailed):
            parts.train(2)
    finally:
        FailsAt.step = 0
    position = saved.latest_position()
    assert position > (1, 0) if fails_at > 14 else position == (1, 0)
    assert without_times(parts.train(2)) == without_times(expected)
    for name, value in whole.weights(3).items():
        found = parts.weights(3)[name]
        assert torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found, (
            name
        )


def wide() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))


@pytest.mark.parametrize(
    ("warm_up_steps", "fails_at"),
    [
        (0, 20),
        (22, 14),
        *left_to_soak("each place and each warm-up, here", (0, 14), (22, 20)),
    ],
)
def test_resumed_run_keeps_unsent_powersgd_gradients(
    tmp_path: Path, fails_at: int, warm_up_steps: int
) -> None:
    def make(name: str) -> Case:
        compression = hvd.Compression.powersgd(rank=1, warm_up_steps=warm_up_steps)
        one = case(tmp_path / name, wide(), compression=compression)
        if fails_at == 14:  # only the checkpoint of the epoch is left
            one.options["checkpoint_interval_s"] = 300.0
        return one

    whole, parts = make("whole"), make("parts")
    assert_resumes_exactly(whole, parts, fails_at)
    saved = whole.checkpoint(3).compression
    error = saved["errors"]["2.weight"]
    assert error.shape == (2, 16, 16)  # of each rank
    assert not torch.equal(error[0], error[1])
    assert saved["alike"]["2.weight"]["steps"] == 39


@pytest.mark.parametrize(
    ("is_instance", "fails_at"),
    [
        (True, 14),
        (False, 20),
        *left_to_soak("each place and each kind, here", (True, 20), (False, 14)),
    ],
)
def test_resumed_run_keeps_several_optimizers(
    tmp_path: Path, fails_at: int, is_instance: bool
) -> None:
    def split(parameters: Any) -> list[torch.optim.Optimizer]:
        first, *rest = parameters
        return [torch.optim.Adam([first], lr=0.01), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]

    def make(name: str) -> Case:
        one = case(tmp_path / name, wide())
        one.optimizer = split(one.model.parameters()) if is_instance else split
        if fails_at == 14:
            one.options["checkpoint_interval_s"] = 300.0
        return one

    whole, parts = make("whole"), make("parts")
    assert_resumes_exactly(whole, parts, fails_at)
    state = whole.checkpoint(3).optimizer["state"]
    assert [sorted(state[i]) for i in range(2)] == [
        ["exp_avg", "exp_avg_sq", "step"],
        ["momentum_buffer"],
    ]


class Counts(nn.Module):
    """Has an extra state, which differs between ranks inside an epoch, and affects the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(3, 1)
        self.seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + float(x.sum())
        return self.layer(x) + 0.01 * self.seen

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Caches(nn.Module):
    """Fills a buffer that grows with the seen rows, and another one if this rank saw a large value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layer = nn.Linear(3, 1)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("large", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            found = x.detach().abs().max(1).values
            self.cache = torch.cat([self.cache, found])[-200:]
            if float(found.max()) > 2.5:
                self.large = found.max().reshape(1)
        shift = self.cache.mean() if len(self.cache) else 0.0
        return self.layer(x) + 0.01 * shift + (0.0 if self.large is None else 0.01 * self.large)


class Turns(nn.Module):
    """Has complex buffers, which change during training, on each rank differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 1)
        angles = torch.polar(torch.ones(3), torch.arange(3.0))
        self.register_buffer("saved", angles)
        self.register_buffer("unsaved", angles.conj(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            angle = x.detach().mean()
            turn = torch.polar(torch.ones(()), angle)
            self.saved.mul_(turn)
            self.unsaved = self.unsaved * turn
        return self.layer((x * self.saved).real + (x * self.unsaved).imag)


@pytest.mark.parametrize(
    ("kind", "fails_at"),
    [
        (Counts, 14),
        (Counts, 20),
        (Caches, 20),
        (Turns, 31),
        *left_to_soak(
            "another module or step, here",
            *[(Counts, 31), (Caches, 14), (Caches, 31), (Turns, 14), (Turns, 20)],
        ),
    ],
)
def test_resumed_run_keeps_module_state_on_every_rank(
    tmp_path: Path, kind: type[nn.Module], fails_at: int
) -> None:
    options = {"has_validation": True, "validation": 0.25, "batch_size": 3}
    whole, parts = (case(tmp_path / name, kind(), options=options) for name in ("whole", "parts"))
    assert_resumes_exactly(whole, parts, fails_at)


def test_ranks_end_an_epoch_with_the_module_state_of_rank_0() -> None:
    from sparkhvd.training.checkpoints.checkpoint import broadcast_module_state

    def body(engine: Any) -> tuple[Any, ...]:
        model = nn.Sequential(Counts(), Caches())
        rank = hvd.rank()
        model[0].seen = float(rank + 1)
        model[1].cache = torch.full((rank + 2,), float(rank))
        model[1].large = None if rank == 0 else torch.ones(1)
        broadcast_module_state(model)
        return model[0].seen, model[1].cache.tolist(), model[1].large

    assert run_ranks(3, body, using=use_engine) == [(1.0, [0.0, 0.0], None)] * 3
