"""What Horovod's variables and questions about MPI mean here."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["is_mpi", "note_of"]

# Of every MPI's launcher, one.
_MARKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_CHOICES = {
    "HOROVOD_CPU_OPERATIONS": ("mpi", "gloo", "ccl"),
    "HOROVOD_CONTROLLER": ("mpi", "gloo"),
}


def is_mpi(variables: Mapping[str, str] | None = None) -> bool:
    """Return True if a launcher of MPI has started this process.

    Args:
        variables: environment; None means this process's.
    """
    own = os.environ if variables is None else variables  # noqa: TID251 - the launcher's
    return any(mark in own for mark in _MARKS)


def note_of(variables: Mapping[str, str] | None = None) -> str:
    """Return one line about Horovod's choices of a transport; "" if there is none.

    Args:
        variables: environment; None means this process's.
    """
    own = os.environ if variables is None else variables  # noqa: TID251 - Horovod's
    chosen = [(name, own[name]) for name in _CHOICES if own.get(name)]
    if not chosen:
        return ""
    said = " and ".join(f"{name}={value}" for name, value in chosen)
    wrong = [name for name, value in chosen if value.lower() not in _CHOICES[name]]
    if wrong:
        known = " or ".join(_CHOICES[wrong[0]])
        return f"sparkhvd: {said} without effect; Horovod knows {known} for {wrong[0]}. sparkhvd's own engine moves the bytes."
    places = "MPI places the ranks" if ("mpi" in {v.lower() for _, v in chosen}) else "accepted"
    return f"sparkhvd: {said}: {places}, and sparkhvd's own engine moves the bytes."
