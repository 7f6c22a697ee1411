"""Losses and metrics that compare all pairs of rows, found by made-up rows."""

from __future__ import annotations

import functools
import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.loss_functions import resolve_losses
from sparkhvd.training.metrics import resolve_metrics
from sparkhvd.training.row_pairs import check_ends, takes_only_integers, unpaired
from tests.harness.later import Later

pytestmark = pytest.mark.pure

torchmetrics = Later("torchmetrics")

COLUMN = torch.zeros(2, 1)
FLAT = torch.zeros(2)
PAIR = torch.zeros(2, 2)
SCORES, CLASS = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
PIXELS, MASK = torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)


def said(
    loss: Any, output: Tensor = COLUMN, label: Tensor = COLUMN, *, per_row: bool = False
) -> str:
    losses, _ = resolve_losses(loss, 1, per_row=per_row)
    return unpaired(losses, (), [output], [label])


def of_metric(function: Any, output: Tensor = COLUMN, label: Tensor = COLUMN) -> str:
    return unpaired((), resolve_metrics({"m": function}, ["y"], ["value"]), [output], [label])


def squeezed(output: Tensor, label: Tensor) -> Tensor:
    return ((output.squeeze() - label) ** 2).mean()


def per_row_squeezed(output: Tensor, label: Tensor, reduction: str) -> Tensor:
    squares = (output.squeeze() - label) ** 2
    return squares if reduction == "none" else squares.mean()


class Squeezed(nn.Module):
    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return F.huber_loss(
            output.squeeze(1) - label, torch.zeros(()).expand(len(output), len(output))
        )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.errors = nn.MSELoss(reduction="none")

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        result: Tensor = (self.errors(output[:, 0], label[:, 0]) * label.abs()).mean()
        return result


def test_pairwise_loss_error_shows_shapes_and_the_fix() -> None:
    text = said(squeezed)
    assert text.startswith("loss returns the same number when the labels of a batch are permuted")
    assert "output as (rows, 1) and the label as (rows, 1)" in text
    assert "`output, label = output.squeeze(1), label.squeeze(1)`" in text
    assert "set pairs_rows=False" in text

    # The line that it says.
    def mended(output: Tensor, label: Tensor) -> Tensor:
        output, label = output.squeeze(1), label.squeeze(1)
        return ((output.squeeze() - label) ** 2).mean()

    assert said(mended) == ""


@pytest.mark.parametrize(
    ("loss", "output", "label", "per_row"),
    [
        (Squeezed(), COLUMN, COLUMN, False),
        (lambda o, t: ((o[:, 0] - t).abs() + 1).log().mean(), COLUMN, COLUMN, False),
        (lambda o, t: (((o.squeeze() - t) ** 2).mean(), len(o)), COLUMN, COLUMN, False),
        (per_row_squeezed, COLUMN, COLUMN, True),
        (lambda o, t: ((o.unsqueeze(1) - t) ** 2).mean(), FLAT, FLAT, False),
        (lambda o, t: ((o[:, None] - t) ** 2).mean(), PAIR, PAIR, False),
        # float64, and 16 bits, which the training widens.
        (squeezed, COLUMN.double(), COLUMN.double(), False),
        (squeezed, COLUMN.bfloat16(), COLUMN.bfloat16(), False),
        (lambda o, t: ((o.squeeze() - t) ** 2).mean(), COLUMN, COLUMN.long(), False),
        # Functions of whole batches, for which `pairs_rows=False` exists.
        (lambda o, t: (o.mean() - t.mean()) ** 2, COLUMN, COLUMN, False),
    ],
)
def test_losses_over_all_row_pairs_are_detected(
    loss: Any, output: Tensor, label: Tensor, per_row: bool
) -> None:
    assert said(loss, output, label, per_row=per_row).startswith("loss returns the same number")


