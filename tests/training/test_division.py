"""The rest of an epoch, divided again among another number of ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparkhvd.data.store.store import Store
from sparkhvd.engine.engine import Engine
from sparkhvd.torch.context import use_engine
from sparkhvd.training.batches import Data, Done
from sparkhvd.training.elastic import _added
from sparkhvd.training.metrics import Totals
from sparkhvd.training.spec import TrainSpec
from tests.harness.ranks import run_ranks
from tests.training.ranks import Case, linear

pytestmark = pytest.mark.ranks

Found = tuple[list[float], int, int, int, int]


def part(spec: TrainSpec, size: int, done: Done, steps: int | None) -> list[Found]:
    """Return of each rank its labels of some steps, rows of all ranks, the last step's number, and rows and steps that the epoch has."""

    def body(_: Engine) -> Found:
        with Data(spec) as data:
            labels: list[float] = []
            rows, number = 0, done.steps - 1
            for plan, batches in itertools.islice(data.steps(1, 0, done), steps):
                rows, number = rows + plan.num_rows, plan.number
                for batch in batches:
                    labels += np.asarray(batch.columns["y"]).tolist()
            assert data.training.is_divisible
            return labels, rows, number, data.planned_rows(1, done), data.steps_in_all(1, done)

    return run_ranks(size, body, using=use_engine)


@pytest.mark.parametrize("limit", [None, 12])
def test_rest_of_an_epoch_is_divided_among_another_number_of_ranks(
    tmp_path: Path, limit: int | None
) -> None:
    model = linear()
    case = Case(Store.create(tmp_path), model, torch.optim.SGD(model.parameters(), lr=0.1))
    spec = replace(case.spec(), batch_size=4, accumulate=2, train_steps_per_epoch=limit)
    first = part(spec, 3, Done(), 2)
    done = Done(first[0][1], first[0][2] + 1)
    assert done == Done(48, 2)
    second = part(spec, 1, done, 3)
    done = Done(done.rows + second[0][1], second[0][2] + 1)
    assert done == Done(72, 5)
    rest = part(spec, 2, done, None)
    seen = [label for found in (*first, *second, *rest) for label in found[0]]
    assert sorted(seen) == sorted(case.values["y"].tolist())
    assert {found[3] for found in (*first, *rest)} == {100}
    # Steps of 24, then of 8 after 2 steps with 48 rows, then of 16 after 5 steps with 72.
    assert [found[0][4] for found in (first, second, rest)] == [5, 9, 7]
    # At its end, and after a limit, nothing is left.
    (nothing,) = part(spec, 1, Done(100, 7), None)
    assert nothing[:3] == ([], 0, 6)
    (nothing,) = part(replace(spec, train_steps_per_epoch=5), 1, done, None)
    assert nothing[:3] == ([], 0, 4)


def test_metric_totals_of_ranks_add_up() -> None:
    states = []
    for rank in range(3):
        totals = Totals([], num_parts=1)
        totals.values += torch.tensor([1.0 + rank, 2.0, 3.0], dtype=torch.float64)
        totals.parts += rank
        states.append(totals.state_dict())
    states[0]["logs"], states[2]["logs"] = {"a": (1.0, 2.0)}, {"a": (3.0, 4.0), "b": (5.0, 6.0)}
    added = Totals([], num_parts=1)
    assert added.adds_up
    added.load_state_dict(sums := _added(states))
    assert added.values.tolist() == [6.0, 6.0, 9.0]
    assert added.parts.tolist() == [[3.0, 3.0]]
    assert sums["logs"] == {"a": (4.0, 6.0), "b": (5.0, 6.0)}
