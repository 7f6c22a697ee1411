"""Output columns of a transform, as tensors.

Loaded in every worker, so it imports nothing of pyspark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.features import InputBinding
from sparkhvd.data.columns.schema import Column

__all__ = ["Computation", "Output", "column_tensor"]


@dataclass(frozen=True)
class Output:
    """Output column.

    Attributes:
        name: of the column.
        kind: "output", "prediction", "probability" or "raw".
        label: index of the model's output in the column.
        is_vector: an ML vector; else a double.
        size: elements of the vector, or classes of the prediction; 0: not known, or a value.
    """

    name: str
    kind: str
    label: int
    is_vector: bool
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Computation of output columns from rows, without the model.

    Attributes:
        columns: feature columns with the names and shapes of the training data.
        sources: their indices among the columns of the DataFrame.
        names: names of all columns of the DataFrame.
        inputs: columns of each argument of the model.
        links: per label, the link from outputs to probabilities.
        outputs: columns to add, in order.
        output_fn: the user's probabilities from an output, or None.
        functions: the user's decoders and collate functions.
        thresholds: of the classes, or None.
        precision: the Param: `forward` computes as in validation.
    """

    columns: tuple[Column, ...]
    sources: tuple[int, ...]
    names: tuple[str, ...]
    inputs: InputBinding
    links: tuple[str, ...]
    outputs: tuple[Output, ...]
    output_fn: Callable[[Tensor], Tensor] | None = None
    functions: RowFunctions = field(default_factory=RowFunctions)
    thresholds: Sequence[float] | None = None
    precision: str = "32"


def column_tensor(spec: Computation, column: Output, output: Tensor) -> Tensor:
    """Compute one output column."""
    link = spec.links[column.label]
    if column.kind == "output":
        return heads.rows(output)
    if column.kind == "raw":
        return heads.raw(link, output)
    if column.kind == "probability":
        return _probability(spec, link, output)
    if spec.thresholds is not None:
        return heads.most_likely(_probability(spec, link, output), spec.thresholds)
    if spec.output_fn is not None:
        return heads.prediction(heads.IDENTITY, _probability(spec, link, output))
    return heads.prediction(link, output)


def _probability(spec: Computation, link: str, output: Tensor) -> Tensor:
    if spec.output_fn is not None:
        rows = heads.rows(spec.output_fn(output))
        return heads.both_classes(rows) if link in (heads.SIGMOID, heads.PROBABILITY) else rows
    found = heads.probability(link, output)
    assert found is not None  # checked on the driver
    return found
