"""What CUDA's driver counts in a rank's process: asked without torch, and without leaving a trace in that process.

The question is asked in a forked process: CUDA's driver reads CUDA_VISIBLE_DEVICES when it starts and never again, and a
process in which it has started cannot fork others that use it. No context is made, so no memory of a GPU is taken.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["LIBRARY", "ask", "cuda_uuids"]

LIBRARY = "libcuda.so.1"


class _CudaError(Exception):
    """What CUDA's driver answered, in words."""


def cuda_uuids(library: str) -> list[str]:
    """UUIDs of the GPUs that this process sees, in the order of CUDA's driver; of MIG devices their own.

    Starts the driver in this process.

    Args:
        library: the driver's library; "" for `LIBRARY`.

    Raises:
        OSError: it cannot be loaded.
        _CudaError: it does not answer.
    """
    cuda = ctypes.CDLL(library or LIBRARY)

    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise _CudaError(f"{name} gave {_error_text(cuda, status)}")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    # The second version tells a MIG device's own UUID; the first, the card's.
    name = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    found = []
    for ordinal in range(count.value):
        device, raw = ctypes.c_int(), ctypes.create_string_buffer(16)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call(name, raw, device)
        found.append(f"GPU-{uuid.UUID(bytes=raw.raw)}")
    return found


def _error_text(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    if hasattr(cuda, "cuGetErrorString") and not cuda.cuGetErrorString(status, ctypes.byref(text)):
        return f"error {status} ({(text.value or b'').decode(errors='replace')})"
    return f"error {status}"


def ask(library: str, tell: Callable[[bytes], None]) -> None:
    """Ask in a forked process, and hand `tell` the answer as JSON, from a thread: {"uuids": [...], "error": ""}.

    Call it while this process has no other thread. The thread waits as long as the driver takes; whoever reads the
    answer has the deadline, and ends the process group.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(library, write)
    os.close(write)

    def pass_on() -> None:
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        if not said:
            code = os.waitstatus_to_exitcode(status)
            error = f"the process that asked CUDA's driver ended with {code}"
            said = json.dumps({"uuids": [], "error": error}).encode()
        tell(said)

    threading.Thread(target=pass_on, name="sparkhvd-gpus", daemon=True).start()


def _answer(library: str, fd: int) -> NoReturn:
    """The forked process: one answer, and no exit handlers of the process that it is a copy of."""
    try:
        try:
            answer = {"uuids": cuda_uuids(library), "error": ""}
        except Exception as e:  # noqa: BLE001 - the answer is why there is none
            answer = {"uuids": [], "error": str(e) or type(e).__name__}
        os.write(fd, json.dumps(answer).encode())
    finally:
        os._exit(0)
