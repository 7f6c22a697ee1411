"""Optimizers of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.corpus.case import TABLE, Case, mlp, sgd


def of(
    library: str,
    name: str,
    *,
    twice_tolerance: float = 1e-5,
    apart: str = "",
    resumes: bool = False,
    **options: Any,
) -> Case:
    """A small network under an optimizer of a library, by its name."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(library), name)(list(parameters), **options)

    return Case(
        f"{library} {name}",
        mlp,
        TABLE,
        optimizer=optimizer,
        twice_tolerance=twice_tolerance,
        apart=apart,
        resumes=resumes,
    )


def schedule_free_with_warmup() -> Callable[..., Any]:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        import schedulefree

        return schedulefree.AdamWScheduleFree(parameters, lr=0.01, warmup_steps=3)

    return optimizer


def lookahead(library: str) -> Callable[..., Any]:
    """Return a function that makes a library's optimizer around SGD."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return importlib.import_module(library).Lookahead(sgd(parameters), k=3)

    return optimizer


def sharpness_aware(parameters: Any) -> torch.optim.Optimizer:
    import pytorch_optimizer

    return pytorch_optimizer.SAM(list(parameters), torch.optim.SGD, lr=0.05)


def wrapped_schedule_free(parameters: Any) -> torch.optim.Optimizer:
    import schedulefree

    return schedulefree.ScheduleFreeWrapper(torch.optim.SGD(parameters, lr=0.1), momentum=0.9)


def of_transformers(parameters: Any) -> torch.optim.Optimizer:
    import transformers

    return transformers.optimization.Adafactor(
        parameters, lr=0.01, relative_step=False, scale_parameter=False
    )


class OnSphere(nn.Module):
    """A parameter on a sphere."""

    def __init__(self) -> None:
        super().__init__()
        import geoopt

        self.weight = geoopt.ManifoldParameter(torch.randn(4), manifold=geoopt.Sphere())
        with torch.no_grad():
            self.weight.proj_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:, None]


def riemannian(parameters: Any) -> torch.optim.Optimizer:
    import geoopt

    return geoopt.optim.RiemannianAdam(parameters, lr=0.01)


CASES = [
    of("schedulefree", "AdamWScheduleFree", lr=0.01, resumes=True),
    of("schedulefree", "SGDScheduleFree", lr=0.1),
    of("schedulefree", "RAdamScheduleFree", lr=0.01),
    Case("schedulefree with warmup", mlp, TABLE, optimizer=schedule_free_with_warmup()),
    of("lion_pytorch", "Lion", lr=0.001),
    of("adabelief_pytorch", "AdaBelief", lr=0.01, print_change_log=False),
    of("prodigyopt", "Prodigy", resumes=True),
    of("dadaptation", "DAdaptAdam"),
    of("dadaptation", "DAdaptSGD"),
    of("came_pytorch", "CAME", lr=0.01),
    *(
        of("torch_optimizer", n, lr=0.01)
        for n in (
            "AdaBound",
            "DiffGrad",
            "Lamb",
            "NovoGrad",
            "QHAdam",
            "RangerVA",
            "Yogi",
            "AggMo",
            "PID",
        )
    ),
    of("torch_optimizer", "Shampoo", lr=0.01),
    *(
        of("pytorch_optimizer", n, lr=0.01)
        for n in (
            "AdaPNM",
            "Adan",
            "ADOPT",
            "GaLore",
            "Grams",
            "MADGRAD",
            "StableAdamW",
            "Tiger",
        )
    ),
    # One bit of the inputs changes its weights by a tenth, because it transforms gradients to a basis of eigenvectors.
    of("pytorch_optimizer", "SOAP", lr=0.01, apart="rounding is magnified"),
    Case("torch_optimizer Lookahead", mlp, TABLE, optimizer=lookahead("torch_optimizer")),
    Case("pytorch_optimizer Lookahead", mlp, TABLE, optimizer=lookahead("pytorch_optimizer")),
    Case("pytorch_optimizer SAM", mlp, TABLE, optimizer=sharpness_aware, has_closure=True),
    Case("schedulefree ScheduleFreeWrapper", mlp, TABLE, optimizer=wrapped_schedule_free),
    Case("transformers Adafactor", mlp, TABLE, optimizer=of_transformers),
    Case("geoopt RiemannianAdam", OnSphere, TABLE, optimizer=riemannian),
]
