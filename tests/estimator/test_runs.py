"""Runs of killed drivers: their files, and the fits that may resume them."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

from sparkhvd.data.store.locks import load_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.data.store.temporary import _temporary, is_temporary_store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.runs import Finished, Run
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints

pytestmark = pytest.mark.pure


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Store.create(tmp_path), "runs/r")


def test_truncated_seed_file_is_restored(run: Run) -> None:
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
def test_truncated_fingerprint_file_is_replaced(run: Run, left: str) -> None:
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


def explain(run: Run, error: BaseException, run_id: str | None, verbose: int = 1) -> None:
    run.explain_failure(error, run_id, epochs=10, verbose=verbose)


def test_a_failed_run_without_a_run_id_explains_how_to_resume(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RuntimeError("killed")
    run.seed(1)
    explain(run, error, "r")
    assert run.store.exists("runs/r/seed.json")
    explain(run, KeyboardInterrupt(), None)  # its ranks may still write
    assert run.store.exists("runs/r/seed.json")
    explain(run, error, None)
    assert run.store.list("runs") == []  # there was no checkpoint
    assert run.progress(10) == "the beginning, without a checkpoint"
    Checkpoints(run.store, run.run_dir).save(Checkpoint(2, {}, {}, None, [], "{}", step=7))
    explain(run, error, None)
    assert Checkpoints(run.store, run.run_dir).latest_position() == (2, 7)
    assert run.progress(10) == "the checkpoint after 7 steps of epoch 3 of 10"
    if sys.version_info >= (3, 11):
        assert error.__notes__ == [
            "The checkpoint after 7 steps of epoch 3 of 10 stays: a fit with run_id='r' and "
            f"store={run.store.url!r} resumes from there. TorchModel.from_run({run.store.url!r}, 'r') gives the model so far."
        ]
    assert bool(capsys.readouterr().err) == (sys.version_info < (3, 11))


def test_run_that_failed_after_training_explains_how_to_get_the_model(run: Run) -> None:
    Checkpoints(run.store, run.run_dir).save(Checkpoint(10, {}, {}, None, [], "{}"))
    run.finish(Finished(10), 1)
    error = RuntimeError("of a logger")
    run.explain_failure(error, "r", epochs=10, verbose=0, is_trained=True)
    if sys.version_info >= (3, 11):
        assert error.__notes__ == [
            f"The checkpoint after epoch 10 of 10 stays: TorchModel.from_run({run.store.url!r}, 'r') gives the model."
        ]


def test_deleting_a_run_keeps_only_the_given_files(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("report.json", "seed.json", "checkpoints/epoch-1.pt"):
        run.store.write_bytes(f"{run.run_dir}/{path}", b"x")
    run.delete(["report.json", "timeline.json"])
    assert run.store.list(run.run_dir) == [f"{run.run_dir}/report.json"]

    def interrupted(self: Store, path: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", interrupted)
        with pytest.warns(UserWarning, match="Ctrl-C came after the model was trained"):
            run.delete()
    run.delete()
    assert run.store.list(run.run_dir) == []


@pytest.mark.parametrize("run_id", [None, "r"])
def test_an_interrupted_run_explains_how_to_resume(
    run: Run, run_id: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpoints(run.store, run.run_dir).save(Checkpoint(4, {}, {}, None, [], "{}"))
    explain(run, KeyboardInterrupt(), run_id, verbose=0)
    assert capsys.readouterr().err == ""
    explain(run, KeyboardInterrupt(), run_id)
    assert capsys.readouterr().err == (
        "sparkhvd: interrupted. The checkpoint after epoch 4 of 10 stays: a fit with run_id='r' and "
        f"store={run.store.url!r} resumes from there. TorchModel.from_run({run.store.url!r}, 'r') gives the model so far.\n"
    )


def test_a_run_announces_its_store_and_starting_point(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def announced(announcing: Run) -> str:
        announcing.announce(10)
        return capsys.readouterr().out

    assert announced(run) == f"run 'r' in {run.store.url}\n"
    warm = Run(run.store, "runs/r/warm-1", start_from="runs/r/checkpoints/epoch-3.pt")
    assert announced(warm) == (
        f"run 'r' in {run.store.url} starts from the weights of runs/r/checkpoints/epoch-3.pt\n"
    )
    Checkpoints(run.store, run.run_dir).save(Checkpoint(3, {}, {}, None, [], "{}"))
    assert announced(run) == f"run 'r' in {run.store.url} resumes after epoch 3 of 10\n"
    temporary = _temporary.folder("an application")
    gone = Run(Store.create(temporary), "runs/r")
    assert (
        announced(gone) == f"run 'r' in {gone.store.url}, which is deleted when this process ends\n"
    )
    assert is_temporary_store(gone.store)
    assert not is_temporary_store(run.store)


def test_run_resumed_with_recomputed_data_prints_a_notice(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.warn_of_other_data()
    Checkpoints(run.store, run.run_dir).save(Checkpoint(1, {"w": torch.ones(2)}, {}, None, [], ""))
    with pytest.warns(
        UserWarning, match=r"runs/r resumes after epoch 1 with data that may differ .*rand\(\)"
    ):
        run.warn_of_other_data()
