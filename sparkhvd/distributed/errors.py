"""Errors of the engine as torch.distributed's: each is both."""

from __future__ import annotations

from torch.distributed import DistBackendError

from sparkhvd import errors

__all__ = ["CollectiveError", "CollectiveTimeoutError", "PeerLostError", "as_torch"]


class CollectiveError(errors.CollectiveError, DistBackendError):
    """`sparkhvd.CollectiveError` that is also torch's `DistBackendError`."""


class CollectiveTimeoutError(errors.CollectiveTimeoutError, DistBackendError):
    """`sparkhvd.CollectiveTimeoutError` that is also torch's `DistBackendError`."""


class PeerLostError(errors.PeerLostError, DistBackendError):
    """`sparkhvd.PeerLostError` that is also torch's `DistBackendError`."""


_TORCH: dict[type[BaseException], type[errors.CollectiveError]] = {
    errors.CollectiveError: CollectiveError,
    errors.CollectiveTimeoutError: CollectiveTimeoutError,
    errors.PeerLostError: PeerLostError,
}


def as_torch(error: BaseException) -> BaseException:
    """Return the error of this module for one of the engine's; others as they are."""
    kind = _TORCH.get(type(error))
    if kind is None or not isinstance(error, errors.CollectiveError):
        return error
    ours = kind(str(error))
    ours.lost = error.lost
    return ours
