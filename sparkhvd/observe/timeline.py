"""Timeline of a job: the ranks' waits for each other, in Chrome's trace format (open it in ui.perfetto.dev).

The engine writes the file of one rank (`Engine.start_timeline`); this module combines those of several ranks. By default only
rank 0 writes, as in Horovod. With `all_ranks` the others do too, into unnamed files. `stop` gathers them on rank 0, shifts their
times to rank 0's clock, and replaces rank 0's file, which holds rank 0 alone until then, by the whole.

**Clocks.** No rank leaves a barrier before all ranks have entered it. With o = clock of rank r minus clock of rank
0, each barrier therefore bounds o from both sides: entered(r) - left(0) <= o <= left(r) - entered(0). The
middle of the tightest bounds of a few barriers is the offset; if they allow 0, it is 0, as between ranks of one
host.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from sparkhvd.engine.calls import TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import DType
from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.wire import read_json

_BARRIERS = 12
# Bytes of all ranks together per round of gathering: bounds memory, not the length of a timeline.
_ROUND_BYTES = 16 << 20
_TIME = re.compile(r'"ts":(-?\d+\.\d{3})')
# Pattern in the head of an engine's file, written when its timeline starts.
_ORIGIN, _HEAD_BYTES = re.compile(rb'"start_monotonic_ns":(\d+)'), 4096


@dataclass
class _Recording:
    """This rank's part of a timeline of all ranks.

    Attributes:
        path: of the merged file on rank 0.
        file: of this rank.
        spans: of the training's own work on this rank; may be disabled.
    """

    path: str
    file: IO[bytes]
    spans: Spans


_recordings: weakref.WeakKeyDictionary[Engine, _Recording] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Engine, Iterator[int]] = weakref.WeakKeyDictionary()


def start(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    mark_cycles: bool = False,
    all_ranks: bool = False,
    spans: Spans | None = None,
) -> None:
    """Start writing a timeline, ending the current one.

    Args:
        engine: this rank's.
        path: a file on rank 0, made or overwritten.
        mark_cycles: also mark when a thread begins to drive the engine.
        all_ranks: every rank records, and every rank must call this and later `stop`. Without it the other
            ranks do nothing here.
        spans: to start with it and to include in the file of `stop`; with `all_ranks` only.

    Raises:
        InvalidArgumentError: the file cannot be written; with `all_ranks` on every rank, naming the rank.
    """
    path = os.fspath(path)
    _recordings.pop(engine, None)
    if not all_ranks:
        if engine.rank == 0:
            engine.start_timeline(path, mark_cycles=mark_cycles)
        return
    trouble = b""
    is_wanted, spans = spans is not None, spans or Spans()
    try:
        if engine.rank == 0:
            engine.start_timeline(path, mark_cycles=mark_cycles)
            _recordings[engine] = _Recording(path, open(path, "rb"), spans)  # noqa: SIM115 - closed by stop()
        else:
            # Unnamed, so that a killed process leaves no orphan.
            file = tempfile.TemporaryFile(prefix="sparkhvd-timeline-")  # noqa: SIM115 - closed by stop()
            _recordings[engine] = _Recording(path, file, spans)
            engine.start_timeline(f"/proc/self/fd/{file.fileno()}", mark_cycles=mark_cycles)
        if is_wanted:
            spans.begin(engine.rank, _origin_ns(_recordings[engine].file))
    except (OSError, SparkhvdError) as error:
        trouble = f"rank {engine.rank}: {error}".encode()
    troubles = [text.decode() for text in _exchange(engine, trouble) if text]
    if troubles:
        engine.stop_timeline()
        _forget(engine)
        raise InvalidArgumentError(
            f"start_timeline({path!r}, all_ranks=True): "
            f"{'; '.join(trouble.removesuffix('.') for trouble in troubles)}. Give a path that rank 0 may write, and "
            "room in the temporary folder of every rank."
        )


def stop(engine: Engine) -> None:
    """End the timeline, if any. Collective if it was started with `all_ranks`.

    Raises:
        InvalidArgumentError: rank 0 could not write the merged file (raised on every rank).
        CollectiveError: a rank is gone; the file has rank 0's part.
    """
    engine.stop_timeline()
    recording = _recordings.get(engine)
    if recording is None:
        return
    try:
        offsets = _measure_offsets(engine)
        with contextlib.ExitStack() as opened:
            parts = [recording.file]
            if (lines := recording.spans.rewound()) is not None:
                parts.append(opened.enter_context(lines))
            files = _gather(engine, parts, opened)
            trouble = b""
            if engine.rank == 0:
                try:
                    _write(recording.path, merge(files, offsets))
                except (OSError, ValueError) as error:
                    trouble = str(error).encode()
        (trouble, *_) = _exchange(engine, trouble)
    finally:
        _forget(engine)
    if trouble:
        raise InvalidArgumentError(
            f"stop_timeline(): rank 0 could not write {recording.path!r}: {trouble.decode()}. Make room, or "
            "give another path."
        )


def abandon(engine: Engine) -> None:
    """End the timeline after an error without notifying the other ranks: the file has rank 0's part, without spans."""
    with contextlib.suppress(SparkhvdError):
        engine.stop_timeline()
    _forget(engine)


