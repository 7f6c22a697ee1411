"""Models loaded from runs in a store."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd import TorchModel, trust
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, UntrustedError
from sparkhvd.estimator.fitting.runs import Finished, Run
from sparkhvd.estimator.saving.run_model import store_run_model
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.modules.fitted import TrainedState

pytestmark = pytest.mark.pure


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def model_of(module: nn.Module, **params: Any) -> TorchModel:
    """Make a model as a fit does before its training."""
    column = Column("x", "vector", "float32", (2,), "vector", "float32")
    model = TorchModel(feature_cols=["x"], label_cols=["y"], **params)
    model._fitted = TrainedState(
        module=module,
        columns=(column,),
        labels=("y",),
        inputs=bind_inputs(module, DataSchema((column,), ())),
        links=("identity",),
        widths=(),
        run_id="r",
    )
    return model


def begin(store: Store, module: nn.Module, run_dir: str = "runs/r", **params: Any) -> Run:
    """Write the files that the driver writes before ranks start."""
    run = Run(store, run_dir)
    run.seed(1)
    store_run_model(store, run_dir, model_of(module, store=store, **params), 10)
    return run


def train(run: Run, module: nn.Module, epochs: int, step: int = 0) -> dict[str, torch.Tensor]:
    """Write checkpoints with different weights, and return the last weights."""
    checkpoints = Checkpoints(run.store, run.run_dir)
    history = [{"epoch": e + 1, "loss": 0.5 / (e + 1)} for e in range(epochs)]
    state: dict[str, torch.Tensor] = {}
    for number in range(1, epochs + 1 + bool(step)):
        state = {name: torch.full_like(t, float(number)) for name, t in module.state_dict().items()}
        done = min(number, epochs)
        at = step if number > epochs else 0
        ranks: Any = [{}] if at else []
        checkpoints.save(
            Checkpoint(done, state, {}, None, history[:done], "{}", step=at, ranks=ranks)
        )
    return state


def same(module: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    found = module.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[n], t) for n, t in state.items())


def test_from_run_returns_the_model_of_a_finished_run(store: Store) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    run = begin(store, module, predictionCol="p")
    state = train(run, module, 3)
    run.finish(Finished(3, (1,), {"train": 2.5}), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = TorchModel.from_run(store, "r")
    assert same(model.getModel(), state)
    assert not model.getModel().training
    fitted = model._require_fitted()
    assert [record["epoch"] for record in model.history] == [1, 2, 3]
    assert model.timings == {"train": 2.5}
    assert fitted.widths == (1,)
    assert fitted.columns == model_of(module)._require_fitted().columns
    assert fitted.inputs == model_of(module)._require_fitted().inputs
    assert model.getRunId() == "r"
    assert model.getPredictionCol() == "p"
    assert model.getStore() == store
    assert model.uid == json.loads(store.read_bytes("runs/r/model.json"))["uid"]
    assert same(TorchModel.from_run(store.url, "r").getModel(), state)
    assert same(TorchModel.from_run(Path(store.url.removeprefix("file://")), "r").getModel(), state)


def test_from_run_returns_the_best_epoch_of_a_finished_run(store: Store) -> None:
    module = nn.Linear(2, 1)
    run = begin(store, module)
    train(run, module, 3)
    run.finish(Finished(2), 2)
    assert set(TorchModel.from_run(store, "r").getModel().weight.flatten().tolist()) == {2.0}


@pytest.mark.parametrize(
    ("step", "where"), [(0, "after epoch 3 of 10"), (7, "after 7 steps of epoch 4 of 10")]
)
def test_from_run_warns_and_returns_newest_weights_of_interrupted_run(
    store: Store, step: int, where: str
) -> None:
    module = nn.Linear(2, 1)
    run = begin(store, module)
    state = train(run, module, 3, step)
    with pytest.warns(UserWarning, match=f"The run 'r' in .* has not finished: .* {where}"):
        model = TorchModel.from_run(store, "r")
    assert same(model.getModel(), state)
    assert len(model.history) == 3


def test_from_run_uses_the_checkpoint_before_a_damaged_one(store: Store) -> None:
    module = nn.Linear(2, 1)
    train(begin(store, module), module, 3)
    store.write_bytes("runs/r/checkpoints/epoch-3.pt", b"cut off")
    with pytest.warns(UserWarning, match="after epoch 2 of 10"):
        model = TorchModel.from_run(store, "r")
    assert set(model.getModel().weight.flatten().tolist()) == {2.0}


def test_from_run_uses_the_last_warm_start_with_weights(store: Store) -> None:
    module = nn.Linear(2, 1)
    run = begin(store, module)
    train(run, module, 3)
    run.finish(Finished(3), 1)
    warm = begin(store, module, "runs/r/warm-1")
    assert len(TorchModel.from_run(store, "r").history) == 3
    train(warm, module, 1)
    with pytest.warns(UserWarning, match="after epoch 1 of 10"):
        assert len(TorchModel.from_run(store, "r").history) == 1
    warm.finish(Finished(1), 1)
    assert len(TorchModel.from_run(store, "r").history) == 1


class Own(nn.Module):
    """A user's module with a state besides its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.extra = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


