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

FORMAT_VERSION = 7
# Version 3 had no separate file of frozen parameters. Version 4 had no `final`, `others` and `changes`. Version 5 was
# in no release. Version 6 had no `history_file`.
_READ_VERSIONS = (3, 4, 6, FORMAT_VERSION)
# The last line of a checkpoint.
_SEAL = re.compile(rb"\nsparkhvd-sha256 ([0-9a-f]{64})\n")
_SEAL_BYTES = len("\nsparkhvd-sha256 \n") + 64
# Completed epochs, and completed steps of the next epoch.
Position = tuple[int, int]


class DamagedError(InvalidArgumentError):
    """Raised if the bytes of a checkpoint do not match its hash. The message names the file."""


class HistoryFile(TypedDict):
    """Beginning of the metrics file with the records of a checkpoint: its number of bytes, and their SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after `epoch` epochs and `step` steps of the next epoch.

    Attributes:
        epoch: completed epochs.
        model: the model's state dict; the checkpoint's file does not contain the parameters in `frozen`.
        optimizer: the optimizer's state dict.
        scheduler: the scheduler's state dict, or None.
        history: the records of the completed epochs; the checkpoint's file does not contain them if `history_file` is set.
        fingerprint: description of the run; a run resumes only from a checkpoint with the same fingerprint.
        scaler: the loss scaler's state dict, or None.
        callbacks: the states of the user's callbacks and their reason to stop, or None.
        step: completed steps of the running epoch; 0 between epochs.
        buffers: the model's buffers outside its state dict.
        ranks: each rank's own state inside an epoch, see `gather_rank_states`; empty between epochs, when all ranks are equal.
        compression: the state of the gradient compression, see `gather_compression`.
        kept: states of the objects kept by a `train_fn`, by name.
        frozen: the parameters in a separate file, see `FrozenParameters`, or None.
        final: changes by `on_train_end`, for the model that `fit` returns: changed entries of "model" and "others", and
            all "buffers" and "changes". A resumed run ignores them and calls the hook again.
        others: state of losses and metrics, see `LossState`.
        changes: changes of model and optimizer since they were built, see `Changes`; {} if unknown.
        history_file: the part of the metrics file with the history, or None if the checkpoint's file contains it.
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
    history_file: HistoryFile | None = None

    @property
    def position(self) -> Position:
        """Completed epochs, and completed steps of the next epoch."""
        return self.epoch, self.step

    @property
    def result(self) -> Checkpoint:
        """The checkpoint with the changes by `on_train_end`, for the model that `fit` returns."""
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
        file: an open, seekable file.
        url: URL of the file, for errors.
        is_mapped: leave all tensors except the model's in the file until they are used. The file may be deleted
            meanwhile.

    Raises:
        DamagedError: the bytes do not match the hash, or are not a checkpoint.
        InvalidArgumentError: the checkpoint has another format version.
    """
    check_seal(file, url)
    try:
        values = _mapped(file) if is_mapped else torch.load(file, weights_only=True)
        version = values.pop("format_version")
    except Exception as e:  # torch raises errors of many classes for invalid bytes
        if "Unsupported global" in str(e):
            named = str(e).partition("Unsupported global")[2][:200]
            raise InvalidArgumentError(
                f"{url} holds an object that torch {torch.__version__} does not load: Unsupported global{named}. Resume with the version "
                "of torch that wrote the file, or give another run_id."
            ) from e
        if is_of_machine(e):
            raise
        raise DamagedError(f"{url} is not a checkpoint ({type(e).__name__}: {e}).") from e
    if version not in _READ_VERSIONS:
        raise InvalidArgumentError(
            f"{url} has format version {version}; this sparkhvd reads {', '.join(map(str, _READ_VERSIONS))}. Give another run_id."
        )
    try:
        return Checkpoint(**values)
    except TypeError as e:
        raise DamagedError(f"{url} is not a checkpoint ({e}).") from e


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
            f"{url} is damaged: it has {size:,} bytes and does not end with its checksum. It may be truncated."
        )
    file.seek(0)
    digest = sha256_of(file, size - _SEAL_BYTES)
    if digest != seal[1].decode():
        raise DamagedError(
            f"{url} is damaged: its SHA-256 is {digest} instead of {seal[1].decode()}."
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
    ):  # the system does not have such names, or the file system cannot map files
        return dict(torch.load(file, weights_only=True))
    # Copy the model's tensors out of the mapping, because a deletion on NFS invalidates mapped pages. Tied tensors stay
    # tied, because each entry is copied as a whole.
    for name in {"model", "final", "buffers", "changes"} & values.keys():
        values[name] = copy.deepcopy(values[name])
    return values


# ----------------------------------------------------------------------------------------------------
# Buffers of a module, saved or not, and the extra state of modules.
# Training changes them on every rank. Between epochs all ranks use rank 0's values; a checkpoint inside an epoch holds
# the values of each rank. A buffer, such as a cache filled by `forward`, may change its shape or exist on some ranks
# only.


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Collect the buffers missing from the model's state dict (`persistent=False`), by name."""
    saved = model.state_dict()
    return {name: value for name, value in model.named_buffers() if name not in saved}


def load_buffers(model: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Set buffers to values of any shape. None removes a buffer's value."""
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
    """Collect the extra states of modules (`get_extra_state`) by module name, with tensors on the CPU."""
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
    """Broadcast rank 0's buffers and extra states. All ranks must call it.

    So validation and the checkpoint use the running statistics of rank 0's rows.

    Cost: one broadcast of the buffers' bytes, and one of a small object if shapes or extra states may differ.
    """
    if _may_differ(model):
        _make_alike(model)
    buffers = dict(model.named_buffers())
    if buffers:
        hvd.broadcast_parameters(buffers, 0)


def _may_differ(model: nn.Module) -> bool:
    """Check whether shapes or extra states may differ between ranks. The result is the same on all ranks."""
    return any(
        module._non_persistent_buffers_set
        or type(module).get_extra_state is not nn.Module.get_extra_state
        for module in model.modules()
    )


def _make_alike(model: nn.Module) -> None:
    """Give this rank's unsaved buffers rank 0's shapes, and its modules rank 0's extra states."""
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
# State that differs between ranks inside an epoch: random number generators, sums of the loss, running statistics.
# Between epochs the ranks have equal state. A checkpoint inside an epoch holds this state of every rank, so that a
# resumed run draws the same random numbers, reports the same means and normalizes with the same statistics.


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
    """Gather each rank's own state, ordered by rank. All ranks must call it.

    Args:
        model: the module. Its buffers are compared between ranks; the result includes buffers that differ from rank
            0's.
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
