"""Modules whose `train` and `eval` return nothing or do something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.labels import bind_labels
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import TorchModel
from sparkhvd.estimator.fitting.request import try_model
from sparkhvd.estimator.saving.encoding import Archive
from sparkhvd.estimator.saving.persistence import decode_fitted, encode_model
from sparkhvd.estimator.transform.worker import ModelCache
from sparkhvd.training.model import check_model
from tests.training.ranks import Case

pytestmark = pytest.mark.pure

X = Column("x", "vector", "float32", (2,), "vector", "float32")
Y = Column("y", "scalar", "float32", (), "double", "float32")


class ReturnsNothing(nn.Linear):
    """Methods without `return self`, as some users write them."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def eval(self) -> None:  # type: ignore[override]
        super().eval()

    def to(self, *positional: Any, **keywords: Any) -> None:  # type: ignore[override]
        super().to(*positional, **keywords)

    def cpu(self) -> None:  # type: ignore[override]
        super().cpu()


class Empty(ReturnsNothing):
    """A module that is false, because it is an empty list."""

    def __len__(self) -> int:
        return 0


class Frozen(nn.Linear):
    """Stays in eval mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


@pytest.mark.parametrize("kind", [ReturnsNothing, Empty, Frozen])
def test_train_and_eval_methods_may_return_none(kind: type[nn.Linear]) -> None:
    net = kind(2, 1)
    assert check_model(net) is net
    schema = DataSchema((X,), (Y,))
    labels = bind_labels(schema, nn.MSELoss())
    assert try_model(net, bind_inputs(net, schema), schema, labels) == (1,)
    model = TorchModel.from_module(net, feature_cols=["x"], label_cols=["y"])
    found = model.getModel()
    assert type(found) is kind
    assert not found.training
    again = model._require_fitted()
    assert torch.equal(again.module.weight, net.weight)  # type: ignore[arg-type]


class Reading:
    """Decoder of what an archive holds, without files."""

    def __init__(self, module: nn.Module) -> None:
        self.prefixes: dict[str, str] = {}
        self.module = module

    def decode(self, name: str, value: object) -> nn.Module:
        return self.module


def test_loaded_module_is_in_eval_mode() -> None:
    net = Empty(2, 1)
    model = TorchModel.from_module(net, feature_cols=["x"], label_cols=["y"])
    content = encode_model(model, archive := Archive())
    fitted = decode_fitted(content, Reading(net))  # type: ignore[arg-type]
    assert fitted.module is net
    assert not net.training
    # The pickle names the tensors: with an empty module in this one's place it would hold them.
    shell = archive.pickles()["model"]
    assert net.weight.numpy(force=True).tobytes() not in shell


def test_transform_worker_loads_a_module_whose_modes_return_none() -> None:
    fitted = TorchModel.from_module(ReturnsNothing(2, 1), feature_cols=["x"])._require_fitted()

    class Spec:
        shell, weights = fitted.shell, fitted.weights

    found = ModelCache(1).get(Spec, torch.device("cpu"))  # type: ignore[arg-type]
    assert isinstance(found, ReturnsNothing)
    assert not found.training


def test_ranks_train_a_module_whose_mode_methods_return_none(tmp_path: Path) -> None:
    net = ReturnsNothing(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    case = Case(
        Store.create(tmp_path / "store"),
        net,
        optimizer,
        options={"epochs": 1, "finds_widths": True},
    )
    assert case.train(1).widths == (1,)


class OwnLoop(nn.Module):
    """Its `train` trains, as in scripts whose class does everything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def train(self, loader: Any, epochs: int = 1) -> float:  # type: ignore[override]
        raise AssertionError("called")


class LoopOfEpochs(OwnLoop):
    def train(self, epochs: int = 10) -> list[float]:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
        return [0.0 for _ in range(epochs)]


class EvalOfRows(OwnLoop):
    def train(self, mode: bool = True) -> nn.Module:  # type: ignore[override]
        return nn.Module.train(self, mode)

    def eval(self, rows: Tensor) -> Tensor:  # type: ignore[override]
        raise AssertionError("called")


class Raises(OwnLoop):
    def train(self, mode: bool = True) -> nn.Module:  # type: ignore[override]
        raise NotImplementedError("no modes here")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            OwnLoop,
            r"OwnLoop\.train does not do what train of torch\.nn\.Module does: .*train\(mode=True\)",
        ),
        (
            LoopOfEpochs,
            r"LoopOfEpochs\.train does not do what train of torch\.nn\.Module does: .*leaves `training` True",
        ),
        (
            EvalOfRows,
            r"EvalOfRows\.eval does not do what eval of torch\.nn\.Module does: .*eval\(\) without arguments \(missing .*'rows'\)",
        ),
        (
            Raises,
            r"Raises\.train does not do what train of torch\.nn\.Module does: .*NotImplementedError: no modes here",
        ),
    ],
)
def test_error_names_train_or_eval_method_of_another_meaning(
    kind: type[nn.Module], says: str
) -> None:
    model = kind()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InvalidArgumentError, match="model: " + says):
        check_model(model)
    assert all(map(torch.equal, model.parameters(), before))
    if kind is EvalOfRows:  # torch does not call that of a part
        check_model(nn.Sequential(kind()))
    else:
        with pytest.raises(InvalidArgumentError, match=r"model \(its part '0'\): " + says):
            check_model(nn.Sequential(kind()))
    with pytest.raises(InvalidArgumentError, match="setModel: " + says):
        TorchModel.from_module(kind(), feature_cols=["x"])
