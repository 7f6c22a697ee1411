"""Compressors: convert tensors before a reduction, and results after it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Compressor:
    """Conversion of a tensor before and after it is reduced. Subclass it for your own scheme.

    `compress` must return a tensor of the same shape, dtype and memory layout on every rank.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to reduce, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Restore the reduced tensor to its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        del ctx
        return tensor


class _CastCompressor(Compressor):
    wire: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Convert floating tensors to the 16-bit type. Other tensors do not change."""
        if not tensor.is_floating_point() or tensor.dtype == cls.wire:
            return tensor, None
        return tensor.to(cls.wire), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype | None) -> Tensor:
        """Convert the tensor back to its original type."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating tensors as float16: 11 significant bits, largest value 65504."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating tensors as bfloat16: 8 significant bits, float32's range."""

    wire = torch.bfloat16


# These compressors have no state, and compressing a sum equals summing compressed tensors, up to rounding.
BUILT_IN = (NoneCompressor, FP16Compressor, BF16Compressor)
