"""Spark stages of an elastic job, beside the thread that decides."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkhvd.spark import SparkShim, cancel_until_over, job_thread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Stages"]

# Spark gives a cancelled task 2 s (spark.python.task.killTimeout) before it kills its Python worker.
_CANCEL_WAIT_S = 10.0
_LOOK_S = 1.0

Future = concurrent.futures.Future[list[Any]]


class Stages:
    """Stages whose tasks are slots; a context manager that cancels what does not end.

    A first one has all tasks. One more has those that shall be started in place of tasks that have left: Spark does not start a task anew
    that has ended well.

    **Threads**: one per stage, and one that looks for executors that Spark will take away. Those that submit stages inherit the Spark properties of the
    thread that has made this.
    """

    def __init__(
        self,
        shim: SparkShim,
        make: Callable[[int], DataFrame],
        tag: str,
        description: str,
        on_end: Callable[[], None],
    ) -> None:
        """Prepare; nothing runs before `submit`.

        Args:
            shim: session.
            make: makes a stage of so many tasks.
            tag: tag of the jobs.
            description: description in Spark's UI.
            on_end: called from a thread when a stage has failed, or all have ended.
        """
        self._shim = shim
        self._make = make
        self._tag, self._description = tag, description
        self._on_end = on_end
        self._lock = threading.Lock()
        self._futures: list[Future] = []
        self._wanted = 0
        self._wakes = threading.Event()
        self._is_over = False
        self._threads = [job_thread(shim, self._serve, "sparkhvd-stages")]
        self._look: Callable[[], None] = lambda: None

    def submit(self, size: int, look: Callable[[], None]) -> None:
        """Submit the first stage; from then on `look` is called every second, from a thread that may ask Spark."""
        self._begin(size)
        self._look = look
        self._threads[0].start()

    def add(self) -> None:
        """Start one more task; returns at once."""
        with self._lock:
            self._wanted += 1
        self._wakes.set()

    def end(self, limit_s: float) -> None:
        """Wait for tasks that leave, for so long, and cancel the others."""
        self._is_over = True
        self._wakes.set()
        if self._threads[0].is_alive():
            self._threads[0].join(_CANCEL_WAIT_S)
        concurrent.futures.wait(self._futures, limit_s)
        for future in self._futures:
            cancel_until_over(self._shim, self._tag, future, _CANCEL_WAIT_S)
        for thread, future in zip(self._threads[1:], self._futures, strict=True):
            if future.done():
                thread.join(_CANCEL_WAIT_S)

    def ended(self) -> Future:
        """Return the stage that has failed, or the first one."""
        failed = [each for each in self._futures if each.done() and each.exception() is not None]
        return (failed or self._futures)[0]

    def _begin(self, size: int) -> None:
        future: Future = concurrent.futures.Future()

        def collects() -> None:
            try:
                stage = self._make(size)
                future.set_result(self._shim.collect(stage, self._tag, self._description))
            except BaseException as e:  # noqa: BLE001 - raised again where the result is awaited
                future.set_exception(e)

        future.add_done_callback(lambda _: self._note_end(future))
        self._futures.append(future)
        thread = job_thread(self._shim, collects, "sparkhvd-collect")
        self._threads.append(thread)
        thread.start()

    def _note_end(self, future: Future) -> None:
        with self._lock:
            has_more = self._wanted > 0 or not all(each.done() for each in self._futures)
        if future.exception() is not None or not has_more:
            self._on_end()

    def _serve(self) -> None:
        while True:
            if self._wakes.wait(_LOOK_S):
                self._wakes.clear()
            if self._is_over:
                return
            with contextlib.suppress(Exception):  # Spark is gone, which the stage tells
                self._look()
            with self._lock:
                wanted = self._wanted
            if wanted:
                self._begin(wanted)
                with self._lock:
                    self._wanted -= wanted
