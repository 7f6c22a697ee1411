"""Backward of the stand-in's tensors on autograd's own thread, as on a GPU: `python -m tests.harness.autograd_threads`.

torch's own code sees the stand-in's tensors on "meta", whose backward runs on the calling thread. Here they are on a
device of a backend made in Python, so torch gives them a thread. This affects a whole process, so it is a program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

import sparkhvd.torch as hvd
from sparkhvd.settings import Settings
from tests.harness import device_training as training
from tests.harness import fake_cuda, ranks
from tests.harness.fake_cuda import FakeDevice, gpu, use_engine

STEPS = 4
DEADLINE_S = 60.0


def make_backend() -> None:
    """Make torch treat the stand-in's tensors as tensors of a device with its own autograd thread."""
    backend_registration._setup_privateuseone_for_python_backend("standin")
    # A process has one such thread, on which the end of backward waits for the other ranks. It belongs to rank 0.
    fake_cuda.torch_device = lambda gpu: "meta" if gpu.ordinal else "standin:0"


class Recomputed(torch.autograd.Function):
    """Reentrant checkpoint: backward computes forward again, and calls backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.run(x)
        torch.autograd.backward(found, gradients)
        return None, x.grad


def train(device: FakeDevice, *, passes: int, as_views: bool) -> Tensor:
    """Return the weights of one rank. The body of the model is recomputed in two parts."""
    model: Any = device.module(training.model())
    optimizer: Any = hvd.DistributedOptimizer(
        training.sgd(model.parameters()),
        backward_passes_per_step=passes,
        gradient_as_bucket_view=as_views,
    )
    callers: set[int] = set()
    model.head.weight.register_hook(lambda _: callers.add(threading.get_ident()))
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            x, y = (
                device.tensor(part.chunk(hvd.size())[hvd.rank()])
                for part in training.batch(step * passes + number, torch.float64)
            )
            hidden = Recomputed.apply(model.body[:2], x.requires_grad_())
            hidden = Recomputed.apply(model.body[2:], hidden)
            (model.head(hidden) - y).square().mean().backward()
        optimizer.step()
    assert hvd.rank() != 0 or threading.get_ident() not in callers, (
        "backward ran where it was called"
    )
    return training.weights(model)


def main() -> None:
    """Compare with one process."""
    make_backend()
    for passes in (1, 2):
        expected = training.alone(steps=STEPS, passes=passes)
        for as_views in (False, True):

            def body(engine: Any, passes: int = passes, as_views: bool = as_views) -> Tensor:
                found = train(gpu(engine.rank), passes=passes, as_views=as_views)
                hvd.barrier()
                return found

            small = Settings(device_bucket_bytes=1024)  # several buckets
            for found in ranks.run_ranks(
                2, body, settings=small, using=use_engine, deadline_s=DEADLINE_S
            ):
                assert float((found - expected).abs().max()) < 1e-12
    print("equal")


if __name__ == "__main__":
    main()
