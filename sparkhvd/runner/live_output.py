"""Driver's side of live output: by a connection, by files, or not at all, and what is shown when the ranks have ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from sparkhvd.runner import launching
from sparkhvd.runner.horovod_arguments import write_tails
from sparkhvd.runner.live.display import Display
from sparkhvd.runner.live.files import ChunkReader, folder_of
from sparkhvd.runner.live.receiver import Receiver
from sparkhvd.runner.live.sender import Way
from sparkhvd.runner.options import LaunchOptions
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.spark import SparkShim

__all__ = ["Attempt", "LiveOutput"]


@dataclass(frozen=True)
class Attempt:
    """Attempt of a launch. Holds the key, so its repr leaves it out.

    Attributes:
        key: in hex.
        job_id: names the attempt.
        number: 0 for the first launch.
        size: number of ranks.
    """

    key: str = field(repr=False)
    job_id: str
    number: int
    size: int


class LiveOutput:
    """Live output of an attempt's ranks; a context manager around its stage."""

    def __init__(
        self,
        shim: SparkShim,
        options: LaunchOptions,
        choice: str,
        attempt: Attempt,
        *,
        on_terminal: bool,
    ) -> None:
        """Prepare what there can be; nothing runs before `with`. Prints why there is none.

        Args:
            shim: session.
            options: of the launch.
            choice: `Settings.live_output`.
            attempt: whose ranks they are.
            on_terminal: whether the tasks' stderr is this process's.
        """
        self._stream = options.stream
        self._shows_lines = choice != "messages"
        self._source: Receiver | ChunkReader | None = None
        self.way: Way | None = None
        is_wanted = options.stream is not None or options.verbose > 0
        if not is_wanted or choice == "0":
            return
        self._log = launching.log_to(
            options.stream, verbose=options.verbose, timestamps=options.timestamps
        )
        self._display = Display(self._show, attempt.size, options.show_progress)
        is_shown = options.verbose > 0
        way = Way(shows_lines=self._shows_lines, on_terminal=on_terminal, is_shown=is_shown)
        why = ""
        if not shim.is_connect:
            try:
                receiver = Receiver.listen(shim, self._display, *astuple(attempt))
                self._source, self.way = receiver, replace(way, address=receiver.address)
            except Exception as e:  # noqa: BLE001 - Spark's, of a conf without an address, too; a job can do without
                why = f"this process cannot listen ({e})"
        elif options.mailbox is not None and options.run_dir is not None:
            folder = folder_of(options.run_dir, attempt.number, attempt.job_id)
            self._source = ChunkReader(options.mailbox, folder, self._display)
            self.way = replace(way, folder=folder)
        else:
            why = "executors cannot reach a client of Spark Connect"
        if why and is_shown and attempt.number == 0:
            sys.stderr.write(
                f"sparkhvd: No live output of the ranks: {why}. It is in the executors' logs.\n"
            )

    def _show(self, text: str) -> None:
        if self._stream is None and getattr(sys.stderr, "isatty", lambda: False)():
            sys.stderr.write("\r\x1b[K")  # in place of Spark's progress bar, which is drawn anew
        self._log(text)

    def __enter__(self) -> LiveOutput:
        if self._source is not None:
            self._source.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._source is not None:
            self._source.__exit__()

    def show_rest(self, outcomes: Sequence[Outcome]) -> None:
        """Show what did not come live: records of the last moment, or of ranks without live output the last lines."""
        silent = outcomes
        if self._source is not None:
            if self._source.is_stuck:  # the stream that blocks would block the caller, too
                return
            self._display.show_rest(outcomes)
            if self._shows_lines:
                silent = [o for o in outcomes if o.rank is None or not self._display.last(o.rank)]
        write_tails(self._stream, silent)
