"""Timeline of a run: operations of the engine and the loop's own work, of all ranks, in one file of the run's folder.

    runs/<run_id>/timeline.json    of the first steps of the launch that came last

Failure: no training ends for its timeline; a file that cannot be written is a warning of rank 0. After an error of a rank the file has what rank
0's engine has seen.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from sparkhvd.data.store.contents import TIMELINE_NAME
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe import timeline
from sparkhvd.observe.spans import Spans
from sparkhvd.torch.context import context
from sparkhvd.training.hashing import PIECE_BYTES

__all__ = ["RunTimeline"]


class RunTimeline:
    """Timeline of a rank's first steps; a context manager that ends it.

    Attributes:
        spans: of this rank.
    """

    def __init__(self, store: Store | None = None, run_dir: str = "", num_steps: int = 0) -> None:
        """Prepare a timeline of so many steps, which `begin` begins; of none by default."""
        self.spans = Spans()
        self._store = store
        self._path = f"{run_dir}/{TIMELINE_NAME}"
        self._left = num_steps
        self._folder = ""  # of rank 0's file, until it is in the store
        self._is_open = False

    def begin(self) -> None:
        """Begin, after `init`; every rank must call it."""
        if not self._left:
            return
        engine = context().engine
        self._folder = tempfile.mkdtemp(prefix="sparkhvd-timeline-")
        path = Path(self._folder, TIMELINE_NAME)
        try:
            timeline.start(engine, path, all_ranks=True, spans=self.spans)
            self._is_open = True
        except InvalidArgumentError as e:  # on every rank
            self._give_up(str(e))

    def step(self) -> None:
        """Count a step that ends; the last one ends the timeline. Every rank must call it after each."""
        if self._is_open:
            self._left -= 1
            if not self._left:
                self.end()

    def end(self) -> None:
        """End the timeline, if there is one; every rank must call it."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            timeline.stop(context().engine)
        except InvalidArgumentError as e:  # on every rank
            self._give_up(str(e))
        self._store_file()

    def _store_file(self) -> None:
        """Put rank 0's file into the run's folder."""
        if not self._folder:
            return
        engine = context().engine
        try:
            if engine.rank == 0 and self._store is not None:
                source = Path(self._folder, TIMELINE_NAME)
                with source.open("rb") as file, self._store.open_output(self._path) as sink:
                    shutil.copyfileobj(file, sink, PIECE_BYTES)
        except Exception as e:  # noqa: BLE001 - a run without its picture
            self._give_up(str(e))
        self._remove()

    def _give_up(self, cause: str) -> None:
        self._remove()
        if context().engine.rank == 0:
            warnings.warn(f"There is no timeline of this run: {cause}", stacklevel=3)

    def _remove(self) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            shutil.rmtree(folder, ignore_errors=True)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Record forward passes and steps of the optimizer, for a loop of the user's own."""
        if not self._is_open:
            return
        spans, began = self.spans, {"forward": 0, "optimizer": 0}

        def note(name: str) -> None:
            began[name] = time.monotonic_ns()

        def record(name: str) -> None:
            spans.add(name, began[name], time.monotonic_ns())

        model.register_forward_pre_hook(lambda *_: note("forward"))
        model.register_forward_hook(lambda *_: record("forward"))
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: note("optimizer"))
            optimizer.register_step_post_hook(lambda *_: record("optimizer"))

    def __enter__(self) -> RunTimeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
        elif self._is_open:  # the other ranks may be gone; a second error would hide the first
            self._is_open = False
            with contextlib.suppress(Exception):
                timeline.abandon(context().engine)
                self._store_file()
            self._remove()
