"""`sparkhvdrun`: run a script on several processes, with the flags of `horovodrun`."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sparkhvd import __version__, as_horovod
from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.interfaces import address_on
from sparkhvd.runner import launching
from sparkhvd.runner.host_names import (
    PLAIN_SSH,
    Host,
    forwarded,
    given_variables,
    is_here,
    merged,
    parse_hosts,
    place_ranks,
    read_hostfile,
)
from sparkhvd.runner.local_processes import check_command, words_of
from sparkhvd.runner.script import run_script
from sparkhvd.runner.supervisor import Output
from sparkhvd.settings import Settings, check_seconds

_LAST_STREAM = 2  # standard error
# Flags of horovodrun that set a variable, and the factor of their unit.
_SETTINGS = {
    "fusion_threshold_mb": ("HOROVOD_FUSION_THRESHOLD", 1 << 20),
    "timeline_filename": ("HOROVOD_TIMELINE", None),
    "stall_check_warning_time_seconds": ("HOROVOD_STALL_CHECK_TIME_SECONDS", 1),
    "stall_check_shutdown_time_seconds": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 1),
}
_SWITCHES = {
    "timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "autotune": "HOROVOD_AUTOTUNE",
    "stall_check": "HOROVOD_STALL_CHECK",
}
# Flags of horovodrun without effect here, and the number of their values.
_WITHOUT_EFFECT = {
    "--cycle-time-ms": 1,
    "--cache-capacity": 1,
    "--hierarchical-allreduce": 0,
    "--no-hierarchical-allreduce": 0,
    "--hierarchical-allgather": 0,
    "--no-hierarchical-allgather": 0,
    "--torus-allreduce": 0,
    "--no-torus-allreduce": 0,
    "--mpi-threads-disable": 0,
    "--no-mpi-threads-disable": 0,
    "--mpi-args": 1,
    "--binding-args": 1,
    "--tcp": 0,
    "--num-nccl-streams": 1,
    "--thread-affinity": 1,
    "--gloo-timeout-seconds": 1,
    "--gloo": 0,
    "--mpi": 0,
    "--jsrun": 0,
    "--disable-cache": 0,
    "--log-level": 1,
    "--log-with-timestamp": 0,
    "--log-without-timestamp": 0,
    "--log-hide-timestamp": 0,
    "--no-log-hide-timestamp": 0,
    "--autotune-log-file": 1,
    "--autotune-warmup-samples": 1,
    "--autotune-steps-per-sample": 1,
    "--autotune-bayes-opt-max-samples": 1,
    "--autotune-gaussian-process-noise": 1,
}
# Flags of elastic training, with their parser options.
_ELASTIC: dict[tuple[str, ...], dict[str, Any]] = {
    ("--min-np", "--min-num-proc"): {
        "type": int,
        "metavar": "N",
        "help": "smallest number of ranks; with fewer the training waits (-np)",
    },
    ("--max-np", "--max-num-proc"): {
        "type": int,
        "metavar": "N",
        "help": "largest number of ranks (all slots)",
    },
    ("--host-discovery-script",): {
        "metavar": "PROGRAM",
        "help": "prints a line `host` or `host:slots` for each available host; run every second",
    },
    ("--slots-per-host",): {
        "type": int,
        "metavar": "N",
        "help": "slots of a host whose line has no number",
    },
    ("--elastic-timeout",): {
        "type": float,
        "metavar": "S",
        "help": "longest wait for the smallest number of ranks (600)",
    },
    ("--reset-limit",): {
        "type": int,
        "metavar": "N",
        "help": "end the job after this number of changes of the ranks",
    },
    ("--blacklist-cooldown-range",): {
        "nargs": 2,
        "type": float,
        "metavar": "S",
        "help": "shortest and longest exclusion of a host after failures (1 600)",
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status for the shell."""
    _open_standard_streams()
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.check_build:
        from sparkhvd.runner.doctor import examine  # its imports must not delay the start of ranks

        return examine()
    try:
        if parsed.config_file is not None:  # flags override the file
            parser.set_defaults(**flags_of(parsed.config_file, vars(parsed)))
            parsed = parser.parse_args(arguments)
        return _run(parsed)
    except SparkhvdError as error:
        sys.stderr.write(f"sparkhvdrun: {error}\n")
        return 2
    except KeyboardInterrupt:  # before the ranks have started; later it is forwarded to them
        return 128 + signal.SIGINT


