"""Spans of a training's own work, such as "forward", for a timeline of all ranks: one lane of each rank, above those of operations.

Times are those of the host: on a GPU a span ends when its work is queued. Threads: one, the training's. Failure: a full disk ends the spans, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from typing import IO, TypeVar

__all__ = ["Spans"]

T = TypeVar("T")

# Of the lane; the engine counts its own from 0.
_LANE = 1 << 20


class Spans:
    """Spans of one rank; off until a timeline begins, and then a context manager's worth of time per call."""

    def __init__(self) -> None:
        """Record nothing yet."""
        self._file: IO[bytes] | None = None
        self._rank = 0
        self._origin_ns = 0

    def begin(self, rank: int, origin_ns: int) -> None:
        """Record from now on, into a file without a name.

        Args:
            rank: of this process.
            origin_ns: moment 0 of the timeline, by `time.monotonic_ns`.

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
        """Yield values, and record each wait for one as a span."""
        while True:
            with self.span(name):
                value = next(values, _END)
            if value is _END:
                return
            yield value  # type: ignore[misc]  # no end

    def add(self, name: str, began_ns: int, ended_ns: int) -> None:
        """Record a span by its moments of `time.monotonic_ns`."""
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
        """End the recording; return the file of its lines, at their beginning, which the caller closes."""
        file, self._file = self._file, None
        if file is not None:
            file.seek(0)
        return file

    def close(self) -> None:
        """Forget what was recorded."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
_END = object()


class _Span:
    """Block whose time becomes a span."""

    __slots__ = ("_began_ns", "_name", "_spans")

    def __init__(self, spans: Spans, name: str) -> None:
        self._spans, self._name = spans, name

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        self._spans.add(self._name, self._began_ns, time.monotonic_ns())
