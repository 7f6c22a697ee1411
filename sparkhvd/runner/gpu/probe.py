"""Count of a rank's GPUs by CUDA's driver, without torch and without side effects in its process.

A forked process loads the driver, because the driver reads CUDA_VISIBLE_DEVICES only when it starts, and a
process with a started driver cannot fork others that use it. No context is created, so no GPU memory is used.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from sparkhvd.wire import read_json

LIBRARY = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
# How long the driver may take to count if only a default depends on it.
_COUNT_S = 30.0


class _CudaError(Exception):
    """Error returned by CUDA's driver."""


def cuda_uuids(library: str) -> list[str]:
    """UUIDs of visible GPUs or MIG devices, in the order of CUDA's driver.

    Starts the driver in this process.

    Args:
        library: the driver's library; "" for `LIBRARY`.

    Raises:
        OSError: it cannot be loaded.
        _CudaError: it returns an error.
    """
    cuda = ctypes.CDLL(library or LIBRARY)

    def call(name: str, *arguments: object) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise _CudaError(f"{name} gave {_error_text(cuda, status)}")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    # The second version returns a MIG device's own UUID, the first the card's.
    name = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    uuids = []
    for ordinal in range(count.value):
        device, raw = ctypes.c_int(), ctypes.create_string_buffer(16)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call(name, raw, device)
        uuids.append(f"GPU-{uuid.UUID(bytes=raw.raw)}")
    return uuids


def has_started(library: str) -> bool:
    """Whether CUDA's driver has started in this process and no longer reads CUDA_VISIBLE_DEVICES. Does not start it.

    Args:
        library: the driver's library; "" for `LIBRARY`.
    """
    try:
        cuda = ctypes.CDLL(library or LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:  # not loaded
        return False
    return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def count_beside(library: str, env: Mapping[str, str]) -> int:
    """Count the GPUs visible to a child process, or return 0 if unknown.

    A fresh process counts and runs only this file: this process may have threads.

    Args:
        library: the driver's library; "" for `LIBRARY`.
        env: variables of the child in addition to this process's.
    """
    inherited = os.environ  # noqa: TID251 - the child inherits this process's environment
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__, library],
            env={**inherited, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COUNT_S,
            check=True,
        )
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def _error_text(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    if hasattr(cuda, "cuGetErrorString") and not cuda.cuGetErrorString(status, ctypes.byref(text)):
        return f"error {status} ({(text.value or b'').decode(errors='replace')})"
    return f"error {status}"


def ask(
    library: str, views: Sequence[Mapping[str, str | None]], notify: Callable[[bytes], None]
) -> None:
    """Count in forked processes, one per view, and pass the answers to `notify` as JSON, from a thread.

    Call it while this process has no other thread. The thread waits as long as the driver takes; the reader of the
    answers has the deadline, and ends the process group.

    Args:
        library: the driver's library; "" for `LIBRARY`.
        views: variables to change before counting; a value of None unsets the variable.
        notify: called once with a list of {"uuids": [...], "error": ""}, in the order of `views`.
    """
    asked = [_fork(library, view) for view in views]

    def pass_on() -> None:
        notify(json.dumps([_read_answer(pid, pipe) for pid, pipe in asked]).encode())

    threading.Thread(target=pass_on, name="sparkhvd-gpus", daemon=True).start()


def _fork(library: str, view: Mapping[str, str | None]) -> tuple[int, int]:
    """Fork a process to count GPUs. Return its pid and the pipe for its answer."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(library, view, write)
    os.close(write)
    return pid, read


def _read_answer(pid: int, pipe: int) -> Any:
    with os.fdopen(pipe, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    if answer:
        return read_json(answer)
    code = os.waitstatus_to_exitcode(status)
    return {"uuids": [], "error": f"the process that asked CUDA's driver ended with {code}"}


def _answer(library: str, view: Mapping[str, str | None], fd: int) -> NoReturn:
    """Answer from a forked process, and end it without inherited exit handlers."""
    try:
        try:
            for name, value in view.items():
                os.environ.pop(name, None)  # noqa: TID251 - CUDA's own, in a process that only asks CUDA
                if value is not None:
                    os.environ[name] = value  # noqa: TID251 - as above
            answer = {"uuids": cuda_uuids(library), "error": ""}
        except Exception as e:  # noqa: BLE001 - the error is the answer
            answer = {"uuids": [], "error": str(e) or type(e).__name__}
        os.write(fd, json.dumps(answer).encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.stdout.write(str(len(cuda_uuids(sys.argv[1]))))
