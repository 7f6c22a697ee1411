"""Metrics of classes by name: F1 and the area under the ROC curve, exact over all rows of an epoch.

Neither is a mean over rows, so each rank keeps a state and the states are merged once per pass. F1 keeps three counts per class. The area
keeps the score and the class of every row: 5 bytes (9 of a float64 model) on the rank that saw it, and 17 more while the ranks merge.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.data.columns import heads
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metric_states import MetricState

__all__ = ["CLASS_METRICS", "F1", "Auc", "ClassMetric", "classes_of", "positives_of"]

Array = npt.NDArray[Any]
# Scores and classes of rows.
Rows: TypeAlias = tuple[Tensor, Tensor]

# Batches that are joined into one tensor: each has its own cost.
_JOINED = 256
# Scores per rank and class from which the ranks choose where to divide the scores of all.
_SAMPLES = 256
# Scores that are looked up at once.
_BLOCK = 1 << 20
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


@dataclass
class F1:
    """F1 of the positive class; of more than two classes, or of several labels per row, the mean over those that occur.

    It is 0, with a warning, where no class occurs: neither a label nor a prediction is positive.

    Attributes:
        name: its key in the history.
        label: index of the output and label that it compares.
        link: relation of outputs and probabilities.
        counts: (3, classes) of rows: rightly predicted, predicted, labelled.
        num_batches: that were added.
    """

    name: str
    label: int
    link: str
    counts: Tensor | None = None
    num_batches: int = 0
    kind = "f1"

    def fresh(self, device: torch.device | None = None) -> F1:
        """Make the metric with an empty state; `device` follows the batches."""
        del device
        return F1(self.name, self.label, self.link)

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch."""
        added = _counts(self.name, output, label, self.link)
        self.counts = added if self.counts is None else self.counts + added
        self.num_batches += 1

    def state_dict(self) -> list[MetricState]:
        """Return this rank's state, for a checkpoint."""
        values = {} if self.counts is None else {"counts": self.counts.cpu()}
        return [{"count": self.num_batches, "values": dict(values)}]

    def load_state_dict(self, state: list[MetricState]) -> None:
        """Continue from the state of `state_dict`."""
        self.num_batches = state[0]["count"]
        counts = state[0]["values"].get("counts")
        self.counts = counts if isinstance(counts, Tensor) else None

    def combine(self) -> None:
        """Add up the counts of all ranks; every rank must call it."""
        states = hvd.allgather_object(self.state_dict(), name=f"metric.{self.name}")
        counts = [s[0]["values"]["counts"] for s in states if s[0]["count"]]
        self.counts = sum(counts) if counts else None

    def values(self) -> dict[str, float]:
        """Return the value by name; NaN without rows."""
        if self.counts is None:
            return {self.name: math.nan}
        hits, predicted, labelled = self.counts.double()
        occurs = predicted + labelled > 0
        if not occurs.any():
            warnings.warn(
                f"metric {self.name!r} is 0, because no label and no prediction is positive.",
                stacklevel=2,
            )
            return {self.name: 0.0}
        return {self.name: float((2 * hits / (predicted + labelled))[occurs].mean())}


def classes_of(output: Tensor, label: Tensor, link: str) -> tuple[Tensor, Tensor] | None:
    """Return the predicted and the labelled class of each row; None if an output is a number, or has several labels."""
    if output.ndim > 1 and output.shape[1] > 1 and label.ndim < output.ndim:
        return output.argmax(dim=1), label
    if link == heads.SOFTMAX and output.ndim > 1 and output.shape == label.shape:
        # Probabilities of classes: one-hot, smoothed or of another model.
        return output.argmax(dim=1), label.argmax(dim=1)
    return None


def positives_of(output: Tensor, label: Tensor, link: str) -> tuple[Tensor, Tensor]:
    """Return whether each number predicts, and whether it is labelled, the positive class."""
    return output > (0.0 if link == heads.SIGMOID else 0.5), label.reshape(output.shape) > 0.5


def _counts(name: str, output: Tensor, label: Tensor, link: str) -> Tensor:
    """Count rows by class: rightly predicted, predicted, labelled; of two classes the second alone.

    A GPU is not waited for.
    """
    classes = classes_of(output, label, link)
    if classes is None:
        _check(name, output.numel() == label.numel(), output, label)
        predicted, actual = (heads.rows(part) for part in positives_of(output, label, link))
        parts = (predicted & actual, predicted, actual)
        return torch.stack([part.sum(dim=0) for part in parts])
    predicted, actual = (part.reshape(-1).long() for part in classes)
    width = output.shape[1]
    _check(name, len(predicted) == len(actual), output, label)
    is_counted = (actual >= 0) & (actual < width)
    counts = torch.zeros(3, width, dtype=torch.int64, device=output.device)
    for count, classes_of_rows, rows in zip(
        counts,
        (predicted, predicted, actual.clamp(0, width - 1)),
        (is_counted & (predicted == actual), is_counted, is_counted),
        strict=True,
    ):
        count.index_add_(0, classes_of_rows, rows.long())
    return counts[:, 1:] if width == 2 else counts


def _check(name: str, fits: bool, output: Tensor, label: Tensor) -> None:
    if not fits:
        raise InvalidArgumentError(
            f"metric {name!r} compares an output of shape {tuple(output.shape)} with a label of shape {tuple(label.shape)}. Give one "
            "score per class, or one number per label."
        )


