"""Every engine and launch setting, with its unit, default, meaning and environment variable.

Later sources win: the default, the driver's environment, the Spark conf (`spark.executorEnv.<variable>`, then
`spark.sparkhvd.<setting>`), `env=` of a launch, variables that the rank's function sets before `init()`, and values
given in code (`settings=`). All except the rank's variables are resolved once, on the driver or in a process that was
not launched, and sent whole to every rank (`RankSettings`). The executors' own environment does not count, because
hosts may differ in it. No other module reads the environment for a setting.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, TypeGuard, TypeVar

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.wire import read_json, rebuild

# ----------------------------------------------------------------------------------------------------
# Declaration of settings, and parsing and checking of their values.

T = TypeVar("T", bool, int, float, str)
Limit = tuple[Callable[[T], bool], str]  # test of a value, and its description for messages


def knob(
    default: T,
    *,
    env: str,
    unit: str,
    doc: str,
    alias: str | None = None,
    limit: Limit[T] | None = None,
) -> T:
    """Declare a setting: a field of a dataclass.

    Args:
        default: its default, which also determines its type.
        env: its environment variable.
        unit: its unit.
        doc: its meaning.
        alias: Horovod's variable for it.
        limit: allowed values; None for all of the type.
    """
    metadata = {"env": env, "unit": unit, "doc": doc, "alias": alias, "limit": limit}
    return field(default=default, metadata=metadata)


def variables_of(f: Field[object]) -> list[str]:
    """List the environment variables of a setting, in order of precedence."""
    return [name for name in (f.metadata["env"], f.metadata["alias"]) if name]


def _parse_bool(text: str) -> bool:
    return {"0": False, "false": False, "1": True, "true": True}[text.strip().lower()]


_PARSERS: dict[type, Callable[[str], object]] = {
    bool: _parse_bool,
    int: int,
    float: float,
    str: str,
}


def parse(f: Field[object], source: str, text: str) -> object:
    """Parse the value of a setting in a variable or key.

    Args:
        f: the setting.
        source: name of the variable or key, for the message.
        text: its text.

    Raises:
        InvalidArgumentError: the text is not of the setting's type, or the value is not allowed.
    """
    kind = type(f.default)
    try:
        value = _PARSERS[kind](text)
    except (KeyError, ValueError):
        expected = "0 or 1" if kind is bool else f"a number such as {f.default!r}"
        raise InvalidArgumentError(
            f"{source}={text!r} is not a valid {kind.__name__}. Give {expected}, or remove it."
        ) from None
    check(f, value, source)
    return value


def check(f: Field[object], value: object, source: str) -> None:
    """Check that a setting allows a value.

    Args:
        f: the setting.
        value: its value.
        source: origin of the value, for the message.

    Raises:
        InvalidArgumentError: the value is not allowed.
    """
    if f.metadata["limit"] is None:
        return
    is_allowed, expected = f.metadata["limit"]
    if not is_allowed(value):
        raise InvalidArgumentError(f"{source} is {value!r}; it must be {expected}.")


def parse_place(text: str) -> tuple[str, int] | None:
    """Parse `host:port` or `[host]:port`, or return None if invalid."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_good = bool(host) and colon == ":" and port.isdecimal() and 0 < int(port) < 65536
    return (host, int(port)) if is_good else None


def may_be_caught(number: int) -> bool:
    """Whether a program may handle the signal, by Linux's numbers. True for 0."""
    faults = {4, 6, 7, 8, 11}  # ILL, ABRT, BUS, FPE, SEGV: the process cannot continue
    reserved = {9, 19, 32, 33}  # KILL, STOP, and two of libc's
    return 0 <= number <= 64 and number not in faults | reserved


def parse_port_range(text: str) -> range | None:
    """Parse `first-last`. An empty text gives `range(1)`, an invalid text None."""
    if not text:
        return range(1)
    first, dash, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not dash)):
        return None
    low, high = int(first), int(last or first)
    return range(low, high + 1) if 0 < low <= high < 65536 else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float. A bool is not a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_seconds(name: str, seconds: object, such_as: float) -> None:
    """Check that a wait is a number of seconds above 0.

    Args:
        name: of the argument or flag.
        seconds: the wait.
        such_as: seconds for the example in the message.

    Raises:
        InvalidArgumentError: it is not a number of seconds above 0.
    """
    if not is_number(seconds) or not 0 < seconds < math.inf:
        shown = f"{seconds:g}" if is_number(seconds) else repr(seconds)
        raise InvalidArgumentError(
            f"{name} is {shown}; it must be a number of seconds above 0, such as {such_as:g}."
        )


