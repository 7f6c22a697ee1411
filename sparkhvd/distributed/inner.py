"""Groups of torch's own backends inside a group of ours, by device: `"cpu:sparkhvd,cuda:nccl"`, `new_group(backend="gloo")`.

A group written in Python takes the place of torch's whole group, so torch itself makes none of the other backends. It keeps
the configuration that was asked for, which is read at the first operation: only then does torch know the group.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from sparkhvd.errors import InvalidArgumentError

OURS = "sparkhvd"


class NestedBackendSpec(NamedTuple):
    """What a backend of torch's is made from.

    Attributes:
        store: for this backend of this group alone.
        rank: in the group.
        size: of the group.
        timeout: of operations that have none of their own.
        name: torch's name of the group.
        options: the user's `pg_options`; None where there are none.
    """

    store: Store
    rank: int
    size: int
    timeout: timedelta
    name: str
    options: object


def _gloo(request: NestedBackendSpec) -> Any:
    kind: Any = dist.ProcessGroupGloo
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")  # noqa: TID251 - Gloo's
    try:
        # As torch's own groups of Gloo do, but lazily: two ranks may exchange a message before a third one has used the group.
        devices = [kind.create_device(interface=name, lazy_init=True) for name in named if name]
        devices = devices or [kind.create_default_device(lazy_init=True)]
    except TypeError:  # torch before 2.8: all ranks connect here
        return kind(request.store, request.rank, request.size, request.timeout)
    options = kind._Options()
    options._devices = devices
    options._timeout = request.timeout
    return kind(request.store, request.rank, request.size, options)


def _nccl(request: NestedBackendSpec) -> Any:
    if not dist.is_nccl_available():
        raise InvalidArgumentError(
            f"backend 'sparkhvd': tensors on a GPU go to NCCL, and this torch ({torch.__version__}) has none. Install torch "
            "with CUDA, or move the tensors with .cpu()."
        )
    kind: Any = dist.ProcessGroupNCCL
    options = request.options if isinstance(request.options, kind.Options) else kind.Options()
    options._timeout = request.timeout
    options.group_name = request.name
    return kind(request.store, request.rank, request.size, options)


Factory = Callable[[NestedBackendSpec], Any]
FACTORIES: dict[str, tuple[Any, Factory]] = {
    "gloo": (dist.ProcessGroup.BackendType.GLOO, _gloo),
    "nccl": (dist.ProcessGroup.BackendType.NCCL, _nccl),
}
"""By torch's name of a backend: its type, and what makes it."""


class NestedBackends:
    """Torch's own groups inside one of ours; made when they are first used, by every rank that uses them.

    Args:
        owner: the group of ours, by which torch finds the configuration.
        request: of its members; the store is the group's.
    """

    def __init__(self, owner: Any, request: NestedBackendSpec) -> None:
        self._owner = owner
        self._request = request
        self._lock = threading.Lock()
        self._backends: dict[str, str] | None = None  # by type of device
        self._groups: dict[str, Any] = {}  # by backend
        self.cpu_is_ours = False  # known to be

    def of(self, device: str) -> Any:
        """Return torch's group for tensors of a type of device; None where they are ours.

        Raises:
            InvalidArgumentError: the group has no backend for them, or it cannot be made.
        """
        backend = self._read().get(device)
        if backend == OURS and device == "cpu":
            return None
        if backend is None:
            raise InvalidArgumentError(
                f"backend 'sparkhvd': the group has backends for {self._config()}, and the tensor is on {device}. Move it, "
                f"or name a backend for {device} too, as in 'cpu:sparkhvd,cuda:nccl'."
            )
        backend = _torchs(backend)
        with self._lock:
            if backend not in self._groups:
                self._groups[backend] = self._make(backend)
            return self._groups[backend]

    def devices(self) -> list[str]:
        """Return the types of devices for which the group has a backend, torch the library, and this host a GPU."""
        return [
            device
            for device, backend in self._read().items()
            if device == "cpu" or backend not in (OURS, "nccl") or _has_nccl()
        ]

    def backend(self) -> str:
        """Return the name of the group's backend: ours, where any device is."""
        names = list(self._read().values())
        return OURS if OURS in names else names[0]

    def each(self, call: Callable[[Any], object]) -> None:
        """Call a function with each of torch's groups that was made."""
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            call(group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self._request = self._request._replace(timeout=timeout)
        for device, backend in self._read().items():
            group = self._groups.get(_torchs(backend))
            if group is not None and not (device == "cpu" and backend == OURS):
                group._get_backend(torch.device(device))._set_default_timeout(timeout)

    def _read(self) -> dict[str, str]:
        found = self._backends
        if found is None:
            try:
                text = dist.get_backend_config(self._owner)
            except (AssertionError, TypeError, ValueError, RuntimeError):
                return {"cpu": OURS}  # torch does not know the group yet, or not any more
            found = dict([part.split(":") for part in text.split(",")])
            self._backends = found
            self.cpu_is_ours = found.get("cpu") == OURS
        return found

    def _config(self) -> str:
        return ", ".join([f"{device} ({name})" for device, name in self._read().items()])

    def _make(self, backend: str) -> Any:
        if backend not in FACTORIES:
            raise InvalidArgumentError(
                f"backend 'sparkhvd': the group's configuration names {backend!r} ({self._config()}). Beside ours a group can "
                f"have {' and '.join(FACTORIES)}; make a group of {backend!r} alone."
            )
        kind, factory = FACTORIES[backend]
        request = self._request._replace(store=PrefixStore(f"{backend}/", self._request.store))
        made = factory(request)
        if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):
            made._set_sequence_number_for_group()  # torch 2.14 does so by itself, and warns
        group: Any = dist.ProcessGroup(request.store, request.rank, request.size)
        group._set_default_backend(kind)
        for device, name in self._read().items():
            if name == backend or (name == OURS and device != "cpu"):
                group._register_backend(torch.device(device), kind, made)
                # C++ that wants a group's backend, such as DDP's logger, asks ours.
                self._owner._register_backend(torch.device(device), kind, made)
        return group


@functools.cache
def _has_nccl() -> bool:
    """Return True where NCCL can run: builds of torch with CUDA have the library on hosts without a GPU, too."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def _torchs(backend: str) -> str:
    """Return the backend of torch's that a device has where ours is asked for and cannot serve it."""
    return "nccl" if backend == OURS else backend


def device_of(items: Iterable[object]) -> str | None:
    """Return the type of device of the first tensor in nested lists; None where there is none."""
    for item in items:
        if isinstance(item, Tensor):
            return item.device.type
        if isinstance(item, (list, tuple)):
            found = device_of(item)
            if found is not None:
                return found
    return None
