"""Every parser of bytes from a file or a socket: valid inputs, and the errors that it may raise for any others.

`tests/fuzz/test_parsers.py` mutates the valid inputs, and `make fuzz` (`tests/fuzz`) searches for others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np
import torch
from hypothesis import strategies as st

import sparkhvd
from sparkhvd import wire
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import MANIFEST_NAME, DataFile, Manifest
from sparkhvd.data.packed import checksums
from sparkhvd.data.packed.file import PackedFile
from sparkhvd.data.packed.writer import write_packed
from sparkhvd.data.store import remote
from sparkhvd.data.store.locks import Lease, ProcessIdentity, dump_sealed, load_sealed, position_of
from sparkhvd.data.store.store import Store, list_runs
from sparkhvd.elastic import coordinator, membership
from sparkhvd.errors import InvalidArgumentError, PreflightError, StoreError
from sparkhvd.estimator.fitting.runs import Finished, Run
from sparkhvd.estimator.saving.encoding import FORMAT_VERSION
from sparkhvd.launchers.bootstrap import Handover
from sparkhvd.observe import autotune, timeline
from sparkhvd.observe.report import page
from sparkhvd.rendezvous import Endpoint, Job
from sparkhvd.rendezvous.handshake import NOTICE, Notice
from sparkhvd.runner import command, host_names, loggers, outcomes
from sparkhvd.runner.elastic.coordinator import AttemptResult
from sparkhvd.runner.elastic.launcher import JobResult
from sparkhvd.runner.elastic.options import CoordinatorTerms, DiscoveryScript, ElasticOptions
from sparkhvd.runner.hosts.protocol import StartRequest
from sparkhvd.runner.live import frames
from sparkhvd.runner.live.frames import Record
from sparkhvd.runner.live.sender import OutputRoute
from sparkhvd.runner.options import RankChange
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.runner.preflight import RankFacts
from sparkhvd.runner.protocol import JobFrame, Prologue
from sparkhvd.runner.supervisor import RankEnded
from sparkhvd.runner.task import TaskSpec
from sparkhvd.runner.zygote import ForkRequest
from sparkhvd.settings import JobSettings, Settings
from sparkhvd.training.checkpoints.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@dataclass(frozen=True)
class Parser:
    """A parser.

    Attributes:
        name: kind of the bytes.
        valid: values that its writer writes.
        dump: the writer.
        parse: the parser.
        errors: all errors that it may raise.
        restored: result of `parse` for a value, or None if it is not compared.
        body: the JSON in written bytes, or None.
        wrap: written bytes with another JSON text as their body.
    """

    name: str
    valid: st.SearchStrategy[Any]
    dump: Callable[[Any], bytes]
    parse: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...] = (ValueError,)
    restored: Callable[[Any], Any] | None = lambda value: value
    body: Callable[[bytes], bytes] | None = lambda data: data
    wrap: Callable[[bytes], bytes] = lambda text: text

    def survives(self, data: bytes) -> bool:
        """Parse any bytes. Return False if the parser raised one of its errors."""
        try:
            self.parse(data)
        except self.errors:
            return False
        return True


# ----------------------------------------------------------------------------------------------------
# Valid values by the annotations of dataclasses.

_TEXT = st.text(max_size=8)
_PLAIN: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**40), 2**40),
    float: st.floats(0, 1e9),
    str: _TEXT,
    bool: st.booleans(),
    types.NoneType: st.none(),
    Any: JSON_VALUES,
    bytes: st.binary(min_size=32, max_size=32),
}


def values_of(kind: Any, **chosen: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a dataclass or of another annotation. `chosen` are fields with fewer values than their type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind is Endpoint:
        return st.builds(
            Endpoint,
            st.ip_addresses().map(str),
            st.integers(0, 65535),
            _TEXT,
            st.binary(max_size=4).map(bytes.hex),
        )
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        parts = {f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)}
        return st.builds(typing.cast(Any, kind), **{**parts, **chosen})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(each) for each in args])
    if origin is tuple and args[1:] != (...,):
        return st.tuples(*map(values_of, args))
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=2).map(tuple)
    if origin in (list, Sequence):
        return st.lists(values_of(args[0]), max_size=2)
    return st.dictionaries(_TEXT, values_of(args[1]), max_size=2)


def _fields(value: Any) -> bytes:
    return json.dumps(asdict(value)).encode()


def _rebuilt(kind: type, **chosen: st.SearchStrategy[Any]) -> Parser:
    """A dataclass that travels as the JSON of its fields."""
    return Parser(
        kind.__name__,
        values_of(kind, **chosen),
        _fields,
        lambda data: wire.rebuild(kind, wire.parse(data)),
    )


# ----------------------------------------------------------------------------------------------------
# Messages.

_KEY = st.binary(min_size=32, max_size=32)
_JOB = st.builds(
    lambda key, name, endpoints, rank: Job(
        key, name, 1, rank % len(endpoints), len(endpoints), tuple(endpoints)
    ),
    _KEY,
    _TEXT,
    st.lists(values_of(Endpoint), min_size=1, max_size=3),
    st.integers(0, 5),
)
_TOKEN = values_of(coordinator.JoinToken)
_OUTCOME = values_of(Outcome)
_RECORDS = st.lists(st.builds(Record, st.integers(0, 2**63), _TEXT, is_metrics=st.booleans()))
_SIDE = Job(b"k" * 32, "job", 0, 1, 4, (Endpoint("", 0, "", ""),) * 4)


def _settings(text: str) -> JobSettings:
    return JobSettings.from_json(text)


def _header(payload: bytes) -> bytes:
    return payload.partition(b"\n")[0]


def _frame(payload: bytes) -> bytes:
    came = bytearray(payload)
    taken = wire.take_frame(came)
    assert taken is not None
    return taken


def _messages_of_members() -> st.SearchStrategy[Any]:
    return st.one_of([values_of(kind) for kind in membership._KINDS.values()])


def _take_all(data: bytes) -> list[object]:
    came, found = bytearray(data), []
    while (message := coordinator.take(came)) is not None:
        found.append(message)
    return found


MESSAGES = [
    Parser(
        "message",
        st.tuples(_TEXT, st.dictionaries(_TEXT, JSON_VALUES, max_size=3), st.binary(max_size=8)),
        lambda given: wire.pack(given[0], given[2], given[1]),
        wire.unpack,
        restored=lambda given: wire.Message(*given),
        body=_header,
        wrap=lambda text: text + b"\ndata",
    ),
    Parser(
        "message of an elastic job",
        _messages_of_members(),
        coordinator.pack,
        _take_all,
        restored=lambda value: [value],
        body=_frame,
        wrap=wire.frame_of,
    ),
    Parser(
        "records of live output",
        _RECORDS,
        frames.pack,
        lambda data: list(frames.unpack(data)),
        restored=None,
        body=lambda data: _header(_frame(data)) if data else b"[]",
        wrap=lambda text: wire.frame_of(text + b"\ntext"),
    ),
    Parser(
        "what the driver has shown",
        st.integers(0, 2**63),
        frames.shown,
        lambda data: frames.take_shown(bytearray(data)),
        body=lambda data: _header(_frame(data)),
        wrap=lambda text: wire.frame_of(text + b"\n"),
    ),
    Parser(
        "notice of a lost rank",
        st.builds(
            Notice, st.integers(0, 3), st.integers(0, 9), st.integers(1, 2), st.integers(0, 3)
        ),
        lambda notice: notice.to_bytes(_SIDE, 1),
        # Its readers wait for exactly so many bytes.
        lambda data: Notice.from_bytes(data[: NOTICE.size].ljust(NOTICE.size), _SIDE),
        errors=(),
        body=None,
    ),
    Parser(
        "job", _JOB, lambda job: job.to_json().encode(), lambda data: Job.from_json(data.decode())
    ),
    Parser(
        "join token",
        _TOKEN,
        lambda token: json.dumps(token.to_dict()).encode(),
        lambda data: wire.rebuild(coordinator.JoinToken, wire.read_json(data)),
    ),
    Parser(
        "settings of a job",
        st.builds(JobSettings, st.just(Settings()), st.lists(_TEXT, max_size=2).map(tuple)),
        lambda chosen: chosen.to_json().encode(),
        lambda data: _settings(data.decode()),
    ),
    Parser(
        "outcome",
        _OUTCOME,
        lambda outcome: outcome.to_json().encode(),
        lambda data: Outcome.from_json(data.decode()),
    ),
    Parser(
        "outcome in the text of an exception",
        _OUTCOME,
        lambda outcome: outcomes.embed(outcome).encode(),
        lambda data: outcomes.find_embedded(data.decode(errors="replace")),
        errors=(),
        restored=None,
        body=None,
    ),
    Parser(
        "specification of a task",
        values_of(TaskSpec),
        lambda spec: spec.to_json().encode(),
        lambda data: TaskSpec.from_json(data.decode()),
    ),
    Parser(
        "result of an elastic attempt",
        st.builds(
            AttemptResult,
            values_of(JobResult),
            st.dictionaries(st.integers(0, 9), _OUTCOME, max_size=2),
            st.dictionaries(st.integers(0, 9), st.binary(max_size=5), max_size=2),
            changes=st.lists(values_of(RankChange), max_size=2).map(tuple),
        ),
        lambda result: result.to_bytes(),
        AttemptResult.from_bytes,
        body=_header,
        wrap=lambda text: text + b"\ndata",
    ),
    Parser(
        "entry of log_metrics",
        st.dictionaries(_TEXT, st.floats(allow_nan=False), max_size=3),
        lambda values: json.dumps({"step": 1, "time": 2.0, "values": values}).encode(),
        lambda data: loggers.metrics_of(data.decode(errors="replace")),
        errors=(),
        restored=None,
    ),
    Parser(
        "place of a rank",
        values_of(Handover, endpoint=values_of(Endpoint).map(asdict)),
        lambda handover: json.dumps(vars(handover)).encode(),
        Handover.from_bytes,
    ),
    *map(
        _rebuilt, (RankFacts, StartRequest, Prologue, JobFrame, ForkRequest, OutputRoute, RankEnded)
    ),
    _rebuilt(CoordinatorTerms, limits=st.builds(ElasticOptions, st.integers(1, 3))),
    Parser(
        "error of a store in a task",
        st.tuples(_TEXT, st.integers(0, 99)),
        lambda given: f"[sparkhvd-store:{json.dumps(given).encode().hex()}]".encode(),
        lambda data: _raised(data.decode(errors="replace")),
        errors=(RuntimeError,),
        restored=lambda given: given[0],
        body=lambda data: bytes.fromhex(data.decode()[16:-1]),
        wrap=lambda text: f"[sparkhvd-store:{text.hex()}]".encode(),
    ),
]


def _raised(text: str) -> str:
    try:
        with remote.raised_by_tasks(Store(_folder())):
            raise RuntimeError(text)
    except StoreError as e:
        return str(e)


# ----------------------------------------------------------------------------------------------------
# Files of a store. They are written into one folder, which each parser replaces.

_MADE: list[tempfile.TemporaryDirectory[str]] = []


def _folder() -> str:
    if not _MADE:
        _MADE.append(tempfile.TemporaryDirectory(prefix="sparkhvd-parsers-"))
    return _MADE[0].name


def _written(path: str, data: bytes) -> Store:
    file = Path(_folder(), path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return Store(_folder())


def _unsealed(data: bytes) -> bytes:
    return json.dumps(load_sealed(data)).encode()


def _sealed(text: bytes) -> bytes:
    """Return the text with the checksum that a reader expects, if it is an object."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(text)
        if isinstance(values, dict):
            return dump_sealed(values)
    return text


