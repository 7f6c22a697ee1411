"""A measured and rejected alternative: gradients computed in registered memory.

`gradient_as_bucket_view=True` with Linear layers whose backward writes the weight's gradient directly to its slot
(`torch.mm(..., out=)`), without a copy or an addition to zeros. Its gain bounds all ways of getting gradients into
registered memory, also a pool for allocations during backward. It changes the model's layers, bypasses autograd's
hooks on weights, and torch has no equivalent for convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Linear(torch.autograd.Function):
    """x W^T + b. Its backward writes the weight's gradient into `weight.grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # one result
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        rows = gradient.reshape(-1, gradient.shape[-1])
        torch.mm(rows.t(), x.reshape(-1, x.shape[-1]), out=weight.grad)
        below = gradient @ weight.detach() if ctx.needs_input_grad[0] else None
        return below, None, rows.sum(0)


class Born(nn.Linear):
    """`nn.Linear` with gradients computed in registered memory.

    Set it as the `__class__` of a Linear.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of `nn.Linear`."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        result: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch's
        return result


def zero_grad(optimizer: Any) -> None:
    """Zero the gradients of biases. Backward overwrites the gradients of weights."""
    for reducer in optimizer._reducers:
        reducer.discard()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dim() == 1 and p.grad is not None:
                p.grad.zero_()
