"""`Routed`: collectives and messages by device: ours for tensors on the CPU, torch's own backends for others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled as is_profiled
from torch._C._distributed_c10d import AllreduceOptions
from torch.autograd.profiler import record_function

from sparkhvd.distributed.forms import FORMS
from sparkhvd.distributed.inner import Inner, device_of
from sparkhvd.distributed.launcher import Launcher
from sparkhvd.distributed.messages import Messages

__all__ = ["Routed"]


class Routed(Messages):
    """A process group whose operations go to the backend of their tensors' device.

    Args:
        inner: torch's own backends of this group.
    """

    _allreduce: Callable[..., Any]

    def __init__(self, rank: int, size: int, launcher: Launcher, inner: Inner) -> None:
        super().__init__(rank, size, launcher)
        self.inner = inner

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> Any:
        """Reduce one tensor in place."""
        # What training does most, in the least time.
        if (
            type(opts) is AllreduceOptions
            and type(tensors) is list
            and self.inner.cpu_is_ours
            and tensors[0].is_cpu
            and not is_profiled()
        ):
            return Messages.allreduce(self, tensors, opts)
        given = (tensors,) if opts is None else (tensors, opts, *rest)
        return self._allreduce(*given, **named)

    allreduce_sparse = allreduce

    def _start_coalescing(self, device_type: torch.device) -> None:
        group = self.inner.of(torch.device(device_type).type)
        if group is None:
            self.launcher.start_coalescing()
        else:
            group._start_coalescing(device_type)

    def _end_coalescing(self, device_type: torch.device) -> Any:
        group = self.inner.of(torch.device(device_type).type)
        if group is None:
            return self.launcher.end_coalescing()
        return group._end_coalescing(device_type)

    # Functional collectives of torch 2.14 and newer call these names from C++.
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing


def _routed(name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(Messages, name)
    form = FORMS[name]
    count = len(form.depths) + form.more + (1 if form.options else len(form.rest))
    last = type(form.options()) if form.options else int
    title = f"sparkhvd:{form.title}"
    find = _device_of_barrier if name == "barrier" else _device_of_tensors

    @functools.wraps(own)
    def routed(self: Routed, *args: Any, **named: Any) -> Any:
        if named or len(args) != count or type(args[-1]) is not last:
            args = tuple(form.full(args, named))
        inner = self.inner
        device = find(inner, args)
        group = None if device == "cpu" and inner.cpu_is_ours else inner.of(device)
        if group is not None:
            return getattr(group, name)(*args)
        if not is_profiled():
            return own(self, *args)
        with record_function(title):
            return own(self, *args)

    return routed


def _device_of_tensors(_: Inner, args: Sequence[Any]) -> str:
    return device_of(args) or "cpu"


def _device_of_barrier(inner: Inner, args: Sequence[Any]) -> str:
    device, types = args[0].device, inner.devices()
    if isinstance(device, torch.device) and device.type in types:
        return device.type
    return "cpu" if "cpu" in types else types[0]


for _name in FORMS:
    setattr(Routed, "_allreduce" if _name == "allreduce" else _name, _routed(_name))
