"""Batches of Horovod's Lightning estimator: types after a function of rows, and inputs, losses and weights of a plain module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkhvd.data.columns.binding import Argument, InputBinding
from sparkhvd.data.columns.labels import LabelBinding
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.horovod.spark.lightning.plain import PlainModule, package_name
from sparkhvd.lightning.loop import RowFunction
from sparkhvd.training.loss_functions import resolve_losses

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module", autouse=True)
def lightning() -> None:
    """Load Lightning, for seconds, only where these tests run."""
    pytest.importorskip("lightning", reason="runs where lightning is")


LABELS = LabelBinding(("y",), ("float32",), ("elementwise",), (True,), (None,))


def wrapped(*arguments: Argument, sample_weight: str | None = None, factor: float = 1.0) -> Any:
    """Return the LightningModule, whose step has no trainer to log to."""
    net = nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.zero_()
    losses, _ = resolve_losses(nn.MSELoss(), 1, per_row=sample_weight is not None)
    spec = SimpleNamespace(
        inputs=InputBinding(arguments),
        labels=LABELS,
        sample_weight=sample_weight,
        loss_weights=(factor,),
    )
    ctx: Any = SimpleNamespace(model=net, device=torch.device("cpu"), _spec=spec, optimizer=None)
    made = PlainModule(package="lightning.pytorch", losses=losses, metrics=())(ctx)
    made.log = made.log_dict = lambda *args, **options: None
    return made


def test_weighted_loss_is_divided_by_the_number_of_rows() -> None:
    """As in Horovod, the sum is not divided by the sum of the weights."""
    batch = {
        "x": torch.tensor([[1.0, 2.0], [0.0, 1.0]]),
        "y": torch.tensor([1.0, 3.0]),
        "w": torch.tensor([3.0, 0.5]),
    }
    argument = Argument(None, ("x",), "float32", (2,), False)
    loss = wrapped(argument, sample_weight="w", factor=0.5).training_step(batch, 0)
    assert float(loss.detach()) == 0.5 * (3.0 * 4.0 + 0.5 * 4.0) / 2
    assert float(wrapped(argument).training_step(batch, 0).detach()) == 4.0


def test_columns_of_one_argument_are_joined_in_the_model_dtype() -> None:
    batch = {
        "a": torch.tensor([1, 0]),
        "b": torch.tensor([2.0, 1.0], dtype=torch.float64),
        "y": torch.tensor([3, 1]),
    }
    joined = Argument(None, ("a", "b"), "float32", None, True)
    assert float(wrapped(joined).training_step(batch, 0).detach()) == 0.0


def test_batch_without_a_needed_column_raises() -> None:
    argument = Argument(None, ("x",), "float32", None, False)
    with pytest.raises(InvalidArgumentError, match="A batch has 'z', and not 'x', 'y', which feat"):
        wrapped(argument).training_step({"z": torch.ones(1)}, 0)
    with pytest.raises(InvalidArgumentError, match="data_module gives a tuple as a batch"):
        wrapped(argument).validation_step((torch.ones(1),), 0)


def test_lightning_package_follows_the_given_objects() -> None:
    import pytorch_lightning

    assert package_name([None, pytorch_lightning.Callback()]) == "pytorch_lightning"
    from lightning import LightningDataModule

    assert package_name([LightningDataModule]) == "lightning.pytorch"


def test_batches_for_lightning_get_the_dtypes_of_the_model() -> None:
    function = RowFunction(
        function=dict, fields=[("kept", np.float64, None, False), ("text", str, None, False)]
    )
    wanted = {"x": torch.float32, "n": torch.int64, "kind": torch.int64, "": torch.float32}
    given = {
        "x": torch.ones(2, dtype=torch.float64),
        "n": torch.ones(2, dtype=torch.int32),
        "kind": torch.ones(2, dtype=torch.float64),
        "text": ["a", "b"],
    }
    made = {
        **given,
        "n": torch.ones(2, dtype=torch.uint8),  # the function's own choice
        "half": torch.ones(2, dtype=torch.float16),
        "new": torch.ones(2, dtype=torch.float64),
        "kept": torch.ones(2, dtype=torch.float64),
    }
    found = function.cast(made, given, wanted)
    assert found["text"] == ["a", "b"]
    assert {n: v.dtype for n, v in found.items() if n != "text"} == {
        "x": torch.float32,
        "n": torch.uint8,
        "kind": torch.int64,
        "half": torch.float16,
        "new": torch.float32,
        "kept": torch.float64,
    }
    assert function.cast({"n": given["n"]}, given, wanted)["n"].dtype == torch.int64
    for name, value in (("kind", 0.5), ("kind", torch.nan), ("x", 1e300), ("new", 1e300)):
        with pytest.raises(
            InvalidArgumentError, match=f"returned {name!r} with numbers that (float|int)"
        ):
            function.cast({name: torch.full((2,), value, dtype=torch.float64)}, given, wanted)
    assert function.cast({"x": given["x"] * torch.inf}, given, wanted)["x"].isinf().all()
