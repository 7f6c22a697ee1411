"""Driver's side of an elastic job on Spark. The tasks of its stage are the slots of the ranks.

The stage is not a barrier stage: it has a task for each possible rank, and Spark starts each when a slot is free. The
coordinator is here, or, for a client of Spark Connect with a store, in the first task. It receives results when ranks
end, so a later loss of another executor loses no result.

**Threads**: the caller's thread decides, or waits for the coordinator; another thread waits for Spark. **Shutdown**:
the end of the block releases the tasks, and cancels tasks that do not leave.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sparkhvd.errors import ElasticError, InvalidArgumentError, PreflightError, SparkhvdError
from sparkhvd.rendezvous import Listener
from sparkhvd.runner import driver_port, launching, live_output, task
from sparkhvd.runner.elastic.coordinator import (
    LOOK_S,
    MARGIN_S,
    AttemptCoordination,
    AttemptResult,
    CoordinatorFiles,
    JobFailure,
    ProcessOutcomes,
)
from sparkhvd.runner.elastic.options import CoordinatorTerms, ElasticOptions, RankRange
from sparkhvd.runner.gpu import decide
from sparkhvd.runner.gpu.decide import share_of
from sparkhvd.runner.job import (
    SHOWS_SPARKS_LOG,
    LaunchPlan,
    check_size,
    make_plan,
    no_progress,
    print_line,
)
from sparkhvd.runner.live.files import Mailbox
from sparkhvd.runner.live_output import Attempt
from sparkhvd.runner.options import JobReport, LaunchOptions
from sparkhvd.runner.outcomes import (
    Outcome,
    OutcomeKind,
    error_of,
    from_spark_failure,
    is_retryable,
    root_cause,
)
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.runner.protocol import carried
from sparkhvd.runner.results import row_schema
from sparkhvd.runner.slots import launch_ticket
from sparkhvd.runner.task import TaskSpec
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S
from sparkhvd.settings import JobSettings
from sparkhvd.spark import (
    SparkShim,
    cancel_until_over,
    job_thread,
    noticing_tasks,
    plain_interrupts,
)
from sparkhvd.wire import rebuild

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


R = TypeVar("R")
# Range of process numbers of an attempt, for live output.
_NUMBERS = 1 << 14
# How long tasks may take to leave at the end.
_LEAVE_S = 2.0


def launch_elastic(
    shim: SparkShim,
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    ranks: RankRange,
    options: LaunchOptions,
) -> JobReport[R]:
    """Call `fn(*args, **kwargs)` as an elastic job, in one stage of a session.

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        PreflightError: the cluster cannot run this job. `fn` has not started.
        ElasticError: there were too few ranks for too long, or too many changes.
        RankError: `fn` failed on every rank, or all ranks were lost more often than `max_retries` allows.
    """
    if not shim.is_connect:  # the driver's port replaces the store
        options = replace(options, shared=None, run_dir=None, mailbox=None)
    largest = ranks.largest()
    program = launching.dump_call(fn, args, kwargs)
    check_size(program, shim)
    plan = make_plan(shim, largest, options, program, is_barrier=False)
    limits = ranks.options(
        ranks.first(plan.configured_slots or ranks.least or plan.size),
        options.start_timeout_s or plan.settings.values.start_timeout_s,
    )
    slots = plan.configured_slots
    if slots is not None and limits.smallest > slots and not plan.is_dynamic:
        raise PreflightError(
            f"min_num_proc is {limits.smallest}, and the application can run {slots} tasks at once. Lower it, or give the application more cores."
        )

    def usable() -> int | None:
        """Count the slots, or return None if unknown or too few. The job itself waits for more."""
        count = plan.slots()
        return None if count is None or count < limits.smallest else count

    log = functools.partial(print_line, options.verbose)
    is_alone = options.is_alone or plan.gpus.mode == decide.GpuMode.HOST
    share = share_of(plan.options.profile)
    application, most = shim.application(), limits.largest
    last_progress: object = None
    with launch_ticket(application, share, limits.smallest, is_alone=is_alone, most=most) as place:
        for attempt in range(options.max_retries + 1):
            with place.slots(usable, limits.start_timeout_s, log):
                ended = _Attempt(plan, limits, attempt).run()
            if isinstance(ended, JobReport):
                return ended
            if not ended.is_lost or attempt == options.max_retries:
                raise ended.error
            if options.progress is not None:
                progress = options.progress()
                if attempt > 0 and progress == last_progress:
                    raise no_progress(ended.error, attempt + 1, progress)
                last_progress = progress
            options.relaunched(str(ended.error))
            log(f"{ended.error}\nRelaunching ({attempt + 1} of {options.max_retries}).")
    raise AssertionError("the last attempt returns or raises")


class _Attempt:
    """One attempt of a job."""

    def __init__(self, plan: LaunchPlan, limits: ElasticOptions, number: int) -> None:
        self._plan = plan
        self._limits = limits
        self._named = Attempt(secrets.token_hex(32), secrets.token_hex(8), number, _NUMBERS)
        self._submitted_at = time.time()
        self._stages: Stages | None = None

    def run(self) -> JobReport[Any] | JobFailure:
        """Run it to its end."""
        plan, largest = self._plan, self._limits.largest
        live = plan.live_output(self._named)
        with contextlib.ExitStack() as stack:
            coordinator = stack.enter_context(self._coordinator())
            spec = plan.spec(_NUMBERS, self._named, coordinator.address, live)
            spec = replace(spec, elastic=self._terms().to_dict())
            coordinator.take(spec)
            stack.enter_context(live)
            self._stages = stages = self._prepare(stack, spec, coordinator)
            stages.submit(largest, coordinator.poll)
            try:
                with plain_interrupts():
                    result = coordinator.run()
            finally:
                coordinator.dismiss()
                stages.end(_LEAVE_S)
        if result is None:
            return self._unreported(stages.ended())
        own = Outcome(_NUMBERS - 1, OutcomeKind.OK, unsent=result.unsent)
        live.show_rest((own, *result.outcomes.values()))
        for change in result.changes:
            plan.options.ranks_changed(change)
        if result.job_result.has_finished:
            return self._report(result)
        return self._failure(result, stages)

    def _coordinator(self) -> AttemptCoordinator:
        plan, options = self._plan, self._plan.options
        if options.shared is not None:
            return CoordinatorInTask(plan.shim, options, self._limits.largest)
        return CoordinatorInDriver(
            plan.shim, functools.partial(print_line, options.verbose), self._replace
        )

    def _replace(self) -> None:
        if self._stages is not None:
            self._stages.add()

    def _terms(self) -> CoordinatorTerms:
        first = self._limits.first
        return CoordinatorTerms(self._limits, min(first, self._plan.slots() or first))

    def _prepare(
        self, stack: contextlib.ExitStack, spec: task.TaskSpec, coordinator: AttemptCoordinator
    ) -> Stages:
        """Prepare the stages. The stack releases their resources."""
        plan, limits, job_id = self._plan, self._limits, self._named.job_id
        program = stack.enter_context(carried(plan.shim, plan.program))
        is_hidden = plan.options.verbose < SHOWS_SPARKS_LOG
        stack.enter_context(live_output.hidden_failures(plan.shim, job_id, is_hidden=is_hidden))
        body = task.make_task(spec, program, plan.shared, "sparkhvd.runner.elastic.coordinator")

        def make(size: int) -> DataFrame:
            profile = plan.options.profile
            return plan.shim.stage(size, body, row_schema(), profile, is_barrier=False)

        text = f"sparkhvd: {limits.smallest} to {limits.largest} ranks, attempt {spec.attempt + 1}"
        return Stages(plan.shim, make, f"sparkhvd-{job_id}", text, coordinator.record_end)

    # --- The end. ---

    def _report(self, result: AttemptResult) -> JobReport[Any]:
        order = ProcessOutcomes(result.job_result, result.outcomes).order()
        outcomes = tuple(
            replace(result.outcomes[number], rank=rank) for rank, number in enumerate(order)
        )
        return JobReport(
            results=[launching.load_result(result.results[number]) for number in order],
            attempts=self._named.number + 1,
            launch_s=max(0.0, outcomes[0].started_at - self._submitted_at),
            run_s=max(outcome.run_s for outcome in outcomes),
            outcomes=outcomes,
        )

    def _failure(self, result: AttemptResult, stages: Stages) -> JobFailure:
        job_result = result.job_result
        if result.refused:
            return JobFailure(PreflightError(result.refused), is_lost=False)
        ends = ProcessOutcomes(job_result, result.outcomes)
        if job_result.problem == STAGE_HAS_ENDED and ends.is_lost:
            cause = self._of_spark(stages.ended())
            cause = cause or Outcome(None, OutcomeKind.SPARK, message=f"{STAGE_HAS_ENDED} early")
            return JobFailure(error_of(cause, ends.size), is_retryable(cause))
        if not job_result.has_begun:
            return JobFailure(not_started(self._limits.start_timeout_s), is_lost=False)
        return ends.failure(job_result.problem.replace(STAGE_HAS_ENDED, ""))

    def _unreported(self, future: Future) -> JobFailure:
        """Make the failure for an attempt without a report from its coordinator in a task."""
        cause = self._of_spark(future)
        if future.exception() is None and (cause is None or cause.kind == OutcomeKind.LOST):
            where = "" if cause is None else f" ({cause.message})"
            text = f"its coordinator was lost with its Spark task{where}"
            return JobFailure(
                ElasticError(f"The elastic job cannot continue: {text}."), is_lost=True
            )
        assert cause is not None
        return JobFailure(error_of(cause, self._limits.first), is_retryable(cause))

    def _of_spark(self, future: Future) -> Outcome | None:
        """Find why the stage ended, from Spark's error or the tasks' outcomes. None if unknown."""
        if (error := future.exception()) is not None:
            if isinstance(error, SparkhvdError):  # Spark itself is gone
                raise error
            return from_spark_failure(str(error), self._plan.shim.worker_python())
        return root_cause(Outcome.from_json(bytes(row["data"]).decode()) for row in future.result())


# ----------------------------------------------------------------------------------------------------
# Spark stages of an elastic job, in threads beside the thread that decides.

# Spark gives a cancelled task 2 s (spark.python.task.killTimeout) before it kills its Python worker.
_CANCEL_WAIT_S = 10.0
# Interval between two calls of `poll`.
_LOOK_S = 1.0

Future = concurrent.futures.Future[list[Any]]


class Stages:
    """Stages with a task per slot. The context manager cancels running stages at its end.

    The first stage has all tasks. Further stages replace tasks that have left, because Spark does not restart a
    successful task.

    **Threads**: one per stage, and one that polls for decommissioned executors. Those that submit stages inherit the
    Spark properties of the thread that created this.
    """

    def __init__(
        self,
        shim: SparkShim,
        make: Callable[[int], DataFrame],
        tag: str,
        description: str,
        on_end: Callable[[], None],
    ) -> None:
        """Prepare the stages. Nothing runs before `submit`.

        Args:
            shim: session.
            make: makes a stage with a number of tasks.
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
        self._poll: Callable[[], None] = lambda: None

    def submit(self, size: int, poll: Callable[[], None]) -> None:
        """Submit the first stage, then call `poll` every second from a thread with Spark access."""
        self._begin(size)
        self._poll = poll
        self._threads[0].start()

    def add(self) -> None:
        """Start one more task without waiting for it."""
        with self._lock:
            self._wanted += 1
        self._wakes.set()

    def end(self, limit_s: float) -> None:
        """Wait up to `limit_s` for tasks to leave, and cancel the others."""
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
        """Find a failed stage, or else the first stage."""
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

        future.add_done_callback(lambda _: self._record_end(future))
        self._futures.append(future)
        thread = job_thread(self._shim, collects, "sparkhvd-collect")
        self._threads.append(thread)
        thread.start()

    def _record_end(self, future: Future) -> None:
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
            with contextlib.suppress(Exception):  # Spark is gone; the stage reports it
                self._poll()
            with self._lock:
                wanted = self._wanted
            if wanted:
                self._begin(wanted)
                with self._lock:
                    self._wanted -= wanted


