"""Every engine and launch setting, with its unit, default, meaning and environment name.

`Settings` is resolved once, on the driver or in a process that nobody launched, and shipped whole to every
rank. Nothing else in the package reads the environment for a setting.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sparkhvd.errors import InvalidArgumentError

__all__ = ["AUTOTUNE", "CONF_PREFIX", "ISAS", "Settings", "markdown_table"]

# Of the settings in the Spark conf: spark.sparkhvd.bucket_bytes and the like.
CONF_PREFIX = "spark.sparkhvd."
AUTOTUNE = ("", "0", "1", "on", "all")
ISAS = ("auto", "scalar", "avx2", "avx512", "neon")


def knob(
    default: Any,
    *,
    env: str,
    unit: str,
    doc: str,
    alias: str | None = None,
    alias_factor: float = 1.0,
) -> Any:
    """A field of `Settings`; `alias` is Horovod's variable, in units of `alias_factor` of ours."""
    metadata = {"env": env, "unit": unit, "doc": doc, "alias": alias, "alias_factor": alias_factor}
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
        doc="Gradients are reduced together up to this many bytes.",
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
        self._require(self.isa in ISAS, "isa", f"one of {', '.join(ISAS)}")
        self._require(self.slot_bytes >= 4096, "slot_bytes", "at least 4096")
        self._require(2 <= self.slots <= 64, "slots", "from 2 to 64")
        self._require(self.bucket_bytes >= 1, "bucket_bytes", "at least 1")
        self._require(self.device_bucket_bytes >= 1, "device_bucket_bytes", "at least 1")
        self._require(self.spin_us >= 0, "spin_us", "0 or more")
        self._require(1 <= self.streams <= 64, "streams", "from 1 to 64")
        self._require(self.stall_warning_s >= 0, "stall_warning_s", "0 or more")
        self._require(self.stall_shutdown_s >= 0, "stall_shutdown_s", "0 or more")
        self._require(
            _may_be_caught(self.stack_signal), "stack_signal", "0, or a signal to be caught"
        )
        self._require(self.autotune in AUTOTUNE, "autotune", "empty, on or all")
        self._require(self.host_loss_s >= 3, "host_loss_s", "at least 3")
        self._require(self.connect_timeout_s > 0, "connect_timeout_s", "more than 0")
        self._require(self.start_timeout_s > 0, "start_timeout_s", "more than 0")
        self._require(
            _parse_port_range(self.port_range) is not None, "port_range", "like 40000-40100"
        )

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise InvalidArgumentError(
                f"Settings.{name} is {getattr(self, name)!r}; it must be {expected}."
            )

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
            conf: texts by key, `spark.sparkhvd.<field>`.
            **explicit: values for fields by name; None means "not given".

        Raises:
            InvalidArgumentError: a value is not of the field's type or out of its range, or a name is unknown.
        """
        environ = os.environ if environ is None else environ
        known = {f.name for f in fields(cls)}
        for name in explicit:
            if name not in known:
                raise InvalidArgumentError(
                    f"{name!r} is not a setting. Settings are: {', '.join(sorted(known))}."
                )
        given = {name: value for name, value in explicit.items() if value is not None}
        values: dict[str, Any] = {}
        for f in fields(cls):
            in_conf = cls._from_conf(f, conf or {})
            source, value = (None, None) if in_conf else _from_environment(f, environ)
            if f.name in given:
                if source is not None and value != given[f.name]:
                    warnings.warn(
                        f"{f.name}={given[f.name]!r} was given in code and {source}={value!r} in the "
                        "environment; the code wins.",
                        stacklevel=2,
                    )
                value = given[f.name]
            elif in_conf:
                value = in_conf[f.name]
            elif source is None:
                continue
            values[f.name] = value
        return cls(**values)

    @classmethod
    def _from_conf(cls, f: Any, conf: Mapping[str, str]) -> dict[str, Any]:
        """{name: value} if the conf has the setting, checked by itself so that an error names its key."""
        key = CONF_PREFIX + f.name
        if conf.get(key, "") == "":
            return {}
        value = {f.name: _parse(key, conf[key], f.default, 1.0)}
        try:
            cls(**value)
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"{key}={conf[key]!r}: {e}") from None
        return value

    def to_json(self) -> str:
        """Text from which `from_json` rebuilds these settings on another machine."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that `to_json` wrote."""
        return cls(**json.loads(text))


def _from_environment(f: Any, environ: Mapping[str, str]) -> tuple[str | None, Any]:
    for name, factor in (
        (f.metadata["env"], 1.0),
        (f.metadata["alias"], f.metadata["alias_factor"]),
    ):
        if name and environ.get(name, "") != "":
            return name, _parse(name, environ[name], f.default, factor)
    return None, None


def _parse(variable: str, text: str, default: Any, factor: float) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"0": False, "false": False, "1": True, "true": True}[text.strip().lower()]
        if kind in (int, float) and factor != 1.0:
            return kind(float(text) * factor)
        return kind(text)
    except (KeyError, ValueError):
        raise InvalidArgumentError(
            f"{variable}={text!r} is not a valid {kind.__name__}. "
            f"Give a plain {kind.__name__} like {default!r}, or unset it."
        ) from None


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


def markdown_table() -> str:
    """The settings as a Markdown table, as it stands in the README."""
    lines = ["| setting | environment | default | unit | meaning |", "|---|---|---|---|---|"]
    for f in fields(Settings):
        names = f"`{f.metadata['env']}`"
        if f.metadata["alias"]:
            names += f" (or `{f.metadata['alias']}`)"
        lines.append(
            f"| `{f.name}` | {names} | `{f.default!r}` | {f.metadata['unit']} | {f.metadata['doc']} |"
        )
    return "\n".join(lines)