def _columns() -> st.SearchStrategy[Column]:
    return values_of(Column, invalid=st.just(("fill", 0.5)))


_MANIFEST = values_of(
    Manifest,
    files=st.lists(values_of(DataFile), max_size=2).map(tuple),
    schema=values_of(
        DataSchema,
        features=st.lists(_columns(), max_size=2).map(tuple),
        labels=st.lists(_columns(), max_size=2).map(tuple),
        **dict.fromkeys(("sample_weight", "validation"), st.none() | _columns()),
        group=st.none(),
    ),
    format_version=st.just(3),
    layout=st.just("packed"),
)
_LEASE = values_of(
    Lease,
    renewed=st.floats(0, 2e11),
    since=st.floats(0, 2e11),
    process=values_of(ProcessIdentity, pid=st.integers(1, 2**31 - 1)),
)
_RECORDS_OF_EPOCHS = st.integers(0, 3).map(
    lambda count: [{"epoch": k + 1, "loss": 0.5} for k in range(count)]
)
_PROFILE = {
    "every": 1,
    "epochs": [{"epoch": 1, "seconds": 0.5, "ranks": [1.0]}],
    "steps": {"first_s": 1e-5, "per_octave": 4, "counts": [0.0, 1.0]},
    "load": [{"host": "a", "time": [1.0, 2.0], "cpu_percent": [5.0, None]}],
}


