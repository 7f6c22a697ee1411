"""`Routed`: collectives and messages by device: ours for tensors on the CPU, torch's own backends for others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparkhvd.distributed.inner import Inner, device_of
from sparkhvd.distributed.launcher import Launcher
from sparkhvd.distributed.messages import Messages

__all__ = ["Routed"]

# All that takes tensors but all_reduce, by the names of every version of torch.
_ROUTED = (
    *("allreduce_coalesced", "broadcast", "reduce", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "all_gather_single", "_allgather_base"),
    *("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_to_all_single", "alltoall_base", "alltoall", "send", "recv", "recv_anysource"),
)


class Routed(Messages):
    """A process group whose operations go to the backend of their tensors' device.

    Args:
        inner: torch's own backends of this group.
    """

    def __init__(self, rank: int, size: int, launcher: Launcher, inner: Inner) -> None:
        super().__init__(rank, size, launcher)
        self.inner = inner

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce one tensor in place; also in the short forms of torch's groups: a tensor alone, no options, or the operation."""
        if type(opts) is not dist.AllreduceOptions:
            options = dist.AllreduceOptions()
            if opts is not None:
                options.reduceOp = opts
            tensors, opts = [tensors] if isinstance(tensors, Tensor) else tensors, options
        # What training does most, in the least time.
        if self.inner.cpu_is_ours and tensors[0].is_cpu:
            return Messages.allreduce(self, tensors, opts)
        group = self.inner.of(device_of(tensors) or "cpu")
        return super().allreduce(tensors, opts) if group is None else group.allreduce(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for every rank."""
        device = getattr(opts, "device", None)
        types = self.inner.devices()
        kind = "cpu" if "cpu" in types else types[0]
        if isinstance(device, torch.device) and device.type in types:
            kind = device.type
        group = self.inner.of(kind)
        return super().barrier(opts) if group is None else group.barrier(opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; torch calls this of groups of Gloo's only."""
        self.inner.of("cpu").monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        group = self.inner.of(torch.device(device).type)
        if group is None:
            self.launcher.start_coalescing()
        else:
            group._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        group = self.inner.of(torch.device(device).type)
        return self.launcher.end_coalescing() if group is None else group._end_coalescing(device)


def _by_device(name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(Messages, name)

    @functools.wraps(own)
    def routed(self: Routed, *args: Any) -> Any:
        inner = self.inner
        device = device_of(args) or "cpu"
        group = None if device == "cpu" and inner.cpu_is_ours else inner.of(device)
        return own(self, *args) if group is None else getattr(group, name)(*args)

    return routed


for _name in _ROUTED:
    setattr(Routed, _name, _by_device(_name))
