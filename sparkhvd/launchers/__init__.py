"""What started this process, where that was neither Spark nor `run_local`: the rendezvous of a script's `init()`.

A launcher's ranks are processes of the user's own command, so they learn of their job when `init()` asks, and not before
the script begins. `sparkhvdrun` hands each rank the job by a descriptor (`handover`).

Trust: the key comes by an inherited descriptor of memory, never by a variable, an argument or a file.

Each module imports only those above it:

    handover  a rank's job, from `sparkhvdrun`
"""

from __future__ import annotations

from sparkhvd.launchers.handover import receive
from sparkhvd.rendezvous import Rendezvous, current

__all__ = ["find"]


def find() -> Rendezvous | None:
    """Return the rendezvous of this process, by whatever started it; None for a process on its own.

    Raises:
        InvalidArgumentError: this process inherited a launcher's variables from a rank, and is none.
    """
    return current() or receive()