# ----------------------------------------------------------------------------------------------------
# Coordinator of an attempt for the launching process: in that process, or in a task of the stage.

STAGE_HAS_ENDED = "its Spark stage has ended"


def not_started(limit_s: float) -> PreflightError:
    return PreflightError(
        f"after {limit_s:g} s (start_timeout=) no task of the job has started. Free slots of the application, or raise start_timeout."
    )


class AttemptCoordinator(Protocol):
    """Coordinator of an attempt. A context manager around its stage.

    Attributes:
        address: at which tasks reach it; None if they find it through the store.
    """

    address: tuple[str, int] | None

    def take(self, spec: TaskSpec) -> None:
        """Start the coordination of an attempt. Call this before its stage is submitted."""

    def poll(self) -> None:
        """Do the periodic work. Call this every second, from a thread with access to Spark."""

    def record_end(self) -> None:
        """Record the end of the stage. Any thread may call this."""

    def run(self) -> AttemptResult | None:
        """Wait for the end of the job, and let the ranks save at Ctrl-C, and return None if the outcome is unknown."""

    def dismiss(self) -> None:
        """Release the tasks."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...


class CoordinatorInDriver:
    """Coordinator in this process.

    Args:
        shim: session.
        log: writes a line.
        replace: called from a thread for each task to start in place of one that leaves.
    """

    def __init__(
        self, shim: SparkShim, log: Callable[[str], None], replace: Callable[[], None]
    ) -> None:
        self._shim = shim
        self._log, self._replace = log, replace
        self._listening, host = driver_port.listen(shim)
        self.address: tuple[str, int] | None = (host, int(self._listening.getsockname()[1]))
        self._stack = contextlib.ExitStack()

    def take(self, spec: TaskSpec) -> None:
        """Start the coordination of an attempt. Call this before its stage is submitted."""
        settings = JobSettings.from_json(spec.settings).values
        listener = Listener.bind(driver_port.address_of_one_interface(self._shim), settings)
        self._made = AttemptCoordination(spec, self._listening, listener, self._log, self._replace)
        self._stack.enter_context(self._made)

    def poll(self) -> None:
        """Retire ranks on decommissioned executors."""
        tasks = self._made.tasks
        if gone := self._shim.decommissioned(tasks.executors()):
            tasks.retire(gone)

    def record_end(self) -> None:
        """Record the end of the stage."""
        self._made.stop(STAGE_HAS_ENDED)

    def run(self) -> AttemptResult | None:
        """Run the job to its end."""
        return self._made.run()

    def dismiss(self) -> None:
        self._made.tasks.dismiss()

    def __enter__(self) -> CoordinatorInDriver:
        self._stack.callback(self._listening.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class CoordinatorInTask:
    """Coordinator in a task. This client of Spark Connect reaches it only through the store.

    Args:
        shim: session.
        options: of the launch, with a store.
        size: number of the stage's tasks.
    """

    def __init__(self, shim: SparkShim, options: LaunchOptions, size: int) -> None:
        self.address: tuple[str, int] | None = None
        self._options = options
        self._started, self._ended = threading.Event(), threading.Event()
        self._news = noticing_tasks(shim.session, size, self._started.set)

    def take(self, spec: TaskSpec) -> None:
        """Start the coordination of an attempt. Call this before its stage is submitted."""
        files = self._options.shared
        assert files is not None
        self._files = CoordinatorFiles(files, spec.run_dir, spec.attempt, spec.job_id, spec.key)
        self._start_s = rebuild(CoordinatorTerms, spec.elastic).limits.start_timeout_s

    def poll(self) -> None:
        """Do nothing: Spark Connect does not report executors."""

    def record_end(self) -> None:
        """Record the end of the stage."""
        self._ended.set()

    def run(self) -> AttemptResult | None:
        """Wait for the end of the stage.

        Raises:
            PreflightError: no task has started in time.
        """
        try:
            if not self._ended.wait(self._start_s) and not self._started.is_set():
                raise not_started(self._start_s)
            self._ended.wait()  # as long as the job takes
        except KeyboardInterrupt:
            self._interrupt()
            raise
        return self._files.result()

    def _interrupt(self) -> None:
        """Let the ranks save, if their coordinator can be notified."""
        mailbox = self._options.mailbox
        if mailbox is None or mailbox.poll_s is None:  # a Spark task would wait for their slots
            return
        with contextlib.suppress(
            Exception
        ):  # a store may raise anything; Spark's own cancellation remains
            self._files.interrupt()
            self._ended.wait(LOOK_S + INTERRUPT_GRACE_S + MARGIN_S)

    def dismiss(self) -> None:
        """Do nothing: the coordinator releases the tasks."""

    def __enter__(self) -> CoordinatorInTask:
        self._news.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._news.__exit__(None, None, None)


# ----------------------------------------------------------------------------------------------------
# Store of an elastic function, for a client of Spark Connect that executors may not reach.

# Pause between two polls for the ranks' output.
_POLL_S = 0.25
# How long the final deletion may take, if it is a Spark task.
_DELETE_S = 10.0


class SharedStore(SharedFiles, Protocol):
    """Interface of a `sparkhvd.Store`."""

    url: str

    @property
    def is_seen(self) -> bool:
        """Whether this process accesses it directly."""
        ...

    def seen_by(self, spark: SparkSession) -> SharedStore:
        """Return the store as the process of a session reaches it."""
        ...

    def waiting(self, limit_s: float) -> SharedStore:
        """Return the store with another timeout per access."""
        ...

    def collect(self, folder: str, done: Sequence[str]) -> list[tuple[str, bytes]]:
        """Delete files, then return paths and contents of the remaining files of a folder."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content."""
        ...


@contextlib.contextmanager
def sharing(
    options: LaunchOptions, store: SharedStore | None, shim: SparkShim
) -> Iterator[LaunchOptions]:
    """Yield options with a folder of the store, deleted at the end.

    On classic Spark or without a store, yield the options unchanged.

    Raises:
        InvalidArgumentError: `store` is not a store.
    """
    if store is not None and not hasattr(store, "seen_by"):
        raise InvalidArgumentError(
            f"store is {store!r:.100}; it must be a Store, for example sparkhvd.Store.create('/shared/folder')."
        )
    if store is None or not shim.is_connect:
        yield options
        return
    folder, run_dir = store.seen_by(shim.session), f"elastic/{secrets.token_hex(8)}"
    if not folder.is_seen:
        print_line(
            options.verbose,
            f"Lines of ranks are printed when the job ends: this client does not see {folder.url}.",
        )
    mailbox = Mailbox(folder.collect, _POLL_S if folder.is_seen else None)
    try:
        yield replace(options, shared=folder, run_dir=run_dir, mailbox=mailbox)
    finally:
        with contextlib.suppress(Exception):  # Spark or the store may be gone
            folder.waiting(_DELETE_S).delete(run_dir)
