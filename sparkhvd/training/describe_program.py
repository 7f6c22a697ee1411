"""The description of a program that a checkpoint is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.training.class_mean import ClassMean
from sparkhvd.training.modules.architecture import module_texts
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.optimizer import build_optimizer
from sparkhvd.training.program import Program
from sparkhvd.training.schedulers import describe_scheduler, is_plain, plain
from sparkhvd.training.types import Compression, Loss

__all__ = ["describe_program"]

# Choices of how a step is computed, and entries of a group besides its options.
_NO_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def describe_program(program: Program) -> dict[str, object]:
    """Describe the structure of model and optimizer and the kinds of the rest, which a checkpoint must share.

    Equal programs have equal descriptions in all processes.
    """
    kind: object = program.optimizer
    optimizer: torch.optim.Optimizer | None = None
    if isinstance(program.optimizer, torch.optim.Optimizer):
        optimizer, kind = program.optimizer, type(program.optimizer)
    elif program.optimizer is not None:
        optimizer = build_optimizer(
            program.optimizer, light_copy(program.model), program.others().trained
        )
    groups = None if optimizer is None else [len(g["params"]) for g in optimizer.param_groups]
    return {
        "model": {
            n: [list(t.shape), str(t.dtype)]
            for n, t in program.model.state_dict().items()
            if isinstance(t, Tensor)
        },
        "modules": module_texts(program.model),
        "optimizer": getattr(kind, "__qualname__", type(kind).__name__),
        "optimizer options": None if optimizer is None else _options(optimizer),
        "parameter groups": groups,
        "loss": [_loss_name(loss) for loss in program.losses],
        # Their sums are saved in this order.
        "metrics": {m.name: [i, m.kind] for i, m in enumerate(program.metrics)},
        "gradient_compression": _compression_name(program.compression),
        "lr_scheduler": None
        if program.lr_scheduler is None or optimizer is None
        else describe_scheduler(program.lr_scheduler, optimizer),
        **program.user.describe(),
    }


def _options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the plain options of all groups: "lr of group 0"."""
    return {
        f"{name} of group {number}": plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _NO_OPTIONS and is_plain(plain(value))
    }


def _compression_name(compression: Compression) -> str:
    # PowerSGD's says its options; an object of the user's own may have its address in it.
    if isinstance(compression, PowerSGD):
        return repr(compression)
    return str(getattr(compression, "__qualname__", type(compression).__name__))


def _loss_name(loss: Loss) -> str:
    loss = loss.loss if isinstance(loss, ClassMean) else loss
    return str(getattr(loss, "__qualname__", type(loss).__name__))