@pytest.mark.parametrize(
    ("loss", "output", "label"),
    [
        (lambda o, t: (((o - t).squeeze() ** 2) * (t > 0)).mean(), COLUMN, COLUMN),
        (lambda o, t: (((o - t)[:, 0] ** 2) * (t > 0)).sum() / (t > 0).sum(), COLUMN, COLUMN),
        (
            lambda o, t: (
                torch.arange(1.0, 5)[t][:, None] * F.cross_entropy(o, t, reduction="none")
            ).mean(),
            SCORES,
            CLASS,
        ),
        (lambda o, t: torch.where(t > 0, (o - t).squeeze() ** 2, 0.0).mean(), COLUMN, COLUMN),
        # The mask of one axis hides in a module, and a second term pairs rows.
        (Masked(), COLUMN, COLUMN),
        (
            lambda o, t: ((o.squeeze() - t) ** 2).mean() + 0.1 * F.l1_loss(o, t),
            COLUMN,
            COLUMN,
        ),
    ],
)
def test_broadcasting_weights_and_masks_are_detected(
    loss: Any, output: Tensor, label: Tensor
) -> None:
    text = said(loss, output, label)
    assert re.match(r"loss compares all pairs of rows in the operation '(mul|where|sub)': ", text)
    assert "set pairs_rows=False" in text


def info_nce(output: Tensor, label: Tensor) -> Tensor:
    distances = ((output[:, None] - label) ** 2).sum(-1)
    return F.cross_entropy(-distances, torch.arange(len(output)))


def ranked(output: Tensor, label: Tensor) -> Tensor:
    output, label = output.squeeze(1), label.squeeze(1)
    above = (label[:, None] > label).float() * (label[:, None] - label.float())
    return (above * F.softplus(output - output[:, None])).sum() / above.sum()


def survival(output: Tensor, label: Tensor) -> Tensor:
    risk, time, event = output.squeeze(1), label[:, 0], label[:, 1] > 0
    at_risk = (time[:, None] <= time).float()
    return ((torch.log((at_risk * risk.exp()).sum(1)) - risk) * event).mean()


def alike(output: Tensor, label: Tensor) -> Tensor:
    same = (label.reshape(-1, 1) == label).float()
    logits = output @ output.T
    logits = logits - logits.max(1, keepdim=True).values.detach()
    return -(same * logits.log_softmax(1)).sum(1).mean() / same.sum(1).mean()


def ranked_errors(output: Tensor, label: Tensor) -> Tensor:
    errors = ((output - label) ** 2).squeeze(1)
    return errors.mean() + (errors[:, None] - errors).abs().mean()


@pytest.mark.parametrize(
    ("loss", "output", "label"),
    [
        (info_nce, PAIR, PAIR),
        (
            lambda o, t: F.cross_entropy(-((o - t.squeeze()) ** 2), torch.arange(len(o))),
            COLUMN,
            COLUMN,
        ),
        (ranked, COLUMN, COLUMN),
        (survival, COLUMN, PAIR),
        (alike, SCORES, CLASS),
        (ranked_errors, COLUMN, COLUMN),
        (lambda o, t: (torch.outer(t, t) * torch.outer(o, o)).mean(), FLAT, FLAT),
        (lambda o, t: (o - t).square().mean() + (o.squeeze() + t).mean(), COLUMN, COLUMN),
    ],
)
def test_intended_pairwise_losses_are_not_reported(
    loss: Any, output: Tensor, label: Tensor
) -> None:
    assert said(loss, output, label) == ""


def contrastive(output: Tensor, label: Tensor) -> Tensor:
    alike = (label[:, None] == label[None]).float()
    return (torch.cdist(output, output) * (2 * alike - 1)).mean()


def cox(output: Tensor, label: Tensor) -> Tensor:
    order = label.reshape(-1).argsort(descending=True)
    risk = output.reshape(-1)[order]
    return (risk.logcumsumexp(0) - risk).mean()


def counted(output: Tensor, label: Tensor) -> Any:
    known = (label > 0).float()
    return ((output - label) ** 2 * known).sum() / known.sum(), known.sum()


