"""Checkpoint and its file format.

`torch.load(..., weights_only=True)` reads the file. It ends with the SHA-256 of the bytes before, which torch.load
ignores and `read_checkpoint` compares first.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import NotRequired

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.checkpoints.frozen import Frozen
from sparkhvd.training.metrics import TotalsState
from sparkhvd.training.modules.weights import HashingWriter, is_of_machine, sha256_of
from sparkhvd.training.to_device import to_cpu
from sparkhvd.training.types import History, State

FORMAT_VERSION = 6
# Version 3 had all parameters in it, version 4 lacked `final`, `others` and `changes`; 5 was in no release.
_READ_VERSIONS = (3, 4, FORMAT_VERSION)
# The last line of a checkpoint.
_SEAL = re.compile(rb"\nsparkhvd-sha256 ([0-9a-f]{64})\n")
_SEAL_BYTES = len("\nsparkhvd-sha256 \n") + 64
# Completed (epochs, steps).
Position = tuple[int, int]


class DamagedError(InvalidArgumentError):
    """Raised for a checkpoint whose bytes do not match its hash; the message names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """State after `epoch` epochs and `step` steps of the next.

    Attributes:
        epoch: completed epochs.
        model: the model's state dict, in its file without the parameters in `frozen`.
        optimizer: the optimizer's state dict.
        scheduler: the scheduler's state dict, or None.
        history: the records of these epochs.
        fingerprint: of the run; a resuming run must share it.
        scaler: the loss scaler's state dict, or None.
        callbacks: the states of the user's callbacks and their reason to stop, or None.
        step: completed steps of the running epoch; 0 between epochs.
        buffers: the model's buffers outside its state dict.
        ranks: each rank's own state inside an epoch, see `gather_rank_states`; empty between epochs, when all ranks are equal.
        compression: the state of the gradient compression, see `gather_compression`.
        kept: states of the objects kept by a `train_fn`, by name.
        frozen: the parameters in a separate file, see `FrozenParameters`, or None.
        final: changes by `on_train_end`, for the model that `fit` returns: entries of "model" and "others", all "buffers" and
            "changes". A resumed run calls the hook again.
        others: state of losses and metrics, see `LossState`.
        changes: of model and optimizer since they were built, see `Changes`; {} if unknown.
    """

    epoch: int
    model: dict[str, Any] = field(repr=False)
    optimizer: dict[str, Any] = field(repr=False)
    scheduler: dict[str, Any] | None = field(repr=False)
    history: History = field(repr=False)
    fingerprint: str = field(repr=False)
    scaler: dict[str, Any] | None = field(default=None, repr=False)
    callbacks: State | None = field(default=None, repr=False)
    step: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)
    ranks: list[RankState] = field(default_factory=list, repr=False)
    compression: State = field(default_factory=dict, repr=False)
    kept: State = field(default_factory=dict, repr=False)
    frozen: Frozen | None = None
    final: dict[str, Any] = field(default_factory=dict, repr=False)
    others: State = field(default_factory=dict, repr=False)
    changes: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def position(self) -> Position:
        """Completed (epochs, steps)."""
        return self.epoch, self.step

    @property
    def result(self) -> Checkpoint:
        """Checkpoint for the model of the run, after `on_train_end`."""
        if not self.final:
            return self
        model = {**self.model, **self.final["model"]}
        return replace(self, **{**self.final, "model": model}, final={})


def write_checkpoint(checkpoint: Checkpoint, sink: IO[bytes] | io.RawIOBase) -> None:
    """Write a checkpoint and its hash to an open file."""
    content = {"format_version": FORMAT_VERSION, **vars(checkpoint)}
    hashing = HashingWriter(sink)
    torch.save(content, hashing)  # type: ignore[arg-type]  # torch only calls write
    sink.write(f"\nsparkhvd-sha256 {hashing.sha256}\n".encode())