def _history(data: bytes) -> object:
    return Checkpoints(_written("runs/r/metrics.jsonl", data), "runs/r").history()


def _profile(data: bytes) -> object:
    from sparkhvd.observe.loggers.fanout import LoggerFanout
    from sparkhvd.training.profile import Profile

    found = Checkpoints(_written("runs/r/profile.json", data), "runs/r").profile()
    Profile().resume(found, 1)
    fanout = LoggerFanout.__new__(LoggerFanout)
    fanout._deliveries, fanout._known_until, fanout._began = [object()], {}, 0.0  # type: ignore[list-item]
    fanout.put = lambda _: None  # type: ignore[method-assign,assignment,misc]
    fanout.load(found)
    return found


def _run_with(name: str) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        runs = list_runs(_written(f"runs/r/{name}", data))
        assert [run.run_id for run in runs] == ["r"]
        return runs

    return parse


def _packed() -> bytes:
    column = Column("x", "scalar", "float32", (), source="float", tensor_dtype="float32")
    values = {"x": np.arange(5, dtype=np.float32)}
    write_packed(Store(_folder()), "data/k/o/whole.parquet", [column], values)
    return Path(_folder(), "data/k/o/whole.parquet").read_bytes()


def _open_packed(data: bytes) -> object:
    file = PackedFile(_written("data/k/o/part.parquet", data), "data/k/o/part.parquet")
    return file.columns()