class Noisy(nn.Module):
    """Draws numbers from each generator in each call."""

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        noise = torch.rand_like(output) + np.random.rand() + random.random()
        return ((output + noise - label) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "output", "label"),
    [
        (nn.MSELoss(), COLUMN, COLUMN),
        (F.mse_loss, COLUMN, COLUMN),
        (lambda o, t: ((o - t) ** 2).mean(), COLUMN, COLUMN),
        (lambda o, t: F.binary_cross_entropy(o, t), COLUMN, COLUMN),
        (lambda o, t: F.binary_cross_entropy_with_logits(o, t), PAIR, PAIR),
        (lambda o, t: (o.exp() - t * o).mean(), COLUMN, COLUMN),
        (lambda o, t: torch.clamp(1 - o * (2 * t - 1), min=0).mean(), COLUMN, COLUMN.long()),
        (lambda o, t: -(o.log() * t).sum(1).mean(), SCORES, SCORES),
        (lambda o, t: F.cross_entropy(o, t), SCORES, CLASS),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), SCORES, CLASS),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), SCORES, CLASS),
        (lambda o, t: -o.log_softmax(1)[torch.arange(len(t)), t].mean(), SCORES, CLASS),
        (lambda o, t: F.cross_entropy(o, t), PIXELS, MASK),
        (contrastive, SCORES, CLASS),
        (cox, COLUMN, COLUMN),
        (counted, COLUMN, COLUMN),
        (Noisy(), COLUMN, COLUMN),
        # Constant, or independent of the labels: the model computes its loss itself.
        (lambda o, t: o.mean(), COLUMN, COLUMN),
        (lambda o, t: torch.ones(()), COLUMN, COLUMN),
        # Functions that fail on made-up numbers are left to the training.
        (lambda o, t: [][0], COLUMN, COLUMN),
        (lambda o, t: {"loss": o.mean()}, COLUMN, COLUMN),
        (lambda o, t: (o - t).mean() / 0.0, COLUMN, COLUMN),
        (lambda o, t: ((o.squeeze() - t) ** 2).mean(), torch.zeros(2, 3000, 3000), COLUMN),
        (lambda o, t: ((o.squeeze() - t) ** 2).mean(), torch.zeros(0, 1), torch.zeros(0, 1)),
    ],
)
def test_losses_over_single_rows_are_not_reported(loss: Any, output: Tensor, label: Tensor) -> None:
    assert said(loss, output, label) == ""


def test_losses_with_sample_weights_are_not_reported() -> None:
    assert said(nn.MSELoss(), per_row=True) == ""
    assert said(lambda o, t, reduction: F.mse_loss(o, t, reduction=reduction), per_row=True) == ""


@pytest.mark.parametrize(
    ("metric", "output", "label", "is_found"),
    [
        (squeezed, COLUMN, COLUMN, True),
        (
            lambda o, t: (o.squeeze() == t).float().mean(),
            COLUMN,
            COLUMN.long(),
            False,
        ),  # never equal
        (lambda o, t: ((o.squeeze() > 0) == (t > 0.5)).float().mean(), COLUMN, COLUMN, True),
        (lambda o, t: ((o > 0) == (t > 0.5)).float().mean(), COLUMN, COLUMN, False),
        (lambda o, t: ((o > 0.5) == t).float().mean(), COLUMN, COLUMN.long(), False),
        (lambda o, t: ((o > 3) == (t > 0)).float().mean(), COLUMN, COLUMN, False),
        (lambda o, t: (o.argmax(1) == t).float().mean(), SCORES, CLASS, False),
        # Right for any shapes: the mean error, and numbers of the labels or outputs alone.
        (lambda o, t: (o - t).mean(), COLUMN, COLUMN, False),
        (lambda o, t: (o.squeeze() - t).mean(), COLUMN, COLUMN, False),
        (lambda o, t: t.mean(), COLUMN, COLUMN, False),
        (lambda o, t: (o - t).mean(), FLAT, FLAT, False),
        (lambda o, t: [][0], COLUMN, COLUMN, False),
    ],
)
def test_metrics_over_all_row_pairs_are_detected(
    metric: Any, output: Tensor, label: Tensor, is_found: bool
) -> None:
    assert bool(of_metric(metric, output, label)) is is_found


