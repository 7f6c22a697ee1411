"""The device of a rank: its GPU or the CPU, decided once.

`choose_device` is the only place that decides; everything else takes a `torch.device` and runs the same on any.
"""

from __future__ import annotations

import collections
import importlib.util
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.system import Gpu
from sparkhvd.runner import RankContext
from sparkhvd.training.rank_sync import fail_together
from sparkhvd.training.references import references

_CPU = torch.device("cpu")


def choose_device(place: RankContext | None, *, looks: bool) -> tuple[torch.device, str]:
    """Return the device of this rank, and why it cannot use the GPU that it was given, or "".

    Args:
        place: of this process in its job; None if no runner started it.
        looks: use_gpu is not given, and Spark gives no GPUs: take one if torch sees one per rank of this host.
    """
    index = place.gpu if place is not None else None
    is_given = index is not None
    if not is_given and not looks:
        return _CPU, ""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not is_given:
        if not count:
            return _CPU, ""
        index = place.local_rank if place is not None else 0
    assert index is not None
    if index < count:
        return torch.device("cuda", index), ""
    if not is_given:
        return _CPU, (
            f"is number {index + 1} on its host, where torch sees {count} GPU{'s' * (count != 1)}. Give num_proc={count}, "
            "or use_gpu=False to train on the CPU"
        )
    build = torch.version.cuda
    has = f"is built for CUDA {build} and sees {count}" if build else "is built without CUDA"
    return _CPU, (
        f"was given a GPU, and its torch {torch.__version__} {has}. Install torch with CUDA on the executors, or give "
        "use_gpu=False"
    )


def agree(device: torch.device, problem: str) -> None:
    """Make sure that all ranks compute on devices of one kind; all ranks must call it.

    Raises:
        InvalidArgumentError: they do not, or one cannot use its GPU; on all ranks.
    """
    devices = hvd.allgather_object((device.type, problem), name="device")
    for rank, (_, text) in enumerate(devices):
        if text:
            fail_together(f"use_gpu: rank {rank} {text}.")
    for rank, (kind, _) in enumerate(devices):
        if kind != devices[0][0]:
            fail_together(
                f"use_gpu: rank 0 would train on {devices[0][0]} and rank {rank} on {kind}. Run on hosts that all have "
                "GPUs, or give use_gpu=False."
            )


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of a device, to ask how busy it is; None for the CPU, and where nobody tells."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else Gpu.find(f"GPU-{uuid}")


# ----------------------------------------------------------------------------------------------------
# Moves of losses, optimizers and batches to the device of a rank, and of state to the CPU.

# A tensor, or lists, tuples and dicts of tensors and other values.
T = TypeVar("T")


def move_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Put the state of an optimizer that has stepped before beside its parameters, after these have moved."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def move_losses(losses: Iterable[object], device: torch.device) -> None:
    """Put the weights of losses on the device: those that are modules, or hold one as `loss` or `function`."""
    for loss in losses:
        for part in (loss, getattr(loss, "loss", None), getattr(loss, "function", None)):
            if isinstance(part, nn.Module):
                part.to(device)
            keywords = getattr(part, "keywords", None)  # of a functools.partial
            if isinstance(keywords, dict):
                plain = {n: each for n, each in keywords.items() if not _has_parameters(each)}
                keywords.update(moved(plain, device))


def _has_parameters(value: object) -> bool:
    """Return True if a value is or has a tensor to train, which must stay the same object; `Others` moves these."""
    tensors = (each for _, each, _ in references(value) if isinstance(each, Tensor))
    return any(each.requires_grad for each in tensors)


# --- batches ----------------------------------------------------------------------------------------------------


