"""`Compression`: fewer bytes on the wire, by 16-bit floats with sums in float32, or by matrices of low rank."""

from __future__ import annotations

from sparkhvd.torch.compressors import BF16Compressor, Compressor, FP16Compressor, NoneCompressor
from sparkhvd.torch.gradients.powersgd import PowerSGD

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
]


class Compression:
    """Compression schemes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def powersgd(rank: int = 4, warm_up_steps: int = 0) -> PowerSGD:
        """Send gradients as matrices of low rank, with error feedback: for a `DistributedOptimizer` over a slow network.

        A gradient of n x m (its first dimension, all others) is sent as (n + m) * rank numbers, in two rounds; the
        rest is added to the next gradient, which takes as much memory as the gradient. Vectors and small matrices
        are sent as they are. Result and state follow from the same bits on every rank; a gradient that is not
        finite on any rank is NaN on all of them, and leaves the state as it was. With `GradScaler` the rest keeps
        the scale of its step.

        Every rank makes one of its own for each optimizer. `state_dict()` and `load_state_dict()`, before the
        optimizer is built, let training go on exactly.

        Args:
            rank: more sends more of the gradient at once.
            warm_up_steps: steps at the beginning whose gradients are sent as they are.

        Raises:
            InvalidArgumentError: an argument is wrong.
        """
        return PowerSGD(rank=rank, warm_up_steps=warm_up_steps)
