"""Statuses of the library, and the exceptions that they become."""

from __future__ import annotations

import ctypes
import threading

from sparkhvd.engine.library import Status
from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    ResultMemoryError,
    SparkhvdError,
)

__all__ = ["ERROR_BYTES", "INTERNAL", "OK", "PENDING", "error_text", "to_exception"]

ERROR_BYTES = 2048
# Plain integers for the path of every operation: looking up a member of an enumeration costs more.
OK = int(Status.OK)
PENDING = int(Status.PENDING)
INTERNAL = int(Status.INTERNAL)


class ErrorText(threading.local):
    """Buffer per thread for the sentence that explains a status."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(ERROR_BYTES)


error_text = ErrorText()

_ERRORS: dict[int, type[SparkhvdError]] = {
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.MISMATCH: MismatchError,
    Status.TIMEOUT: CollectiveTimeoutError,
    Status.PEER_LOST: PeerLostError,
    Status.SHUT_DOWN: CollectiveError,
    Status.UNSUPPORTED: InvalidArgumentError,
    Status.INTERNAL: InternalError,
    Status.NO_MEMORY: ResultMemoryError,
}


def to_exception(status: int, buffer: ctypes.Array[ctypes.c_char]) -> SparkhvdError:
    """Return the exception for a status and its sentence."""
    message = buffer.value.decode("utf-8", errors="replace")
    return _ERRORS.get(status, InternalError)(message or f"The library gave status {status}.")