class Mover:
    """Takes batches to a device without waiting for it.

    The copy reads page-locked memory after the call has returned, and the reader reuses that memory as soon as it is
    released; so each batch is held until the device has copied it.
    """

    def __init__(self, device: torch.device) -> None:
        """Move batches to `device`."""
        self.device = device
        self._flying: collections.deque[tuple[torch.cuda.Event, object]] = collections.deque()

    def __call__(self, value: T) -> T:
        """Return the same tensors, in lists, tuples and dicts, on the device; on the CPU, the value itself."""
        if self.device.type == "cpu":
            return value
        there = moved(value, self.device, non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._flying.append((event, value))
            while self._flying and self._flying[0][0].query():
                self._flying.popleft()
        return there


def _moved(value: object, device: torch.device, *, non_blocking: bool) -> object:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, PackedSequence):  # a tuple, of which one part stays on the CPU
        # torch's annotations know dtypes only.
        there: PackedSequence = value.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
        return there
    if isinstance(value, Mapping):
        return {k: _moved(v, device, non_blocking=non_blocking) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Callable[..., object] = type(value)
        return make(*(_moved(v, device, non_blocking=non_blocking) for v in value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_moved(v, device, non_blocking=non_blocking) for v in value)
    return value


def moved(value: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """Return the same tensors, in lists, tuples and dicts, on a device."""
    return cast("T", _moved(value, device, non_blocking=non_blocking))


def to_cpu(value: T) -> T:
    """Return the same tensors on the CPU: pickled objects must be readable without a GPU."""
    return moved(value, _CPU)


# ----------------------------------------------------------------------------------------------------
# Mixed precision: autocast of forward, and the loss scale that float16 needs.

# Values of `precision`, and the dtype in which `forward` computes.
PRECISIONS: dict[str, torch.dtype | None] = {
    "32": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def check_precision(precision: str, model: nn.Module) -> None:
    """Refuse a mixed precision that would change nothing.

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
    """Return a context in which `forward` computes in this precision."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a scaler of the loss for float16, whose small gradients would vanish; else None."""
    if precision != "16-mixed":
        return None
    scaler = torch.amp.GradScaler(device.type)
    # It makes its scale with the first loss, and a rank may have no rows in its first step.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def widened(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Widen outputs of 16 bits to float32, so that labels, losses and metrics are not rounded to 8 or 11 bits."""
    narrow = (torch.float16, torch.bfloat16)
    return tuple(o.float() if o.dtype in narrow else o for o in outputs)


# ----------------------------------------------------------------------------------------------------
# `compile=True`: torch.compile of the model, if every rank's machine can.


def compile_model(model: nn.Module) -> nn.Module:
    """Compile the model by torch.compile; every rank must call this.

    The module itself is not changed, so its state dict keeps its names, and `train()` and `eval()` of it count.

    Raises:
        InvalidArgumentError: on every rank, where the machine of one lacks what the compiler needs.
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    for rank, missing in enumerate(hvd.allgather_object(missing_tools(device), name="compile")):
        if missing:
            fail_together(
                f"compile=True: torch.compile needs a C++ compiler and Python's headers on every executor, on GPUs Triton "
                f"too, and on rank {rank} {missing}. Install them there, set CXX to the compiler, or set compile=False."
            )
    # Not `model.compile()`: that silently compiles nothing where the class is of torch.nn, such as Sequential.
    return cast("nn.Module", torch.compile(model))


# Triton compiles for GPUs of this major number and later (Volta, of 2017).
_LEAST_CAPABILITY = 7


def missing_tools(device: torch.device) -> str:
    """Return the tool that torch.compile misses on this machine for this device, in words; "" if none."""
    cxx = torch._inductor.config.cpp.cxx
    names = [name for name in (cxx if isinstance(cxx, (list, tuple)) else [cxx]) if name]
    if not any(shutil.which(name) for name in names):
        return f"none of {', '.join(map(repr, names))} was found"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"{header} was not found"
    return _missing_for_gpu(device) if device.type == "cuda" else ""


def _missing_for_gpu(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the module triton was not found"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _LEAST_CAPABILITY:
        return f"the GPU has the compute capability {major}.{minor}, and Triton needs {_LEAST_CAPABILITY}.0"
    return ""
