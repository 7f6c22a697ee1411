"""Arguments of Horovod's `run` without effect, or with one right value."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from typing import TextIO

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner.host_names import is_here, parse_hosts, place_ranks
from sparkhvd.runner.outcomes import Outcome

_TRANSPORT = "ranks communicate through sparkhvd's own transport, which needs neither MPI nor Gloo"
_INSTEAD = {
    "use_mpi": _TRANSPORT,
    "use_gloo": _TRANSPORT,
    "extra_mpi_args": _TRANSPORT,
    "mpi_args": _TRANSPORT,
    "network_interfaces": "the ranks are processes of this host, and connect over its loopback interface",
    "start_timeout": "the ranks are processes of this host, and start at once",
}


def warn_of(stacklevel: int = 3, **given: object) -> None:
    """Warn about each argument without effect, unless it is None or False."""
    for name, value in given.items():
        if value is not None and value is not False:
            text = f"{name}={value!r} has no effect in sparkhvd: {_INSTEAD[name]}."
            warnings.warn(text, stacklevel=stacklevel)


def check_executable(executable: str | None, python: str, remedy: str) -> None:
    """Reject a Python other than the ranks' Python.

    Raises:
        InvalidArgumentError: `executable` differs from `python`.
    """
    if executable is not None and executable != python:
        raise InvalidArgumentError(
            f"executable is {executable!r}, and the ranks run {python!r}. {remedy}"
        )


def check_hosts(hosts: str | None, num_proc: int) -> None:
    """Reject hosts of Horovod's form "name:slots,name:slots" other than this one, or with too few slots.

    Raises:
        InvalidArgumentError: a host is another one, or there are more ranks than slots.
    """
    if hosts is None:
        return
    places = place_ranks(parse_hosts(hosts), num_proc)
    if others := [place.host for place in places if not is_here(place.host)]:
        raise InvalidArgumentError(
            f"hosts is {hosts!r}, but this call starts processes only on this host, not on {', '.join(others)}. "
            "Call sparkhvd.run_hosts, which reaches them by ssh, or start Spark there and call sparkhvd.run."
        )


def join_interfaces(names: Iterable[str] | str | None) -> str:
    """Join names in the form of `Settings.interfaces`, or return "" without names.

    Raises:
        InvalidArgumentError: a name is not text.
    """
    listed = [names] if isinstance(names, str) else list(names or ())
    if not all(isinstance(name, str) for name in listed):
        raise InvalidArgumentError(
            f"nics (network_interfaces) is {names!r}; it must be names of interfaces or networks, such as ['eth0']."
        )
    return ",".join(listed)


def choose_stream(stdout: TextIO | None, stderr: TextIO | None) -> TextIO | None:
    """Choose `stdout`, else `stderr`, else None. Warn if they are two streams.

    Raises:
        InvalidArgumentError: a stream cannot be written to.
    """
    for name, stream in (("stdout", stdout), ("stderr", stderr)):
        if stream is not None and not hasattr(stream, "write"):
            raise InvalidArgumentError(
                f"{name} is {stream!r}; it must be a text stream, such as open('ranks.log', 'w')."
            )
    if stdout is not None and stderr is not None and stdout is not stderr:
        warnings.warn(
            "stderr has no effect in sparkhvd beside stdout: both streams of a rank are one pipe, and all its lines go to stdout.",
            stacklevel=3,
        )
    return stdout if stdout is not None else stderr


def write_tails(stream: TextIO | None, outcomes: Iterable[Outcome]) -> None:
    """Write the last output lines, by rank, of ranks without live output."""
    known = [outcome for outcome in outcomes if outcome.rank is not None]
    for outcome in sorted(known, key=lambda one: one.rank or 0):
        with contextlib.suppress(Exception):  # a broken stream never breaks training
            if stream is not None and outcome.log_tail:
                stream.write("".join(f"[{outcome.rank}] {line}\n" for line in outcome.log_tail))
                stream.flush()
