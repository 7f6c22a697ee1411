"""Every loss of torch.nn, and the forms in which users give losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from tests.corpus.case import (
    ROWS,
    TABLE,
    Case,
    Data,
    adam,
    binary,
    classes,
    floats,
    labelled,
    mlp,
    positive,
    rows,
    target,
    whole,
)

CLASSES, BINARY, SEVERAL = labelled(4), binary(4), rows(4, outputs=3)
POSITIVE = Data({"x": floats(4)}, {"y": positive()})
SIGNS = Data({"x": floats(4)}, {"y": (2 * classes(floats(4), 2) - 1).astype(np.float32)})
TAGS = Data({"x": floats(4)}, {"t": (floats(3, seed=3) > 0).astype(np.float32)})
SHARES = Data(
    {"x": floats(4)},
    {"p": np.exp(floats(3, seed=4)) / np.exp(floats(3, seed=4)).sum(1, keepdims=True)},
)
SETS = Data({"x": floats(4)}, {"t": np.tile(np.array([0, 2, -1]), (ROWS, 1))})
IGNORED = Data({"x": floats(4)}, {"c": np.where(whole(4) == 0, -100, classes(floats(4), 3))})
PIXELS = Data({"x": floats(2, 4, 4)}, {"c": whole(3, 4, 4)})
WORDS = Data({"ids": whole(20, 6)}, {"next": whole(20, 6, seed=5)})
DDP_SUM = "DistributedDataParallel averages a sum over ranks"
DDP_WEIGHTS = "DistributedDataParallel averages the means of ranks without their different weights"
WEIGHTED = "gradients are divided by the sum of weights after the backward pass"


def number(name: str, **options: Any) -> Case:
    """A loss of one number per row."""
    return Case(name, mlp, TABLE, lambda: getattr(nn, name)(**options))


def own_mse(output: Tensor, label: Tensor) -> Tensor:
    return ((output - label) ** 2).mean()


def quantiles(output: Tensor, label: Tensor) -> Tensor:
    error = label.reshape(-1, 1) - output
    levels = torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def focal(output: Tensor, label: Tensor) -> Tensor:
    each = F.cross_entropy(output, label, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def dice(output: Tensor, label: Tensor) -> Tensor:
    share = torch.sigmoid(output)
    return 1 - (2 * (share * label).sum() + 1) / (share.sum() + label.sum() + 1)


def weighted(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    weight = label.abs() + 0.1
    return (weight * (output - label) ** 2).sum() / weight.sum(), weight.sum()


class Uncertain(nn.Module):
    """Loss with a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(()))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return F.mse_loss(output, label) * torch.exp(-self.logarithm) + self.logarithm


class Centers(nn.Module):
    """Loss with trained centers of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 3))

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(output, label) + 0.1 * (output - self.centers[label]).square().mean()


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def gaussian(output: Tensor, label: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output[:, 0], label.reshape(-1), output[:, 1].exp())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.a(hidden), self.b(hidden)


class Twins(nn.Module):
    """Embeddings of two or three rows by one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 3)

    def forward(self, *rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.body(x) for x in rows)


class Pairs(Twins):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.body(a), self.body(b)


class Triples(Twins):
    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return self.body(a), self.body(p), self.body(n)


TWO = Data({"a": floats(4), "b": floats(4, seed=1)}, {"y": SIGNS.labels["y"]})
THREE = Data({"a": floats(4), "p": floats(4, seed=1), "n": floats(4, seed=2)})


def step_of(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a step that compares the outputs of pairs or triples."""

    def train_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
        del ctx
        names = [n for n in batch if n != "y"]
        outputs = model(*[batch[n] for n in names])
        return loss(*outputs, *([batch["y"]] if "y" in batch else []))

    return train_step


def contrastive(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    a, b = model(batch["a"], batch["b"])
    scores = F.normalize(a) @ F.normalize(b).T / 0.5
    return F.cross_entropy(scores, torch.arange(len(a)))


class Letters(nn.Module):
    """Scores of 5 letters at 6 places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.embedding(ids))


