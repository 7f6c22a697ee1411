"""Groups of torch's own backends inside a group of ours, as for `"cpu:sparkhvd,cuda:nccl"`.

Our group is written in Python and replaces torch's whole group, so torch does not create other backends. This module
creates them. It reads the requested configuration at the first operation, because torch registers the group only then.
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
    """Arguments for the creation of a torch backend inside a group.

    Attributes:
        store: store for this backend of this group only.
        rank: rank in the group.
        size: number of ranks of the group.
        timeout: timeout of operations that have none.
        name: torch's name of the group.
        options: the user's `pg_options`, if any.
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
        # Connect lazily, so that two ranks may exchange a message before a third rank has used the group.
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
            f"backend 'sparkhvd': tensors on a GPU need NCCL, but this torch ({torch.__version__}) was built without NCCL. "
            "Install torch with CUDA, or move the tensors with .cpu()."
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
"""Type and factory of each backend, by torch's name of the backend."""


class NestedBackends:
    """Torch's own groups inside a group of ours. Each rank creates such a group at its first use.

    Args:
        owner: our group, for which torch has the configuration.
        request: arguments for new groups, with our group's store.
    """

    def __init__(self, owner: Any, request: NestedBackendSpec) -> None:
        self._owner = owner
        self._request = request
        self._lock = threading.Lock()
        self._backends: dict[str, str] | None = None  # by type of device
        self._groups: dict[str, Any] = {}  # by backend
        self.cpu_is_ours = False  # True once it is known that CPU tensors use our engine

    def of(self, device: str) -> Any:
        """Return torch's group for tensors on a type of device, or None if our engine handles these tensors.

        Raises:
            InvalidArgumentError: the group has no backend for the device, or the backend cannot be created.
        """
        backend = self._read().get(device)
        if backend == OURS and device == "cpu":
            return None
        if backend is None:
            raise InvalidArgumentError(
                f"backend 'sparkhvd': the group has backends for {self._config()}, but the tensor is on {device}. Move the tensor, "
                f"or give a backend for {device} too, as in 'cpu:sparkhvd,cuda:nccl'."
            )
        backend = _torchs(backend)
        with self._lock:
            if backend not in self._groups:
                self._groups[backend] = self._make(backend)
            return self._groups[backend]

    def devices(self) -> list[str]:
        """List the types of devices usable by the group on this host."""
        return [
            device
            for device, backend in self._read().items()
            if device == "cpu" or backend not in (OURS, "nccl") or _has_nccl()
        ]

    def backend(self) -> str:
        """Return the name of the group's backend: ours if our engine handles any device."""
        names = list(self._read().values())
        return OURS if OURS in names else names[0]

    def restart(self, store: Store, rank: int, size: int, name: str) -> None:
        """Drop torch's groups after a change of the ranks. The next use creates them again."""
        with self._lock:
            former, self._groups = self._groups, {}
            self._request = self._request._replace(store=store, rank=rank, size=size, name=name)
        for group in former.values():
            group.abort()

    def each(self, call: Callable[[Any], object]) -> None:
        """Call a function with each of torch's groups created so far."""
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
                return {"cpu": OURS}  # torch has not registered the group yet, or has removed it
            found = dict([part.split(":") for part in text.split(",")])
            self._backends = found
            self.cpu_is_ours = found.get("cpu") == OURS
        return found

    def _config(self) -> str:
        return ", ".join([f"{device} ({name})" for device, name in self._read().items()])

    def _make(self, backend: str) -> Any:
        if backend not in FACTORIES:
            raise InvalidArgumentError(
                f"backend 'sparkhvd': the group's configuration names {backend!r} ({self._config()}). Together with 'sparkhvd' a "
                f"group can have {' and '.join(FACTORIES)}. Create a group with only {backend!r}."
            )
        kind, factory = FACTORIES[backend]
        request = self._request._replace(store=PrefixStore(f"{backend}/", self._request.store))
        made = factory(request)
        if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):
            # Torch 2.14 does this itself, and warns about the call.
            made._set_sequence_number_for_group()
        group: Any = dist.ProcessGroup(request.store, request.rank, request.size)
        group._set_default_backend(kind)
        for device, name in self._read().items():
            if name == backend or (name == OURS and device != "cpu"):
                group._register_backend(torch.device(device), kind, made)
                # Register with our group too, because torch's C++ (such as DDP's logger) asks our group for the
                # backend.
                self._owner._register_backend(torch.device(device), kind, made)
        return group


@functools.cache
def _has_nccl() -> bool:
    """Check that NCCL can run on this host: it needs the library and a GPU."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def _torchs(backend: str) -> str:
    """Replace our backend by NCCL, for a device without support in our engine."""
    return "nccl" if backend == OURS else backend


def device_of(items: Iterable[object]) -> str | None:
    """Find the type of device of the first tensor in nested lists, or None without a tensor."""
    for item in items:
        if isinstance(item, Tensor):
            return item.device.type
        if isinstance(item, (list, tuple)):
            found = device_of(item)
            if found is not None:
                return found
    return None
