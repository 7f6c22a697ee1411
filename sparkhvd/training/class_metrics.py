"""Metrics of classes by name: F1 and the area under the ROC curve, exact over all rows of an epoch.

Neither is a mean over rows, so each rank keeps a state and the states are merged once per pass. F1 keeps three counts per class. The area
keeps the score and the class of every row: 5 bytes (9 of a float64 model) on the rank that saw it, and once more while ranks merge.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.data.columns import heads
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metric_states import MetricState

__all__ = ["CLASS_METRICS", "F1", "Auc", "classes_of", "positives_of"]

# Scores and classes of rows.
Rows: TypeAlias = tuple[Tensor, Tensor]

# Batches that are joined into one tensor: each has its own cost.
_JOINED = 256
# Scores per rank from which the ranks choose where to divide the scores of all.
_SAMPLES = 256


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
    """Count rows by class: rightly predicted, predicted, labelled. Of two classes the second counts; labels below 0 do not."""
    classes = classes_of(output, label, link)
    if classes is None:
        _check(name, output.numel() == label.numel(), output, label)
        predicted, actual = (heads.rows(part) for part in positives_of(output, label, link))
        parts = (predicted & actual, predicted, actual)
        return torch.stack([part.sum(dim=0) for part in parts])
    predicted, actual = (part.reshape(-1).long() for part in classes)
    width = output.shape[1]
    _check(name, len(predicted) == len(actual), output, label)
    is_counted = actual >= 0
    predicted, actual = predicted[is_counted], actual[is_counted]
    _check(name, not len(actual) or int(actual.max()) < width, output, label)
    parts = (actual[actual == predicted], predicted, actual)
    counts = torch.stack([torch.bincount(part, minlength=width) for part in parts])
    return counts[:, 1:] if width == 2 else counts


def _check(name: str, fits: bool, output: Tensor, label: Tensor) -> None:
    if not fits:
        raise InvalidArgumentError(
            f"metric {name!r} compares an output of shape {tuple(output.shape)} with a label of shape {tuple(label.shape)}, or with a "
            "class that the output does not have. Give one score per class, or one number per label."
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

        Each rank gets the rows of all whose scores lie between two limits, so that none holds more than its part, unless many
        scores are equal.
        """
        scores, classes = self._rows()
        self.pieces, self.batches = [], []
        order = scores.argsort()
        scores, classes = scores[order], classes[order]
        name = f"metric.{self.name}"
        samples = scores[
            torch.linspace(
                0, len(scores) - 1, min(len(scores), _SAMPLES), dtype=torch.float64
            ).long()
        ]
        facts = hvd.allgather_object((samples, bool(scores.isnan().any())), name=f"{name}.samples")
        sampled = torch.cat([part.double() for part, _ in facts]).sort().values
        if any(has_nan for _, has_nan in facts) or not len(sampled):
            self.sums = torch.full((3,), math.nan, dtype=torch.float64)
            return
        dtypes = [part.dtype for part, _ in facts if len(part)]
        places = torch.arange(1, hvd.size()) * len(sampled) // hvd.size()
        ends = torch.searchsorted(scores.double(), sampled[places]).tolist()
        splits = [b - a for a, b in itertools.pairwise([0, *ends, len(scores)])]
        dtype = functools.reduce(torch.promote_types, dtypes)
        scores, _ = hvd.alltoall(scores.to(dtype), splits, name=f"{name}.scores")
        classes, _ = hvd.alltoall(classes, splits, name=f"{name}.classes")
        parts = hvd.allgather(_ranked(scores, classes)[None], name=f"{name}.sums")
        self.sums = parts.sum(dim=0)
        # Every positive row of a part is ranked above the negative rows of all parts before it.
        self.sums[0] += (parts[:, 1] * (parts[:, 2].cumsum(0) - parts[:, 2])).sum()

    def values(self) -> dict[str, float]:
        """Return the value by name."""
        rightly, positive, negative = (
            _ranked(*self._rows()) if self.sums is None else self.sums
        ).tolist()
        pairs = positive * negative
        return {self.name: rightly / pairs if pairs else math.nan}

    def _rows(self) -> Rows:
        """Return the scores and classes of this rank's rows, on the CPU; without those that are ignored."""
        rows = [*self.pieces, *self.batches]
        if not rows:
            return torch.empty(0), torch.empty(0, dtype=torch.int8)
        scores, classes = (part.cpu() for part in _joined(rows))
        return scores[classes >= 0], classes[classes >= 0]


def _joined(rows: list[Rows]) -> Rows:
    scores, classes = zip(*rows, strict=True)
    return torch.cat(scores), torch.cat(classes)


def _scores(name: str, output: Tensor, label: Tensor, link: str) -> Rows:
    """Return a score per row that ranks it, and its class: 1, 0, or below 0 if it is ignored."""
    classes = classes_of(output, label, link)
    if classes is not None and output.ndim == 2 and output.shape[1] == 2:
        return output[:, 1] - output[:, 0], classes[1].reshape(-1).clamp(-1, 1).to(torch.int8)
    if output.numel() != len(output) or output.numel() != label.numel():
        raise InvalidArgumentError(
            f"metric {name!r} is of two classes, and gets an output of shape {tuple(output.shape)} and a label of shape "
            f"{tuple(label.shape)}. Give one score per row, or two; for more classes metrics of torchmetrics."
        )
    return output.reshape(-1), (label.reshape(-1) > 0.5).to(torch.int8)


def _ranked(scores: Tensor, classes: Tensor) -> Tensor:
    """Count pairs that are ranked rightly, positive rows and negative rows."""
    scores, order = scores.sort()
    _, group, sizes = torch.unique_consecutive(scores, return_inverse=True, return_counts=True)
    positive = torch.zeros(len(sizes), dtype=torch.float64)
    positive.index_add_(0, group, classes[order].double())
    negative = sizes - positive
    below = negative.cumsum(0) - negative
    rightly = (positive * (below + negative / 2)).sum()
    rightly = torch.full((), math.nan).double() if scores.isnan().any() else rightly
    return torch.stack([rightly, positive.sum(), negative.sum()])


CLASS_METRICS: Mapping[str, type[F1] | type[Auc]] = {"f1": F1, "auc": Auc}
