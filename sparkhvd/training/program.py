"""What the ranks train: model, optimizer, loss and metrics, checked and pickled on the driver.

All of it is one pickle, so that an optimizer instance still points at the parameters of its model on the other
side, with its parameter groups and state. The weights of a large model are a file beside it, which is written and read
without a second copy in memory.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.training.check_user_code import UserCode
from sparkhvd.training.class_mean import ClassMean
from sparkhvd.training.metrics import Metric, StateMetric
from sparkhvd.training.modules.architecture import (
    dump_shell,
    light_copy,
    load_shell,
    module_texts,
    tensors_of,
)
from sparkhvd.training.modules.weights import CLOSURE_BYTES, Weights, dump
from sparkhvd.training.schedulers import describe_scheduler, is_plain, plain

__all__ = [
    "PROGRAM_NAME",
    "Program",
    "build_optimizer",
    "check_model",
    "check_optimizer",
    "describe_program",
    "dump_program",
    "load_program",
    "resolve_losses",
    "store_program",
]

Loss = Callable[..., Any]

PROGRAM_NAME = "program.pkl"
WEIGHTS_NAME = "program-weights.pt"


@dataclass(frozen=True)
class Program:
    """The user's objects.

    Attributes:
        model: the module to train; what is pickled may be the function that makes it.
        optimizer: an optimizer over its parameters, or a function of parameters that makes one.
        losses: one per label; with sample weights they return a value per row.
        is_sum: per loss, whether it adds up rows instead of averaging them.
        metrics: what is measured besides the loss.
        lr_scheduler: a function of (optimizer) or (optimizer, total_steps), or None.
        compression: of gradients on their way; of `hvd.Compression`.
        functions: decoders and collate functions.
        user: the user's functions and callbacks.
    """

    model: nn.Module
    optimizer: Any
    losses: tuple[Loss, ...]
    is_sum: tuple[bool, ...]
    metrics: tuple[Metric | StateMetric, ...]
    lr_scheduler: Callable[..., Any] | None = None
    compression: Any = hvd.Compression.none
    functions: RowFunctions = field(default_factory=RowFunctions)
    user: UserCode = field(default_factory=UserCode)


def dump_program(program: Program) -> tuple[bytes, str]:
    """The program as bytes and their SHA-256.

    Raises:
        InvalidArgumentError: a part cannot be pickled; the message names the param.
    """
    try:
        data = dump_shell(_apart(program.model), program)
    except Exception as e:
        name, part = _unpicklable(program)
        raise InvalidArgumentError(
            f"{name} cannot be sent to the ranks: pickling {part!r:.200} failed: {type(e).__name__}: {e}. Build "
            "it from classes and functions that pickle, without open files, locks or sessions."
        ) from e
    return data, hashlib.sha256(data).hexdigest()


def _apart(model: Any) -> nn.Module:
    """The module whose tensors are not part of the pickle: the model if it is large, else one without tensors."""
    if not isinstance(model, nn.Module):
        return nn.Module()
    tensors = model.state_dict(keep_vars=True).values()
    # Other kinds of tensors could not be read back without trust.
    if not all(type(t) in (Tensor, nn.Parameter) for t in tensors if isinstance(t, Tensor)):
        return nn.Module()
    return (
        model if sum(t.nbytes for t in tensors_of(model).values()) > CLOSURE_BYTES else nn.Module()
    )


def store_program(store: Store, run_dir: str, data: bytes, model: Any) -> Weights | None:
    """Write what `dump_program` gave, and the weights of a large model beside it.

    Args:
        store: where the run is.
        run_dir: its folder.
        data: the program.
        model: of the program: a module, or the function that makes it.

    Returns:
        Where the weights are; None if they are part of the program.
    """
    store.write_bytes(f"{run_dir}/{PROGRAM_NAME}", data)
    tensors = tensors_of(_apart(model))
    if not tensors:
        return None
    path = f"{run_dir}/{WEIGHTS_NAME}"
    with store.open_output(path) as sink:
        sha256 = dump(tensors, sink)
    return Weights(sha256, None, store, path)


def _unpicklable(program: Program) -> tuple[str, Any]:
    parts = {f.name: getattr(program, f.name) for f in fields(program)}
    parts |= vars(parts.pop("user"))
    for name, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001 - which part fails is the question
            names = {
                "losses": "loss",
                "compression": "gradient_compression",
                "functions": "decoders or collate_fn",
            }
            return names.get(name, name), value
    return "model", program.model


def load_program(
    store: Store, run_dir: str, sha256: str, weights: Weights | None = None
) -> Program:
    """Read the program that `store_program` wrote.

    Raises:
        StoreError: the file is not what the driver wrote; nothing was unpickled.
    """
    path = f"{run_dir}/{PROGRAM_NAME}"
    data = store.read_bytes(path)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise StoreError(
            f"{store.full_url(path)} is not what the driver wrote: its SHA-256 is {found} instead of {sha256}. It is "
            "damaged, or something else writes to the run's folder. Fit again: the file is written anew."
        )
    program = load_shell(data, {} if weights is None else weights.load())
    assert isinstance(program, Program)
    return program


# --- checks on the driver -------------------------------------------------------------------------------------


def check_model(model: Any) -> nn.Module:
    """Return `model` if it can be trained.

    Raises:
        InvalidArgumentError: it is missing, no module, or has nothing to train.
    """
    if model is None:
        raise InvalidArgumentError("model is required: give the torch.nn.Module to train.")
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is {model!r:.200}; it must be a torch.nn.Module.")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InvalidArgumentError(
                f"model: parameter {name!r} has no shape yet. Run the lazy module on one batch before fit."
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise InvalidArgumentError(
                f"model: parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, and gradients of complex "
                "numbers cannot be reduced. Keep real and imaginary parts, and join them in forward with "
                "torch.view_as_complex."
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(
                f"model: {name!r} is on {tensor.device}. Give the model on the CPU, by model.cpu(): every rank moves its "
                "copy to its own GPU."
            )
        if tensor.layout != torch.strided:
            raise InvalidArgumentError(
                f"model: {name!r} has the layout {tensor.layout}, and ranks share dense parameters and buffers only. "
                "Register its indices and values, or the tensor as .to_dense(); one that never changes may be a plain "
                "attribute instead of a buffer."
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidArgumentError(
            "model has no parameter that requires a gradient: nothing to train."
        )
    return model


def check_optimizer(optimizer: Any, given: Any, model: nn.Module) -> None:
    """Check an optimizer, or a function that makes one, against the model; neither is changed.

    Args:
        optimizer: the Param.
        given: the Param `model`: the module, or a function that makes one in each rank.
        model: the module.

    Raises:
        InvalidArgumentError: it is missing, of another kind, or not over this model's parameters.
    """
    if optimizer is None:
        raise InvalidArgumentError(
            "optimizer is required: give an optimizer over model.parameters(), or a function of the parameters, "
            "for example torch.optim.Adam."
        )
    made = optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise InvalidArgumentError(
                f"optimizer is {optimizer!r:.200}; it must be a torch.optim.Optimizer or a function of the "
                "model's parameters."
            )
        # A copy, because an optimizer may hang hooks on its parameters.
        made = build_optimizer(optimizer, light_copy(model))
    elif given is not model:
        raise InvalidArgumentError(
            f"optimizer is an instance of {type(optimizer).__name__}, which holds the parameters of one model, and model is "
            "a function, by which each rank makes its own. Give a function of the parameters, for example "
            f"lambda parameters: torch.optim.{type(optimizer).__name__}(parameters, lr=0.1)."
        )
    else:
        own = {id(p) for p in model.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise InvalidArgumentError(
                        f"optimizer: parameter group {number} holds a parameter of shape "
                        f"{tuple(parameter.shape)} that the model does not have: it is tied to another model. Build "
                        "it from this model's parameters(), or give a function of the parameters."
                    )
    if isinstance(made, torch.optim.LBFGS):
        raise InvalidArgumentError(
            "optimizer is LBFGS, which evaluates the loss several times per step; fit evaluates it once. Give "
            "another optimizer, or write the loop yourself with sparkhvd.runner.run."
        )


def build_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer for this model: the instance given, or what the function makes of its parameters."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    try:
        made = optimizer(model.parameters())
    except Exception as e:
        raise InvalidArgumentError(
            f"optimizer: calling it with the model's parameters failed: {type(e).__name__}: {e}. Give a function of "
            "one argument, for example lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        ) from e
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer: calling it with the model's parameters gave {made!r:.200}; it must give a "
            "torch.optim.Optimizer."
        )
    return made


def resolve_losses(
    loss: Any, num_labels: int, *, per_row: bool
) -> tuple[tuple[Loss, ...], tuple[bool, ...]]:
    """One loss per label, and whether each adds rows up.

    Args:
        loss: a function or module, or a list with one per label.
        num_labels: number of label columns.
        per_row: sample weights are used: every loss must return a value per row.

    Raises:
        InvalidArgumentError: it is missing, not callable, not one per label, or not able to return values per row.
    """
    if loss is None:
        raise InvalidArgumentError(
            "loss is required: give a function of (output, label), for example torch.nn.MSELoss()."
        )
    given = list(loss) if isinstance(loss, (list, tuple)) else [loss] * num_labels
    if len(given) != num_labels:
        raise InvalidArgumentError(
            f"loss has {len(given)} entries and label_cols {num_labels}. Give one loss, or one per label."
        )
    for entry in given:
        if isinstance(entry, type) or not callable(entry):
            hint = f" Give an instance: {entry.__name__}()." if isinstance(entry, type) else ""
            raise InvalidArgumentError(
                f"loss is {entry!r:.200}; it must be a function of (output, label).{hint}"
            )
        if (
            isinstance(entry, nn.Module)
            and getattr(entry, "reduction", "") == "none"
            and not per_row
        ):
            raise InvalidArgumentError(
                f"loss is {type(entry).__name__} with reduction='none', which gives no single number. Use "
                "reduction='mean'."
            )
    if per_row:
        return tuple(_per_row(entry) for entry in given), (False,) * num_labels
    is_sum = tuple(getattr(entry, "reduction", "") == "sum" for entry in given)
    if any(is_sum) and not all(is_sum):
        raise InvalidArgumentError(
            "loss: some of the losses have reduction='sum' and some do not, so their sizes depend on the batch "
            "in different ways. Give all of them one reduction."
        )
    return tuple(ClassMean.of(entry) or entry for entry in given), is_sum


@dataclass(frozen=True)
class PerRow:
    """A function that takes `reduction`, asked for one value per row."""

    function: Loss

    def __call__(self, output: Tensor, label: Tensor) -> Any:
        return self.function(output, label, reduction="none")


def _per_row(loss: Loss) -> Loss:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        changed = copy.copy(loss)
        changed.__dict__["reduction"] = "none"
        return changed
    try:
        accepts = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        accepts = inspect.signature(lambda output, label: None).parameters
    if "reduction" not in accepts:
        raise InvalidArgumentError(
            f"loss: sample_weight_col needs a loss that gives one value per row, and {loss!r:.100} has no "
            "argument 'reduction'. Give a torch.nn loss, or a function of (output, label, reduction)."
        )
    return PerRow(loss)


def describe_program(program: Program) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit: the structure of model and optimizer, and the kinds of the rest.

    Nothing of it may differ between two processes that were given the same.
    """
    optimizer = program.optimizer
    is_instance = isinstance(optimizer, torch.optim.Optimizer)
    kind = type(optimizer) if is_instance else optimizer
    made: torch.optim.Optimizer | None = None
    if optimizer is not None:
        made = optimizer if is_instance else build_optimizer(optimizer, light_copy(program.model))
    return {
        "model": {
            n: [list(t.shape), str(t.dtype)]
            for n, t in program.model.state_dict().items()
            if isinstance(t, Tensor)
        },
        "modules": module_texts(program.model),
        "optimizer": getattr(kind, "__qualname__", type(kind).__name__),
        "optimizer options": None if made is None else _options(made),
        "parameter groups": None if made is None else [len(g["params"]) for g in made.param_groups],
        "loss": [_loss_name(loss) for loss in program.losses],
        # Their sums are saved in this order.
        "metrics": {m.name: [i, m.kind] for i, m in enumerate(program.metrics)},
        "gradient_compression": _compression_name(program.compression),
        "lr_scheduler": None
        if program.lr_scheduler is None or made is None
        else describe_scheduler(program.lr_scheduler, made),
        **program.user.describe(),
    }


# How a step is computed, and what a group says besides its options.
_NO_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The plain options of all groups: "lr of group 0"."""
    return {
        f"{name} of group {number}": plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _NO_OPTIONS and is_plain(plain(value))
    }


def _compression_name(compression: Any) -> str:
    # PowerSGD's says its options; an object of the user's own may have its address in it.
    if isinstance(compression, PowerSGD):
        return repr(compression)
    return str(getattr(compression, "__qualname__", type(compression).__name__))


def _loss_name(loss: Loss) -> str:
    loss = loss.loss if isinstance(loss, ClassMean) else loss
    return str(getattr(loss, "__qualname__", type(loss).__name__))
