"""What started this process, where that was neither Spark nor `run_local`: the rendezvous of a script's `init()`.

A launcher's ranks are processes of the user's own command, so they learn of their job when `init()` asks, and not before
the script begins. `sparkhvdrun` hands each rank the job by a descriptor (`handover`); torchrun, MPI and Slurm tell it its
number by variables (`environment`), and the ranks, all on one host, meet at a Unix socket (`meeting`).

Trust: the key comes by an inherited descriptor of memory, or over a Unix socket whose ends the kernel names; never by a
variable, an argument or a file.

Each module imports only those above it:

    gathering    texts of all ranks of a host
    environment  a rank's place, by the variables of torchrun, MPI and Slurm
    handover     a rank's job, from `sparkhvdrun`
    meeting      a rank's job, from the ranks themselves
"""

from __future__ import annotations

from sparkhvd.launchers.handover import receive
from sparkhvd.launchers.meeting import meet
from sparkhvd.rendezvous import Rendezvous, current

__all__ = ["find"]


def find() -> Rendezvous | None:
    """Return the rendezvous of this process, by whatever started it; None for a process on its own.

    The first call installs it, and is collective under torchrun, MPI and Slurm.

    Raises:
        InvalidArgumentError: this process inherited a launcher's variables from a rank, and is none; two launchers
            contradict each other; or the ranks are on several hosts.
        PreflightError: a rank did not come within `start_timeout_s`.
    """
    return current() or receive() or meet()