def read_checkpoint(file: IO[bytes], url: str, *, is_mapped: bool = False) -> Checkpoint:
    """Check the hash of a checkpoint and read it from an open file.

    Args:
        file: seekable.
        url: of the file, for errors.
        is_mapped: leave all tensors except the model's in the file, which may be deleted afterwards.

    Raises:
        DamagedError: the bytes do not match the hash, or are no checkpoint.
        InvalidArgumentError: it has another format version.
    """
    check_seal(file, url)
    try:
        values = _mapped(file) if is_mapped else torch.load(file, weights_only=True)
        version = values.pop("format_version")
    except Exception as e:  # torch's reader raises any class for other bytes
        if "Unsupported global" in str(e):
            named = str(e).partition("Unsupported global")[2][:200]
            raise InvalidArgumentError(
                f"{url} holds what torch {torch.__version__} does not load: Unsupported global{named}. Resume with the torch that has written it, "
                "or give another run_id."
            ) from e
        if is_of_machine(e):
            raise
        raise DamagedError(f"{url} is no checkpoint ({type(e).__name__}: {e}).") from e
    if version not in _READ_VERSIONS:
        raise InvalidArgumentError(
            f"{url} has format version {version}; this sparkhvd reads {', '.join(map(str, _READ_VERSIONS))}. Give another run_id."
        )
    try:
        return Checkpoint(**values)
    except TypeError as e:
        raise DamagedError(f"{url} is no checkpoint ({e}).") from e


def check_seal(file: IO[bytes], url: str) -> None:
    """Compare the whole file with its hash, and seek back to the start.

    Raises:
        DamagedError: the bytes do not match the hash.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _SEAL_BYTES))
    seal = _SEAL.fullmatch(file.read())
    if seal is None:
        raise DamagedError(
            f"{url} is damaged: it has {size:,} bytes and does not end with its checksum, as if it was cut off."
        )
    file.seek(0)
    digest = sha256_of(file, size - _SEAL_BYTES)
    if digest != seal[1].decode():
        raise DamagedError(
            f"{url} is damaged: its SHA-256 is {digest}, and {seal[1].decode()} was written."
        )
    file.seek(0)


def _mapped(file: IO[bytes]) -> dict[str, Any]:
    """Load a checkpoint, leaving all tensors except the model's in the file."""
    try:
        values: dict[str, Any] = torch.load(
            f"/proc/self/fd/{file.fileno()}", weights_only=True, mmap=True
        )
    except (
        OSError,
        RuntimeError,
    ):  # not every system has such names, nor every file system mappings
        return dict(torch.load(file, weights_only=True))
    # Copied out of the mapping, with tied tensors kept tied: a file deleted on NFS invalidates its mapped pages.
    for name in {"model", "final", "buffers", "changes"} & values.keys():
        values[name] = copy.deepcopy(values[name])
    return values


# ----------------------------------------------------------------------------------------------------
# Buffers of a module, saved or not, and the extra state of modules.
# Training changes them on every rank. Between epochs all ranks use rank 0's; a checkpoint inside an epoch holds each rank's own.
# A buffer may change its shape while training, or exist on some ranks only, such as a cache filled by `forward`.


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers excluded from the model's state dict (`persistent=False`), by name."""
    saved = model.state_dict()
    return {name: value for name, value in model.named_buffers() if name not in saved}


def load_buffers(model: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Set buffers to these values of any shape; None empties a buffer."""
    with torch.no_grad():
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            buffer = owner._buffers.get(leaf)
            if value is None or buffer is None or not _is_alike(buffer, value):
                device = _device(model) if buffer is None else buffer.device
                owner._buffers[leaf] = None if value is None else value.to(device, copy=True)
            else:
                buffer.copy_(value)


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def extra_states(model: nn.Module) -> State:
    """Extra states of modules by module name; tensors on the CPU."""
    return {
        name: to_cpu(module.get_extra_state())
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def load_extra_states(model: nn.Module, states: Mapping[str, object]) -> None:
    """Load the states of `extra_states`."""
    for name, state in states.items():
        model.get_submodule(name).set_extra_state(state)


def broadcast_module_state(model: nn.Module) -> None:
    """Broadcast rank 0's buffers and extra states; all ranks must call it.

    Running statistics then come from rank 0's rows, in validation and in the checkpoint.

    Cost: one broadcast of the buffers' bytes, and one of a small object if more than values may differ.
    """
    if _may_differ(model):
        _make_alike(model)
    buffers = dict(model.named_buffers())
    if buffers:
        hvd.broadcast_parameters(buffers, 0)


def _may_differ(model: nn.Module) -> bool:
    """Check whether ranks may have other shapes or extra states; by the classes, so equal on all ranks."""
    return any(
        module._non_persistent_buffers_set
        or type(module).get_extra_state is not nn.Module.get_extra_state
        for module in model.modules()
    )


def _make_alike(model: nn.Module) -> None:
    """Set this rank's unsaved buffers to rank 0's shapes, and its modules to rank 0's extra states."""
    buffers = unsaved_buffers(model)
    shapes = {n: (v.shape, v.dtype) for n, v in buffers.items()}
    states = (shapes, extra_states(model)) if hvd.rank() == 0 else None
    wanted, extra = hvd.broadcast_object(states, 0, name="module state")
    if hvd.rank() == 0:
        return
    changed = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in wanted.items()
        if shapes.get(name) != (shape, dtype)
    }
    load_buffers(model, {**dict.fromkeys(shapes.keys() - wanted.keys()), **changed})
    load_extra_states(model, extra)