def _open_standard_streams() -> None:
    """Open the null device for missing standard streams, as under cron."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STREAM:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkhvdrun",
        description="Run a script on processes of this host or, over ssh, of several hosts. hvd.init() connects them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__)
    add("-np", "--num-proc", type=int, metavar="N", help="number of processes")
    add(
        "-cb",
        "--check-build",
        action="store_true",
        help="report what this machine supports and lacks",
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and their slots")
    hosts.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="lines `host slots=N` or `host:N`"
    )
    add("-p", "--ssh-port", type=int, metavar="PORT", help="of the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for the other hosts")
    add(
        *("--network-interfaces", "--network-interface"),
        action="append",
        default=[],
        metavar="NAME,...",
        help="interfaces between hosts: names, or networks such as 10.0.0.0/8",
    )
    add(
        "--start-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="longest wait for each step of the start on other hosts (30)",
    )
    add("--config-file", metavar="FILE", help="flags in YAML, in the form of horovodrun's")
    add("--output-filename", type=Path, metavar="FOLDER", help="keep rank.N/stdout and stderr")
    add(
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        action="store_true",
        help="the local time before every line",
    )
    add("-x", action="append", default=[], metavar="NAME[=VALUE]", help="a variable of every rank")
    add("--verbose", action="store_true", help="show the command")
    for name in _SETTINGS:
        variable = _SETTINGS[name][0]
        add(f"--{name.replace('_', '-')}", metavar="VALUE", help=f"as {variable}")
    for name, variable in _SWITCHES.items():
        flag = name.replace("_", "-")
        add(f"--{flag}", dest=name, action="store_const", const="1", help=f"as {variable}=1")
        add(f"--no-{flag}", dest=name, action="store_const", const="0", help=argparse.SUPPRESS)
    for flag, values in _WITHOUT_EFFECT.items():
        if values:
            add(flag, dest=flag, metavar="VALUE", help=argparse.SUPPRESS)
        else:
            add(flag, dest=flag, action="store_true", help=argparse.SUPPRESS)
    group = parser.add_argument_group("elastic training")
    for flags, options in _ELASTIC.items():
        group.add_argument(*flags, **options)
    add("command", nargs=argparse.REMAINDER, metavar="command ...", help="such as: python train.py")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    if any(getattr(parsed, _name_of(flags[0])) is not None for flags in _ELASTIC):
        return _run_elastic(parsed)
    # The limit is that of a host's slots: more ranks would take all memory before the first of them starts.
    if parsed.num_proc is None or not 1 <= parsed.num_proc <= 99_999:
        raise InvalidArgumentError(
            f"-np is {parsed.num_proc}; it must be at least 1 and at most 99999, as in sparkhvdrun -np 2 python train.py"
        )
    check_seconds("--start-timeout", parsed.start_timeout, 30)
    hosts = _hosts(parsed, parsed.num_proc)
    places = place_ranks(hosts, parsed.num_proc)
    command = as_horovod.command(words_of(parsed.command))
    environ = launching.environ()
    given = {**_variables(parsed), **given_variables(parsed.x, environ)}
    _report_flags_without_effect(parsed)
    if parsed.verbose:
        where = ", ".join(f"{place.count} on {place.host}" for place in places)
        sys.stderr.write(f"sparkhvdrun: {' '.join(command)}: {where}\n")
    output = Output(parsed.output_filename, parsed.prefix_output_with_timestamp)
    settings = Settings.resolve({**environ, **given})
    ssh = (settings.ssh_command, parsed.ssh_port, parsed.ssh_identity_file)
    here = partial(is_here, by_ssh=ssh != PLAIN_SSH)
    if all(here(place.host) for place in places):
        if parsed.network_interfaces:
            address_on(settings.interfaces)
            sys.stderr.write(
                "sparkhvdrun: --network-interfaces has no effect on ranks of one host, which communicate through its memory.\n"
            )
        # Ranks here inherit the environment of the shell.
        env = {**environ, **given}
        check_command(command, env)
        with launching.within_open_files(parsed.num_proc):
            return run_script(command, parsed.num_proc, env, output)
    # Imported here, because ranks of this host need no ssh.
    from sparkhvd.runner.hosts.connection import Reach
    from sparkhvd.runner.hosts.run import run_script_on_hosts

    reach = Reach(*ssh, parsed.start_timeout)
    env = {**forwarded(environ), **given}
    places = place_ranks(merged(hosts, here), parsed.num_proc)
    return run_script_on_hosts(command, places, env, settings, reach, output)


def _run_elastic(parsed: argparse.Namespace) -> int:
    """Run the command as an elastic job."""
    from sparkhvd.runner.elastic.options import DiscoveryScript, ElasticOptions
    from sparkhvd.runner.elastic.script import run_elastic_script
    from sparkhvd.runner.hosts.connection import Reach

    given_limits = {
        "timeout_s": parsed.elastic_timeout,
        "cooldown_s": parsed.blacklist_cooldown_range and tuple(parsed.blacklist_cooldown_range),
    }
    options = ElasticOptions(
        num_proc=parsed.num_proc,
        least=parsed.min_np,
        most=parsed.max_np,
        reset_limit=parsed.reset_limit,
        **{name: value for name, value in given_limits.items() if value is not None},
    )
    command = as_horovod.command(words_of(parsed.command))
    environ = launching.environ()
    given = {**_variables(parsed), **given_variables(parsed.x, environ)}
    _report_flags_without_effect(parsed)
    check_seconds("--start-timeout", parsed.start_timeout, 30)
    discovery = None
    if parsed.host_discovery_script is not None:
        if parsed.hosts is not None or parsed.hostfile is not None:
            raise InvalidArgumentError(
                "--host-discovery-script lists the hosts, and so do -H and --hostfile. Give one of them."
            )
        slots = parsed.slots_per_host
        discovery = DiscoveryScript(parsed.host_discovery_script, slots, environ)
        hosts = list(discovery.first())
    elif parsed.slots_per_host is not None:
        raise InvalidArgumentError(
            "--slots-per-host is for the hosts of --host-discovery-script. Give slots with the hosts: -H a:4,b:4"
        )
    else:
        hosts = _hosts(parsed, options.most or options.first)
    settings = Settings.resolve({**environ, **given})
    reach = Reach(
        settings.ssh_command, parsed.ssh_port, parsed.ssh_identity_file, parsed.start_timeout
    )
    if all(reach.is_here(host.name) for host in hosts):
        check_command(command, {**environ, **given})
        env = {**environ, **given}
    else:
        env = {**forwarded(environ), **given}
    output = Output(parsed.output_filename, parsed.prefix_output_with_timestamp)
    with launching.within_open_files(options.first):
        return run_elastic_script(command, hosts, discovery, options, env, settings, reach, output)


def _hosts(parsed: argparse.Namespace, slots: int) -> list[Host]:
    """Read the hosts from the flags. Without flags, use this host with `slots` slots."""
    if parsed.hostfile is not None:
        return read_hostfile(parsed.hostfile)
    if parsed.hosts is not None:
        return parse_hosts(parsed.hosts)
    return [Host("localhost", slots)]


def _report_flags_without_effect(parsed: argparse.Namespace) -> None:
    for flag in _WITHOUT_EFFECT:
        if getattr(parsed, flag):
            sys.stderr.write(f"sparkhvdrun: {flag} is accepted and has no effect in sparkhvd.\n")


def _name_of(flag: str) -> str:
    """Name of the flag's value in the parser."""
    return flag.removeprefix("--").replace("-", "_")


