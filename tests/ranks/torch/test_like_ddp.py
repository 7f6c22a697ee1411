"""Programs of `ways.py` trained with DDP and with DistributedOptimizer, all of them in one pair of processes."""

from __future__ import annotations

import pytest
import torch

from sparkhvd.runner import run_local
from sparkhvd.settings import Settings
from tests.ranks.torch import like_ddp
from tests.ranks.torch.like_ddp import Outcome
from tests.ranks.torch.ways import BEHAVIOURS

pytestmark = pytest.mark.timeout(400)

Outcomes = list[dict[tuple[str, str], Outcome]]
CASES = [
    pytest.param(name, options, id=f"{name}-{options}")
    for name, entry in BEHAVIOURS.items()
    for options in entry.options
]


@pytest.fixture(scope="module")
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Results of every selected program on two ranks, by DDP and by DistributedOptimizer."""
    wanted = [
        item.callspec.params.get("name")
        for item in request.session.items
        if getattr(item, "callspec", None) and item.path == request.path
    ]
    names = [name for name in BEHAVIOURS if name in wanted]
    meeting = str(tmp_path_factory.mktemp("ddp") / "meeting")
    # A bucket or two of these small models, and the end of ranks that wait for different things.
    settings = Settings(bucket_bytes=256, stall_shutdown_s=20)
    outcomes: Outcomes = run_local(
        like_ddp.run_all,
        (meeting, names),
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


@pytest.mark.parametrize(("name", "options"), CASES)
def test_training(name: str, options: str, by_rank: Outcomes) -> None:
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
