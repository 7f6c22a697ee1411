"""Parts of a user's module besides its weights, through a whole fit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from sparkhvd import InvalidArgumentError, Store, TorchModel
from sparkhvd.estimator import Callback
from sparkhvd.training.modules.copies import hooks_of
from tests.estimator.fits import estimator
from tests.harness.by_value import by_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


class Net(nn.Module):
    """A module with methods that return nothing, and the truth value of an empty list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        mask = torch.tensor([[1.0, 0.0]])
        self.layer.weight.register_hook(lambda grad: grad * mask)
        self.layer.bias.no_decay = True  # type: ignore[attr-defined]
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.settings = {"scale": 1.0}

    def __len__(self) -> int:
        return 0

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        result: Tensor = self.layer(x)
        return result * self.settings["scale"]


class Uncertain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(1))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        error = ((output - label) ** 2).mean()
        return (error * torch.exp(-self.log_var) + self.log_var).squeeze()


class Fills(Callback):
    """Changes a setting of the module, and sets the bias when the training is over."""

    def on_epoch_end(self, ctx: Any, record: Any) -> None:
        ctx.model.settings["scale"] /= 2

    def on_train_end(self, ctx: Any, history: Any) -> None:
        with torch.no_grad():
            ctx.model.layer.bias.fill_(7.0)
        ctx.model.layer.weight.requires_grad_(False)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [([i / 10, 1 - i / 10], float(i % 3)) for i in range(20)]
    return spark.createDataFrame(rows, "x array<double>, y double").coalesce(1)


def squeezed(output: Tensor, label: Tensor) -> Tensor:
    return ((output.squeeze() - label) ** 2).mean()


def test_fitted_saved_and_run_models_keep_attributes_buffers_and_hooks(
    df: DataFrame, tmp_path: Path
) -> None:
    store, net = Store.create(tmp_path / "store"), Net()
    before = net.layer.weight.detach().clone()

    def adam(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        assert [hasattr(p, "no_decay") for p in parameters] == [False, True, False]
        return torch.optim.Adam(parameters, lr=0.05)

    given = estimator(
        net, store, num_proc=1, epochs=2, loss=Uncertain(), optimizer=adam, callbacks=[Fills()],
        run_id="r", metrics={"wrong": squeezed},
    )  # fmt: skip
    with pytest.warns(UserWarning, match="^metric 'wrong' returns the same number"):
        model = given.fit(df)
    model.save(str(tmp_path / "saved"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = TorchModel.load(str(tmp_path / "saved"), trust=True)
        of_run = TorchModel.from_run(store, "r", trust=True)
    for found in (model, loaded, of_run):
        module: Any = found.getModel()
        assert not module.training
        assert module.layer.bias.tolist() == [7.0]
        assert module.layer.bias.no_decay
        assert module.settings == {"scale": 0.25}
        assert module.calls.item() == 6  # three steps in each epoch
        assert not module.layer.weight.requires_grad
        assert hooks_of(module.layer.weight) is not None
        changed = module.layer.weight != before
        assert changed.tolist() == [[True, False]]
        assert found.getLoss().log_var.abs() > 0.01
        assert torch.equal(found.getLoss().log_var, model.getLoss().log_var)
    assert net.layer.bias.tolist() != [7.0]
    assert net.settings == {"scale": 1.0}
    row = loaded.transform(df).first()
    assert row is not None
    expected = model.getModel()(torch.tensor([row.x], dtype=torch.float32)).item()
    assert row.y__output == pytest.approx(expected, rel=1e-5)


class OwnLoop(Net):
    def train(self, loader: Any, epochs: int = 1) -> None:  # type: ignore[override]
        raise AssertionError("called")


def test_module_whose_train_method_has_another_meaning_is_refused(
    df: DataFrame, tmp_path: Path
) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^model: OwnLoop\.train does not do what train of"
    ):
        estimator(OwnLoop(), Store.create(tmp_path / "store"), num_proc=1).fit(df)
