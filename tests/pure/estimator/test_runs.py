"""Runs of killed drivers: their files, and the fits that may go on with them."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

from sparkhvd.data.store.checksummed import load_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.runs import Run
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Store.create(tmp_path), "runs/r")


def test_a_seed_that_is_cut_off_does_not_end_the_run(run: Run) -> None:
    seed = run.seed(None)
    assert run.seed(None) == seed
    run.check(json.dumps({"random_seed": seed}), 1)
    for left in ("", str(seed)):
        run.store.write_bytes("runs/r/seed.json", left.encode())
        assert run.seed(None) == seed
    run.store.delete("runs/r/fingerprint.json")
    run.store.write_bytes("runs/r/seed.json", b"")
    new = run.seed(None)
    assert run.seed(None) == new
    assert run.seed(5) == run.seed(None) == 5


@pytest.mark.parametrize("left", ["", '{"random_', "[]"])
def test_a_fingerprint_that_is_cut_off_does_not_end_the_run(run: Run, left: str) -> None:
    ours = json.dumps({"batch_size": 8, "model": {"w": [2]}})
    run.check(ours, 1)
    checkpoints = Checkpoints(run.store, run.run_dir)
    checkpoints.save(Checkpoint(1, {"w": torch.ones(2)}, {}, None, [], ours))
    with pytest.raises(InvalidArgumentError, match="batch_size was 8 and is 16"):
        run.check(json.dumps({"batch_size": 16, "model": {"w": [2]}}), 1)
    run.store.write_bytes("runs/r/fingerprint.json", left.encode())
    run.check(ours, 1)  # the ranks compare with the checkpoint's
    assert load_sealed(run.store.read_bytes("runs/r/fingerprint.json")) == json.loads(ours)
    run.store.write_bytes("runs/r/fingerprint.json", left.encode())
    Run(run.store, "runs/r/warm-1", start_from=checkpoints.path(1)).check(ours, 1)


def test_a_run_that_failed_without_a_run_id_says_how_it_goes_on(run: Run) -> None:
    error = RuntimeError("killed")
    run.seed(1)
    run.explain_failure(error, "r")
    assert run.store.exists("runs/r/seed.json")
    run.explain_failure(KeyboardInterrupt(), None)  # its ranks may still write
    assert run.store.exists("runs/r/seed.json")
    run.explain_failure(error, None)
    assert run.store.list("runs") == []  # there was no checkpoint
    Checkpoints(run.store, run.run_dir).save(Checkpoint(2, {}, {}, None, [], "{}", step=7))
    run.explain_failure(error, None)
    assert Checkpoints(run.store, run.run_dir).latest_position() == (2, 7)
    if sys.version_info >= (3, 11):
        assert error.__notes__ == [
            "The checkpoint after 2 epochs and 7 steps stays: a fit with run_id='r' and "
            f"store={run.store.url!r} goes on from there."
        ]


def test_a_run_that_goes_on_with_data_computed_anew_says_so(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.warn_of_other_data()
    Checkpoints(run.store, run.run_dir).save(Checkpoint(1, {"w": torch.ones(2)}, {}, None, [], ""))
    with pytest.warns(
        UserWarning, match=r"runs/r goes on after epoch 1 with data that may differ .*rand\(\)"
    ):
        run.warn_of_other_data()
