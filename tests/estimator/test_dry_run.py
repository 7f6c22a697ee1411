"""Trial of the model and the labels on zeros."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.labels import bind_labels
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.request import PairingCheck, try_model
from sparkhvd.training.metrics import resolve_metrics

pytestmark = pytest.mark.pure

X = Column("x", "vector", "float32", (4,), "vector", "float32")
NUMBER = Column("y", "scalar", "float32", (), "double", "float32")
CLASS = Column("y", "scalar", "int64", (), "bigint", "int64")
PAIR = Column("y", "array", "float32", (2,), "array<double>", "float32")


def tried(model: nn.Module, label: Column, loss: Any) -> tuple[int, ...] | None:
    schema = DataSchema((X,), (label,))
    return try_model(model, bind_inputs(model, schema), schema, bind_labels(schema, loss))


@pytest.mark.parametrize(
    ("width", "label", "loss"),
    [
        (1, NUMBER, nn.MSELoss()),
        (2, PAIR, nn.MSELoss()),
        (3, CLASS, nn.CrossEntropyLoss()),
        (1, CLASS, nn.BCEWithLogitsLoss()),
        (3, CLASS, lambda output, label: nn.functional.cross_entropy(output, label)),
    ],
)
def test_labels_that_match_the_model_are_accepted(width: int, label: Column, loss: Any) -> None:
    assert tried(nn.Linear(4, width), label, loss) == (width,)


@pytest.mark.parametrize(
    ("model", "label", "loss", "says"),
    [
        (
            nn.Linear(4, 2),
            NUMBER,
            nn.MSELoss(),
            r"\(2,\), but the model's output has shape \(2, 2\): the loss",
        ),
        (
            nn.Linear(4, 1),
            PAIR,
            nn.L1Loss(),
            r"\(2, 2\), but the model's output has shape \(2, 1\): the loss",
        ),
        (nn.Linear(4, 2), PAIR, nn.NLLLoss(), "class indices"),
        (nn.Linear(4, 1), PAIR, lambda o, t: (o - t).mean(), "would broadcast"),
    ],
)
def test_error_names_labels_that_mismatch_the_output_shape(
    model: nn.Module, label: Column, loss: Any, says: str
) -> None:
    if isinstance(loss, nn.NLLLoss):
        label = Column("y", "array", "int64", (2,), "array<bigint>", "int64")
    with pytest.raises(InvalidArgumentError, match=f"two rows of zeros: Label 'y' has .*{says}"):
        tried(model, label, loss)


class ClassesInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores if self.training else scores.argmax(1)


def test_trial_accepts_and_keeps_a_model_with_other_training_outputs() -> None:
    model = ClassesInEval().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert tried(model, CLASS, nn.CrossEntropyLoss()) == (1,)
    assert torch.rand(1) == expected
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class Named(nn.Module):
    """Returns a dict of two outputs."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.layer(x) for name in self.names}


def test_output_names_in_another_order_than_labels_raise() -> None:
    schema = DataSchema((X,), (NUMBER, replace(NUMBER, name="z")))

    def widths(model: nn.Module) -> tuple[int, ...] | None:
        return try_model(model, bind_inputs(model, schema), schema, None)

    assert widths(Named("y", "z")) == widths(Named("first", "second")) == (1, 1)
    with pytest.raises(InvalidArgumentError, match="returned the outputs 'z', 'y', but label_cols"):
        widths(Named("z", "y"))


def squeezed(output: Tensor, label: Tensor) -> Tensor:
    return ((output.squeeze() - label) ** 2).mean()


@pytest.mark.parametrize("is_asked", [True, False])
def test_trial_calls_loss_and_metrics_once_on_permuted_labels(is_asked: bool) -> None:
    metrics = resolve_metrics([squeezed], ["y"], ["value"])
    pairs = PairingCheck([squeezed], metrics, is_asked=is_asked)
    net, schema = nn.Linear(4, 1), DataSchema((X,), (NUMBER,))
    labels = bind_labels(schema, squeezed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            try_model(net, bind_inputs(net, schema), schema, labels, metrics=metrics, compare=pairs)
    said = [str(w.message) for w in caught]
    assert len(said) == is_asked
    assert all("loss returns" in text and "metric 'squeezed' returns" in text for text in said)
    assert not pairs.is_left


def test_loss_that_broadcasts_raises_before_any_job() -> None:
    def loss(output: Tensor, label: Tensor) -> Tensor:
        return nn.functional.l1_loss(output.squeeze(1), label)

    net, schema = nn.Linear(4, 1), DataSchema((X,), (NUMBER,))
    pairs = PairingCheck([loss], (), is_asked=True)
    with pytest.raises(InvalidArgumentError, match=r"loss broadcasts: .*label.shape"):
        try_model(net, bind_inputs(net, schema), schema, bind_labels(schema, loss), compare=pairs)
