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

        A gradient of n x m (its first dimension, all others) is sent as (n + m) * rank numbers, in two rounds. The
        error is added to the next gradient and needs as much memory as the gradient. Vectors and small matrices
        are sent uncompressed. Result and state follow from the same bits on every rank. A gradient that is not
        finite on any rank is NaN on all of them, and does not change the state. With `GradScaler` the error keeps
        the scale of its step.

        Every rank creates its own object for each optimizer. To resume training exactly, save `state_dict()` and call
        `load_state_dict()` before the optimizer is built.

        Args:
            rank: columns of the two matrices; more columns send more of the gradient.
            warm_up_steps: first steps whose gradients are sent uncompressed.

        Raises:
            InvalidArgumentError: an argument is wrong.
        """
        return PowerSGD(rank=rank, warm_up_steps=warm_up_steps)