def _checkpoint() -> bytes:
    sink = io.BytesIO()
    write_checkpoint(Checkpoint(1, {"w": torch.zeros(2)}, {}, None, [], "{}"), sink)
    return sink.getvalue()


_MODEL = (
    Path(__file__).parents[1] / "saving/fixtures" / f"saved_model_v{FORMAT_VERSION}" / "plain_model"
)


def _part_of_model(name: str) -> bytes:
    (part,) = _MODEL.glob(f"{name}/part-*")
    return part.read_bytes()


def _load_model(name: str) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        for other in ("metadata", "weights"):
            content = data if other == name else _part_of_model(other)
            _written(f"model/{other}/part-00000", content)
        return sparkhvd.load_local(f"{_folder()}/model")

    return parse


def _tuned(data: bytes) -> object:
    tuner = autotune.Tuner.__new__(autotune.Tuner)
    tuner._file = str(Path(_folder(), "tuned.json"))
    Path(tuner._file).write_bytes(data)
    tuner._notify = lambda _: None  # type: ignore[method-assign]
    tuner._world = lambda: [2]  # type: ignore[method-assign,assignment,return-value]
    tuner._search = autotune.Search([autotune.TunedKnob("pieces", (1, 2, 4), 2)])
    tuner._values = {"pieces": 2}
    return tuner._load()