def test_custom_torchmetrics_metrics_are_checked_for_row_pairs() -> None:
    class Mean(torchmetrics.Metric):  # type: ignore[misc]
        """The mean of a function."""

        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
            self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, output: Tensor, label: Tensor) -> None:
            self.total += self.function(output, label) * len(label)
            self.rows += len(label)

        def compute(self) -> Any:
            return self.total / self.rows

    text = of_metric(Mean(lambda o, t: ((o[:, None] - t) ** 2).mean()))
    assert text.startswith("metric 'm' returns the same number when the labels")
    assert "output as (rows,) and the label as (rows,)" in text
    for right in (Mean(F.mse_loss), Mean(lambda o, t: [][0]), torchmetrics.MeanSquaredError()):
        assert of_metric(right) == ""
    with pytest.raises(
        InvalidArgumentError,
        match=r"^metric 'm' broadcasts: .* labels of one number per row as \(rows,\)\.",
    ):
        of_metric(Mean(lambda o, t: F.mse_loss(o[:, None], t)))
    own = Mean(lambda o, t: t.mean())
    own.update(torch.ones(3), torch.ones(3))
    assert of_metric(own) == ""
    assert (own.total, own.rows) == (3, 3)


@pytest.mark.parametrize("make", [said, of_metric])
def test_torch_broadcast_warning_raises(make: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^(loss|metric 'm') broadcasts: Using a target size"
    ):
        make(lambda o, t: F.mse_loss(o.squeeze(1), t))


class Centers(nn.Module):
    """A loss with a parameter, a buffer, a counter, a list, and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.scale.grad = torch.full((1,), 7.0)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[float] = []
        self.number = 0

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(label.sum()))
        self.number += 1
        self.train(not self.training)
        with torch.no_grad():
            self.scale.mul_(0.5)
        return (self.scale * (output - label) ** 2).mean()


GLOBAL = Centers()


def by_name(output: Tensor, label: Tensor) -> Tensor:
    CALLS.append(1)
    result: Tensor = GLOBAL(output, label)
    return result


def test_row_pair_check_keeps_states_and_random_generators() -> None:
    own = Centers()
    functions = (own, own.forward, lambda o, t: own(o, t), by_name, functools.partial(own))
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    drawn = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    for function in functions:
        assert said(function) == ""
        assert of_metric(function) == ""
    assert said(Noisy()) == ""
    assert (torch.rand(1), np.random.rand(), random.random()) == drawn
    for loss in (own, GLOBAL):
        assert (float(loss.calls), loss.seen, loss.number, loss.training) == (0.0, [], 0, True)
        assert (loss.scale.item(), loss.scale.grad) == (1.0, torch.full((1,), 7.0))


RANDOM, CALLS = np.random.default_rng(0), []


def noted(output: Tensor) -> Tensor:
    CALLS.append(1)
    return output


def noisy(output: Tensor, label: Tensor) -> Tensor:
    noisy.calls = getattr(noisy, "calls", 0) + 1  # type: ignore[attr-defined]
    return ((noted(output) + float(RANDOM.normal()) / 1000 - label) ** 2).mean()


def test_row_pair_check_keeps_objects_used_by_a_loss() -> None:
    before = RANDOM.bit_generator.state
    assert said(noisy) == ""
    assert (RANDOM.bit_generator.state, CALLS, vars(noisy)) == (before, [], {})


class Annealed:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        self.calls += 1
        return self.calls / 1000 * ((output.squeeze() - label) ** 2).mean()


def test_row_pair_check_calls_the_loss_from_the_same_state() -> None:
    loss = Annealed()
    assert "permuted" in said(loss)
    assert loss.calls == 0


def test_row_pair_check_shows_no_other_warning() -> None:
    def warns(output: Tensor, label: Tensor) -> Tensor:
        warnings.warn("of a function", stacklevel=1)
        return ((output - label) ** 2).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert said(warns) == ""


def test_losses_of_several_labels_are_checked_separately() -> None:
    losses, _ = resolve_losses([F.mse_loss, squeezed], 2, per_row=False)
    metrics = resolve_metrics({"m": squeezed}, ["y", "z"], ["value"] * 2)
    text = unpaired(losses, metrics, [PAIR, COLUMN], [PAIR, COLUMN])
    assert re.findall(r"(loss|metric '\w+') returns the same number", text) == [
        "loss",
        "metric 'z_m'",
    ]


class Focal(nn.Module):
    """A loss of class indices with a state that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        self.calls += 1
        mean = F.cross_entropy(output, label, self.weight, reduction="none")
        result: Tensor = ((1 - (-mean).exp()) ** 2 * mean).mean()
        return result