def ctc(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    scores = model(batch["ids"]).log_softmax(-1).transpose(0, 1)
    n = len(batch["ids"])
    return F.ctc_loss(scores, batch["letters"], torch.full((n,), 6), torch.full((n,), 2))


class Words(nn.Module):
    """Scores of the next word at each place, with the classes first, as cross-entropy expects them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.embedding(ids)).transpose(1, 2)


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.last = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10])

    def forward(self, x: Tensor) -> Tensor:
        return self.last.log_prob(self.body(x))


CASES = [
    *(number(n) for n in ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")),
    Case("MSELoss of vectors", lambda: mlp(4, 3), SEVERAL),
    Case(
        "MSELoss sum",
        mlp,
        TABLE,
        lambda: nn.MSELoss(reduction="sum"),
        no_ddp=DDP_SUM,
        optimizer=adam,
    ),
    Case("CrossEntropyLoss", lambda: mlp(4, 3), CLASSES, nn.CrossEntropyLoss, resumes=True),
    Case(
        "CrossEntropyLoss smoothed",
        lambda: mlp(4, 3),
        CLASSES,
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    ),
    Case(
        "CrossEntropyLoss weighted",
        lambda: mlp(4, 3),
        CLASSES,
        lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5])),
        tolerance=1e-5,
        because=WEIGHTED,
        no_ddp=DDP_WEIGHTS,
    ),
    Case(
        "CrossEntropyLoss with ignored rows",
        lambda: mlp(4, 3),
        IGNORED,
        nn.CrossEntropyLoss,
        tolerance=1e-5,
        because=WEIGHTED,
        no_ddp=DDP_WEIGHTS,
    ),
    Case("CrossEntropyLoss of shares", lambda: mlp(4, 3), SHARES, nn.CrossEntropyLoss),
    Case(
        "CrossEntropyLoss of pixels",
        lambda: nn.Conv2d(2, 3, 3, padding=1),
        PIXELS,
        nn.CrossEntropyLoss,
    ),
    Case("CrossEntropyLoss of words", Words, WORDS, nn.CrossEntropyLoss),
    Case("NLLLoss", lambda: nn.Sequential(mlp(4, 3), nn.LogSoftmax(1)), CLASSES, nn.NLLLoss),
    Case("BCELoss", lambda: nn.Sequential(mlp(), nn.Sigmoid()), BINARY, nn.BCELoss),
    Case("BCEWithLogitsLoss", mlp, BINARY, nn.BCEWithLogitsLoss),
    Case(
        "BCEWithLogitsLoss of tags",
        lambda: mlp(4, 3),
        TAGS,
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])),
    ),
    Case(
        "KLDivLoss",
        lambda: nn.Sequential(mlp(4, 3), nn.LogSoftmax(1)),
        SHARES,
        lambda: nn.KLDivLoss(reduction="batchmean"),
    ),
    Case("PoissonNLLLoss", mlp, POSITIVE, nn.PoissonNLLLoss),
    Case("GaussianNLLLoss", Gaussian, TABLE, lambda: gaussian),
    Case("HingeEmbeddingLoss", mlp, SIGNS, nn.HingeEmbeddingLoss),
    Case("SoftMarginLoss", mlp, SIGNS, nn.SoftMarginLoss),
    Case("MultiMarginLoss", lambda: mlp(4, 3), CLASSES, nn.MultiMarginLoss),
    Case("MultiLabelMarginLoss", lambda: mlp(4, 3), SETS, nn.MultiLabelMarginLoss),
    Case("MultiLabelSoftMarginLoss", lambda: mlp(4, 3), TAGS, nn.MultiLabelSoftMarginLoss),
    Case(
        "AdaptiveLogSoftmaxWithLoss", Adaptive, Data({"x": floats(4)}, {"c": whole(20)}), nn.NLLLoss
    ),
    Case("CosineEmbeddingLoss", Pairs, TWO, None, step=step_of(nn.CosineEmbeddingLoss())),
    Case(
        "MarginRankingLoss",
        lambda: nn.Sequential(mlp()),
        SIGNS,
        lambda: lambda o, y: F.margin_ranking_loss(o, torch.zeros_like(o), y),
    ),
    Case("TripletMarginLoss", Triples, THREE, None, step=step_of(nn.TripletMarginLoss())),
    Case(
        "TripletMarginWithDistanceLoss",
        Triples,
        THREE,
        None,
        step=step_of(
            nn.TripletMarginWithDistanceLoss(
                distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
            )
        ),
    ),
    Case(
        "CTCLoss",
        Letters,
        Data({"ids": whole(20, 6)}, {"letters": whole(5, 2, begin=1)}),
        None,
        step=ctc,
    ),
    Case(
        "contrastive",
        Pairs,
        Data({"a": floats(4), "b": floats(4, seed=1)}),
        None,
        step=contrastive,
        apart="compares the rows of a batch",
    ),
    Case("F.mse_loss", mlp, TABLE, lambda: F.mse_loss),
    Case("F.cross_entropy", lambda: mlp(4, 3), CLASSES, lambda: F.cross_entropy),
    Case("a name", mlp, TABLE, lambda: F.huber_loss, options={"loss": "huber"}),
    Case(
        "a partial",
        lambda: mlp(4, 3),
        CLASSES,
        lambda: functools.partial(F.cross_entropy, label_smoothing=0.1),
    ),
    Case("own function", mlp, TABLE, lambda: own_mse),
    Case("quantiles", lambda: mlp(4, 3), TABLE, lambda: quantiles),
    Case("focal", lambda: mlp(4, 3), CLASSES, lambda: focal),
    Case("dice", mlp, BINARY, lambda: dice, apart="a ratio of sums over the batch"),
    Case(
        "mean and weight",
        mlp,
        TABLE,
        lambda: weighted,
        tolerance=1e-5,
        because=WEIGHTED,
        no_ddp=DDP_WEIGHTS,
    ),
    Case(
        "trained weight",
        mlp,
        TABLE,
        Uncertain,
        no_ddp="DistributedDataParallel does not average the gradients of a loss",
    ),
    Case(
        "trained centers",
        lambda: mlp(4, 3),
        CLASSES,
        Centers,
        no_ddp="DistributedDataParallel does not average the gradients of a loss",
    ),
    Case(
        "two labels",
        Heads,
        Data({"x": floats(4)}, {"y": target(floats(4)), "c": classes(floats(4), 3)}),
        lambda: [nn.MSELoss(), nn.CrossEntropyLoss()],
        tolerance=1e-5,
        because="the losses of labels are weighted apart",
    ),
    Case(
        "complex MSE",
        lambda: mlp(4, 2),
        rows(4, outputs=2),
        lambda: lambda o, y: torch.view_as_complex(o - y).abs().square().mean(),
    ),
]