# ----------------------------------------------------------------------------------------------------
# Each rank's own state inside an epoch: random numbers, sums of the loss, running statistics.
# Between epochs the ranks have equal state. A checkpoint of a step holds this state for every rank, so that a resumed
# run draws the same numbers, reports the same means and normalizes with the same statistics.


class RngState(TypedDict):
    """States of the generators of torch, numpy, random and the current GPU."""

    torch: Tensor
    numpy: tuple[str, Tensor, int, int, float]
    random: tuple[int, list[int], float | None]
    cuda: Tensor | None


class RankState(TypedDict):
    """A rank's own state inside an epoch."""

    rng: RngState
    totals: TotalsState | None
    seconds: float
    stop_reason: str
    extra: State
    buffers: dict[str, Tensor | None]
    others: NotRequired[State]


def gather_rank_states(
    model: nn.Module,
    totals: TotalsState | None,
    seconds: float,
    *,
    stop_reason: str = "",
    others: State | None = None,
) -> list[RankState]:
    """Gather every rank's own state, by rank; all ranks must call it.

    Args:
        model: its buffers are compared over ranks; the result includes those that differ from rank 0's.
        totals: the rank's sums of the epoch so far: tensors and plain values; None for a `train_fn`.
        seconds: duration of the epoch so far on this rank.
        others: this rank's state of losses and metrics that may differ between ranks.
        stop_reason: reason given by this rank's callback for stopping after the epoch, or "".

    Cost: a digest of every buffer, one allgather of about 15 KB per rank, and one of the buffers that differ.
    """
    buffers = dict(model.named_buffers())
    state: RankState = {
        "rng": _rng(),
        "totals": totals,
        "seconds": seconds,
        "stop_reason": stop_reason,
        "extra": extra_states(model),
        "buffers": {},
        "others": others or {},
    }
    ranks: list[tuple[RankState, dict[str, bytes]]] = hvd.allgather_object(
        (state, {name: _digest(value) for name, value in buffers.items()}), name="checkpoint.ranks"
    )
    reference = ranks[0][1]
    names = {name for _, digests in ranks for name in digests}
    changed = {n for n in names if any(d.get(n) != reference.get(n) for _, d in ranks)}
    differing: list[dict[str, Tensor | None]] = [{}] * len(ranks)
    if changed:
        # A buffer missing on this rank is None.
        values = {n: buffers[n].detach().cpu() if n in buffers else None for n in changed}
        sent = {} if hvd.rank() == 0 else values
        differing = hvd.allgather_object(sent, name="checkpoint.buffers")
    return [{**state, "buffers": kept} for (state, _), kept in zip(ranks, differing, strict=True)]


def load_rng(state: RngState) -> None:
    """Set the generators of torch, numpy and random to a state."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, following = state["random"]
    random.setstate((version, tuple(words), following))
    # A run on a GPU may resume on a machine without a GPU.
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rng() -> RngState:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)
    kind, keys, position, has_gauss, gauss = state
    version, words, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            position,
            has_gauss,
            gauss,
        ),
        "random": (version, list(words), following),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def _digest(value: Tensor) -> bytes:
    flat = value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    kind = f"{tuple(value.shape)} {value.dtype} ".encode()
    return hashlib.blake2b(kind + flat.numpy().tobytes(), digest_size=16).digest()
