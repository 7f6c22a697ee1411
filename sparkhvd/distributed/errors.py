"""Errors of the engine as torch.distributed's: each is both."""

from __future__ import annotations

import re

from torch.distributed import DistBackendError

from sparkhvd import errors

__all__ = [
    "CollectiveError",
    "CollectiveTimeoutError",
    "NUMBER_BITS",
    "PeerLostError",
    "TAG_BITS",
    "as_torch",
]


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


# What the engine's advice says of names and settings that callers of torch.distributed do not have.
_WORDS = {
    ", or use different names": "",
    ", or give the two tensors different names": "",
    "raise stall_shutdown_s": "raise the timeout of the group",
    "or raise the timeout.": "or raise the timeout of the group.",
    "that wait() was given. It goes on; wait again, or shut the engine down.": "timeout of wait(). The operation continues: wait again, "
    "or destroy the group.",
    "Call shutdown() on a rank only": "Destroy a group on a rank only",
}

# The engine's tags have 63 bits. Groups of the same ranks are one process set, and tell their messages apart by the upper ones.
TAG_BITS, NUMBER_BITS = 32, 16


def as_torch(error: BaseException) -> BaseException:
    """Return the error of this module for one of the engine's, in torch's words; others as they are."""
    if not isinstance(error, (errors.CollectiveError, errors.MismatchError)):
        return error
    text = re.sub(r"(?<=with tag )\d+", lambda tag: str(int(tag[0]) % (1 << TAG_BITS)), str(error))
    for engines, torchs in _WORDS.items():
        text = text.replace(engines, torchs)
    ours = _TORCH.get(type(error), type(error))(text)
    if isinstance(error, errors.CollectiveError) and isinstance(ours, errors.CollectiveError):
        ours.lost = error.lost
    return ours
