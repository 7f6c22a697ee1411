from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sparkhvd.data.columns import labels
from sparkhvd.estimator.params.converters import LOSSES

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("loss", "link"),
    [
        (nn.CrossEntropyLoss(), "softmax"),
        (F.cross_entropy, "softmax"),
        (nn.BCEWithLogitsLoss(), "sigmoid"),
        (F.binary_cross_entropy_with_logits, "sigmoid"),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), "softmax"),
        (nn.NLLLoss(), "softmax"),
        (nn.MSELoss(), "value"),
        (nn.HuberLoss(), "value"),
        (F.smooth_l1_loss, "value"),
        (LOSSES["mse"](), "value"),
        (LOSSES["mae"](), "value"),
        (nn.BCELoss(), "identity"),
        (nn.KLDivLoss(), "identity"),
        (nn.PoissonNLLLoss(), "identity"),
        (None, "identity"),
        (lambda output, label: output.sum(), "identity"),
    ],
)
def test_loss_determines_the_link_of_outputs(loss: Any, link: str) -> None:
    assert labels.link_of(loss) == link


def test_predicted_values_of_a_regression_are_not_rounded() -> None:
    output = torch.tensor([[0.25], [-1.75]], dtype=torch.float64)
    assert labels.prediction("identity", output).tolist() == [0.25, -1.75]
    assert labels.prediction("identity", output[:, 0]).tolist() == [0.25, -1.75]


def test_single_logit_gives_probabilities_of_two_classes() -> None:
    output = torch.tensor([0.0, 2.0, -2.0])
    assert labels.prediction("sigmoid", output).tolist() == [False, True, False]
    probability = labels.probability("sigmoid", output)
    assert probability is not None
    torch.testing.assert_close(probability.sum(1), torch.ones(3))
    torch.testing.assert_close(probability[:, 1], torch.sigmoid(output))
    assert labels.raw("sigmoid", output)[1].tolist() == [-2.0, 2.0]


def test_raw_second_logit_orders_rows_like_its_probability() -> None:
    output = torch.tensor([[4.0, 5.0], [0.0, 3.0], [1.0, -1.0]])
    raw, probability = labels.raw("softmax", output), labels.probability("softmax", output)
    assert probability is not None
    assert raw[:, 1].argsort().tolist() == probability[:, 1].argsort().tolist() == [2, 0, 1]
    torch.testing.assert_close(torch.softmax(raw, 1), probability)


def test_prediction_of_several_outputs_is_the_largest_index() -> None:
    output = torch.tensor([[1.0, 3.0, 2.0]])
    for link in labels.LINKS:
        assert labels.prediction(link, output).tolist() == [1]
    assert labels.probability("identity", output) is None
    assert labels.raw("softmax", output).tolist() == [[1.0, 3.0, 2.0]]


def test_probability_output_gives_probabilities_of_all_classes() -> None:
    one, several = torch.tensor([[0.25], [0.75]]), torch.tensor([[0.25, 0.125, 0.625]])
    assert labels.prediction("probability", one).tolist() == [False, True]
    assert labels.prediction("probability", several).tolist() == [2]
    both = [[0.75, 0.25], [0.25, 0.75]]
    for found in (labels.probability("probability", one), labels.raw("probability", one)):
        assert found is not None
        assert found.tolist() == both
    assert labels.raw("probability", several).tolist() == several.tolist()
    assert labels.num_classes("probability", 1) == 2
    assert labels.known_kinds("probability", 3) == ("raw", "probability", "prediction")
