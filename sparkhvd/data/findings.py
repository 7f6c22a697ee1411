"""Counts of unusable rows of a column, and the sentences that tell the user about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from sparkhvd.data.columns.schema import Column

__all__ = ["Findings", "problems", "shape_text"]

Array = npt.NDArray[Any]

_COUNTS = ("nulls", "nans", "infinities", "overflows", "inexact", "fractions")


@dataclass
class Findings:
    """Counts of the rows of a column that cannot be used, and of the shapes of all rows.

    Attributes:
        nulls: rows that are null, or hold a null element.
        nans: rows with a NaN.
        infinities: rows with an infinity that stood in the data.
        overflows: rows with a finite number beyond the range of the tensor's type.
        inexact: rows with an integer that the tensor's floating type does not have.
        fractions: rows with a number that is not whole although the stored type is an integer.
        shapes: shape of a row -> rows, for arrays and vectors; of a ragged column, the shape of a row's entries. -1
            stands where lengths differ inside a row.
        examples: by name of a count the first number that was counted there, as text.
    """

    nulls: int = 0
    nans: int = 0
    infinities: int = 0
    overflows: int = 0
    inexact: int = 0
    fractions: int = 0
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_clean(self) -> bool:
        """True if all rows can be used: no bad values, and one shape without an axis of 0."""
        has_elements = all(size > 0 for shape in self.shapes for size in shape)
        return not any(self.counts().values()) and len(self.shapes) <= 1 and has_elements

    def counts(self) -> dict[str, int]:
        """Return the counts of unusable rows by their names."""
        return {name: getattr(self, name) for name in _COUNTS}

    def add(self, other: Findings) -> None:
        """Add the counts of another part of the data."""
        for name, count in other.counts().items():
            setattr(self, name, getattr(self, name) + count)
        self.shapes.update(other.shapes)
        self.examples = {**other.examples, **self.examples}

    def note(self, name: str, rows: int, values: Array, bad: Array) -> None:
        """Count rows that hold bad elements of `values`, and keep the first of these as an example."""
        if rows:
            setattr(self, name, getattr(self, name) + rows)
            self.examples.setdefault(name, f"{values[bad].flat[0].item()!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` rebuilds the findings."""
        shapes = [[list(k), v] for k, v in self.shapes.items()]
        return {**self.counts(), "shapes": shapes, "examples": self.examples}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Findings:
        """Rebuild the findings from `to_dict`."""
        return cls(**{**values, "shapes": Counter({tuple(k): v for k, v in values["shapes"]})})


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a row's shape in words: "3", "2 x 3", or "2 x ?" where lengths differ inside the row."""
    return " x ".join("?" if n < 0 else str(n) for n in shape)


def problems(
    column: Column, findings: Findings, num_rows: int, *, is_flag: bool = False
) -> Iterator[str]:
    """Tell in sentences why a column cannot be used: counts of rows, and remedies.

    Args:
        column: as `check_schema` returned it.
        findings: in all its rows.
        num_rows: how many these are.
        is_flag: it is the validation column, to which `handle_invalid` does not apply.
    """
    where = f"column {column.name!r} ({column.source})"
    of = f"of {num_rows:,} rows"
    if findings.nulls and is_flag:
        yield (
            f"{where}: {findings.nulls:,} {of} are null. Every row needs a value that tells whether it is for validation: fill in "
            "0 or 1 before."
        )
    elif findings.nulls:
        yield (
            f"{where}: {findings.nulls:,} {of} are null or hold a null. Every row needs a value: df.na.drop() or "
            "df.na.fill(...), an Imputer, or handle_invalid='skip' or {column: value}."
        )
    if findings.nans:
        yield f"{where}: {findings.nans:,} {of} hold NaN. Every value must be a number: drop or replace them."
    if findings.infinities:
        yield (
            f"{where}: {findings.infinities:,} {of} hold infinity, for example {findings.examples['infinities']}. Every value must "
            "be finite: drop, cap or replace them, or give handle_invalid='skip' or {column: value}."
        )
    if findings.overflows:
        yield (
            f"{where}: {findings.overflows:,} {of} hold a number that {column.number_type} cannot hold, for example "
            f"{findings.examples['overflows']}. Scale the column, choose a wider type with feature_dtypes or label_dtypes, or "
            "give handle_invalid."
        )
    if findings.inexact:
        yield (
            f"{where}: {findings.inexact:,} {of} hold an integer that {column.number_type} cannot hold exactly, for example "
            f"{findings.examples['inexact']}. Scale the column, cast it to double if it may be rounded, choose a wider type with "
            "feature_dtypes or label_dtypes, or give handle_invalid; an index of an embedding stays int64 in an argument "
            "of its own (inputs)."
        )
    if findings.fractions:
        remedy = "Choose a floating type, or round the column"
        if not column.is_explicit:  # nothing but classes is stored as integers unasked
            remedy = "It holds classes, which are 0, 1, 2, ...: number them with a StringIndexer, or give a loss of values"
        yield (
            f"{where}: {findings.fractions:,} {of} hold a number that is not whole, but it is to be stored as {column.dtype}. {remedy}."
        )
    if len(findings.shapes) > 1:
        yield f"{where}: {_different_lengths(column, findings)}"
    elif any(0 in shape for shape in findings.shapes):
        yield f"{where}: every row is empty. At least one element per row is expected."


def _different_lengths(column: Column, findings: Findings) -> str:
    usual, count = findings.shapes.most_common(1)[0]
    others = ", ".join(
        f"{n:,} of {shape_text(w)}" for w, n in sorted(findings.shapes.items())[:6] if w != usual
    )
    remedy = "pad or cut them"
    if column.kind == "array":
        remedy += f", or give collate_fn={{{column.name!r}: pad(0)}} (sparkhvd.estimator.pad)"
    return (
        f"rows have different lengths: {count:,} rows of {shape_text(usual)} elements, but {others}. Every row "
        f"must have the same number of elements: {remedy}."
    )
