"""Fewer bytes on the wire: 16-bit floats, whose sums are still accumulated in float32, or matrices of low rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparkhvd.torch.powersgd import PowerSGD

__all__ = ["Compression", "Compressor"]


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


class Compression:
    """The schemes to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def powersgd(rank: int = 4, warm_up_steps: int = 0) -> PowerSGD:
        """For a `DistributedOptimizer` over a slow network: gradients as matrices of low rank, with error feedback.

        A gradient of n x m (its first dimension, all others) is sent as (n + m) * rank numbers, in two rounds; what
        was not sent is added to the next one, which takes as much memory as the gradient. Vectors and small
        matrices are sent as they are. Result and state follow from the same bits on every rank; a gradient that is
        not finite on any rank is NaN on all of them, and leaves the state as it was. With `GradScaler` what was not
        sent keeps the scale of its step.

        Every rank makes one of its own for each optimizer. `state_dict()` and `load_state_dict()`, before the
        optimizer is built, let training go on exactly.

        Args:
            rank: more sends more of the gradient at once.
            warm_up_steps: steps at the beginning whose gradients are sent as they are.

        Raises:
            InvalidArgumentError: an argument is wrong.
        """
        from sparkhvd.torch.powersgd import PowerSGD  # it builds on this module

        return PowerSGD(rank=rank, warm_up_steps=warm_up_steps)
