"""`Compression`: sends fewer bytes, as 16-bit floats with sums in float32 or as matrices of low rank."""

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
    """Choice of how gradients are compressed before they are sent."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def powersgd(rank: int = 4, warm_up_steps: int = 0) -> PowerSGD:
        """Compress the gradients of a `DistributedOptimizer` to matrices of low rank, for a slow network.

        A gradient of n x m (its first dimension, and the product of the others) is sent as (n + m) * rank numbers, in
        two rounds. The unsent part, the error, is added to the next gradient and needs as much memory as the gradient.
        Vectors and small matrices are sent uncompressed. The result has the same bits on every rank. If a gradient is
        not finite on some rank, the result is NaN on all ranks and the state does not change. With `GradScaler` the
        error keeps the scale of its step.

        Every rank creates its own object for each optimizer. To resume training exactly, save `state_dict()` and call
        `load_state_dict()` before the optimizer is built.

        Args:
            rank: columns of the two matrices; more columns send more of the gradient.
            warm_up_steps: first steps whose gradients are sent uncompressed.

        Raises:
            InvalidArgumentError: an argument is wrong.
        """
        return PowerSGD(rank=rank, warm_up_steps=warm_up_steps)
