"""Every optimizer and scheduler of torch, and the Params that change a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

from tests.corpus.case import TABLE, Case, Data, adam, mlp, sgd, tokens, whole

CE = nn.CrossEntropyLoss
THIRDS = "a step of three batches divides by 3 in another place"
DUPLICATES = "rows of a sparse gradient that several ranks have are added in another order"


def optimizer(name: str, *, case: str = "", **options: Any) -> Case:
    """A small network under an optimizer."""
    return Case(case or name, mlp, TABLE, optimizer=lambda p: getattr(optim, name)(p, **options))


def schedule(name: str, *, per_step: bool = False, case: str = "", **options: Any) -> Case:
    """A small network under a scheduler."""
    return Case(
        case or name,
        mlp,
        TABLE,
        scheduler=lambda o: getattr(schedules, name)(o, **options),
        is_per_step=per_step,
    )


def chained(o: optim.Optimizer) -> Any:
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, 2), schedules.ExponentialLR(o, 0.9)]
    )


def sequential(o: optim.Optimizer) -> Any:
    first, then = schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 8)
    return schedules.SequentialLR(o, [first, then], [4])


def lbfgs(parameters: Any) -> optim.Optimizer:
    return optim.LBFGS(parameters, lr=0.1, max_iter=4)


def wolfe(parameters: Any) -> optim.Optimizer:
    return optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")


def groups(parameters: Any) -> optim.Optimizer:
    first, *rest = parameters
    return optim.SGD(
        [{"params": [first], "lr": 0.01}, {"params": rest, "weight_decay": 0.1}], lr=0.05
    )


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.EmbeddingBag(20, 3, sparse=True), nn.Softmax(1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(ids)


def two_groups(parameters: Any) -> optim.Optimizer:
    given = [*parameters]
    return optim.Muon([p for p in given if p.ndim == 2], lr=0.02)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 4).requires_grad_(requires_grad=False)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x))


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


OPTIMIZERS = [
    optimizer("SGD", lr=0.1),
    optimizer("SGD", case="SGD Nesterov", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    optimizer("SGD", case="SGD foreach", lr=0.05, foreach=True),
    optimizer("SGD", case="SGD fused", lr=0.05, fused=True),
    optimizer("SGD", case="SGD maximize", lr=0.001, maximize=True),
    optimizer("Adam", lr=0.01),
    optimizer("Adam", case="Adam AMSGrad", lr=0.01, amsgrad=True),
    optimizer("Adam", case="Adam fused", lr=0.01, fused=True),
    Case("Adam of a tensor", mlp, TABLE, optimizer=lambda p: optim.Adam(p, lr=torch.tensor(0.01))),
    *(optimizer(n, lr=0.01) for n in ("AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD")),
    optimizer("RMSprop", case="RMSprop centered", lr=0.01, centered=True, momentum=0.9),
    *(optimizer(n) for n in ("Adadelta", "Adagrad", "Adafactor", "Rprop")),
    Case("Muon", Matrices, TABLE, optimizer=two_groups),
    Case(
        "LBFGS", mlp, TABLE, optimizer=lbfgs, has_closure=True, resumes=True, twice_tolerance=1e-4
    ),
    Case(
        "LBFGS with line search",
        mlp,
        TABLE,
        optimizer=wolfe,
        has_closure=True,
        twice_tolerance=1e-4,
    ),
    Case(
        "SparseAdam",
        Sparse,
        Data(tokens().features, {"c": whole(3)}),
        CE,
        optimizer=lambda p: optim.SparseAdam([*p], lr=0.01),
        ddp_tolerance=1e-6,
        because=DUPLICATES,
    ),
    Case(
        "SGD of sparse gradients",
        Sparse,
        Data(tokens().features, {"c": whole(3)}),
        CE,
        optimizer=lambda p: optim.SGD(p, lr=0.1),
        ddp_tolerance=1e-6,
        because=DUPLICATES,
    ),
    Case("an instance", mlp, TABLE, optimizer=adam, has_own_optimizer=True, resumes=True),
    Case("groups", mlp, TABLE, optimizer=groups),
    Case("groups of an instance", mlp, TABLE, optimizer=groups, has_own_optimizer=True),
    Case(
        "frozen layers",
        Frozen,
        TABLE,
        optimizer=lambda p: optim.AdamW((x for x in p if x.requires_grad), lr=0.01),
    ),
    Case("a class", mlp, TABLE, optimizer=optim.Adagrad),
    Case("a name", mlp, TABLE, optimizer=optim.RMSprop, options={"optimizer": "rmsprop"}),
]

SCHEDULES = [
    schedule("StepLR", step_size=1),
    schedule("StepLR", case="StepLR per step", per_step=True, step_size=2),
    schedule("MultiStepLR", per_step=True, milestones=[2, 5], gamma=0.5),
    schedule("ExponentialLR", gamma=0.5),
    schedule("LinearLR", per_step=True, total_iters=6),
    schedule("ConstantLR", per_step=True, total_iters=3),
    schedule("PolynomialLR", per_step=True, total_iters=8),
    schedule("CosineAnnealingLR", per_step=True, T_max=12),
    schedule("CosineAnnealingWarmRestarts", per_step=True, T_0=4),
    schedule("CyclicLR", per_step=True, base_lr=0.01, max_lr=0.1, step_size_up=2),
    Case(
        "OneCycleLR",
        mlp,
        TABLE,
        scheduler=lambda o: schedules.OneCycleLR(o, 0.1, total_steps=12),
        is_per_step=True,
        resumes=True,
        apart="twice as many rows are half as many steps",
    ),
    schedule("LambdaLR", per_step=True, lr_lambda=lambda step: 1 / (1 + step)),
    schedule("MultiplicativeLR", lr_lambda=lambda epoch: 0.5),
    schedule("ReduceLROnPlateau", patience=0, threshold=10.0),
    Case("ChainedScheduler", mlp, TABLE, scheduler=chained, is_per_step=True),
    Case("SequentialLR", mlp, TABLE, scheduler=sequential, is_per_step=True),
    Case(
        "SWALR",
        mlp,
        TABLE,
        scheduler=lambda o: optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=2),
    ),
]

PARAMS = [
    Case(
        "gradient_clip_norm", mlp, TABLE, options={"gradient_clip_norm": 0.1}, twice_tolerance=1e-5
    ),
    Case("gradient_clip_value", mlp, TABLE, options={"gradient_clip_value": 0.05}),
    Case(
        "accumulate",
        mlp,
        TABLE,
        options={"accumulate": 3},
        apart="twice as many rows would not be whole steps",
        ddp_tolerance=1e-6,
        because=THIRDS,
    ),
    Case(
        "accumulate with Adam",
        mlp,
        TABLE,
        optimizer=adam,
        options={"accumulate": 3},
        apart="twice as many rows would not be whole steps",
        ddp_tolerance=1e-6,
        because=THIRDS,
    ),
    Case(
        "bf16-mixed",
        mlp,
        TABLE,
        optimizer=sgd,
        options={"precision": "bf16-mixed"},
        apart="sums are rounded to 8 bits",
    ),
]

CASES = [*OPTIMIZERS, *SCHEDULES, *PARAMS]