FILES = [
    Parser(
        "pointer to a checkpoint",
        st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
        lambda given: dump_sealed({"epoch": given[0], "step": given[1]}),
        position_of,
        errors=(),
        body=_unsealed,
        wrap=_sealed,
    ),
    Parser(
        "pointer in the list of runs",
        st.just((1, 2)),
        lambda given: dump_sealed({"epoch": given[0], "step": given[1]}),
        _run_with("checkpoints/latest.json"),
        errors=(),
        restored=None,
        body=_unsealed,
        wrap=_sealed,
    ),
    Parser(
        "lease",
        _LEASE,
        lambda lease: lease.to_bytes(),
        Lease.parse,
        errors=(),
        body=_unsealed,
        wrap=_sealed,
    ),
    Parser(
        "lock in the list of runs",
        _LEASE,
        lambda lease: lease.to_bytes(),
        _run_with("holder.json"),
        errors=(),
        restored=None,
        body=_unsealed,
        wrap=_sealed,
    ),
    Parser(
        MANIFEST_NAME,
        _MANIFEST,
        lambda manifest: manifest.to_json().encode(),
        lambda data: Manifest.load(_written(f"data/k/o/{MANIFEST_NAME}", data), "data/k/o"),
        errors=(InvalidArgumentError,),
        body=_unsealed,
        wrap=_sealed,
    ),
    Parser(
        "metrics.jsonl",
        _RECORDS_OF_EPOCHS,
        lambda history: "".join(json.dumps(each) + "\n" for each in history).encode(),
        _history,
        body=lambda data: data.splitlines()[0] if data else b"{}",
        wrap=lambda text: text.replace(b"\n", b" ") + b"\n",
    ),
    Parser(
        "profile.json",
        st.just(_PROFILE),
        lambda state: json.dumps(state).encode(),
        _profile,
        errors=(),
        restored=None,
    ),
    Parser(
        "end of a run",
        values_of(Finished),
        lambda finished: dump_sealed(asdict(finished)),
        lambda data: Run(_written("runs/r/finished.json", data), "runs/r").finished(),
        errors=(InvalidArgumentError,),
        restored=None,
        body=_unsealed,
        wrap=_sealed,
    ),
    Parser(
        "report.json",
        st.just({"format": 1, "history": [{"epoch": 1, "loss": 0.5}], **_PROFILE}),
        page.dumps,
        lambda data: page.render(page.loads(data, "here")),
        errors=(InvalidArgumentError,),
        restored=None,
    ),
    Parser(
        "checkpoint",
        st.builds(_checkpoint),
        lambda data: data,
        lambda data: read_checkpoint(io.BytesIO(data), "here"),
        errors=(InvalidArgumentError,),
        restored=None,
        body=None,
    ),
    Parser(
        "weights",
        st.builds(lambda: _part_of_model("weights")),
        lambda data: data,
        _load_model("weights"),
        errors=(InvalidArgumentError,),
        restored=None,
        body=None,
    ),
    Parser(
        "packed file",
        st.builds(_packed),
        lambda data: data,
        _open_packed,
        errors=(StoreError, InvalidArgumentError),
        restored=None,
        body=None,
    ),
    Parser(
        "checksums of a packed file",
        st.binary(max_size=40_000),
        lambda data: _table(data),
        lambda data: checksums.decode(data) if len(data) >= checksums.TRAILER_BYTES else None,
        errors=(),
        restored=None,
        body=None,
    ),
    Parser(
        "metadata of a saved model",
        st.builds(lambda: _part_of_model("metadata")),
        lambda data: data,
        _load_model("metadata"),
        errors=(InvalidArgumentError,),
        restored=None,
    ),
    Parser(
        "choice of autotune",
        st.just({"format": 1, "world": [2], "choice": {"pieces": 4}}),
        lambda value: json.dumps(value).encode(),
        _tuned,
        errors=(),
        restored=lambda value: value["choice"],
    ),
]


def _config_file(data: bytes) -> object:
    file = Path(_folder(), "config.yaml")
    file.write_bytes(data)
    return command.flags_of(str(file), {"--fusion-threshold-mb", "fusion_threshold_mb"})


def _timeline(start: int) -> bytes:
    begin = {"name": "sparkhvd", "ts": 0.0, "args": {"start_monotonic_ns": start}}
    return b"[\n" + json.dumps(begin, separators=(",", ":")).encode() + b",\n]\n"


READ_BY_HAND = [
    Parser(
        "--config-file",
        st.integers(0, 1 << 20),
        lambda size: json.dumps({"params": {"fusion_threshold_mb": size}}).encode(),
        _config_file,
        errors=(InvalidArgumentError,),
        restored=lambda size: {"fusion_threshold_mb": str(size)},
    ),
    Parser(
        "timeline of a rank",
        st.integers(0, 2**62),
        _timeline,
        lambda data: "".join(timeline.merge([io.BytesIO(data)], [0])),
        restored=lambda start: "[\n" + _timeline(start).decode().splitlines()[1][:-1] + "\n]\n",
        body=None,
    ),
]


def _table(data: bytes) -> bytes:
    sink = io.BytesIO()
    summing = checksums.SummingSink(sink)
    summing.write(data)
    summing.write_table()
    return sink.getvalue()[len(data) :]


# ----------------------------------------------------------------------------------------------------
# Lists of hosts.

