"""Processes that ranks have started and left behind, also in sessions of their own: found by a mark in their variables.

A process has the variables with which it was started, whatever session and parent it gives itself afterwards.
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

# Marks of all launches that a process is in, one inside the other.
_VARIABLE = "SPARKHVD_LAUNCHED_BY"
# A process that forks faster than it is found is left alone after this time.
_LIMIT_S = 1.0
# A shell starts at once, and becomes a Python only if the launcher ends without a word.
_GUARD = ("/bin/sh", "-c", 'read -r done || exec "$@"', "sparkhvd-guard")
# Without the working directory, whose `secrets.py` is not Python's.
_KILL = "import sys; sys.path = [p for p in sys.path if p]; from sparkhvd.runner.orphans import kill; kill(sys.argv[1])"


class OrphanReaper:
    """What the ranks of a launch leave behind, which ends with it, also if this process is killed; a context manager.

    `ParentDeathReaper` does the same for launchers that have no threads yet, which may fork.
    """

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._reaper = subprocess.Popen(
            [*_GUARD, os.path.abspath(sys.executable), "-c", _KILL, self.mark],
            env={**os.environ, "PYTHONPATH": path},  # noqa: TID251 - what Python needs there
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> OrphanReaper:
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.mark)
        # Somebody may have killed the guard, or stopped it.
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._reaper.communicate(b"done\n", _LIMIT_S)
        self._reaper.kill()
        self._reaper.wait()


def marked(env: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return the variables with one more mark, whose parts are divided by dots; "" for none."""
    marks = ":".join(filter(None, [env.get(_VARIABLE, ""), mark]))
    return {**env, **({_VARIABLE: marks} if marks else {})}


def kill(mark: str) -> None:
    """Kill all processes of this user that have a mark, or one that begins with it and a dot; never this process."""
    deadline = time.monotonic() + _LIMIT_S
    # What they start while this looks is found in the next round.
    while any([_kill(number, mark) for number in _processes()]) and time.monotonic() < deadline:
        time.sleep(0.005)  # until they are gone


def _processes() -> Iterator[int]:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != own:
            yield int(name)


def _kill(number: int, mark: str) -> bool:
    """Kill a process if it has the mark; return True if it had."""
    if not _has(number, mark):
        return False
    try:
        process = os.pidfd_open(number)
    except OSError:
        return False
    try:
        if not _has(number, mark):  # its number has been given to another one meanwhile
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
    except OSError:  # it has ended, or is another user's
        return False
    if mark.encode() not in variables:
        return False
    name = f"{_VARIABLE}=".encode()
    found = next((each for each in variables.split(b"\0") if each.startswith(name)), b"")
    return any(
        each == mark or each.startswith(f"{mark}.")
        for each in found[len(name) :].decode(errors="replace").split(":")
    )


# ----------------------------------------------------------------------------------------------------
# A process that ends what a launcher has started, however the launcher ends.
# **Lifetime**: a fork of the launcher that does nothing but wait for the end of a pipe; it ends with the launcher.


class ParentDeathReaper:
    """Kills process groups that are still there when this process has ended; a context manager.

    Made before the process has threads.

    Args:
        mark: what has it in its variables is killed, too; empty for nothing (see `orphans`).
    """

    def __init__(self, mark: str = "") -> None:
        reader, self._writer = os.pipe()  # neither is inherited by what this process starts
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writer)
            _reaper(reader, mark)
        os.close(reader)

    def add(self, group: int) -> None:
        """Kill a process group at the end, unless `remove` comes before."""
        self._notify(f"+{group}")

    def remove(self, group: int) -> None:
        """Leave a process group alone that has ended; called before its number is free."""
        self._notify(f"-{group}")

    def _notify(self, line: str) -> None:
        # Somebody may kill the guard: this process still ends the groups itself.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writer, f"{line}\n".encode())

    def __enter__(self) -> ParentDeathReaper:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def _reaper(reader: int, mark: str) -> None:
    """Wait for the end of the launcher, in the fork; never returns."""
    try:
        os.setsid()  # Ctrl-C and a terminal's hang-up are not for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        groups: set[int] = set()
        with open(reader) as lines:
            for line in lines:
                group = int(line[1:])
                (groups.add if line[0] == "+" else groups.discard)(group)
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if mark:
            kill(mark)
    finally:
        os._exit(0)