def one_hot(output: Tensor, label: Tensor) -> Tensor:
    return -(F.one_hot(label, output.shape[1]) * output.log_softmax(1)).sum(1).mean()


def gathered(output: Tensor, label: Tensor) -> Tensor:
    return -output.log_softmax(1).gather(1, label[:, None]).mean() + 0.1 * torch.rand(())


def asserting(output: Tensor, label: Tensor) -> Tensor:
    assert label.dtype == torch.int64
    return output[torch.arange(len(label)), label].mean()


def either(output: Tensor, label: Tensor) -> Tensor:
    if output.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(output, label)
    return F.cross_entropy(output, label)


@pytest.mark.parametrize(
    ("loss", "width", "expected"),
    [
        (Focal(), 4, True),
        (Focal(), 3, False),  # it raises for both, so nothing is known
        (one_hot, 4, True),
        (gathered, 4, True),
        (asserting, 4, True),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), 4, True),
        (either, 4, True),
        (either, 1, False),
        (F.mse_loss, 1, False),
        (squeezed, 1, False),
        (lambda output, label: (output.sum(1) * label).mean(), 4, False),
        (lambda output, label: 1 / 0, 4, False),
        (lambda output, label, scale: output.sum(), 4, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_float_labels_detect_losses_that_take_only_class_indices(
    loss: Any, width: int, expected: bool, dtype: torch.dtype
) -> None:
    if dtype == torch.float64 and isinstance(loss, Focal):
        loss = Focal().double()
    torch.manual_seed(5)
    expected_draw = torch.rand(1)
    torch.manual_seed(5)
    assert takes_only_integers(loss, width, dtype) == expected
    assert torch.rand(1) == expected_draw
    assert not isinstance(loss, Focal) or loss.calls == 0


def table(output: Tensor, label: Tensor) -> Tensor:
    return (output.sum(1) * torch.ones(5)[label]).mean()


@pytest.mark.parametrize(
    ("loss", "range_", "said"),
    [
        (lambda o, y: F.cross_entropy(o, y), (1, 4), "'k' = 4, the largest label"),
        (lambda o, y: F.nll_loss(o.log_softmax(1), y), (-1, 3), "'k' = -1, the smallest label"),
        (one_hot, (0, 4), "'k' = 4, the largest label"),
        (table, (0, 5), "'k' = 5, the largest label"),
        (lambda o, y: F.cross_entropy(o, y), (-100, 3), ""),
        (table, (0, 4), ""),
        (F.cross_entropy, (0, 9), ""),  # `bind_labels` knows it
        (lambda o, y: ((o.argmax(1) - y) ** 2).float().mean(), (-7, 99), ""),
        (lambda o, y: F.cross_entropy(o, y - 1), (1, 9), ""),  # 0 is no class: nothing is known
        (lambda o, y: 1 / 0, (0, 9), ""),
    ],
)
def test_custom_loss_that_fails_on_extreme_labels_raises(
    loss: Any, range_: tuple[int, int], said: str
) -> None:
    def check() -> None:
        check_ends([loss], [SCORES], [CLASS], ["k"], {"k": range_})

    if not said:
        check()
        return
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        check()
    assert "The output has shape (4,) per row. Number the classes from 0" in str(caught.value)
