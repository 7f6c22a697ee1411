"""Program of a fit: model, optimizer, losses and metrics, pickled on the driver for the ranks.

All objects are in one pickle, so that on the ranks an optimizer instance still refers to the parameters of its model.
The weights of a large model are in a separate file, which is written and read without a second copy in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import cloudpickle
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.runner.protocol import failing_path
from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.training.check_user_code import UserCode
from sparkhvd.training.loss_functions import ClassMean
from sparkhvd.training.loss_state import LossState
from sparkhvd.training.metrics import AnyMetric
from sparkhvd.training.modules.architecture import dump_shell, load_shell, module_texts, tensors_of
from sparkhvd.training.modules.copies import hooks_of, light_copy
from sparkhvd.training.modules.weights import CLOSURE_BYTES, Weights, dump
from sparkhvd.training.optimizer import OptimizerList, build_optimizer
from sparkhvd.training.schedule import describe_scheduler, is_plain, plain
from sparkhvd.training.types import Compression, Loss, MakeOptimizer, MakeScheduler

PROGRAM_NAME = "program.pkl"
WEIGHTS_NAME = "program-weights.pt"


@dataclass(frozen=True)
class Program:
    """The user's objects of a fit.

    Attributes:
        model: the module to train; the pickle may hold the function that makes the module.
        optimizer: an optimizer of its parameters, or a function of parameters that makes an optimizer; None if
            `train_fn` has its own optimizer.
        losses: one loss per label; with sample weights they return a value per row.
        is_sum: for each loss, whether it sums over rows instead of averaging.
        metrics: metrics besides the loss.
        lr_scheduler: a function of (optimizer) or (optimizer, total_steps), or None.
        compression: compression of gradients between ranks, from `hvd.Compression`.
        functions: decoders and collate functions.
        user: the user's functions and callbacks.
    """

    model: nn.Module
    optimizer: MakeOptimizer | None
    losses: tuple[Loss, ...]
    is_sum: tuple[bool, ...]
    metrics: tuple[AnyMetric, ...]
    lr_scheduler: MakeScheduler | None = None
    compression: Compression = hvd.Compression.none
    functions: RowFunctions = field(default_factory=RowFunctions)
    user: UserCode = field(default_factory=UserCode)

    def others(self) -> LossState:
        """Find the state of losses and metrics. `model` must be a module."""
        user = self.user
        trains = not user.computes_loss
        return LossState(self.losses, self.metrics, self.model, user.steps, trains=trains)


def dump_program(program: Program) -> tuple[bytes, str]:
    """Pickle a program and return the bytes and their SHA-256.

    Raises:
        InvalidArgumentError: a part cannot be pickled; the message names the param.
    """
    try:
        data = dump_shell(_stored_apart(program.model), program, names_files=True)
    except Exception as e:
        name, part = _unpicklable(program)
        raise _not_sent(name, part, e) from e
    return data, hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def naming_unpicklable(name: str, value: object) -> Iterator[None]:
    """Name the failing part of a Param's value in pickle and copy errors of the block.

    Raises:
        InvalidArgumentError: a part of the value cannot be pickled or copied.
    """
    try:
        yield
    except TypeError as e:
        if not str(e).startswith("cannot pickle") or not _fails(value):
            raise
        raise _not_sent(name, value, e) from e


def _not_sent(name: str, part: object, error: Exception) -> InvalidArgumentError:
    path = failing_path(part, _fails)
    failed = f"failed at {name}{path}" if path else f"{part!r:.200} failed"
    return InvalidArgumentError(
        f"{name} cannot be sent to the ranks: pickling {failed}: {type(error).__name__}: {error}. Build "
        "it from classes and functions that pickle, without open files, locks or sessions."
    )


def _fails(value: object) -> bool:
    """Check whether a value cannot be pickled, without copying a module's tensors.

    Tensors are assumed to be picklable.
    """
    try:
        if not isinstance(value, Tensor):
            dump_shell(value if isinstance(value, nn.Module) else nn.Module(), value)
    except Exception:  # noqa: BLE001 - pickling runs methods of the user's classes
        return True
    return False


def _stored_apart(model: object) -> nn.Module:
    """Return a large model, to store its tensors outside the pickle, or an empty module."""
    if not isinstance(model, nn.Module):
        return nn.Module()
    tensors = model.state_dict(keep_vars=True).values()
    # Keep other classes of tensors in the pickle, because the file of weights is read without trust.
    if not all(type(t) in (Tensor, nn.Parameter) for t in tensors if isinstance(t, Tensor)):
        return nn.Module()
    return (
        model if sum(t.nbytes for t in tensors_of(model).values()) > CLOSURE_BYTES else nn.Module()
    )


def store_program(store: Store, run_dir: str, data: bytes, model: object) -> Weights | None:
    """Write the bytes of `dump_program`, and the weights of a large model beside them.

    Args:
        store: the run's store.
        run_dir: the run's folder.
        data: the program.
        model: the program's model: a module, or the function that makes it.

    Returns:
        The file of the weights; None if they are part of the program.
    """
    store.write_bytes(f"{run_dir}/{PROGRAM_NAME}", data)
    tensors = tensors_of(_stored_apart(model))
    if not tensors:
        return None
    path = f"{run_dir}/{WEIGHTS_NAME}"
    with store.open_output(path) as sink:
        sha256 = dump(tensors, sink)
    return Weights(sha256, None, store, path)


def _unpicklable(program: Program) -> tuple[str, object]:
    """Find the name and value of the unpicklable Param."""
    if (found := _unpicklable_of_parameters(program.model)) is not None:
        return found
    parts = {f.name: getattr(program, f.name) for f in fields(program)}
    parts |= vars(parts.pop("user"))
    parts |= {"decoders": program.functions.decoders, "collate_fn": program.functions.collate}
    del parts["functions"]
    if len(program.losses) == 1:
        parts["losses"] = program.losses[0]
    for name, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001 - to find the part that fails
            names = {"losses": "loss", "compression": "gradient_compression"}
            return names.get(name, name), value
    return "model", program.model


def _unpicklable_of_parameters(model: object) -> tuple[str, object] | None:
    """Find an unpicklable hook or attribute of a parameter, with a name for the message."""
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        hooks = hooks_of(parameter)
        for value in (vars(parameter), *(hooks.backward + hooks.accumulated if hooks else ())):
            what = "attributes" if isinstance(value, dict) else "a hook"
            try:
                cloudpickle.dumps(value)
            except Exception:  # noqa: BLE001 - to find the part that fails
                return f"model: {what} of parameter {name!r}", value
    return None


def load_program(
    store: Store, run_dir: str, sha256: str, weights: Weights | None = None
) -> Program:
    """Read the program of `store_program`.

    Raises:
        StoreError: the file is not what the driver wrote; nothing was unpickled.
    """
    path = f"{run_dir}/{PROGRAM_NAME}"
    data = store.read_bytes(path)
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise StoreError(
            f"{store.full_url(path)} is not what the driver wrote: its SHA-256 is {digest} instead of {sha256}. It is "
            "damaged, or another program writes to the run's folder. Fit again; this writes the file again."
        )
    program = load_shell(data, {} if weights is None else weights.load())
    assert isinstance(program, Program)
    return program


# ----------------------------------------------------------------------------------------------------
# Description of a program, which a checkpoint must match.

# Entries of a group to ignore: choices between implementations of a step, and entries that are not options.
_NO_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def describe_program(program: Program) -> dict[str, object]:
    """Describe the program: structure of model and optimizer, and kinds of the other objects.

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
    if isinstance(optimizer, OptimizerList):
        kind = [type(each).__name__ for each in optimizer.optimizers]
    groups = None if optimizer is None else [len(g["params"]) for g in optimizer.param_groups]
    return {
        "model": {
            n: [list(t.shape), str(t.dtype)]
            for n, t in program.model.state_dict().items()
            if isinstance(t, Tensor)
        },
        "modules": module_texts(program.model),
        "optimizer": kind
        if isinstance(kind, list)
        else getattr(kind, "__qualname__", type(kind).__name__),
        "optimizer options": None if optimizer is None else _options(optimizer),
        "parameter groups": groups,
        "loss": [_loss_name(loss) for loss in program.losses],
        # Include the order, because checkpoints hold the metrics' sums in this order.
        "metrics": {m.name: [i, m.kind] for i, m in enumerate(program.metrics)},
        "gradient_compression": _compression_name(program.compression),
        "lr_scheduler": None
        if program.lr_scheduler is None or optimizer is None
        else describe_scheduler(program.lr_scheduler, optimizer),
        **program.user.describe(),
    }


def _options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the plain options of all groups by names such as "lr of group 0"."""
    return {
        f"{name} of group {number}": plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _NO_OPTIONS and is_plain(plain(value))
    }


def _compression_name(compression: Compression) -> str:
    # PowerSGD's repr has its options. The repr of a user's object may contain an address, which differs between
    # processes.
    if isinstance(compression, PowerSGD):
        return repr(compression)
    return str(getattr(compression, "__qualname__", type(compression).__name__))


def _loss_name(loss: Loss) -> str:
    loss = loss.loss if isinstance(loss, ClassMean) else loss
    return str(getattr(loss, "__qualname__", type(loss).__name__))
