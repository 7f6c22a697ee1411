"""End of a rank with its launcher: torchrun, mpirun and the like leave their ranks behind where they are killed.

A rank notices that from when it begins to meet the others; processes of a group that it leads end with it. The launcher is the first process
above this one that has not the rank's own variables, so a shell or another wrapper may stand between. A shell without them is a script that
sets the variables by hand, and may end before its ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers.environment import PLAIN, Place, place_in

__all__ = ["end_with_launcher", "launcher_of"]

# Time to save after SIGTERM.
GRACE_S = 2.5
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh", "busybox")
_started = threading.Event()


def end_with_launcher(place: Place | None = None) -> None:
    """End this process soon after its launcher's process on this host has gone; the first call starts a thread for that.

    Args:
        place: of this rank; None for the one that its variables tell, if any.
    """
    if place is None:
        with contextlib.suppress(InvalidArgumentError):
            place = place_in(os.environ, os.getppid())  # noqa: TID251 - the launcher's
    if place is None or place.launcher == PLAIN or _started.is_set():
        return
    with contextlib.suppress(OSError):  # a kernel or a container without descriptors of processes
        launcher = launcher_of(place)
        descriptor = os.pidfd_open(launcher)
        if launcher != launcher_of(place):  # gone meanwhile: the number may be another process's
            os.close(descriptor)
        elif not _is_shell(launcher):
            _started.set()
            arguments = (place, launcher, descriptor)
            thread = threading.Thread(
                target=_wait, args=arguments, name="sparkhvd-launcher", daemon=True
            )
            thread.start()


def launcher_of(place: Place) -> int:
    """Return the number of the process on this host that has started this rank."""
    number = os.getppid()
    with contextlib.suppress(OSError):  # a wrapper that has just ended
        while number > 1 and _is_of_rank(number, place):
            status = Path(f"/proc/{number}/stat").read_text()
            number = int(status.rpartition(")")[2].split()[1])
    return number


def _is_of_rank(number: int, place: Place) -> bool:
    """Return True for a process that has the variables of this rank."""
    found = None
    with contextlib.suppress(OSError, InvalidArgumentError):  # another user's; of other launchers
        text = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace")
        entries = (entry.partition("=") for entry in text.split("\0"))
        found = place_in({name: value for name, _, value in entries}, place.parent)
    return found is not None and (found.job, found.rank) == (place.job, place.rank)


def _is_shell(number: int) -> bool:
    return Path(f"/proc/{number}/comm").read_text().strip() in _SHELLS


def _wait(place: Place, launcher: int, descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll()
    # Its stream may be closed, its pipe gone, or there never was one.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(
            f"sparkhvd: rank {place.rank} ends, because {place.launcher} (process {launcher}), which has started it, has ended.\n"
        )
    send = os.killpg if os.getpgrp() == os.getpid() else os.kill
    send(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    send(os.getpid(), signal.SIGKILL)
