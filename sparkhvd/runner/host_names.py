"""Hosts and slots as users write them, and the placement of ranks."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.interfaces import interfaces
from sparkhvd.topology import HOROVOD_NAMES

# Defaults for ssh: command, port and key file.
PLAIN_SSH = ("ssh", None, None)
# A host for ssh, with an optional user; never an option.
_NAME = re.compile(r"[\w:][\w.@%:-]*")
_SLOT_DIGITS = 5
_FORM = "host:slots,host:slots, such as 'localhost:2' or 'a:4,b:4'; an IPv6 address in brackets"


@dataclass(frozen=True)
class Host:
    """Host by its name for ssh, and its number of slots."""

    name: str
    slots: int


@dataclass(frozen=True)
class HostSlots:
    """Consecutive ranks of one host."""

    host: str
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def is_here(name: str, *, by_ssh: bool = False) -> bool:
    """Whether a name is this host's, or an address of its interfaces.

    Args:
        name: of a host.
        by_ssh: whether the user has configured ssh. Then an address of this host may lead into a container.
    """
    own = socket.gethostname()
    short = own.partition(".")[0]
    if name in {"localhost", "127.0.0.1", "::1", own, short}:
        return True
    if name.startswith(f"{short}."):  # other names need no lookup, which may wait for a name server
        return name == socket.getfqdn()
    return not by_ssh and name in {each.address for each in interfaces()}


def parse_hosts(text: str) -> list[Host]:
    """Parse hosts in the form of horovodrun's -H.

    Raises:
        InvalidArgumentError: the text has another form, or names a host twice.
    """
    return _checked(f"hosts is {text!r}", (_host(part, text) for part in text.split(",")))


def _host(part: str, text: str) -> Host:
    name, slots = part.strip(), "1"
    if match := re.fullmatch(r"\[(.*)\](?::(.*))?|([^:]*):(.*)", name):
        name = match[1] or match[3] or ""
        slots = next((text for text in (match[2], match[4]) if text is not None), "1")
    is_number = slots.isdecimal() and len(slots) <= _SLOT_DIGITS and int(slots) > 0
    if not _NAME.fullmatch(name) or not is_number:
        raise InvalidArgumentError(
            f"hosts is {text!r:.200}; it must be {_FORM}; slots from 1 to 99999."
        )
    return Host(name, int(slots))


def read_hostfile(path: str) -> list[Host]:
    """Read the hosts of a file with lines `host slots=N` (Open MPI's) or `host:N`.

    Raises:
        InvalidArgumentError: the file cannot be read, a line has another form, or a host appears twice.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--hostfile {path!r} cannot be read: {error}.") from error
    return _checked(f"--hostfile {path!r}", _hosts_of(path, lines))


def _hosts_of(path: str, lines: Sequence[str]) -> Iterator[Host]:
    for number, line in enumerate(lines, 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        given = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        part = f"{words[0]}:{given['slots']}" if "slots" in given else words[0]
        try:
            yield _host(part, line)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"--hostfile {path!r}, line {number}: {line!r} is neither `host slots=N` nor `host:N`."
            ) from error


def _checked(what: str, hosts: Iterator[Host]) -> list[Host]:
    found: dict[str, Host] = {}
    for host in hosts:
        key = host.name.rpartition("@")[2]
        if key in found:
            names = " and ".join(dict.fromkeys((found[key].name, host.name)))
            raise InvalidArgumentError(
                f"{what}: a host appears twice, {names}. Give it once, with all of its slots."
            )
        found[key] = host
    if not found:
        raise InvalidArgumentError(f"{what} has no host; it must have {_FORM}.")
    return list(found.values())


def merged(hosts: Sequence[Host], is_here: Callable[[str], bool] = is_here) -> list[Host]:
    """Merge all names of this host into the first one, with the sum of their slots.

    Args:
        hosts: with different names.
        is_here: whether a name is of this host.
    """
    here = [host for host in hosts if is_here(host.name)]
    if len(here) < 2:
        return list(hosts)
    slots = sum(host.slots for host in here)
    return [
        Host(host.name, slots) if host is here[0] else host
        for host in hosts
        if host is here[0] or host not in here
    ]


def place_ranks(hosts: Sequence[Host], num_proc: int) -> list[HostSlots]:
    """Place ranks on hosts, filling them in order.

    Raises:
        InvalidArgumentError: there are more ranks than slots.
    """
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise InvalidArgumentError(
            f"hosts is {named!r} with {slots} slots, and num_proc (-np) is {num_proc}; there must be at least one slot per rank."
        )
    places = []
    first = 0
    for host in hosts:
        count = min(host.slots, num_proc - first)
        if count:
            places.append(HostSlots(host.name, first, count))
        first += count
    return places


# ----------------------------------------------------------------------------------------------------
# Variables of a launcher that are forwarded to ranks on other hosts.

# Settings, variables of numerical libraries and Python, and search paths, which are equal on the hosts of a cluster.
_PREFIXES = ("HOROVOD_", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "SPARKHVD_", "TORCH_")
_NAMES = {
    "CONDA_PREFIX",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "TZ",
    "VIRTUAL_ENV",
}
# Variables of this process only.
_OWN = {
    *("SPARKHVD_LAUNCHED_BY", "SPARKHVD_PLACE", "SPARKHVD_RANK_PROCESS", "SPARKHVD_SSH"),
    *HOROVOD_NAMES,
}


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks on other hosts, sent without `-x`."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OWN and (name in _NAMES or name.startswith(_PREFIXES))
    }


def given_variables(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse `-x NAME=VALUE`, and `-x NAME` for this process's value.

    Raises:
        InvalidArgumentError: NAME without a value is not set here.
    """
    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not name or (not sign and name not in environ):
            raise InvalidArgumentError(
                f"-x {word}: this variable is not set here. Give it a value, as in -x {name or 'NAME'}=VALUE."
            )
        found[name] = value if sign else environ[name]
    return found
