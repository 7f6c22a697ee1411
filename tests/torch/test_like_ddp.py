"""Programs of `ways.py` trained with DDP and with DistributedOptimizer, all in one pair of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkhvd.runner import run_local
from sparkhvd.settings import Settings
from tests.torch import like_ddp
from tests.torch.like_ddp import Outcome
from tests.torch.ways import BEHAVIOURS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

Outcomes = list[dict[tuple[str, str], Outcome]]


@pytest.fixture
def by_rank(zygote_has_compiler: None, tmp_path: Path) -> Outcomes:
    """Results of every program on two ranks, by DDP and by DistributedOptimizer."""
    # One or two buckets for these small models, and a timeout for ranks that wait for different operations.
    settings = Settings(bucket_bytes=256, stall_shutdown_s=20)
    outcomes: Outcomes = run_local(
        like_ddp.run_all,
        (str(tmp_path / "meeting"), list(BEHAVIOURS)),
        num_proc=2,
        env={"OMP_NUM_THREADS": "1"},
        settings=settings,
        verbose=0,
    )
    return outcomes


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, by the largest value."""
    assert one.shape == other.shape
    same = one.eq(other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().where(~same, 0).max()
    return float(apart / other.nan_to_num(posinf=0, neginf=0).abs().max())


def test_distributed_optimizer_trains_like_ddp(by_rank: Outcomes) -> None:
    """A test for each behaviour would start the processes in every pytest worker. The message names all that differ."""
    wrong = {}
    for name, entry in BEHAVIOURS.items():
        for options in entry.options:
            try:
                compare(name, options, by_rank)
            except AssertionError as error:
                wrong[f"{name}-{options}"] = str(error)
    assert not wrong, "\n".join(f"{case}: {text}" for case, text in wrong.items())


def compare(name: str, options: str, by_rank: Outcomes) -> None:
    entry = BEHAVIOURS[name]
    ours = [outcomes[name, options] for outcomes in by_rank]
    if entry.refused:
        assert [entry.refused in outcome.error for outcome in ours] == [True, True], ours
        return
    assert [outcome.error for outcome in ours] == ["", ""]
    assert torch.equal(ours[0].values, ours[1].values)
    if entry.has_ddp:
        theirs = by_rank[0][name, "ddp"]
        assert theirs.error == ""
        assert theirs.moved > 1e-3, "nothing was trained"
        assert distance(ours[0].values, theirs.values) <= entry.bound
    if entry.has_one_process:
        (alone,) = (
            found[name, "one process"] for found in by_rank if (name, "one process") in found
        )
        assert alone.error == ""
        assert alone.moved > 1e-3, "nothing was trained"
        assert distance(ours[0].values, alone.values) <= entry.bound_of_one
