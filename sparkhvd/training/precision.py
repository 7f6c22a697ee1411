"""Mixed precision: autocast of forward, and the loss scale for float16."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from sparkhvd.errors import InvalidArgumentError

# Values of `precision`, and the dtype in which `forward` computes.
PRECISIONS: dict[str, torch.dtype | None] = {
    "32": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def check_precision(precision: str, model: nn.Module) -> None:
    """Raise an error if a mixed precision would have no effect.

    Raises:
        InvalidArgumentError: no parameter is float32, the only dtype that autocast converts.
    """
    if PRECISIONS[precision] is None or any(p.dtype == torch.float32 for p in model.parameters()):
        return
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    raise InvalidArgumentError(
        f"precision is {precision!r}, but the model's parameters are {', '.join(dtypes)}. Mixed precision needs parameters "
        "in float32, and computes in 16 bits. Call model.float(), or leave precision at '32', which computes in "
        "the model's own dtype."
    )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Make a context manager for `forward` in this precision."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Make a loss scaler for float16, or return None for other precisions.

    Without it, small gradients would become 0 in float16.
    """
    if precision != "16-mixed":
        return None
    scaler = torch.amp.GradScaler(device.type)
    # Initialize the scale now: the first loss would do it, but a rank may have no rows in its first step.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def widened(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Convert 16-bit outputs to float32, so that losses and metrics are not rounded to 16 bits."""
    narrow = (torch.float16, torch.bfloat16)
    return tuple(o.float() if o.dtype in narrow else o for o in outputs)
