"""Optimizers of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.corpus.case import TABLE, Case, mlp


def of(
    library: str, name: str, *, twice_tolerance: float = 1e-5, resumes: bool = False, **options: Any
) -> Case:
    """A small network under an optimizer of a library, by its name."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        import importlib

        return getattr(importlib.import_module(library), name)(list(parameters), **options)

    return Case(
        f"{library} {name}",
        mlp,
        TABLE,
        optimizer=optimizer,
        twice_tolerance=twice_tolerance,
        resumes=resumes,
    )


def schedule_free_with_warmup() -> Callable[..., Any]:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        import schedulefree

        return schedulefree.AdamWScheduleFree(parameters, lr=0.01, warmup_steps=3)

    return optimizer


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
            "SOAP",
            "StableAdamW",
            "Tiger",
        )
    ),
    Case("geoopt RiemannianAdam", OnSphere, TABLE, optimizer=riemannian),
]
