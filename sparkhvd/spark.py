"""The one place that knows classic Spark from Spark Connect.

Everything else uses the DataFrame API. What that API lacks is here: cancel a job, count slots, name the
application.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkhvd.errors import InvalidArgumentError, SparkhvdError
from sparkhvd.topology import address_towards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from typing_extensions import TypeIs

__all__ = ["SparkShim", "active_session", "connect_session", "is_dataframe"]

# gRPC refuses larger messages; the program is in the plan, next to little else.
_CONNECT_MESSAGE_BYTES = 120 << 20
# Spark gives a cancelled task 2 s (spark.python.task.killTimeout) before it kills its Python worker.
_CANCEL_WAIT_S = 10.0
_CANCEL_AGAIN_S = 0.5


class SparkShim:
    """A session, classic or Connect, by the few things that a launch needs."""

    def __init__(self, spark: Any) -> None:
        """Wrap a session.

        Raises:
            InvalidArgumentError: `spark` is not a SparkSession.
        """
        kind = type(spark)
        if not (kind.__module__.startswith("pyspark.") and hasattr(spark, "range")):
            raise InvalidArgumentError(
                f"spark is {spark!r}; it must be a SparkSession, for example df.sparkSession."
            )
        self.session = spark
        self.is_connect = kind.__module__.startswith("pyspark.sql.connect")

    def conf(self, keys: Iterable[str]) -> dict[str, str]:
        """The values of those keys that are set."""
        values = {key: self.session.conf.get(key, None) for key in keys}
        return {key: value for key, value in values.items() if value is not None}

    def ml_context(self) -> Any:
        """Return what Spark ML's readers and writers of metadata take: the session, before pyspark 4 its context."""
        import pyspark

        return self.session.sparkContext if pyspark.__version__.startswith("3.") else self.session

    def application(self) -> str:
        """What names the application among those that this process drives."""
        if self.is_connect:
            return str(self.session.conf.get("spark.app.id", "connect"))
        return str(self.session.sparkContext.applicationId)

    def own_addresses(self) -> tuple[str, str]:
        """Where this process can listen for executors, and what host they find it at."""
        if self.is_connect:
            # Towards the server; whether executors elsewhere come that way too is not known here.
            address = address_towards(self.session.client.host.strip("[]"))
            return address, address
        host = self.session.conf.get("spark.driver.host")
        own = self.session.conf.get("spark.driver.bindAddress", host)
        return own.strip("[]"), host.strip("[]")

    def session_key(self) -> str:
        """What names the session: two objects of one session have one key."""
        if self.is_connect:
            return str(self.session.session_id)
        return str(self.session._jsparkSession.sessionUUID())

    def profile_scope(self) -> str:
        """What names the sessions whose stages can ask by one resource profile; on classic all of the application."""
        return self.session_key() if self.is_connect else self.application()

    def is_over(self) -> bool:
        """Whether the session (on classic: its application) has been stopped."""
        if self.is_connect:
            return bool(getattr(self.session, "is_stopped", False))
        return self.session.sparkContext._jsc is None

    def registered_slots(self, profile: Any = None) -> int | None:
        """Barrier tasks that the executors now registered can run at once; None where Spark does not say."""
        if self.is_connect:
            return None
        context = self.session.sparkContext._jsc.sc()
        if profile is None:
            chosen = context.resourceProfileManager().defaultResourceProfile()
        else:
            chosen = profile._java_resource_profile
        if chosen is None:  # built before there was a session: Spark learns of it with the stage
            return None
        return int(context.maxNumConcurrentTasks(chosen))

    def profile(self, cpus: int | None, gpus: float | None) -> Any:
        """A resource profile of a stage whose tasks get so much each, known to Spark; None leaves a resource out.

        Raises:
            Exception: of Spark's own kinds, where its master takes no profiles.
        """
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        requests = TaskResourceRequests()
        if cpus is not None:
            requests = requests.cpus(cpus)
        if gpus is not None:
            requests = requests.resource("gpu", gpus)
        profile = ResourceProfileBuilder().require(requests).build
        if self.is_connect:
            self._register_remotely(profile)
        else:
            context = self.session.sparkContext._jsc.sc()
            context.resourceProfileManager().addResourceProfile(profile._java_resource_profile)
        return profile

    def _register_remotely(self, profile: Any) -> None:
        """Make a profile known to the server; by itself it would ask the session that is active in this thread."""
        from pyspark.sql.connect import proto

        tasks = {
            name: proto.TaskResourceRequest(resource_name=name, amount=one.amount)
            for name, one in profile.taskResources.items()
        }
        profile._id = self.session.client._create_profile(
            proto.ResourceProfile(task_resources=tasks)
        )

    def worker_python(self) -> str:
        """The Python that Spark's workers are told to run; for messages, so it never raises."""
        with contextlib.suppress(Exception):
            if self.is_connect:
                return str(self.session.conf.get("spark.pyspark.python", "python3"))
            return str(self.session.sparkContext.pythonExec)
        return "a Python"

    @property
    def closure_limit(self) -> int | None:
        """The most bytes that a program may have; None where Spark sets no limit."""
        return _CONNECT_MESSAGE_BYTES if self.is_connect else None

    def stage(self, size: int, task: Callable[..., Any], schema: str, profile: Any = None) -> Any:
        """The DataFrame whose `collect` runs `task` in a barrier stage of `size` tasks."""
        rows = self.session.range(0, size, 1, numPartitions=size)
        if profile is None:
            return rows.mapInArrow(task, schema, barrier=True)
        return rows.mapInArrow(task, schema, barrier=True, profile=profile)

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Give the jobs of this thread a tag inside the block, by which `cancel` finds them."""
        # On classic the context's own tags, because pyspark 3.5 has no others.
        if self.is_connect:
            self.session.addTag(tag)
        else:
            self.session.sparkContext.addJobTag(tag)
        try:
            yield
        finally:
            if self.is_connect:
                self.session.removeTag(tag)
            else:
                # The application may be over: then its tags are too.
                with contextlib.suppress(Exception):
                    self.session.sparkContext.removeJobTag(tag)

    @contextlib.contextmanager
    def described(self, text: str) -> Iterator[None]:
        """Show `text` in Spark's UI as the description of this thread's jobs, after the user's; not on Connect."""
        if self.is_connect or not text:
            yield
            return
        context = self.session.sparkContext
        given = context.getLocalProperty("spark.job.description")
        context.setJobDescription(f"{given}: {text}" if given else text)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the application may be over
                context.setJobDescription(given)

    def collect(
        self,
        stage: Any,
        tag: str,
        description: str = "",
        interrupt: Callable[[], None] | None = None,
    ) -> list[Any]:
        """The rows of a stage, whose job has this tag; whatever interrupts the wait cancels the job.

        Py4j cannot be interrupted in a call: pyspark's own handler of Ctrl-C fails on the busy connection and
        leaves a broken one; a call of Connect takes its job with it. So the main thread waits, and another one, with its
        Spark properties, calls.

        Args:
            stage: what to collect.
            tag: of the job.
            description: for Spark's UI.
            interrupt: called at Ctrl-C before the job is cancelled.
        """
        with self.tagged(tag), self.described(description):
            try:
                if threading.current_thread() is not threading.main_thread():
                    rows: list[Any] = stage.collect()
                    return rows
                with _plain_interrupts():
                    return self._collect_beside(stage, tag, interrupt)
            except BaseException as e:  # noqa: BLE001 - raised again
                self.cancel(tag)
                if isinstance(e, Exception) and self._has_died():
                    raise SparkhvdError(
                        f"Spark's JVM has died while it ran {description or 'a job'!r}; look for why in its log (out of memory, "
                        "or killed). Start a new session, if need be in a new process: this one's is lost."
                    ) from e
                raise

    def collect_within(
        self, df: Any, limit_s: float, is_held: Callable[[], bool] = lambda: False
    ) -> list[Any]:
        """The rows of a DataFrame, whose jobs are cancelled after a time.

        Args:
            df: what to collect.
            limit_s: longest wait in seconds.
            is_held: whether the slots are known to be taken; such time does not count.

        Raises:
            TimeoutError: there were no rows after `limit_s` seconds.
        """
        tag = f"sparkhvd-{uuid.uuid4().hex}"
        is_late, is_over = threading.Event(), threading.Event()

        def watch() -> None:
            left = limit_s
            while left > 0:
                began = time.monotonic()
                if is_over.wait(min(left, 1.0)):
                    return
                if not is_held():
                    left -= time.monotonic() - began
            is_late.set()
            self.cancel(tag)

        watcher = threading.Thread(target=watch, name="sparkhvd-limit", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at its end
            watcher.start()
        try:
            return self.collect(df, tag)
        except Exception as e:
            if is_late.is_set():
                raise TimeoutError(f"cancelled after {limit_s:g} s") from e
            raise
        finally:
            is_over.set()
            if watcher.is_alive():
                watcher.join(_CANCEL_WAIT_S)

    def _collect_beside(
        self, stage: Any, tag: str, interrupt: Callable[[], None] | None
    ) -> list[Any]:
        future: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        tags = self.session.getTags() if self.is_connect else ()

        def collects() -> None:
            try:
                for inherited in tags:
                    self.session.addTag(inherited)
                future.set_result(stage.collect())
            except BaseException as e:  # noqa: BLE001 - raised again where the result is awaited
                future.set_exception(e)

        thread = self._thread(collects, "sparkhvd-collect")
        thread.start()
        try:
            return future.result()
        except KeyboardInterrupt:
            if interrupt is not None and not future.done():
                interrupt()
            raise
        finally:
            # Interrupted if it is not done. Again and again: the job may not have been submitted yet.
            deadline = time.monotonic() + _CANCEL_WAIT_S
            while not future.done() and time.monotonic() < deadline:
                self.cancel(tag)
                concurrent.futures.wait([future], _CANCEL_AGAIN_S)
            thread.join(_CANCEL_WAIT_S if future.done() else 0)

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A daemon thread; on classic Spark its jobs have the properties of this thread's."""
        if self.is_connect:
            return threading.Thread(target=target, name=name, daemon=True)
        from pyspark import InheritableThread

        return InheritableThread(target, name=name, daemon=True)

    def _has_died(self) -> bool:
        """Whether the driver's JVM answers no more."""
        from py4j.protocol import Py4JError

        if self.is_connect:
            return False
        try:
            self.session._jvm.java.lang.System.nanoTime()
        except (OSError, Py4JError):
            return True
        return False

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with this tag; never raises, because something else is already being raised."""
        with contextlib.suppress(Exception):
            if self.is_connect:
                self.session.interruptTag(tag)
            else:
                self.session.sparkContext.cancelJobsWithTag(tag)


@contextlib.contextmanager
def _plain_interrupts() -> Iterator[None]:
    """Let Ctrl-C only raise KeyboardInterrupt inside the block, and call pyspark's handler, which cancels all jobs, after it."""
    given: Any = signal.getsignal(signal.SIGINT)
    if not getattr(given, "__module__", "").startswith("pyspark."):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        given(signal.SIGINT, None)
        raise
    finally:
        signal.signal(signal.SIGINT, given)


def active_session() -> Any:
    """The session of this thread, classic or Connect.

    Raises:
        InvalidArgumentError: there is none.
    """
    from pyspark.sql import SparkSession

    session: Any = SparkSession.getActiveSession()
    if session is None:  # a thread or connection of its own has only the default session
        with contextlib.suppress(Exception):
            session = SparkSession.active()
    if session is None:
        with contextlib.suppress(ImportError):  # the client's packages may be absent
            from pyspark.sql.connect.session import SparkSession as ConnectSession

            session = ConnectSession.getActiveSession()
    if session is None:
        raise InvalidArgumentError(
            "There is no active Spark session. Start one, or give spark=<session>."
        )
    return session


def connect_session() -> Any:
    """The active session of Spark Connect in this process, or None."""
    module = sys.modules.get("pyspark.sql.connect.session")
    if module is None:
        return None
    kind = module.SparkSession
    for find in (kind.getActiveSession, getattr(kind, "_get_default_session", lambda: None)):
        with contextlib.suppress(NotImplementedError):  # Spark 3.4's client has no active session
            if (session := find()) is not None:
                return session
    return None


def is_dataframe(value: object) -> TypeIs[DataFrame]:
    """Return True for a DataFrame, classic or Connect."""
    return hasattr(value, "sparkSession") and hasattr(value, "schema")
