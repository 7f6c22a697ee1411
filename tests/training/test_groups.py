"""`group_col`: a ranking loss over whole groups, on ranks with unequal batches, against one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store
from sparkhvd.training.checkpoints.files import Checkpoints
from tests.harness.plans import batch_rows
from tests.harness.ranks import RanksFailed
from tests.harness.waiting import wait_until_no_checkpoint_is_written
from tests.training.ranks import DATA_DIR, RUN_DIR, Case, assert_close, linear, without_times

pytestmark = pytest.mark.ranks

LENGTHS = [1, 7, 3, 2, 5, 6, 1, 4, 8, 3] * 4
GROUPS = np.repeat(np.arange(len(LENGTHS)) + 10, LENGTHS)
OPTIONS = {"batch_size": 20, "epochs": 2, "has_validation": True, "validation": 0.2}


def pairs(scores: torch.Tensor, labels: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Loss of the pairs of each group that are in the wrong order, by row."""
    same = groups[:, None] == groups[None, :]
    better = labels[:, None] > labels[None, :]
    loss = F.softplus(scores[None, :] - scores[:, None]) * (same & better)
    return loss.sum() / len(scores)


# The program is pickled, so a step uses variables of this module. (epoch, rank, groups) of each batch:
SEEN: list[tuple[int, int, list[int]]] = []
FAILS_AT: set[int] = set()


def train_step(model: nn.Module, batch: dict[str, torch.Tensor], ctx: Any) -> torch.Tensor:
    SEEN.append((ctx.epoch, ctx.rank, batch["g"].tolist()))
    if ctx.rank == 0 and ctx.step + 3 in FAILS_AT:
        wait_until_no_checkpoint_is_written()
    if ctx.rank == 0 and ctx.step in FAILS_AT:
        FAILS_AT.clear()
        raise ValueError("a loss")
    return pairs(model(batch["x"])[:, 0], batch["y"], batch["g"])


def case(folder: Path, **options: Any) -> Case:
    SEEN.clear()
    model = linear()
    return Case(
        Store.create(folder),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        rows=len(GROUPS),
        loss=None,
        groups=GROUPS,
        user={"train_step": train_step, "validation_step": train_step},
        options={**OPTIONS, **options},
    )


def one_process(case: Case, size: int) -> nn.Module:
    """Train on the batches of all ranks, in plain PyTorch."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y, g = (torch.from_numpy(case.values[name]) for name in ("x", "y", "g"))
    reader = Reader(
        case.store,
        Manifest.load(case.store, DATA_DIR),
        rank=0,
        size=size,
        batch_size=20,
        seed=0,
        subset="train",
        validation=0.2,
    )
    with reader:
        for plan in (reader.plan(epoch) for epoch in range(2)):
            for step in range(plan.num_steps):
                optimizer.zero_grad()
                batches = [batch_rows(plan, rank, step) for rank in range(size)]
                for rows in batches:
                    loss = pairs(model(x[rows])[:, 0], y[rows], g[rows])
                    (loss * len(rows) / sum(map(len, batches))).backward()
                optimizer.step()
    return model


@pytest.mark.parametrize("size", [1, 3])
def test_ranking_loss_gets_whole_groups_and_equals_one_process(tmp_path: Path, size: int) -> None:
    trained = case(tmp_path)
    result = trained.train(size)
    assert re.fullmatch(r"\d+ groups in random order, the longest of 8 rows", result.order)
    assert_close(trained.weights(2), one_process(trained, size).state_dict(), 1e-5)
    for epoch in (1, 2):
        parts: list[tuple[int, list[int]]] = []
        for _, rank, groups in (batch for batch in SEEN if batch[0] == epoch):
            cuts = np.flatnonzero(np.diff(groups)) + 1
            parts += [(rank, part.tolist()) for part in np.split(groups, cuts)]
        # Training and validation together see every row once, and no group in two parts.
        assert sorted(row for _, part in parts for row in part) == GROUPS.tolist()
        assert len(parts) == len(LENGTHS)
        assert {rank for rank, _ in parts} == set(range(size))


def test_a_run_resumed_mid_epoch_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    options = {"checkpoint_interval_s": 1e-6, "batch_size": 6}
    whole = case(tmp_path / "whole", **options)
    expected = whole.train(2)
    num_steps = len([batch for batch in SEEN if batch[:2] == (1, 0)])
    parts = case(tmp_path / "parts", **options)
    FAILS_AT.add(num_steps + 4)  # of the second epoch
    with pytest.raises(RanksFailed):
        parts.train(2)
    assert not FAILS_AT
    assert Checkpoints(parts.store, RUN_DIR).latest_position() > (1, 0)
    assert without_times(parts.train(2)) == without_times(expected)
    for name, value in whole.weights(2).items():
        assert torch.equal(value, parts.weights(2)[name])
