"""The user's modules that import `horovod`, in ranks and in workers of `transform`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import as_horovod
from sparkhvd.errors import InvalidArgumentError

pytestmark = pytest.mark.spark

MODULE = """
import torch

import horovod.torch as hvd
from horovod.spark.torch import TorchModel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.is_ours = hvd.__name__ == "sparkhvd.horovod.torch"

    def forward(self, x):
        assert self.is_ours and hvd.__name__ == "sparkhvd.horovod.torch"
        return self.layer(x)


class Model(TorchModel):
    def get_prediction_fn(self):
        return lambda model, row: model(torch.tensor([row["x"]])).detach()
"""


@pytest.fixture
def as_horovod_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = list(sys.meta_path)
    monkeypatch.setenv(as_horovod.VARIABLE, "0")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    as_horovod.install()
    yield
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.mark.usefixtures("as_horovod_installed")
def test_module_that_imports_horovod_is_fitted_and_transforms(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net_of_horovods.py"
    path.write_text(MODULE)
    spark.sparkContext.addPyFile(str(path))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("net_of_horovods")
    net = module.Net()
    df = spark.createDataFrame([(float(n), 2.0 * n) for n in range(32)], ["x", "y"])
    # Row by row, in workers that have not taken the name yet.
    by_rows = module.Model(model=net, feature_columns=["x"], label_columns=["y"]).transform(df)
    wanted = [net(torch.tensor([row.x])).item() for row in df.collect()]
    assert [row.y__output for row in by_rows.collect()] == pytest.approx(wanted)
    estimator = importlib.import_module("horovod.spark.torch").TorchEstimator(
        num_proc=2,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=1,
        store=str(tmp_path / "store"),
        verbose=0,
    )
    model = estimator.fit(df)
    assert model.transform(df).count() == 32


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(1, 1)


@pytest.mark.usefixtures("as_horovod_installed")
def test_estimator_behaves_like_the_horovod_estimator(spark: SparkSession, tmp_path: Path) -> None:
    """It compares the scaled learning rate, whole steps, a backend's ranks and variables, a kept run, hooks, and a plain model."""
    backends = importlib.import_module("horovod.spark.common.backend")
    stores = importlib.import_module("horovod.spark.common.store")
    of_torch = importlib.import_module("horovod.spark.torch")

    class Own(of_torch.TorchEstimator):  # type: ignore[misc,name-defined]
        def _get_model_kwargs(self, *given: object, **named: object) -> dict[str, object]:
            self.asked = True  # an attribute of a subclass, no Param
            kwargs: dict[str, object] = super()._get_model_kwargs(*given, **named)
            return kwargs

    common = {
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "random_seed": 1,
        "verbose": 0,
    }
    df = spark.createDataFrame([(n / 36, 2.0 * n / 36) for n in range(36)], ["x", "y"])
    store = stores.LocalStore(str(tmp_path / "store"))
    module = net()
    estimator = Own(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        backend=backends.SparkBackend(num_proc=2, env={"OWN": "1"}),
        store=store,
        run_id="first",
        input_shapes=[[-1, 1]],
        mp_start_method="spawn",
        num_gpus=0,
        callbacks=[object()],
        **common,
    )
    model = estimator.fit(df)
    assert estimator.asked
    assert type(model) is of_torch.TorchModel
    assert [record["rows"] for record in model._fitted.history] == [32, 32]
    assert model.getHistory()[1]["train"]["loss"] < model.getHistory()[0]["train"]["loss"]
    assert model.transform(df).columns == ["x", "y", "y__output"]
    assert store.exists(store.get_run_path("first"))
    assert store.exists(store.get_checkpoint_path("first"))

    module = net()
    ours = sparkhvd.TorchEstimator(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.2),
        num_proc=2,
        drop_last=True,
        store=str(tmp_path / "ours"),
        **common,
    ).fit(df)
    for name, weights in ours.getModel().state_dict().items():
        assert torch.equal(weights, model.getModel().state_dict()[name])
    wanted = [row.y__output for row in ours.transform(df).collect()]
    assert [row.y__output for row in model.transform(df).collect()] == wanted

    plain = of_torch.TorchModel(
        model=ours.getModel(),
        feature_columns=["x"],
        label_columns=["y"],
        input_shapes=[[-1, 1]],
        history=[],
        run_id="none",
        _metadata={},
    )
    assert [row.y__output for row in plain.transform(df).collect()] == wanted
    predict = plain.get_prediction_fn()
    assert float(predict(plain.getModel(), {"x": 0.5})) == pytest.approx(
        float(ours.getModel()(torch.tensor([[0.5]])))
    )


def test_epoch_with_fewer_batches_than_passes_has_one_step(
    spark: SparkSession, tmp_path: Path
) -> None:
    from sparkhvd.horovod.spark.torch import TorchEstimator

    df = spark.createDataFrame([(float(n), 2.0 * n) for n in range(4)], ["x", "y"])
    given = {
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 1,
        "backward_passes_per_step": 3,
        "num_proc": 2,
        "verbose": 0,
    }
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = TorchEstimator(
        model=module, optimizer=optimizer, store=str(tmp_path / "horovods"), **given
    ).fit(df)
    assert [record["rows"] for record in model._fitted.history] == [4]
    for group in optimizer.param_groups:
        group["lr"] *= 2  # of two ranks
    x = torch.arange(4.0).reshape(-1, 1)
    torch.nn.functional.mse_loss(module(x), 2 * x).backward()
    optimizer.step()
    for name, weights in model.getModel().state_dict().items():
        torch.testing.assert_close(weights, module.state_dict()[name])

    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    ours = sparkhvd.TorchEstimator(
        model=module, optimizer=optimizer, drop_last=True, store=str(tmp_path / "ours"), **given
    )
    with pytest.raises(InvalidArgumentError, match="drop_last drops a step that is not full"):
        ours.fit(df)


def test_backend_with_a_different_num_proc_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    from sparkhvd.horovod.spark.common.backend import SparkBackend
    from sparkhvd.horovod.spark.torch import TorchEstimator

    df = spark.createDataFrame([(1.0, 2.0)], ["x", "y"])
    module = net()
    estimator = TorchEstimator(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        loss="mse",
        feature_cols=["x"],
        label_cols=["y"],
        backend=SparkBackend(3),
        num_proc=2,
        store=str(tmp_path),
    )
    with pytest.raises(
        InvalidArgumentError, match="num_proc is 2, and the backend has 3 processes"
    ):
        estimator.fit(df)
