"""Frozen parameters that the ranks of a host hold once.

Weights of a large model are a file that every rank maps; those of others, of a model that each rank makes, and those that rank 0 sent come to each
rank as memory of its own. The first rank of a host copies such parameters into a file in memory, and all ranks map that. The
mapping is private: code of the user's that writes to one has its own copy of the pages, as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.engine.memfd import new_memfd
from sparkhvd.torch.context import context

__all__ = ["SHARED_BYTES", "give_back", "share_frozen"]

# Fewer bytes are not worth a message and a mapping.
SHARED_BYTES = 8 << 20


def share_frozen(model: nn.Module, names: Collection[str] | None = None) -> None:
    """Let the ranks of each host hold frozen parameters once; all ranks must call it, with equal values.

    A parameter stays as it is on a rank that cannot map the first rank's, such as one in another container.

    Args:
        model: on the CPU; elsewhere nothing happens.
        names: of the parameters that each rank holds for itself; None: all of them.
    """
    place = context().engine.topology
    if len(set(place.hosts)) == place.size:
        return
    frozen = _frozen(model, names)
    if sum(each.nbytes for each in frozen.values()) < SHARED_BYTES:
        return
    with contextlib.ExitStack() as kept:
        path = ""
        if place.local_rank == 0:
            with contextlib.suppress(OSError, RuntimeError):  # forbidden here, or too little memory
                path = _written(frozen, kept)
        paths = hvd.allgather_object(path, name="frozen.memory")
        first = paths[place.hosts.index(place.hosts[place.rank])]
        if first:
            _take(frozen, first)
        hvd.barrier()  # then all have opened the file


def _frozen(model: nn.Module, names: Collection[str] | None) -> dict[str, nn.Parameter]:
    """Return the frozen parameters of these names whose memory is no other tensor's."""
    state = model.state_dict(keep_vars=True)
    tensors = {id(t): t for t in state.values() if isinstance(t, Tensor)}
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    return {
        name: value
        for name, value in state.items()
        if (names is None or name in names)
        and type(value) is nn.Parameter
        and not value.requires_grad
        and value.device.type == "cpu"
        and value.untyped_storage().nbytes() == value.nbytes
        and owners[value.untyped_storage().data_ptr()] == 1
    }


def _written(frozen: dict[str, nn.Parameter], kept: contextlib.ExitStack) -> str:
    """Write parameters to a file in memory that is there as long as `kept`; return its path for processes of this host."""
    descriptor = new_memfd("sparkhvd-frozen")
    kept.callback(os.close, descriptor)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    torch.save({name: each.detach() for name, each in frozen.items()}, path)
    return path


def _take(frozen: dict[str, nn.Parameter], path: str) -> None:
    """Let parameters be those of a file, where these are equal."""
    try:
        mapped = torch.load(path, weights_only=True, mmap=True)
    except Exception:  # noqa: BLE001 - a path of another container, where anything may be
        return
    for name, parameter in frozen.items():
        if _is_equal(parameter.detach(), mapped.get(name)):
            parameter.data = mapped[name]
    give_back()


def _is_equal(own: Tensor, other: object) -> bool:
    """Compare bits: numbers that are none equal themselves here."""
    if not isinstance(other, Tensor) or (own.shape, own.stride(), own.dtype) != (
        *(other.shape, other.stride()),
        other.dtype,
    ):
        return False
    a, b = (each.untyped_storage() for each in (own, other))
    return torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(each) for each in (a, b)))


def give_back() -> None:
    """Give freed memory to the system: a rank keeps it for its next allocations else."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
