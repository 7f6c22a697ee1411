"""Modules of the user's that import `horovod`, in ranks and in workers of `transform`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pyspark.sql import SparkSession

from sparkhvd import as_horovod

MODULE = """
import torch

import horovod.torch as hvd


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.is_ours = hvd.__name__ == "sparkhvd.horovod.torch"

    def forward(self, x):
        assert self.is_ours and hvd.__name__ == "sparkhvd.horovod.torch"
        return self.layer(x)
"""


@pytest.fixture
def as_horovod_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = list(sys.meta_path)
    monkeypatch.setenv(as_horovod.VARIABLE, "0")
    as_horovod.install()
    yield
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.mark.usefixtures("as_horovod_installed")
def test_a_module_that_imports_horovod_is_fitted_and_transforms(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net_of_horovods.py"
    path.write_text(MODULE)
    spark.sparkContext.addPyFile(str(path))
    monkeypatch.syspath_prepend(str(tmp_path))
    net = importlib.import_module("net_of_horovods").Net()
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
    df = spark.createDataFrame([(float(n), 2.0 * n) for n in range(32)], ["x", "y"])
    model = estimator.fit(df)
    assert model.transform(df).count() == 32