def _variables(parsed: argparse.Namespace) -> dict[str, str]:
    found = {}
    for name, (variable, factor) in _SETTINGS.items():
        if (value := getattr(parsed, name)) is not None:
            found[variable] = value if factor is None else _scaled(name, value, factor)
    for name, variable in _SWITCHES.items():
        if (value := getattr(parsed, name)) is not None:
            found[variable] = value
    if found.pop("HOROVOD_STALL_CHECK", "1") == "0":
        found |= {"SPARKHVD_STALL_WARNING_S": "0", "SPARKHVD_STALL_SHUTDOWN_S": "0"}
    if interfaces := [name for names in parsed.network_interfaces for name in names.split(",")]:
        found["SPARKHVD_INTERFACES"] = ",".join(interfaces)
    return found


def _scaled(name: str, value: str, factor: int) -> str:
    try:
        return f"{float(value) * factor:g}" if factor == 1 else str(round(float(value) * factor))
    except (ValueError, OverflowError) as error:  # not a number, or not finite
        raise InvalidArgumentError(
            f"--{name.replace('_', '-')} is {value!r}; it must be a number."
        ) from error


# ----------------------------------------------------------------------------------------------------
# `--config-file` of `sparkhvdrun`: flags from a YAML file in the form of horovodrun's.

