"""Write a timeline of a job, with the ranks' waits, in Chrome's trace format for ui.perfetto.dev.

The engine writes the file of one rank (`Engine.start_timeline`); this module merges the files of several ranks. By
default only rank 0 writes, as in Horovod. With `all_ranks` the other ranks write, too, into unnamed files. `stop`
gathers these files on rank 0, shifts their times to rank 0's clock, and replaces rank 0's own file by the merged file.

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
# Bytes that all ranks together send per round of gathering. This limits memory, not the length of a timeline.
_ROUND_BYTES = 16 << 20
_TIME = re.compile(r'"ts":(-?\d+\.\d{3})')
# The engine writes its start time into the head of its file; pattern of the time, and bytes of the head.
_ORIGIN, _HEAD_BYTES = re.compile(rb'"start_monotonic_ns":(\d+)'), 4096


@dataclass
class _Recording:
    """This rank's part of a timeline of all ranks.

    Attributes:
        path: path of the merged file on rank 0.
        file: file of this rank.
        spans: spans of the training's own work on this rank; may be disabled.
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
    """Start writing a timeline, and end the current timeline.

    Args:
        engine: engine of this rank.
        path: file on rank 0, which is made or overwritten.
        mark_cycles: also mark when a thread begins to drive the engine.
        all_ranks: True records every rank: then every rank must call this function, and later `stop`. If False, this
            call has no effect on ranks other than 0.
        spans: spans to start with the timeline and to include in the merged file; only with `all_ranks`.

    Raises:
        InvalidArgumentError: the file cannot be written; with `all_ranks` every rank raises it, and the message names
            the rank.
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
            # The file has no name, so that a killed process leaves no file behind.
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
            f"{'; '.join(trouble.removesuffix('.') for trouble in troubles)}. Give a path that rank 0 may write, and free "
            "space in the temporary folder of every rank."
        )


def stop(engine: Engine) -> None:
    """End the timeline, if any. A collective call if it was started with `all_ranks`.

    Raises:
        InvalidArgumentError: rank 0 could not write the merged file (raised on every rank).
        CollectiveError: a rank is lost; the file has only rank 0's part.
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
            f"stop_timeline(): rank 0 could not write {recording.path!r}: {trouble.decode()}. Free disk space, or "
            "give another path."
        )


def abandon(engine: Engine) -> None:
    """End the timeline after an error, without the other ranks. The file has only rank 0's part, without spans."""
    with contextlib.suppress(SparkhvdError):
        engine.stop_timeline()
    _forget(engine)


def _forget(engine: Engine) -> None:
    recording = _recordings.pop(engine, None)
    if recording is not None:
        recording.file.close()
        recording.spans.close()


def _origin_ns(file: IO[bytes]) -> int:
    """Read time 0 of the engine's timeline, in ns of `time.monotonic_ns`."""
    found = _ORIGIN.search(os.pread(file.fileno(), _HEAD_BYTES, 0))
    if found is None:
        raise OSError("the timeline has no beginning")
    return int(found[1])


# --- Merging. ---


def clock_offset(
    own: Sequence[tuple[int, int]], reference: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Compute how far a rank's clock is ahead of a reference clock from the times at the same barriers.

    Args:
        own: (entered, left) of the rank for each barrier, in ns of its clock.
        reference: (entered, left) of the reference for each barrier, in ns of its clock.

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
        files: files that the engines of the ranks wrote, in the order of the ranks.
        offsets: how far each rank's clock is ahead of rank 0's clock, in ns.

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
    # The first match is the time, because it precedes all names that users choose.
    return _TIME.sub(lambda match: f'"ts":{float(match[1]) + shift_us:.3f}', line, count=1)


def _write(path: str, pieces: Iterable[str]) -> None:
    """Write a complete file, then replace the old file."""
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
    """Make a new name for an operation, equal on every rank."""
    counter = _numbers.setdefault(engine, itertools.count())
    return f"sparkhvd.timeline.{next(counter)}"


def _exchange(engine: Engine, value: bytes) -> list[bytes]:
    """Gather the `value` of every rank, by rank."""
    source = ctypes.create_string_buffer(value, len(value) or 1)
    view = TensorView(ctypes.addressof(source), 0, (len(value),))
    work = engine.allgather(view, name=_name(engine), dtype=DType.UINT8, keep=source)
    work.wait()
    output = work.output()
    whole = ctypes.string_at(output.address, output.num_bytes) if output.num_bytes else b""
    ends = list(itertools.accumulate(output.rows, initial=0))
    return [whole[a:b] for a, b in itertools.pairwise(ends)]


def _measure_offsets(engine: Engine) -> list[int]:
    """Measure how far each rank's clock is ahead of rank 0's clock, in ns."""
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
    """Gather the files of every rank on rank 0, joined per rank, or return [] on other ranks.

    The files stay open as long as `opened`.
    """
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
    """Read the next bytes from the files, one file after another."""
    return next(filter(None, (file.read(num_bytes) for file in files)), b"")


# ----------------------------------------------------------------------------------------------------
# Spans of a training's own work, such as "forward", for a timeline of all ranks. Each rank has one lane of spans, above
# the lanes of operations.
# Times are taken on the host: on a GPU a span ends when its work is queued. Threads: only the training thread. Failure:
# a full disk ends the recording of spans, and nothing else.

T = TypeVar("T")

# Number of the lane of spans; the engine numbers its own lanes from 0.
_LANE = 1 << 20


class Spans:
    """Recorder of one rank's spans, disabled until a timeline begins."""

    def __init__(self) -> None:
        """Start disabled."""
        self._file: IO[bytes] | None = None
        self._rank = 0
        self._origin_ns = 0

    def begin(self, rank: int, origin_ns: int) -> None:
        """Start recording into an unnamed file.

        Args:
            rank: rank of this process.
            origin_ns: time 0 of the timeline, in ns of `time.monotonic_ns`.

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
        """Record a block as a span. `name` must not hold quotes."""
        return _NOTHING if self._file is None else _Span(self, name)

    def timed(self, values: Iterator[T], name: str) -> Iterator[T]:
        """Yield values, and record the wait for each value as a span."""
        while True:
            with self.span(name):
                value = next(values, _END)
            if value is _END:
                return
            yield value  # type: ignore[misc]  # the value is not the end marker

    def add(self, name: str, began_ns: int, ended_ns: int) -> None:
        """Record a span by its begin and end in ns of `time.monotonic_ns`."""
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
        """Stop recording and return the file of the lines, positioned at its beginning.

        The caller closes the file.
        """
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
