"""Mixed precision: autocast of forward, and the loss scale that float16 needs."""

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
    """Reject a mixed precision without effect.

    Raises:
        InvalidArgumentError: no parameter is float32, the only dtype that autocast narrows.
    """
    if PRECISIONS[precision] is None or any(p.dtype == torch.float32 for p in model.parameters()):
        return
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    raise InvalidArgumentError(
        f"precision is {precision!r} and the model's parameters are {', '.join(dtypes)}: mixed precision keeps "
        "parameters in float32 and computes in 16 bits. Call model.float(), or leave precision at '32', which uses "
        "the model's dtype as it is."
    )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """A context in which `forward` computes in this precision."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """None except for float16: its small gradients would vanish."""
    if precision != "16-mixed":
        return None
    scaler = torch.amp.GradScaler(device.type)
    # The first loss initializes the scale, and a rank may have no rows in its first step.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def widened(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Widen 16-bit outputs to float32, so that labels, losses and metrics are not rounded to 8 or 11 bits."""
    narrow = (torch.float16, torch.bfloat16)
    return tuple(o.float() if o.dtype in narrow else o for o in outputs)
