"""Every engine and launch setting, with its unit, default, meaning and environment name.

Later sources win: the default, the driver's environment, the Spark conf (`spark.executorEnv.<variable>`, then
`spark.sparkhvd.<setting>`), `env=` of a launch, variables that the rank's function sets before `init()`, and values
given in code (`settings=`). All but the last-but-one are resolved once, on the driver or in a process that was not
launched, and shipped whole to every rank (`rank_settings`). The executors' own environment does not count, because hosts
may differ in it. Nothing else in the package reads the environment for a setting.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from typing import Any

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.knobs import (
    Limit,
    check,
    knob,
    may_be_caught,
    parse,
    parse_place,
    parse_port_range,
    variables_of,
)

__all__ = [
    "AUTOTUNE",
    "CONF_PREFIX",
    "ISAS",
    "Settings",
    "conf_keys",
    "markdown_table",
    "read_variables",
]

# Of the settings in the Spark conf: spark.sparkhvd.bucket_bytes and the like.
CONF_PREFIX = "spark.sparkhvd."
_EXECUTOR_ENV = "spark.executorEnv."
AUTOTUNE = ("", "0", "1", "on", "all")
LIVE_OUTPUT = ("auto", "messages", "0")
ISAS = ("auto", "scalar", "avx2", "avx512", "neon")


_COUNT: Limit[int] = (lambda value: value >= 0, "0 or more")
_SECONDS: Limit[float] = (lambda value: value >= 0, "0 or more")
_DURATION: Limit[float] = (lambda value: value > 0, "more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of engine and launch. Built once, shipped whole to every rank."""

    isa: str = knob(
        "auto",
        env="SPARKHVD_ISA",
        unit="name",
        doc="Instruction set of the reduce kernels: auto, scalar, avx2, avx512 or neon; all give the same bits.",
        limit=(lambda value: value in ISAS, f"one of {', '.join(ISAS)}"),
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
        doc="Size of a pipeline slot of the shared-memory plane; should fit the L2 cache.",
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
        doc="Largest bucket of gradients that are reduced together; 0 = each by itself.",
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
        doc="NCCL library to load for tensors on GPUs; empty = the copy that torch has loaded, else one that pip has installed, else libnccl.so.2.",
    )
    spin_us: int = knob(
        100,
        env="SPARKHVD_SPIN_US",
        unit="us",
        doc="Time that a waiting thread spins before it sleeps; longer than it takes to wake a thread.",
        limit=_COUNT,
    )
    keep_freed_memory: bool = knob(
        True,
        env="SPARKHVD_KEEP_FREED_MEMORY",
        unit="0 or 1",
        doc="Let processes started by run() and fit() keep freed memory, so that steps do not pay for new pages; 0 leaves glibc's malloc as it is.",
    )
    nursery: str = knob(
        "auto",
        env="SPARKHVD_NURSERY",
        unit="auto, 0 or 1",
        doc="Fork the ranks of later launches from a process per executor that has imported torch; it ends after a minute unused. "
        "auto = not on YARN and Kubernetes, where it is not tested.",
        limit=(lambda value: value in ("auto", "0", "1"), "auto, 0 or 1"),
    )
    streams: int = knob(
        1,
        env="SPARKHVD_STREAMS",
        unit="count",
        doc="Connections for tensors per pair of ranks, beside the one for control frames; tensors are spread over them.",
        limit=(lambda value: 1 <= value <= 64, "from 1 to 64"),
    )
    stall_warning_s: float = knob(
        60.0,
        env="SPARKHVD_STALL_WARNING_S",
        unit="s",
        doc="Warn about ranks that keep others waiting longer than this; 0 = never.",
        alias="HOROVOD_STALL_CHECK_TIME_SECONDS",
        limit=_SECONDS,
    )
    stall_shutdown_s: float = knob(
        1800.0,
        env="SPARKHVD_STALL_SHUTDOWN_S",
        unit="s",
        doc="Longest wait for a rank before the operation fails; 0 = no limit.",
        alias="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        limit=_SECONDS,
    )
    stack_signal: int = knob(
        44,
        env="SPARKHVD_STACK_SIGNAL",
        unit="number",
        doc="Signal at which a rank that keeps others waiting writes its Python stacks for the warning; ignored "
        "if the program uses it; 0 = no stacks. 44 is SIGRTMIN+10: neither libc nor batch systems use it.",
        limit=(lambda value: may_be_caught(value), "0, or a signal to be caught"),
    )
    timeline: str = knob(
        "",
        env="SPARKHVD_TIMELINE",
        unit="path",
        doc="File to which rank 0 writes a timeline (Chrome trace, opens in Perfetto) from the start; empty or DYNAMIC = none until `hvd.start_timeline()`.",
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
        "fastest, with the same bits in every result; `all`: also sizes in a ring of more than 16 hosts, which "
        "may change the last bits; empty: off.",
        alias="HOROVOD_AUTOTUNE",
        limit=(lambda value: value in AUTOTUNE, "empty, on or all"),
    )
    autotune_file: str = knob(
        "",
        env="SPARKHVD_AUTOTUNE_FILE",
        unit="path",
        doc="JSON file to which rank 0 writes the choice of autotune; an existing file is loaded instead of tuning again.",
    )
    host_loss_s: float = knob(
        15.0,
        env="SPARKHVD_HOST_LOSS_S",
        unit="s",
        doc="Longest time without an acknowledgement before a host is lost; at least 3, and above the longest round trip: bytes that queue in front of a slow link count.",
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
        doc="Ports that ranks may listen on, for example 40000-40100; empty = any free port.",
        limit=(lambda value: parse_port_range(value) is not None, "like 40000-40100"),
    )
    interfaces: str = knob(
        "",
        env="SPARKHVD_INTERFACES",
        unit="names or networks",
        doc="Interfaces by which hosts talk, such as eth0 or 10.0.0.0/8, with commas; a host's first that is up counts. Empty = by address.",
        alias="HOROVOD_GLOO_IFACE",
    )
    directory: str = knob(
        "",
        env="SPARKHVD_DIRECTORY",
        unit="host:port",
        doc="Where rank 0 listens for ranks that a launcher has started on several hosts; empty = MASTER_ADDR, one of 8 ports after MASTER_PORT.",
        limit=(lambda value: not value or parse_place(value) is not None, "like host:29600"),
    )
    ssh_command: str = knob(
        "ssh",
        env="SPARKHVD_SSH",
        unit="command",
        doc="OpenSSH's client, with any options, by which sparkhvdrun and run_hosts reach other hosts.",
    )
    job_key_file: str = knob(
        "",
        env="SPARKHVD_JOB_KEY_FILE",
        unit="path",
        doc="File of this user alone (mode 0600), 32 or more random bytes, the same on every host, by which ranks without a launcher's key know each other.",
    )
    trust_network: bool = knob(
        False,
        env="SPARKHVD_TRUST_NETWORK",
        unit="0 or 1",
        doc="Let ranks on several hosts hand each other the job's key over the network, where whoever reaches rank 0 can join; "
        "without it they need a launcher that gives one, or a file of the key.",
    )
    cuda_library: str = knob(
        "",
        env="SPARKHVD_CUDA_LIB",
        unit="path",
        doc="Library of CUDA's driver; empty = the system's libcuda.so.1.",
    )
    live_output: str = knob(
        "auto",
        env="SPARKHVD_LIVE_OUTPUT",
        unit="auto, messages or 0",
        doc="Show on the driver what ranks print while they run; messages = only those of `hvd.log_to_driver`; 0 = the last lines at the end.",
        limit=(lambda value: value in LIVE_OUTPUT, f"one of {', '.join(LIVE_OUTPUT)}"),
    )
    start_timeout_s: float = knob(
        600.0,
        env="SPARKHVD_START_TIMEOUT_S",
        unit="s",
        doc="Longest wait for enough free Spark task slots, and of a rank that a launcher has started for the others.",
        alias="HOROVOD_SPARK_START_TIMEOUT",
        limit=_DURATION,
    )
    elastic_patience_s: float = knob(
        30.0,
        env="SPARKHVD_ELASTIC_PATIENCE_S",
        unit="s",
        doc="Longest wait of the ranks of an elastic job, while ranks change, for one that lives and does not answer; then they go on without it.",
        limit=_DURATION,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            check(f, getattr(self, f.name), f"Settings.{f.name}")

    @property
    def tuning(self) -> str:
        """Knobs that may be tuned: "" none, "on" those that cannot change bits, "all" all."""
        return {"": "", "0": "", "1": "on"}.get(self.autotune, self.autotune)

    @property
    def ports(self) -> range:
        """Ports that a listener may take; `range(0, 1)` means any free one."""
        ports = parse_port_range(self.port_range)
        assert ports is not None
        return ports

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the fields that differ from their defaults."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    @classmethod
    def resolve(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        conf: Mapping[str, str] | None = None,
        **explicit: object,
    ) -> Settings:
        """Build settings: an argument wins over the conf, it over the environment, and that over the default.

        Args:
            environ: variables to read; None means this process's environment.
            conf: values by key; only `conf_keys()` are read.
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
        given: dict[str, Any] = {k: v for k, v in explicit.items() if v is not None}
        in_conf, of_executors = _of_conf(conf)
        own = os.environ if environ is None else environ
        settings = cls(**given).overridden(own, given).overridden(of_executors, given)
        return replace(settings, **{**in_conf, **given})

    def overridden(self, variables: Mapping[str, str], keep: Collection[str] = ()) -> Settings:
        """Return these settings with the values that environment variables hold.

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
        """Return JSON from which `from_json` rebuilds these settings on another machine."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Rebuild settings from `to_json`."""
        return cls(**json.loads(text))


def conf_keys() -> list[str]:
    """Return the keys of the Spark conf that hold settings."""
    keys = [CONF_PREFIX + f.name for f in fields(Settings)]
    return keys + [_EXECUTOR_ENV + name for f in fields(Settings) for name in variables_of(f)]


def _of_conf(conf: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a Spark conf by field, and the executors' variables in it."""
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
