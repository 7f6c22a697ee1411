"""Processes left behind by ranks, in any session, found by a mark in their environment.

A process keeps the environment with which it was started, whatever session and parent it moves to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

# Marks of all nested launches of a process.
_VARIABLE = "SPARKHVD_LAUNCHED_BY"
# Give up on a process that forks faster than it is found.
_LIMIT_S = 1.0
# Reads the process groups of a launch from a pipe. When the pipe ends, it kills the remaining groups, and then a Python
# kills the marked processes. dash does not know `kill -KILL -- -1`.
_REAPER = """
trap '' INT TERM HUP
groups=' '
while read -r sign group; do
  case $sign in
    +) groups="$groups$group " ;;
    -) case $groups in *" $group "*) groups="${groups%% $group *} ${groups#* $group }" ;; esac ;;
    *) exit 0 ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group"; done
exec "$@"
"""
# Leave out the working directory: a `secrets.py` there would hide Python's.
_KILL = "import sys; sys.path = [p for p in sys.path if p]; from sparkhvd.runner.orphans import kill; kill(sys.argv[1])"


class OrphanReaper:
    """Reaper of processes left by a launch, even if this process is killed. A context manager.

    Attributes:
        mark: for `marked`, which marks the launch's processes.
    """

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        python = os.path.abspath(sys.executable)
        self._reaper = subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, "sparkhvd-reaper", python, "-c", _KILL, self.mark],
            env={**os.environ, "PYTHONPATH": path},  # noqa: TID251 - for the reaper's Python
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it ignores Ctrl-C and hang-ups of a terminal
        )
        assert self._reaper.stdin is not None
        # A stopped reaper must not stop this process.
        os.set_blocking(self._reaper.stdin.fileno(), False)

    def add(self, group: int) -> None:
        """Kill a process group if this process ends before `remove`."""
        self._notify(f"+ {group}")

    def remove(self, group: int) -> None:
        """Remove an ended process group, before its number can be reused."""
        self._notify(f"- {group}")

    def _notify(self, line: str) -> None:
        assert self._reaper.stdin is not None
        # The reaper may be killed, stopped or closed; this process still ends the groups itself.
        with contextlib.suppress(BrokenPipeError, BlockingIOError, ValueError):
            os.write(self._reaper.stdin.fileno(), f"{line}\n".encode())

    def __enter__(self) -> OrphanReaper:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reaper.returncode is not None:
            return
        kill(self.mark)
        # The reaper may have been killed or stopped.
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._reaper.communicate(b"done\n", _LIMIT_S)
        self._reaper.kill()
        self._reaper.wait()


def marked(env: Mapping[str, str], mark: str) -> dict[str, str]:
    """Append a mark to the variables, or nothing for "". Dots separate the parts of a mark."""
    marks = ":".join(filter(None, [env.get(_VARIABLE, ""), mark]))
    return {**env, **({_VARIABLE: marks} if marks else {})}


def kill(mark: str) -> None:
    """Kill this user's processes with this mark, or with a mark that starts with it and a dot.

    Never kills this process.
    """
    deadline = time.monotonic() + _LIMIT_S
    # The next round finds processes that they start in between.
    while any([_kill(number, mark) for number in _processes()]) and time.monotonic() < deadline:
        time.sleep(0.005)  # until they are gone


def _processes() -> Iterator[int]:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != own:
            yield int(name)


def _kill(number: int, mark: str) -> bool:
    """Kill a process if it has the mark and return True if it had."""
    if not _has(number, mark):
        return False
    try:
        process = os.pidfd_open(number)
    except OSError:
        return False
    try:
        if not _has(number, mark):  # the pid now belongs to another process
            return False
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    finally:
        os.close(process)


def _has(number: int, mark: str) -> bool:
    try:
        with open(f"/proc/{number}/environ", "rb") as file:
            variables = file.read()
    except OSError:  # the process has ended, or is another user's
        return False
    if mark.encode() not in variables:
        return False
    name = f"{_VARIABLE}=".encode()
    found = next((each for each in variables.split(b"\0") if each.startswith(name)), b"")
    return any(
        each == mark or each.startswith(f"{mark}.")
        for each in found[len(name) :].decode(errors="replace").split(":")
    )
