"""Checks of arguments of torch's collectives, and of the rows that have come."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparkhvd.distributed.operands import width
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.errors import InvalidArgumentError, MismatchError

__all__ = [
    "check_count",
    "check_parts",
    "check_received",
    "check_rows",
    "check_same",
    "check_kinds",
]


def check_count(what: str, items: Sequence[object], size: int) -> None:
    """Check that a list has a tensor for each rank."""
    if len(items) != size:
        raise InvalidArgumentError(
            f"{what}: the list has {len(items)} tensors for {size} ranks. Give one for each rank of the group."
        )


def check_same(what: str, output: Tensor, tensor: Tensor) -> None:
    """Check that a rank's tensor fits its place in the list."""
    if output.numel() != tensor.numel() or output.dtype != tensor.dtype:
        raise InvalidArgumentError(
            f"{what}: this rank's tensor has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, its place in the list "
            f"{tuple(output.shape)} and {output.dtype}. Give both the same."
        )


def check_kinds(what: str, kinds: Sequence[str], own: int) -> None:
    """Check that shapes and dtypes of all ranks' tensors, as texts by rank, are this rank's."""
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[own]), None)
    if other is not None:
        raise MismatchError(
            f"{what}: the ranks disagree on shape or dtype. This rank sent {kinds[own]}, rank {other} of the group "
            f"{kinds[other]}. Give tensors of the same shape and dtype on every rank."
        )


def check_parts(what: str, part: Tensor, whole: Tensor, size: int) -> None:
    """Check that equal parts of all ranks make the whole."""
    if part.numel() * size != whole.numel() or part.dtype != whole.dtype:
        raise InvalidArgumentError(
            f"{what}: {size} parts of shape {tuple(part.shape)} and dtype {part.dtype} do not make a tensor of shape "
            f"{tuple(whole.shape)} and dtype {whole.dtype}. Give the whole the elements of all parts."
        )


def check_rows(what: str, work: Operation, tensors: Sequence[Tensor]) -> None:
    """Check that what came from each rank fits its tensor."""
    check_received(what, work, tuple([each.numel() * width(each) for each in tensors]))


def check_received(what: str, work: Operation, wanted: tuple[int, ...]) -> None:
    """Check that as many numbers came from each rank as there is room for."""
    rows = work.output().rows
    if rows != wanted:
        raise MismatchError(
            f"{what}: the ranks sent {list(rows)} numbers, by rank, and this rank's tensors have room for {list(wanted)}. "
            "Give tensors of the sizes that are sent."
        )