# Prefix of settings in the Spark conf: spark.sparkhvd.bucket_bytes and the like.
CONF_PREFIX = "spark.sparkhvd."
_EXECUTOR_ENV = "spark.executorEnv."
AUTOTUNE = ("", "0", "1", "on", "all")
LIVE_OUTPUT = ("auto", "messages", "0")
# Three years: as long as any application.
ZYGOTE_STAYS_S = 1e8
ISAS = ("auto", "scalar", "avx2", "avx512", "neon")


_COUNT: Limit[int] = (lambda value: value >= 0, "0 or more")
_SECONDS: Limit[float] = (lambda value: value >= 0, "0 or more")
_DURATION: Limit[float] = (lambda value: value > 0, "more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of engine and launch. Built once, sent whole to every rank."""

    isa: str = knob(
        "auto",
        env="SPARKHVD_ISA",
        unit="name",
        doc="Instruction set of the reduce kernels: auto, scalar, avx2, avx512 or neon. All give the same bits.",
        limit=(lambda value: value in ISAS, f"one of {', '.join(ISAS)}"),
    )
    shared_memory: bool = knob(
        True,
        env="SPARKHVD_SHARED_MEMORY",
        unit="0 or 1",
        doc="Move tensors between ranks of one host through shared memory. 0 uses sockets.",
    )
    slot_bytes: int = knob(
        256 << 10,
        env="SPARKHVD_SLOT_BYTES",
        unit="bytes",
        doc="Size of a pipeline slot of the shared-memory plane. It should fit the L2 cache.",
        limit=(lambda value: value >= 4096, "at least 4096"),
    )
    slots: int = knob(
        4,
        env="SPARKHVD_SLOTS",
        unit="count",
        doc="Pipeline slots per rank, at least 2.",
        limit=(lambda value: 2 <= value <= 64, "from 2 to 64"),
    )
    bucket_bytes: int = knob(
        4 << 20,
        env="SPARKHVD_BUCKET_BYTES",
        unit="bytes",
        doc="Largest bucket of gradients that are reduced together. 0 = each by itself.",
        alias="HOROVOD_FUSION_THRESHOLD",
        limit=_COUNT,
    )
    device_bucket_bytes: int = knob(
        32 << 20,
        env="SPARKHVD_DEVICE_BUCKET_BYTES",
        unit="bytes",
        doc="Largest bucket of gradients on a GPU, where an operation costs a launch.",
        limit=_COUNT,
    )
    nccl_library: str = knob(
        "",
        env="SPARKHVD_NCCL_LIB",
        unit="path",
        doc="NCCL library to load for tensors on GPUs. Empty = the copy that torch has loaded, else the copy that pip has installed, else libnccl.so.2.",
    )
    spin_us: int = knob(
        100,
        env="SPARKHVD_SPIN_US",
        unit="us",
        doc="Time that a waiting thread spins before it sleeps. It should be longer than it takes to wake a thread.",
        limit=_COUNT,
    )
    keep_freed_memory: bool = knob(
        True,
        env="SPARKHVD_KEEP_FREED_MEMORY",
        unit="0 or 1",
        doc="Processes started by run() and fit() keep freed memory, so that steps do not pay for new pages. 0 leaves glibc's malloc unchanged.",
    )
    lazy_compiler: bool = knob(
        True,
        env="SPARKHVD_LAZY_COMPILER",
        unit="0 or 1",
        doc="Ranks import torch's compiler, which takes as long as torch, only when something compiles. 0 leaves the import to torch, "
        "which imports it with the first optimizer.",
    )
    nursery: str = knob(
        "auto",
        env="SPARKHVD_NURSERY",
        unit="auto, 0 or 1",
        doc="Fork the ranks of later launches from a zygote, a process per executor that has imported torch. "
        "auto = not on YARN and Kubernetes, where it is not tested.",
        limit=(lambda value: value in ("auto", "0", "1"), "auto, 0 or 1"),
    )
    nursery_idle_s: float = knob(
        0.0,
        env="SPARKHVD_NURSERY_IDLE_S",
        unit="s",
        doc="Seconds after which an idle zygote (about 256 MiB) ends. 0 = with its application on a local master and without Spark, "
        "elsewhere 60 s.",
        limit=(lambda value: 0 <= value <= ZYGOTE_STAYS_S, "from 0 to 1e8"),
    )
    streams: int = knob(
        1,
        env="SPARKHVD_STREAMS",
        unit="count",
        doc="Connections for tensors per pair of ranks, beside the connection for control frames. Tensors are spread over them.",
        limit=(lambda value: 1 <= value <= 64, "from 1 to 64"),
    )
    stall_warning_s: float = knob(
        60.0,
        env="SPARKHVD_STALL_WARNING_S",
        unit="s",
        doc="Warn about ranks that keep others waiting longer than this. 0 = never.",
        alias="HOROVOD_STALL_CHECK_TIME_SECONDS",
        limit=_SECONDS,
    )
    stall_shutdown_s: float = knob(
        1800.0,
        env="SPARKHVD_STALL_SHUTDOWN_S",
        unit="s",
        doc="Longest wait for a rank before the operation fails. 0 = no limit.",
        alias="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        limit=_SECONDS,
    )
    stack_signal: int = knob(
        44,
        env="SPARKHVD_STACK_SIGNAL",
        unit="number",
        doc="Signal at which a straggler writes its Python stacks for the warning. It is "
        "ignored if the program uses it. 0 = no stacks. 44 is SIGRTMIN+10: neither libc nor batch systems use it.",
        limit=(lambda value: may_be_caught(value), "0, or a signal that can be caught"),
    )
    timeline: str = knob(
        "",
        env="SPARKHVD_TIMELINE",
        unit="path",
        doc="File to which rank 0 writes a timeline (Chrome trace, opens in Perfetto) from the start. Empty or DYNAMIC = no timeline until `hvd.start_timeline()`.",
        alias="HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = knob(
        False,
        env="SPARKHVD_TIMELINE_MARK_CYCLES",
        unit="0 or 1",
        doc="Mark in that timeline when a thread begins to drive the engine.",
        alias="HOROVOD_TIMELINE_MARK_CYCLES",
    )
    autotune: str = knob(
        "",
        env="SPARKHVD_AUTOTUNE",
        unit="name",
        doc="`on`: DistributedOptimizer tries bucket and chunk sizes and streams while it trains and keeps the "
        "fastest. Every result has the same bits. `all`: also sizes in a ring of more than 16 hosts, which "
        "may change the last bits. Empty: off.",
        alias="HOROVOD_AUTOTUNE",
        limit=(lambda value: value in AUTOTUNE, "empty, on or all"),
    )
    autotune_file: str = knob(
        "",
        env="SPARKHVD_AUTOTUNE_FILE",
        unit="path",
        doc="JSON file to which rank 0 writes the choice of autotune. An existing file is loaded instead of tuning again.",
    )
    host_loss_s: float = knob(
        15.0,
        env="SPARKHVD_HOST_LOSS_S",
        unit="s",
        doc="Longest time without an acknowledgement before a host is lost. At least 3, and above the longest round trip, including bytes that queue in front of a slow link.",
        limit=(lambda value: value >= 3, "at least 3"),
    )
    connect_timeout_s: float = knob(
        300.0,
        env="SPARKHVD_CONNECT_TIMEOUT_S",
        unit="s",
        doc="Longest wait for the other ranks inside init().",
        limit=_DURATION,
    )
    port_range: str = knob(
        "",
        env="SPARKHVD_PORT_RANGE",
        unit="first-last",
        doc="Ports that ranks may listen on, for example 40000-40100. Empty = any free port.",
        limit=(lambda value: parse_port_range(value) is not None, "like 40000-40100"),
    )
    interfaces: str = knob(
        "",
        env="SPARKHVD_INTERFACES",
        unit="names or networks",
        doc="Interfaces between hosts, such as eth0 or 10.0.0.0/8, separated by commas. Each host uses the first interface that is up. Empty = by address.",
        alias="HOROVOD_GLOO_IFACE",
    )
    directory: str = knob(
        "",
        env="SPARKHVD_DIRECTORY",
        unit="host:port",
        doc="Address at which rank 0 listens for ranks started by a launcher on several hosts. Empty = MASTER_ADDR, one of 8 ports after MASTER_PORT.",
        limit=(lambda value: not value or parse_place(value) is not None, "like host:29600"),
    )
    ssh_command: str = knob(
        "ssh",
        env="SPARKHVD_SSH",
        unit="command",
        doc="OpenSSH's client, with any options, with which sparkhvdrun and run_hosts reach other hosts.",
    )
    job_key_file: str = knob(
        "",
        env="SPARKHVD_JOB_KEY_FILE",
        unit="path",
        doc="File of this user only (mode 0600) with 32 or more random bytes, the same on every host, with which ranks without a launcher's key authenticate.",
    )
    trust_network: bool = knob(
        False,
        env="SPARKHVD_TRUST_NETWORK",
        unit="0 or 1",
        doc="Ranks on several hosts send each other the job's key over the network, where any process that reaches rank 0 can join. "
        "Without it they need a launcher that provides a key, or a key file.",
    )
    cuda_library: str = knob(
        "",
        env="SPARKHVD_CUDA_LIB",
        unit="path",
        doc="Library of CUDA's driver. Empty = the system's libcuda.so.1.",
    )
    live_output: str = knob(
        "auto",
        env="SPARKHVD_LIVE_OUTPUT",
        unit="auto, messages or 0",
        doc="Show the ranks' output on the driver live. messages = only the messages of `hvd.log_to_driver`. 0 = the last lines at the end.",
        limit=(lambda value: value in LIVE_OUTPUT, f"one of {', '.join(LIVE_OUTPUT)}"),
    )
    start_timeout_s: float = knob(
        600.0,
        env="SPARKHVD_START_TIMEOUT_S",
        unit="s",
        doc="Longest wait for enough free Spark task slots, and for the other ranks of a launcher.",
        alias="HOROVOD_SPARK_START_TIMEOUT",
        limit=_DURATION,
    )
    elastic_patience_s: float = knob(
        30.0,
        env="SPARKHVD_ELASTIC_PATIENCE_S",
        unit="s",
        doc="Time that an unresponsive rank may delay a change of the ranks of an elastic job. The others then continue without it.",
        limit=_DURATION,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            check(f, value, f"Settings.{f.name}")
            # People write 0 for False and 16e6 for an int; ranks require the exact types.
            if f.type == "bool" and value in (0, 1):
                object.__setattr__(self, f.name, bool(value))
            elif f.type == "int" and isinstance(value, float) and value.is_integer():
                object.__setattr__(self, f.name, int(value))

    @property
    def tuning(self) -> str:
        """Scope of autotuning: "" (off), "on" (only settings without effect on bits) or "all"."""
        return {"": "", "0": "", "1": "on"}.get(self.autotune, self.autotune)

    @property
    def ports(self) -> range:
        """Port range for listeners. `range(0, 1)` means any free port."""
        ports = parse_port_range(self.port_range)
        assert ports is not None
        return ports

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the fields with a non-default value."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        conf: Mapping[str, str] | None = None,
        **explicit: object,
    ) -> Settings:
        """Build settings, in order of precedence: arguments, conf, environment, defaults.

        Args:
            environ: variables to read; None means this process's environment.
            conf: values by key; only `conf_keys()` are read.
            **explicit: values for fields by name; None means "not given".

        Raises:
            InvalidArgumentError: a value is not of the field's type or out of its range, or a name is unknown. The
                message has the variable or key.
        """
        conf = conf or {}
        known = {f.name for f in fields(cls)}
        for name in explicit:
            if name not in known:
                raise InvalidArgumentError(
                    f"{name!r} is not a setting. Settings are: {', '.join(sorted(known))}."
                )
        given: dict[str, Any] = {k: v for k, v in explicit.items() if v is not None}
        in_conf, of_executors = _of_conf(conf)
        own = os.environ if environ is None else environ
        settings = cls(**given).overridden(own, given).overridden(of_executors, given)
        return replace(settings, **{**in_conf, **given})

    def overridden(self, variables: Mapping[str, str], keep: Collection[str] = ()) -> Settings:
        """Copy these settings with the values of environment variables.

        Args:
            variables: values by name; names that are not settings are ignored. An empty value means the default.
            keep: fields that were given in code; warns if a variable has another value.

        Raises:
            InvalidArgumentError: the value of a variable is not allowed.
        """
        values: dict[str, Any] = {}
        for f, name, value in read_variables(variables):
            if f.name not in keep:
                values[f.name] = value
            elif variables[name] != "" and value != getattr(self, f.name):
                warnings.warn(
                    f"{f.name}={getattr(self, f.name)!r} was given in code and {name}={value!r} in the "
                    "environment; the code wins.",
                    stacklevel=3,
                )
        return replace(self, **values)

    def to_json(self) -> str:
        """JSON for `from_json`, also on another machine."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Rebuild settings from the text of `to_json`, or raise ValueError for any other text."""
        return rebuild(cls, read_json(text))


def conf_keys() -> list[str]:
    """Keys of the Spark conf for settings, and for their variables on executors."""
    keys = [CONF_PREFIX + f.name for f in fields(Settings)]
    return keys + [_EXECUTOR_ENV + name for f in fields(Settings) for name in variables_of(f)]


def _of_conf(conf: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Extract the settings by field, and the executors' variables, from a Spark conf."""
    in_conf: dict[str, Any] = {}
    for f in fields(Settings):
        key = CONF_PREFIX + f.name
        if conf.get(key, "") != "":
            in_conf[f.name] = parse(f, key, conf[key])
    variables = {
        key.removeprefix(_EXECUTOR_ENV): text
        for key, text in conf.items()
        if key.startswith(_EXECUTOR_ENV)
    }
    return in_conf, variables


def read_variables(
    variables: Mapping[str, str],
) -> Iterator[tuple[Field[object], str, object]]:
    """Yield field, variable and value of each setting among environment variables."""
    for f in fields(Settings):
        present = sorted(
            (n for n in variables_of(f) if n in variables), key=lambda n: not variables[n]
        )
        for name in present[:1]:
            value = parse(f, name, variables[name]) if variables[name] else f.default
            yield f, name, value


def markdown_table() -> str:
    """Make the table of docs/settings.md."""
    lines = ["| setting | environment | default | unit | meaning |", "|---|---|---|---|---|"]
    for f in fields(Settings):
        names = f"`{f.metadata['env']}`"
        if f.metadata["alias"]:
            names += f" (or `{f.metadata['alias']}`)"
        lines.append(
            f"| `{f.name}` | {names} | `{f.default!r}` | {f.metadata['unit']} | {f.metadata['doc']} |"
        )
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------
# Transfer of settings from the driver to a launched rank.


@dataclass(frozen=True)
class JobSettings:
    """Settings of a launch, decided by the driver.

    Attributes:
        values: the settings.
        fixed: names of settings given in code, which no variable of a rank changes.
    """

    values: Settings
    fixed: tuple[str, ...] = ()

    def to_json(self) -> str:
        """JSON for `from_json`, also on another machine."""
        return json.dumps([self.values.to_json(), self.fixed])

    @classmethod
    def from_json(cls, text: str) -> JobSettings:
        """Rebuild settings from the text of `to_json`, or raise ValueError for any other text."""
        values, fixed = rebuild(tuple[str, tuple[str, ...]], read_json(text))
        return cls(Settings.from_json(values), fixed)


class RankSettings:
    """Settings of a launched rank: the job's, with variables set by its function before `init()`.

    Variables that were set before do not count: they are the host's, or already in the job's settings.

    Args:
        job: settings of the job.
        before: variables that were set when the rank started; None for the current ones.
    """

    # Settings that have taken effect before the function starts.
    _EARLY = (
        "elastic_patience_s",
        "keep_freed_memory",
        "lazy_compiler",
        "nursery",
        "nursery_idle_s",
        "port_range",
        "start_timeout_s",
    )

    def __init__(self, job: JobSettings, before: Mapping[str, str] | None = None) -> None:
        self._job = job
        self._before = dict(os.environ if before is None else before)

    def current(self) -> Settings:
        """Apply the variables changed in this rank to the settings of the job.

        Raises:
            InvalidArgumentError: the value of a variable is not allowed, or is too late to have an effect.
        """
        changed = {
            name: text for name, text in os.environ.items() if self._before.get(name) != text
        }
        job = self._job.values
        settings = job.overridden(changed, self._job.fixed)
        for f, name, value in read_variables(changed):
            if f.name in self._EARLY and getattr(settings, f.name) != getattr(job, f.name):
                raise InvalidArgumentError(
                    f"{name}={value!r} was set in a rank, where it comes too late. Give it with env= of the launch, or set it in "
                    "the driver's environment."
                )
        return settings


def setting_variables() -> dict[str, str]:
    """Collect the variables of settings from this process's environment."""
    names = {name for f in fields(Settings) for name in variables_of(f)}
    return {name: os.environ[name] for name in names if name in os.environ}
