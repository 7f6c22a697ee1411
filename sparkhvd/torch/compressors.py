"""Compressors: what travels in place of a tensor that is reduced, and how the result comes back."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["BUILT_IN", "BF16Compressor", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """What is done to a tensor before and after it is reduced. Subclass it for a scheme of your own.

    `compress` must give a tensor of the same shape, dtype and memory layout on every rank.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to reduce, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Gives `tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Gives `tensor` itself."""
        del ctx
        return tensor


class _CastCompressor(Compressor):
    wire: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Floating tensors in the wire's type; others as they are."""
        if not tensor.is_floating_point() or tensor.dtype == cls.wire:
            return tensor, None
        return tensor.to(cls.wire), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in the type it had."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating tensors as float16: 11 significant bits, largest value 65504."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating tensors as bfloat16: 8 significant bits, float32's range."""

    wire = torch.bfloat16


# Stateless: a sum of their outputs is the output of the sum, up to rounding.
BUILT_IN = (NoneCompressor, FP16Compressor, BF16Compressor)
