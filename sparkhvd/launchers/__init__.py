"""What started this process, where that was neither Spark nor `run_local`: the rendezvous of a script's `init()`.

A launcher's ranks are processes of the user's own command, so they learn of their job when `init()` asks, and not before
the script begins. `sparkhvdrun` hands each rank the job by a descriptor, and a program that a rank starts gets it over a Unix socket (`place`). torchrun, MPI, Slurm and variables as Kubernetes'
operators set them tell it its number (`environment`), and the ranks meet at rank 0 (`meeting`): at a Unix socket where they
share a host, else at a TCP port, the job's directory. Where the program itself has a communicator of MPI, the ranks meet over that, on
any hosts (`communicator`).

Trust: the key comes by an inherited descriptor of memory, over a Unix socket whose ends the kernel names, or from the user's
`SPARKHVD_JOB_KEY_FILE`, or by messages of the program's MPI; never by a variable or an argument. Without any, ranks on several hosts do not start, unless the user
says that the network is trusted.

Each module imports only those above it:

    environment  a rank's place, by the variables of its launcher
    gather       texts of all ranks, at rank 0
    meeting      a rank's job, from the ranks themselves
    place        a rank's job, from `sparkhvdrun`, or for a program that the rank starts
    mpi          a rank's job, over mpi4py's communicator
"""

from __future__ import annotations

from sparkhvd.launchers.meeting import mark, meet
from sparkhvd.launchers.place import claim, inherit, receive
from sparkhvd.rendezvous import Rendezvous, current

__all__ = ["find", "mark"]


def find() -> Rendezvous | None:
    """Return the rendezvous of this process, by whatever started it; None for a process on its own.

    The first call installs it, and is collective where ranks meet by themselves. A program that a rank has started takes the rank's place.

    Raises:
        InvalidArgumentError: another process has the place of the rank that has started this one, or of this one; this process inherited a
            launcher's variables from a rank, and is none; two launchers contradict each other; or ranks on several hosts have no key, or
            no address of rank 0.
        PreflightError: a rank did not come within `start_timeout_s`, or hosts cannot reach each other.
    """
    if (own := current()) is not None:
        claim()
        return own
    return receive() or inherit() or meet()