_HOSTS = st.lists(
    st.tuples(st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True), st.integers(1, 99999)),
    min_size=1,
    max_size=3,
    unique_by=lambda host: host[0],
)


def _given(hosts: Sequence[tuple[str, int]], between: str) -> bytes:
    return between.join(f"{name}:{slots}" for name, slots in hosts).encode()


def _hosts(pairs: Sequence[tuple[str, int]]) -> list[host_names.Host]:
    return [host_names.Host(*pair) for pair in pairs]


def _read_hostfile(data: bytes) -> object:
    file = Path(_folder(), "hosts")
    file.write_bytes(data)
    return host_names.read_hostfile(str(file))


LISTS = [
    Parser(
        "-H",
        _HOSTS,
        lambda hosts: _given(hosts, ","),
        lambda data: host_names.parse_hosts(data.decode(errors="surrogateescape")),
        errors=(InvalidArgumentError,),
        restored=_hosts,
        body=None,
    ),
    Parser(
        "hostfile",
        _HOSTS,
        lambda hosts: _given(hosts, "\n"),
        _read_hostfile,
        errors=(InvalidArgumentError,),
        restored=_hosts,
        body=None,
    ),
    Parser(
        "output of a discovery script",
        _HOSTS,
        lambda hosts: _given(hosts, "\n"),
        lambda data: DiscoveryScript("find", 1, {})._parse("find", data.decode(errors="replace")),
        errors=(PreflightError,),
        restored=lambda hosts: tuple(_hosts(hosts)),
        body=None,
    ),
]

PARSERS = [*MESSAGES, *FILES, *LISTS, *READ_BY_HAND]


def example(parser: Parser) -> bytes:
    """One written value with many of its fields."""
    found: list[bytes] = []

    def score(data: bytes) -> int:
        return len(data)

    from hypothesis import HealthCheck, Phase, given, seed, settings

    @seed(1)
    @settings(
        max_examples=8,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(parser.valid)
    def collect(value: Any) -> None:
        found.append(parser.dump(value))

    collect()
    return max(found, key=score)


# ----------------------------------------------------------------------------------------------------
# Mutations.

_DEEP = "@deep@"
_DEEP_TEXT = b"[" * 100_000 + b"]" * 100_000
# Values for any field. Python writes and reads NaN, infinity and large exponents.
HOSTILE: Sequence[Any] = (
    None, True, False, -1, 0, 2**63, -(2**64), 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x" * 5000, "\0", "\ud800",
    "../../x", [], [[]], [None], [{}], {}, {"a": 1}, {"message": "ask"}, [float("inf")], [10**400], _DEEP,
)  # fmt: skip


_REMOVED, _ADDED = object(), object()


def mutated(body: bytes, most: int) -> Iterator[bytes]:
    """Return JSON texts with a field replaced by a hostile value, removed, or doubled: all, or `most` of them."""
    paths = [(), *_paths(json.loads(body))]
    changes = [(path, other) for path in paths for other in (*HOSTILE, _REMOVED, _ADDED)]
    if len(changes) > most:
        changes = random.Random(1).sample(changes, most)
    for path, other in changes:
        changed = json.loads(body)
        inner = changed
        for step in path[:-1]:
            inner = inner[step]
        if not path:
            changed = None if other in (_REMOVED, _ADDED) else other
        elif other is _REMOVED:
            del inner[path[-1]]
        elif other is not _ADDED:
            inner[path[-1]] = other
        elif isinstance(inner, dict):
            inner["other"] = 1
        yield json.dumps(changed).encode().replace(f'"{_DEEP}"'.encode(), _DEEP_TEXT)


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        entries: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, list):
        entries = iter(list(enumerate(value))[:2])
    else:
        return
    for key, inner in entries:
        yield (key,)
        for rest in _paths(inner):
            yield (key, *rest)


def cut(data: bytes, places: int) -> Iterator[bytes]:
    """Return the bytes truncated at some places, with flipped bits, and with additional bytes."""
    for end in range(0, len(data), max(1, len(data) // places)):
        yield data[:end]
        changed = bytearray(data)
        changed[end] ^= 1 << (end % 8)
        yield bytes(changed)
        yield data[:end] + b"\xff" * 8 + data[end:]
