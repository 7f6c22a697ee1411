"""Every engine and launch setting, with its unit, default, meaning and environment name.

Later sources win: the default, the driver's environment, the Spark conf (`spark.executorEnv.<variable>`, then
`spark.sparkhvd.<setting>`), `env=` of a launch, variables that the rank's function sets before `init()`, and values
given in code (`settings=`). All but the last-but-one are resolved once, on the driver or in a process that nobody
launched, and shipped whole to every rank (`RankSettings`). What the executors' own environment holds does not count:
hosts may differ in it. Nothing else in the package reads the environment for a setting.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "AUTOTUNE",
    "CONF_PREFIX",
    "ISAS",
    "JobSettings",
    "RankSettings",
    "Settings",
    "markdown_table",
]

# Of the settings in the Spark conf: spark.sparkhvd.bucket_bytes and the like.
CONF_PREFIX = "spark.sparkhvd."
_EXECUTOR_ENV = "spark.executorEnv."
AUTOTUNE = ("", "0", "1", "on", "all")
ISAS = ("auto", "scalar", "avx2", "avx512", "neon")


def knob(
    default: Any,
    *,
    env: str,
    unit: str,
    doc: str,
    alias: str | None = None,
) -> Any:
    """A field of `Settings`; `alias` is Horovod's variable."""
    metadata = {"env": env, "unit": unit, "doc": doc, "alias": alias}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything a user may tune below the estimator. Built once, shipped whole to every rank."""

    isa: str = knob(
        "auto",
        env="SPARKHVD_ISA",
        unit="name",
        doc="Instruction set of the reduce kernels: auto, scalar, avx2, avx512 or neon; "
        "all give the same bits.",
    )
    shared_memory: bool = knob(
        True,
        env="SPARKHVD_SHARED_MEMORY",
        unit="0 or 1",
        doc="Move tensors between ranks of one host through shared memory; 0 uses sockets.",
    )
    slot_bytes: int = knob(
        256 << 10,
        env="SPARKHVD_SLOT_BYTES",
        unit="bytes",
        doc="One pipeline slot of the shared-memory plane; should fit the L2 cache.",
    )
    slots: int = knob(
        4, env="SPARKHVD_SLOTS", unit="count", doc="Pipeline slots per rank, at least 2."
    )
    bucket_bytes: int = knob(
        4 << 20,
        env="SPARKHVD_BUCKET_BYTES",
        unit="bytes",
        doc="Gradients are reduced together up to this many bytes; 0 = each by itself.",
        alias="HOROVOD_FUSION_THRESHOLD",
    )
    device_bucket_bytes: int = knob(
        32 << 20,
        env="SPARKHVD_DEVICE_BUCKET_BYTES",
        unit="bytes",
        doc="The same for gradients on a GPU, where an operation costs a launch.",
    )
    nccl_library: str = knob(
        "",
        env="SPARKHVD_NCCL_LIB",
        unit="path",
        doc="The NCCL to load for tensors on GPUs, and no other; empty = the copy that torch has loaded, else one "
        "that pip has installed, else libnccl.so.2.",
    )
    spin_us: int = knob(
        100,
        env="SPARKHVD_SPIN_US",
        unit="us",
        doc="How long a waiter spins before it sleeps; longer than it takes to wake a thread.",
    )
    keep_freed_memory: bool = knob(
        True,
        env="SPARKHVD_KEEP_FREED_MEMORY",
        unit="0 or 1",
        doc="Processes started by run() and fit() keep memory that is freed, so that steps do not pay for new "
        "pages; 0 leaves glibc's malloc as it is.",
    )
    streams: int = knob(
        1,
        env="SPARKHVD_STREAMS",
        unit="count",
        doc="TCP connections per pair of ranks on different hosts; tensors are spread over them.",
    )
    stall_warning_s: float = knob(
        60.0,
        env="SPARKHVD_STALL_WARNING_S",
        unit="s",
        doc="A rank that is waited for longer is named in a warning; 0 = never.",
        alias="HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown_s: float = knob(
        1800.0,
        env="SPARKHVD_STALL_SHUTDOWN_S",
        unit="s",
        doc="Longest wait for a rank before the operation fails; 0 = never.",
        alias="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    stack_signal: int = knob(
        44,
        env="SPARKHVD_STACK_SIGNAL",
        unit="number",
        doc="Signal by which a rank that is waited for writes its Python stacks for the warning; left alone "
        "if the program uses it; 0 = no stacks. 44 is SIGRTMIN+10: neither libc nor batch systems use it.",
    )
    timeline: str = knob(
        "",
        env="SPARKHVD_TIMELINE",
        unit="path",
        doc="Rank 0 writes a timeline (Chrome trace, opens in Perfetto) to this file from the start; "
        "empty or DYNAMIC = none until `hvd.start_timeline()`.",
        alias="HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = knob(
        False,
        env="SPARKHVD_TIMELINE_MARK_CYCLES",
        unit="0 or 1",
        doc="That timeline also marks when a thread begins to drive the engine.",
        alias="HOROVOD_TIMELINE_MARK_CYCLES",
    )
    autotune: str = knob(
        "",
        env="SPARKHVD_AUTOTUNE",
        unit="name",
        doc="`on`: DistributedOptimizer tries bucket and chunk sizes and streams while it trains and keeps the "
        "fastest, with the same bits in every result; `all`: also where algorithms change, which may change "
        "the last bits; empty: off.",
        alias="HOROVOD_AUTOTUNE",
    )
    autotune_file: str = knob(
        "",
        env="SPARKHVD_AUTOTUNE_FILE",
        unit="path",
        doc="Rank 0 writes what autotune chose to this JSON file; one that is there is loaded instead of "
        "tuning again.",
    )
    host_loss_s: float = knob(
        15.0,
        env="SPARKHVD_HOST_LOSS_S",
        unit="s",
        doc="A host that acknowledges nothing for this long is lost; at least 3.",
    )
    connect_timeout_s: float = knob(
        300.0,
        env="SPARKHVD_CONNECT_TIMEOUT_S",
        unit="s",
        doc="Longest wait for the other ranks inside init().",
    )
    port_range: str = knob(
        "",
        env="SPARKHVD_PORT_RANGE",
        unit="first-last",
        doc="Ports that ranks may listen on, for example 40000-40100; empty = any free port.",
    )
    cuda_library: str = knob(
        "",
        env="SPARKHVD_CUDA_LIB",
        unit="path",
        doc="Library of CUDA's driver; empty = the system's libcuda.so.1.",
    )
    start_timeout_s: float = knob(
        600.0,
        env="SPARKHVD_START_TIMEOUT_S",
        unit="s",
        doc="Longest wait for enough free Spark task slots.",
        alias="HOROVOD_SPARK_START_TIMEOUT",
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f"Settings.{f.name}")

    @property
    def tuning(self) -> str:
        """Which knobs may move: "" none, "on" those that cannot change bits, "all" all."""
        return {"": "", "0": "", "1": "on"}.get(self.autotune, self.autotune)

    @property
    def ports(self) -> range:
        """The ports that a listener may take; `range(0, 1)` means any free one."""
        ports = _parse_port_range(self.port_range)
        assert ports is not None
        return ports

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that differ from their defaults."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    @classmethod
    def conf_keys(cls) -> list[str]:
        """The keys of the Spark conf that hold settings."""
        keys = [CONF_PREFIX + f.name for f in fields(cls)]
        return keys + [_EXECUTOR_ENV + name for f in fields(cls) for name in _variables(f)]

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        conf: Mapping[str, str] | None = None,
        **explicit: Any,
    ) -> Settings:
        """Build settings: an argument wins over the conf, it over the environment, and that over the default.

        Args:
            environ: variables to read; None means this process's environment.
            conf: texts by key, of `conf_keys()`; others are ignored.
            **explicit: values for fields by name; None means "not given".

        Raises:
            InvalidArgumentError: a value is not of the field's type or out of its range, or a name is unknown. The
                message has the variable or key that holds it.
        """
        conf = conf or {}
        known = {f.name for f in fields(cls)}
        for name in explicit:
            if name not in known:
                raise InvalidArgumentError(
                    f"{name!r} is not a setting. Settings are: {', '.join(sorted(known))}."
                )
        given = {name: value for name, value in explicit.items() if value is not None}
        in_conf = {}
        for f in fields(cls):
            key = CONF_PREFIX + f.name
            if conf.get(key, "") != "":
                in_conf[f.name] = _parse(f, key, conf[key])
        of_executors = {
            key.removeprefix(_EXECUTOR_ENV): text
            for key, text in conf.items()
            if key.startswith(_EXECUTOR_ENV)
        }
        found = cls(**given).overridden(os.environ if environ is None else environ, given)
        return replace(found.overridden(of_executors, given), **{**in_conf, **given})

    def overridden(self, variables: Mapping[str, str], keep: Collection[str] = ()) -> Settings:
        """Return these settings with the values that environment variables hold.

        Args:
            variables: texts by name of the variable; those that are no settings are ignored. An empty one means the default.
            keep: fields that were given in code; a variable with another value gets a warning.

        Raises:
            InvalidArgumentError: a variable holds no value that is allowed.
        """
        values = {}
        for f, name, value in _read(variables):
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
        """Text from which `from_json` rebuilds these settings on another machine."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class JobSettings:
    """What the driver has decided on.

    Attributes:
        values: the settings.
        fixed: names of those that were given in code, which no variable of a rank changes.
    """

    values: Settings
    fixed: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Text from which `from_json` rebuilds this on another machine."""
        return json.dumps([self.values.to_json(), self.fixed])

    @classmethod
    def from_json(cls, text: str) -> JobSettings:
        """The settings that `to_json` wrote."""
        values, fixed = json.loads(text)
        return cls(Settings.from_json(values), tuple(fixed))


class RankSettings:
    """The settings of a launched rank: the job's, and what its function sets in the environment before `init()`.

    Variables that were there when this was made do not count: they are of the host, or the job's settings have them.

    Args:
        job: the job's.
    """

    # What has had its effect when the function begins.
    _EARLY = ("keep_freed_memory", "port_range", "start_timeout_s")

    def __init__(self, job: JobSettings) -> None:
        self._job = job
        self._before = dict(os.environ)

    def current(self) -> Settings:
        """Return the settings as they are now.

        Raises:
            InvalidArgumentError: a variable holds no value that is allowed, or comes too late to have an effect.
        """
        changed = {
            name: text for name, text in os.environ.items() if self._before.get(name) != text
        }
        job = self._job.values
        found = job.overridden(changed, self._job.fixed)
        for f, name, value in _read(changed):
            if f.name in self._EARLY and getattr(found, f.name) != getattr(job, f.name):
                raise InvalidArgumentError(
                    f"{name}={value!r} was set in a rank, where it comes too late. Give it with env= of the launch, or set it in "
                    "the driver's environment."
                )
        return found


def _variables(f: Any) -> list[str]:
    """The environment variables of a field; the first that is set counts."""
    return [name for name in (f.metadata["env"], f.metadata["alias"]) if name]


def _read(variables: Mapping[str, str]) -> Iterator[tuple[Any, str, Any]]:
    """Yield field, variable and value of each setting among the variables."""
    for f in fields(Settings):
        present = sorted(
            (n for n in _variables(f) if n in variables), key=lambda n: not variables[n]
        )
        for name in present[:1]:
            value = _parse(f, name, variables[name]) if variables[name] else f.default
            yield f, name, value


def _parse(f: Any, source: str, text: str) -> Any:
    """Return the value that a variable or key holds, once it is known to be allowed."""
    kind = type(f.default)
    try:
        if kind is bool:
            value = {"0": False, "false": False, "1": True, "true": True}[text.strip().lower()]
        else:
            value = kind(text)
    except (KeyError, ValueError):
        raise InvalidArgumentError(
            f"{source}={text!r} is not a valid {kind.__name__}. "
            f"Give a plain {kind.__name__} like {f.default!r}, or unset it."
        ) from None
    _check(f.name, value, source)
    return value


def _check(name: str, value: Any, source: str) -> None:
    is_allowed, expected = _LIMITS.get(name, (lambda _: True, ""))
    if not is_allowed(value):
        raise InvalidArgumentError(f"{source} is {value!r}; it must be {expected}.")


def _may_be_caught(number: int) -> bool:
    """Whether a program may give a handler to the signal; 0 counts. Numbers of Linux."""
    faults = {4, 6, 7, 8, 11}  # ILL, ABRT, BUS, FPE, SEGV: the process cannot go on
    reserved = {9, 19, 32, 33}  # KILL, STOP, and two of libc's
    return 0 <= number <= 64 and number not in faults | reserved


def _parse_port_range(text: str) -> range | None:
    if not text:
        return range(1)
    first, dash, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not dash)):
        return None
    low, high = int(first), int(last or first)
    return range(low, high + 1) if 0 < low <= high < 65536 else None


_COUNT: tuple[Callable[[Any], bool], str] = (lambda value: value >= 0, "0 or more")
# What a value must be, by field; those that are not here take any of their type.
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "isa": (lambda value: value in ISAS, f"one of {', '.join(ISAS)}"),
    "slot_bytes": (lambda value: value >= 4096, "at least 4096"),
    "slots": (lambda value: 2 <= value <= 64, "from 2 to 64"),
    "bucket_bytes": _COUNT,
    "device_bucket_bytes": _COUNT,
    "spin_us": _COUNT,
    "streams": (lambda value: 1 <= value <= 64, "from 1 to 64"),
    "stall_warning_s": _COUNT,
    "stall_shutdown_s": _COUNT,
    "stack_signal": (lambda value: _may_be_caught(value), "0, or a signal to be caught"),
    "autotune": (lambda value: value in AUTOTUNE, "empty, on or all"),
    "host_loss_s": (lambda value: value >= 3, "at least 3"),
    "connect_timeout_s": (lambda value: value > 0, "more than 0"),
    "start_timeout_s": (lambda value: value > 0, "more than 0"),
    "port_range": (lambda value: _parse_port_range(value) is not None, "like 40000-40100"),
}


def markdown_table() -> str:
    """Return the settings as the Markdown table of docs/settings.md."""
    lines = ["| setting | environment | default | unit | meaning |", "|---|---|---|---|---|"]
    for f in fields(Settings):
        names = f"`{f.metadata['env']}`"
        if f.metadata["alias"]:
            names += f" (or `{f.metadata['alias']}`)"
        lines.append(
            f"| `{f.name}` | {names} | `{f.default!r}` | {f.metadata['unit']} | {f.metadata['doc']} |"
        )
    return "\n".join(lines)
