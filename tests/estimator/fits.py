"""Modules and estimators for tests with real fits, and the same training in one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkhvd import TorchEstimator, TorchModel, read_packed
from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store
from sparkhvd.training.modules.fitted import TrainedState
from tests.harness.plans import batch_rows


def mlp(inputs: int, outputs: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a small module with the same weights in each call."""
    generator = torch.Generator().manual_seed(inputs * 10 + outputs)
    model = nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def estimator(model: nn.Module, store: Store | None = None, **options: Any) -> TorchEstimator:
    """Make an estimator of `y` from `x` on two ranks without output."""
    given = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "num_proc": 2,
        "random_seed": 3,
        "verbose": 0,
        "max_retries": 0,
        "store": store,
    }
    return TorchEstimator(model=model, **{**given, **options})


def fitted(
    module: nn.Module, link: str = "identity", width: int = 1, inputs: int = 2
) -> TorchModel:
    """Make a model as `fit` does, without the fit."""
    column = Column("x", "vector", "float32", (inputs,), "vector", "float32")
    model = TorchModel(feature_cols=["x"], label_cols=["y"])
    model._fitted = TrainedState(
        module=module.eval(),
        columns=(column,),
        labels=("y",),
        inputs=bind_inputs(module, DataSchema((column,), ())),
        links=(link,),
        widths=(width,),
    )
    return model


def only_data(store: Store) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Read the only materialized data set of a store: its manifest and its columns."""
    (data_dir,) = store.data_directories()
    return Manifest.load(store, data_dir), read_packed(store.full_url(data_dir))


def one_process(
    model: nn.Module,
    store: Store,
    features: list[str],
    *,
    size: int,
    batch_size: int,
    **options: Any,
) -> nn.Module:
    """Train a copy of `model` in plain PyTorch over the global batches of `size` ranks, with SGD and MSE."""
    manifest, values = only_data(store)
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=options["lr"])
    dtype = next(model.parameters()).dtype
    columns = [values[n].reshape(len(values[n]), -1) for n in features]
    x = torch.from_numpy(np.concatenate(columns, axis=1)).to(dtype)
    y = torch.from_numpy(values["y"]).to(dtype)
    with Reader(
        store, manifest, rank=0, size=size, batch_size=batch_size, seed=options["seed"]
    ) as reader:
        for epoch in range(options["epochs"]):
            plan = reader.plan(epoch)
            for step in range(plan.num_steps):
                rows = np.concatenate([batch_rows(plan, r, step) for r in range(size)])
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x[rows]), y[rows].reshape(-1, 1)).backward()
                optimizer.step()
    return model


def assert_same_weights(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name
        )