@dataclass
class Auc:
    """Area under the ROC curve of two classes; scores that are equal count one half. NaN if one class does not occur.

    Attributes:
        name: its key in the history.
        label: index of the output and label that it compares.
        link: relation of outputs and probabilities.
        pieces: scores and classes of this rank's rows, several batches each.
        batches: those that are in no piece yet.
        sums: after `combine`: pairs of rows that are ranked rightly, positive rows, negative rows, of all ranks.
    """

    name: str
    label: int
    link: str
    pieces: list[Rows] = field(default_factory=list)
    batches: list[Rows] = field(default_factory=list)
    sums: Tensor | None = None
    kind = "auc"

    def fresh(self, device: torch.device | None = None) -> Auc:
        """Make the metric with an empty state; `device` follows the batches."""
        del device
        return Auc(self.name, self.label, self.link)

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch."""
        self.batches.append(_scores(self.name, output, label, self.link))
        if len(self.batches) == _JOINED:
            self.pieces.append(_joined(self.batches))
            self.batches = []

    def state_dict(self) -> list[MetricState]:
        """Return this rank's state, for a checkpoint."""
        scores, classes = self._rows()
        return [{"count": len(scores), "values": {"scores": scores, "classes": classes}}]

    def load_state_dict(self, state: list[MetricState]) -> None:
        """Continue from the state of `state_dict`."""
        scores, classes = (state[0]["values"][name] for name in ("scores", "classes"))
        assert isinstance(scores, Tensor)
        assert isinstance(classes, Tensor)
        self.pieces, self.batches = [(scores, classes)], []

    def combine(self) -> None:
        """Rank the rows of all ranks; every rank must call it.

        Each rank gets the scores of all ranks between two limits, so that none holds more than its part, unless most are equal.
        """
        parts = self._by_class()
        self.pieces, self.batches = [], []
        name = f"metric.{self.name}"
        samples = [
            part[np.linspace(0, len(part) - 1, min(len(part), _SAMPLES)).astype(int)]
            for part in parts
        ]
        facts = hvd.allgather_object(samples, name=f"{name}.samples")
        known = np.sort(np.concatenate(list(itertools.chain.from_iterable(facts))))
        if not len(known) or np.isnan(known[-1]):  # a sample has the last score, and NaN comes last
            self.sums = torch.full((3,), math.nan, dtype=torch.float64)
            return
        limits = known[np.arange(1, hvd.size()) * len(known) // hvd.size()]
        mine = []
        for part, kind in zip(parts, ("positive", "negative"), strict=True):
            ends = [0, *np.searchsorted(part, limits).tolist(), len(part)]
            sent = torch.from_numpy(part.astype(known.dtype, copy=False))
            splits = [end - start for start, end in itertools.pairwise(ends)]
            received, _ = hvd.alltoall(sent, splits, name=f"{name}.{kind}")
            mine.append(np.sort(received.numpy()))
        sums = hvd.allgather(_ranked(*mine)[None], name=f"{name}.sums")
        self.sums = sums.sum(dim=0)
        # Every positive row of a rank is above the negative rows of all ranks before it.
        self.sums[0] += (sums[:, 1] * (sums[:, 2].cumsum(0) - sums[:, 2])).sum()

    def values(self) -> dict[str, float]:
        """Return the value by name."""
        sums = _ranked(*self._by_class()) if self.sums is None else self.sums
        rightly, positive, negative = sums.tolist()
        pairs = positive * negative
        return {self.name: rightly / pairs if pairs else math.nan}

    def _by_class(self) -> tuple[Array, Array]:
        """Return the scores of this rank's positive and of its negative rows, ascending."""
        scores, classes = self._rows()
        positive, negative = (scores[classes == number].numpy() for number in (1, 0))
        positive.sort()
        negative.sort()
        return positive, negative

    def _rows(self) -> Rows:
        """Return the scores and classes of this rank's rows, on the CPU."""
        rows = [*self.pieces, *self.batches]
        if not rows:
            return torch.empty(0), torch.empty(0, dtype=torch.int8)
        scores, classes = _joined(rows)
        return scores.cpu(), classes.cpu()


def _joined(rows: list[Rows]) -> Rows:
    scores, classes = zip(*rows, strict=True)
    return torch.cat(scores), torch.cat(classes)


def _scores(name: str, output: Tensor, label: Tensor, link: str) -> Rows:
    """Return a score per row that ranks it, and its class: 1, 0, or below 0 if it is ignored."""
    classes = classes_of(output, label, link)
    if classes is not None and output.ndim == 2 and output.shape[1] == 2:
        actual = classes[1].reshape(-1)
        is_counted = (actual == 0) | (actual == 1)
        return output[:, 1] - output[:, 0], actual.where(is_counted, -1).to(torch.int8)
    if output.numel() != len(output) or output.numel() != label.numel():
        raise InvalidArgumentError(
            f"metric {name!r} is of two classes, and gets an output of shape {tuple(output.shape)} and a label of shape "
            f"{tuple(label.shape)}. Give one score per row, or two; for more classes metrics of torchmetrics."
        )
    return output.reshape(-1), (label.reshape(-1) > 0.5).to(torch.int8)


def _ranked(positive: Array, negative: Array) -> Tensor:
    """Count pairs of a positive and a negative row that ascending scores rank rightly, and the rows of each class."""
    twice = 0
    for start in range(0, len(positive), _BLOCK):
        block = positive[start : start + _BLOCK]
        # A pair of equal scores counts one half.
        twice += sum(int(np.searchsorted(negative, block, side).sum()) for side in _SIDES)
    has_nan = any(np.isnan(part[-1:]).any() for part in (positive, negative))
    rightly = math.nan if has_nan else twice / 2
    return torch.tensor([rightly, len(positive), len(negative)], dtype=torch.float64)


ClassMetric: TypeAlias = F1 | Auc
CLASS_METRICS: Mapping[str, type[ClassMetric]] = {"f1": F1, "auc": Auc}
