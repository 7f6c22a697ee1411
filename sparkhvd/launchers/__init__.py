"""What started this process, where that was neither Spark nor `run_local`: the rendezvous of a script's `init()`.

A launcher's ranks are processes of the user's own command, so they learn of their job when `init()` asks, and not before
the script begins. `sparkhvdrun` hands each rank the job by a descriptor (`handover`). torchrun, MPI, Slurm and variables as Kubernetes'
operators set them tell it its number (`environment`), and the ranks meet at rank 0 (`meeting`): at a Unix socket where they
share a host, else at a TCP port, the job's directory. Where the program itself has a communicator of MPI, the ranks meet over that, on
any hosts (`communicator`).

Trust: the key comes by an inherited descriptor of memory, over a Unix socket whose ends the kernel names, or from the user's
`SPARKHVD_JOB_KEY_FILE`, or by messages of the program's MPI; never by a variable or an argument. Without any, ranks on several hosts do not start, unless the user
says that the network is trusted.

Each module imports only those above it:

    gathering    texts of all ranks, at rank 0
    network      key and addresses of ranks on several hosts
    environment  a rank's place, by the variables of its launcher
    lifetime     its end with that launcher
    meeting      a rank's job, from the ranks themselves
    handover     a rank's job, from `sparkhvdrun`
    communicator  a rank's job, over mpi4py's communicator
    horovod       what Horovod's variables and questions about MPI mean here
"""

from __future__ import annotations

from sparkhvd.launchers.handover import receive
from sparkhvd.launchers.meeting import mark, meet
from sparkhvd.rendezvous import Rendezvous, current

__all__ = ["find", "mark"]


def find() -> Rendezvous | None:
    """Return the rendezvous of this process, by whatever started it; None for a process on its own.

    The first call installs it, and is collective where ranks meet by themselves.

    Raises:
        InvalidArgumentError: this process inherited a launcher's variables from a rank, and is none; two launchers
            contradict each other; or ranks on several hosts have no key, or no address of rank 0.
        PreflightError: a rank did not come within `start_timeout_s`, or hosts cannot reach each other.
    """
    return current() or receive() or meet()