# Sections of the file, each with the prefix of its flags and its renamed keys.
_SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "params": ("", {}),
    "autotune": ("autotune_", {"enabled": "autotune"}),
    "timeline": ("timeline_", {}),
    "stall_check": ("stall_check_", {"enabled": "stall_check"}),
    "library_options": ("", {}),
    "logging": ("log_", {"hide_timestamp": "log_with_timestamp"}),
}


# A limit, because PyYAML takes seconds for a megabyte.
_CONFIG_CHARACTERS = 1 << 15


def flags_of(path: str, known: Collection[str]) -> dict[str, Any]:
    """Read the values of flags, by their names in the parser.

    Args:
        path: of the file.
        known: names in the parser; for a flag without effect the flag itself.

    Raises:
        InvalidArgumentError: PyYAML is missing, the file cannot be read or has another form, a key is unknown, or a
            number is negative.
    """
    found: dict[str, Any] = {}
    for where, name, value in _entries(path, _load(path)):
        flag = "--" + name.replace("_", "-")
        target = next((each for each in (name, flag) if each in known), None)
        if target is None:
            raise InvalidArgumentError(f"--config-file {path!r} has {where}, which is no option.")
        if isinstance(value, bool):
            # A switch of a flag without effect is only reported.
            found[target] = value if target == flag else str(int(value))
        elif value is not None:
            if not isinstance(value, (int, float, str)):
                raise InvalidArgumentError(
                    f"--config-file {path!r}: {where} is {value!r}; it must be one number, text, true or false."
                )
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise InvalidArgumentError(
                    f"--config-file {path!r}: {where} is {value}; it must be a number of 0 or more."
                )
            found[target] = str(value)
    return found


def _load(path: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidArgumentError(
            "--config-file needs PyYAML, which is not installed here: pip install pyyaml, or give the flags themselves."
        ) from error
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_CONFIG_CHARACTERS + 1)
        if len(text) <= _CONFIG_CHARACTERS:
            return yaml.safe_load(text)
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"--config-file {path!r} cannot be read: {error}.") from error
    raise InvalidArgumentError(
        f"--config-file {path!r} has more than {_CONFIG_CHARACTERS:,} characters, and flags need a few hundred. Give the file with the flags."
    )


def _entries(path: str, content: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield each entry: its section and key, the name of its flag, and its value."""
    if not isinstance(content, dict) or not content:
        raise InvalidArgumentError(
            f"--config-file {path!r} {'is empty' if not content else 'has no sections'}; it must have sections, such as params and timeline."
        )
    for section, entries in content.items():
        if section == "controller":
            if not isinstance(entries, str):
                raise InvalidArgumentError(
                    f"--config-file {path!r}: controller is {entries!r}; it must be a name such as gloo or mpi."
                )
            yield section, entries, True
            continue
        if section not in _SECTIONS or not isinstance(entries, dict):
            raise InvalidArgumentError(
                f"--config-file {path!r} has the section {section!r}; sections are controller, {', '.join(_SECTIONS)}, with "
                "options in them."
            )
        prefix, renamed = _SECTIONS[section]
        for key, value in entries.items():
            yield f"{section}.{key}", renamed.get(key, f"{prefix}{key}"), value


if __name__ == "__main__":
    sys.exit(main())