def _forget(engine: Engine) -> None:
    recording = _recordings.pop(engine, None)
    if recording is not None:
        recording.file.close()
        recording.spans.close()


def _origin_ns(file: IO[bytes]) -> int:
    """Time 0 of the engine's timeline, by `time.monotonic_ns`."""
    found = _ORIGIN.search(os.pread(file.fileno(), _HEAD_BYTES, 0))
    if found is None:
        raise OSError("the timeline has no beginning")
    return int(found[1])


# --- Merging. ---


def clock_offset(
    own: Sequence[tuple[int, int]], reference: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """How far a rank's clock is ahead of the reference's, from the times at which both passed the same barriers.

    Args:
        own: (entered, left) of the rank, one per barrier, ns of its clock.
        reference: the same of the reference.

    Returns:
        The offset and its maximal error, in ns.
    """
    low = max(entered - left for (entered, _), (_, left) in zip(own, reference, strict=True))
    high = min(left - entered for (_, left), (entered, _) in zip(own, reference, strict=True))
    error = (high - low) // 2
    return (0 if low <= 0 <= high else low + error), abs(error)


def merge(files: Iterable[IO[bytes]], offsets: Sequence[int]) -> Iterator[str]:
    """Merge several ranks' traces into one, piece by piece, with times of rank 0's clock.

    Args:
        files: the ranks' files, as the engine wrote them, rank 0's first.
        offsets: by rank, how far its clock is ahead of rank 0's, in ns.

    Raises:
        ValueError: a file was not written by the engine.
    """
    origin = None
    yield "["
    for index, (file, offset) in enumerate(zip(files, offsets, strict=True)):
        file.seek(0)
        shift_us: float | None = None
        for number, raw in enumerate(file):
            line = raw.decode().rstrip("\n,")
            if line in ("[", "]", ""):
                continue
            if shift_us is None and '"name":"sparkhvd"' in line:
                began = _start_of(line) - offset
                origin = began if origin is None else origin
                shift_us = (began - origin) / 1000
            yield (",\n" if index or number > 1 else "\n") + _shifted(line, shift_us)
        if shift_us is None:
            raise ValueError(f"the timeline of rank {index} has no beginning")
    yield "\n]\n"


def _start_of(line: str) -> int:
    try:
        return int(read_json(line)["args"]["start_monotonic_ns"])
    except (LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"the beginning of a timeline is {line[:200]!r}") from error


def _shifted(line: str, shift_us: float | None) -> str:
    if not shift_us:
        return line
    # The time precedes all user-given names, so it is the first match.
    return _TIME.sub(lambda match: f'"ts":{float(match[1]) + shift_us:.3f}', line, count=1)


def _write(path: str, pieces: Iterable[str]) -> None:
    """Write a complete file, then replace the old one."""
    target = Path(path).resolve()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(handle, "w") as file:
            file.writelines(pieces)
        os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


# --- Between ranks. ---


def _name(engine: Engine) -> str:
    """A new name for an operation, equal on every rank."""
    counter = _numbers.setdefault(engine, itertools.count())
    return f"sparkhvd.timeline.{next(counter)}"


def _exchange(engine: Engine, value: bytes) -> list[bytes]:
    """Every rank's `value`, by rank."""
    source = ctypes.create_string_buffer(value, len(value) or 1)
    view = TensorView(ctypes.addressof(source), 0, (len(value),))
    work = engine.allgather(view, name=_name(engine), dtype=DType.UINT8, keep=source)
    work.wait()
    output = work.output()
    whole = ctypes.string_at(output.address, output.num_bytes) if output.num_bytes else b""
    ends = list(itertools.accumulate(output.rows, initial=0))
    return [whole[a:b] for a, b in itertools.pairwise(ends)]


def _measure_offsets(engine: Engine) -> list[int]:
    """Measure, by rank, how far its clock is ahead of rank 0's, in ns."""
    moments: list[tuple[int, int]] = []
    for _ in range(_BARRIERS):
        work_name = _name(engine)
        entered = time.monotonic_ns()
        engine.barrier(name=work_name).wait()
        moments.append((entered, time.monotonic_ns()))
    by_rank: list[list[tuple[int, int]]] = [
        read_json(text) for text in _exchange(engine, json.dumps(moments).encode())
    ]
    return [clock_offset(own, by_rank[0])[0] for own in by_rank]


def _gather(
    engine: Engine, own: Sequence[IO[bytes]], opened: contextlib.ExitStack
) -> list[IO[bytes]]:
    """On rank 0 every rank's `own` files joined, by rank, open as long as `opened`; empty elsewhere."""
    chunk = max(4096, _ROUND_BYTES // engine.size)
    own[0].seek(0)
    files: list[IO[bytes]] = []
    if engine.rank == 0:
        for _ in range(engine.size):
            made = tempfile.TemporaryFile(prefix="sparkhvd-timeline-")  # noqa: SIM115 - entered below
            files.append(opened.enter_context(made))
    while True:
        parts = _exchange(engine, _read(own, chunk))
        if not any(parts):
            return files
        for target, part in zip(files, parts, strict=False):
            target.write(part)


def _read(files: Sequence[IO[bytes]], num_bytes: int) -> bytes:
    """Continue reading in the first file that has not ended."""
    return next(filter(None, (file.read(num_bytes) for file in files)), b"")


# ----------------------------------------------------------------------------------------------------
# Spans of a training's own work, such as "forward", for a timeline of all ranks: one lane of each rank, above those of
# operations.
# Times are the host's: on a GPU a span ends when its work is queued. Threads: only the training's. Failure: a full disk only ends
# the spans.

T = TypeVar("T")

# Number of the lane; the engine numbers its own from 0.
_LANE = 1 << 20


class Spans:
    """Spans of one rank; disabled until a timeline begins, and then as cheap as a context manager per call."""

    def __init__(self) -> None:
        """Start disabled."""
        self._file: IO[bytes] | None = None
        self._rank = 0
        self._origin_ns = 0

    def begin(self, rank: int, origin_ns: int) -> None:
        """Start recording into an unnamed file.

        Args:
            rank: of this process.
            origin_ns: time 0 of the timeline, by `time.monotonic_ns`.

        Raises:
            OSError: the temporary folder cannot be written.
        """
        self.close()
        file = tempfile.TemporaryFile(prefix="sparkhvd-timeline-")  # noqa: SIM115 - closed by close()
        self._rank, self._origin_ns = rank, origin_ns
        of_lane = {"ph": "M", "pid": rank, "tid": _LANE}
        names = ("thread_name", {"name": "training"}), ("thread_sort_index", {"sort_index": -1})
        for name, arguments in names:
            line = json.dumps({**of_lane, "name": name, "args": arguments}, separators=(",", ":"))
            file.write(f"\n{line},".encode())
        self._file = file

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Record a block as a span; `name` holds no quotes."""
        return _NOTHING if self._file is None else _Span(self, name)

    def timed(self, values: Iterator[T], name: str) -> Iterator[T]:
        """Yield values, and record the wait for each as a span."""
        while True:
            with self.span(name):
                value = next(values, _END)
            if value is _END:
                return
            yield value  # type: ignore[misc]  # no end

    def add(self, name: str, began_ns: int, ended_ns: int) -> None:
        """Record a span by its times of `time.monotonic_ns`."""
        if self._file is None:
            return
        at, length = (began_ns - self._origin_ns) / 1000, (ended_ns - began_ns) / 1000
        line = (
            f'\n{{"ph":"X","pid":{self._rank},"tid":{_LANE},"ts":{at:.3f},"dur":{length:.3f},'
            f'"cat":"training","name":"{name}"}},'
        )
        try:
            self._file.write(line.encode())
        except OSError:
            self.close()

    def rewound(self) -> IO[bytes] | None:
        """Stop recording; return the file of its lines, at their beginning. The caller closes it."""
        file, self._file = self._file, None
        if file is not None:
            file.seek(0)
        return file

    def close(self) -> None:
        """Discard the recording."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
_END = object()


class _Span:
    """Block recorded as a span."""

    __slots__ = ("_began_ns", "_name", "_spans")

    def __init__(self, spans: Spans, name: str) -> None:
        self._spans, self._name = spans, name

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        self._spans.add(self._name, self._began_ns, time.monotonic_ns())
