"""Launchers other than Spark and `run_local`: the rendezvous of a script's `init()`.

Ranks of a launcher are processes of the user's own command, which find their job only when they call `init()`.
`sparkhvdrun` passes each rank the job by a descriptor, and a program that a rank starts gets it over a Unix socket
(`rank_claim`). torchrun, MPI, Slurm and Kubernetes' operators set a rank's number in variables (`environment`), and the
ranks gather at rank 0 (`bootstrap`): at a Unix socket if they share a host, else at a TCP port. If the program passes an
MPI communicator, the ranks use it to exchange addresses, on any hosts (`mpi`).

Trust: the key comes through an inherited memory descriptor, over a Unix socket with a kernel-checked peer, from the
user's `SPARKHVD_JOB_KEY_FILE`, or by messages of the program's MPI, never by a variable or an argument. Without a key,
ranks on several hosts do not start, unless the user trusts the network (`SPARKHVD_TRUST_NETWORK`).

Each module imports only those above it:

    environment  rank and size of a process, from the variables of its launcher
    gather       gathers texts of all ranks at rank 0
    bootstrap    a rank's job, exchanged among the ranks
    rank_claim   a rank's job, from `sparkhvdrun`, or from the rank that started this program
    mpi          a rank's job, over mpi4py's communicator
"""

from __future__ import annotations

from sparkhvd.launchers.bootstrap import mark, meet
from sparkhvd.launchers.rank_claim import claim, inherit, receive
from sparkhvd.rendezvous import Rendezvous, current_rendezvous

__all__ = ["find", "mark"]


def find() -> Rendezvous | None:
    """Find the rendezvous of this process under any launcher, or None for a single process.

    The first call installs it, and is collective if ranks exchange the job themselves. A program started by a rank
    takes the rank's place.

    Raises:
        InvalidArgumentError: another process has taken this rank's place; this process inherited a launcher's variables
            from a rank; two launchers contradict each other; or ranks on several hosts have no key or no address of
            rank 0.
        PreflightError: a rank did not connect within `start_timeout_s`, or hosts cannot reach each other.
    """
    if (own := current_rendezvous()) is not None:
        claim()
        return own
    return receive() or inherit() or meet()
