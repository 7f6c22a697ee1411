"""Horovod's `horovod.runner`: a function on processes of this or several hosts, and the command line.

Each module imports only those above it:

    launch  the command line
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import run_hosts, run_local
from sparkhvd.runner.command import main as run_commandline
from sparkhvd.runner.elastic.function_hosts import HostsOfFunction, launch_elastic_function
from sparkhvd.runner.elastic.options import RankRange
from sparkhvd.runner.horovod_arguments import join_interfaces
from sparkhvd.runner.host_names import Host, parse_hosts, read_hostfile

__all__ = ["run", "run_commandline"]

R = TypeVar("R")
# Arguments that select elastic training.
_ELASTIC = (
    *("min_num_proc", "max_num_proc", "min_np", "max_np"),
    *("slots", "reset_limit", "cooldown_range", "host_discovery_script"),
)


def run(
    func: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[R]:
    """Call `func(*args, **kwargs)` on processes, and return the results by rank.

    The arguments are those of `horovod.run`, in its order. Without `hosts` and `hostfile` this is `sparkhvd.run_local`, with one
    of them `sparkhvd.run_hosts`, whose documentation explains each. `np` is the old name of `num_proc`, `network_interface` of
    `network_interfaces`. `disable_cache` has no effect: nothing about hosts is cached.

    A minimum or maximum, `slots`, `reset_limit`, `cooldown_range` or `host_discovery_script` selects elastic training
    (docs/elastic.md), on this host or on the named hosts, as `sparkhvdrun --min-np` does. A process that dies is replaced, and
    the results are those of the last generation. `slots` are this host's, or those of a host that the script prints without
    slots. The default maximum is all slots if hosts are named.

    Raises:
        PreflightError: hosts cannot run their ranks, or the discovery script fails.
        ElasticError: there were too few ranks for too long, or they have changed too often.
        InvalidArgumentError: an argument is wrong, `output_filename` is given (redirect the ranks' output with `sparkhvdrun
            --output-filename`), or both `hosts` and `hostfile` or `use_gloo` and `use_mpi` are.
        RankError: `func` failed on a rank.
    """
    del disable_cache
    given = {**locals()}
    is_elastic = any(given[name] is not None for name in _ELASTIC)
    if output_filename is not None:
        raise InvalidArgumentError(
            f"horovod.run(output_filename={output_filename!r}): the output of the ranks comes to stderr here. Call sparkhvdrun "
            "--output-filename with a script instead."
        )
    if use_gloo and use_mpi:
        raise InvalidArgumentError(
            "horovod.run: use_gloo and use_mpi exclude each other. Give neither: there is one transport."
        )
    ranks = num_proc if np is None else np
    if is_elastic and np is None and num_proc == 1:  # default: the minimum
        ranks = min_num_proc or min_np or 1
    interfaces = network_interfaces if network_interface is None else network_interface
    shown: dict[str, Any] = {
        "verbose": verbose,
        "start_timeout": start_timeout,
        "network_interfaces": interfaces,
    }
    if is_elastic:
        where = HostsOfFunction(
            _hosts(hosts, hostfile),
            host_discovery_script or "",
            slots,
            ssh_port,
            ssh_identity_file,
            join_interfaces(interfaces),
        )
        return launch_elastic_function(
            func,
            args,
            kwargs or {},
            RankRange(
                ranks,
                min_num_proc if min_np is None else min_np,
                max_num_proc if max_np is None else max_np,
                reset_limit=reset_limit,
                cooldown_s=_seconds(cooldown_range),
            ),
            hosts=where,
            start_timeout_s=start_timeout,
            env={},
            verbose=1 if verbose is None else verbose,
        )
    if hosts is None and hostfile is None:
        return run_local(
            func,
            args,
            kwargs,
            ranks,
            use_mpi=use_mpi,
            use_gloo=use_gloo,
            mpi_args=mpi_args,
            executable=executable,
            **shown,
        )
    return run_hosts(
        func,
        args,
        kwargs,
        ranks,
        hosts=hosts,
        hostfile=hostfile,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        **shown,
    )


def _hosts(hosts: str | None, hostfile: str | None) -> list[Host] | None:
    if hosts is not None and hostfile is not None:
        raise InvalidArgumentError(
            f"horovod.run: hosts is {hosts!r} and hostfile {hostfile!r}; give one of them."
        )
    if hosts is not None:
        return parse_hosts(hosts)
    return None if hostfile is None else read_hostfile(hostfile)


def _seconds(cooldown_range: Sequence[float] | None) -> tuple[float, float] | None:
    if cooldown_range is None:
        return None
    if len(cooldown_range) != 2:
        raise InvalidArgumentError(
            f"cooldown_range is {cooldown_range!r}; it must be two numbers of seconds, the shorter one first."
        )
    shortest, longest = cooldown_range
    return float(shortest), float(longest)