def test_user_code_of_a_run_requires_trust(store: Store) -> None:
    module = Own()
    run = begin(store, module, output_fn=lambda output: output)
    state = {name: torch.ones_like(t) for name, t in module.layer.state_dict().items()}
    state = {f"layer.{name}": t for name, t in state.items()}
    whole: Any = {**state, "_extra_state": "trained"}
    Checkpoints(store, run.run_dir).save(Checkpoint(1, whole, {}, None, [{"epoch": 1}], "{}"))
    run.finish(Finished(1), 1)
    with pytest.raises(UntrustedError, match=r"runs/r' holds .*Own, and loading it runs code"):
        TorchModel.from_run(store, "r")
    model = TorchModel.from_run(store, "r", trust=True)
    assert set(model.getModel().layer.weight.flatten().tolist()) == {1.0}
    assert model.getModel().extra == "trained"
    assert model.getOutputFn()(3) == 3
    with trust():
        TorchModel.from_run(store, "r")


def test_error_names_a_param_that_cannot_be_pickled(store: Store) -> None:
    module = nn.Linear(2, 1)
    lock = __import__("threading").Lock()
    run = begin(store, module, output_fn=lambda output, lock=lock: output)
    train(run, module, 1)
    with pytest.raises(InvalidArgumentError, match="does not hold output_fn, a .*lambda"):
        TorchModel.from_run(store, "r", trust=True)


def test_runs_without_a_model_raise_a_clear_error(store: Store) -> None:
    with pytest.raises(InvalidArgumentError, match="There is no run 'r' in .*It has none"):
        TorchModel.from_run(store, "r")
    module = nn.Linear(2, 1)
    for name in ("one", "two"):
        begin(store, module, f"runs/{name}")
    with pytest.raises(InvalidArgumentError, match="no run 'r' in .*It has 'one', 'two'"):
        TorchModel.from_run(store, "r")
    with pytest.raises(InvalidArgumentError, match="runs/one has no complete checkpoint"):
        TorchModel.from_run(store, "one")
    with pytest.raises(InvalidArgumentError, match=r"run_id is '\.\./one'"):
        TorchModel.from_run(store, "../one")
    with pytest.raises(InvalidArgumentError, match="from_run: store is 3"):
        TorchModel.from_run(3, "one")  # type: ignore[arg-type]
    run = Run(store, "runs/two")
    train(run, module, 1)
    run.finish(Finished(1), 1)
    store.delete("runs/two/checkpoints/epoch-1.pt")
    with pytest.raises(InvalidArgumentError, match=r"has no epoch-1\.pt, .*: the file was deleted"):
        TorchModel.from_run(store, "two")
    store.write_bytes("runs/two/model.json", b"{}")
    with pytest.raises(InvalidArgumentError, match=r"model\.json is damaged"):
        TorchModel.from_run(store, "two")
    store.delete("runs/two/model.json")
    with pytest.raises(InvalidArgumentError, match=r"model\.json does not exist: .*older sparkhvd"):
        TorchModel.from_run(store, "two")


def test_model_description_contains_neither_weights_nor_secrets(store: Store) -> None:
    module = nn.Linear(2, 1)
    begin(store, module)
    text = store.read_bytes("runs/r/model.json").decode()
    assert store.url not in text
    assert len(text) < 4000
