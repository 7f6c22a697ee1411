"""Sessions of classic Spark and of Spark Connect behind one interface.

The rest of the package uses the DataFrame API. Operations outside of it are here, such as cancelling a job or counting
slots.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from sparkhvd.errors import InvalidArgumentError, SparkhvdError, SparkUnavailableError
from sparkhvd.interfaces import address_towards, loopback

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from typing_extensions import TypeIs


# gRPC refuses larger messages; the plan holds the program and little else.
_CONNECT_MESSAGE_BYTES = 120 << 20
# Spark gives a cancelled task 2 s (spark.python.task.killTimeout) before it kills its Python worker.
_CANCEL_WAIT_S = 10.0
_CANCEL_AGAIN_S, _CANCEL_REST_S = 0.5, 120.0
_PYTHON_CONF = "spark.pyspark.python"


# Up to this number of keys, a py4j call per key is cheaper than a call for all keys.
_FEW_KEYS = 3
# Separator of the items of Spark's conf: ASCII's record separator does not occur in usual values.
_SEPARATOR = "\x1e"


class SparkShim:
    """Session of classic Spark or Spark Connect, with the operations for a launch.

    Attributes:
        session: the session.
        is_connect: whether it is a Spark Connect session.
    """

    def __init__(self, spark: SparkSession) -> None:
        """Wrap a session.

        Raises:
            InvalidArgumentError: `spark` is not a SparkSession.
        """
        check_session(spark)
        self.session: Any = spark  # the two kinds have no common type
        self.is_connect = is_connect(spark)
        self._choose_python()

    def _choose_python(self) -> None:
        """Run the workers of a local master with this Python, unless the user has chosen another.

        This Python has the package. By default the workers run `python3` of the search path, which differs in a virtual
        environment that is not activated.
        """
        if not self._has_executors_here() or not sys.executable:
            return
        if "PYSPARK_PYTHON" in os.environ or self.conf([_PYTHON_CONF]):  # noqa: TID251 - pyspark's variable
            return
        self.session.sparkContext.pythonExec = sys.executable

    def _has_executors_here(self) -> bool:
        """Whether the master runs executors on the driver's host: `local[...]` and `local-cluster[...]`."""
        return not self.is_connect and self.session.sparkContext.master.startswith("local")

    def is_served_here(self) -> bool:
        """Whether this process has the driver of a classic session or of its own Connect server."""
        return not self.is_connect or is_served_here(self.session)

    def runs_this_python(self) -> bool:
        """Whether Spark's workers are on this host and run the Python of this process."""
        return self._has_executors_here() and self.worker_python() == sys.executable

    def conf(self, keys: Iterable[str]) -> dict[str, str]:
        """Read the values of the keys, without unset keys."""
        names = list(keys)
        values: Iterable[tuple[str, str | None]]
        if self.is_connect:
            values = conf(self.session, names)
        elif len(names) <= _FEW_KEYS:
            values = [(key, self.session.conf.get(key, None)) for key in names]
        else:  # one call of py4j for all keys that are set: a call per key took a launch 20 ms
            text = str(self.session.conf._jconf.getAll().mkString(_SEPARATOR))
            known = dict(item.partition(" -> ")[::2] for item in text.split(_SEPARATOR))
            values = [(key, known.get(key)) for key in names]
        return {key: value for key, value in values if value is not None}

    def application(self) -> str:
        """Id of the application."""
        if self.is_connect:
            return str(self.session.conf.get("spark.app.id", "connect"))
        return str(self.session.sparkContext.applicationId)

    def own_addresses(self) -> tuple[str, str]:
        """Address for this process to listen on, and its host as executors reach it."""
        if self.is_connect:
            # This host's address on the route to the server; executors on other hosts may be unable to reach it.
            address = address_towards(server_host(self.session))
            return address, address
        if self._has_executors_here():
            return loopback(), loopback()
        host = self.session.conf.get("spark.driver.host")
        own = self.session.conf.get("spark.driver.bindAddress", host)
        return own.strip("[]"), host.strip("[]")

    def profile_scope(self) -> str:
        """Make the key of a resource profile's scope.

        The scope is the session on Connect, and the application on classic Spark.
        """
        return session_key(self.session) if self.is_connect else self.application()

    def is_over(self) -> bool:
        """Whether the session (on classic: its application) has been stopped."""
        return is_stopped(self.session)

    def registered_slots(self, profile: ResourceProfile | None = None) -> int | None:
        """Count the barrier task slots of the registered executors, or None if unknown."""
        if self.is_connect:
            return None
        context = self.session.sparkContext._jsc.sc()
        if profile is None:
            chosen = context.resourceProfileManager().defaultResourceProfile()
        else:
            chosen = profile._java_resource_profile
        if chosen is None:  # built before the session: Spark registers it with the stage
            return None
        return int(context.maxNumConcurrentTasks(chosen))

    def decommissioned(self, executors: Iterable[str]) -> set[str]:
        """Find the executors under decommissioning. Always empty over Connect."""
        if self.is_connect:
            return set()
        scheduler = self.session.sparkContext._jsc.sc().taskScheduler()
        return {e for e in executors if scheduler.getExecutorDecommissionState(e).isDefined()}

    def profile(self, cpus: int | None, gpus: float | None) -> ResourceProfile:
        """Register a resource profile with these resources per task. None leaves a resource out.

        Raises:
            Exception: of Spark's own kinds, if its master does not support profiles.
        """
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        requests = TaskResourceRequests()
        if cpus is not None:
            requests = requests.cpus(cpus)
        if gpus is not None:
            requests = requests.resource("gpu", gpus)
        profile = ResourceProfileBuilder().require(requests).build
        if self.is_connect:
            register_profile(self.session, profile)
        else:
            context = self.session.sparkContext._jsc.sc()
            context.resourceProfileManager().addResourceProfile(profile._java_resource_profile)
        return profile

    def worker_python(self) -> str:
        """Python of Spark's workers, for messages. Never raises."""
        with contextlib.suppress(Exception):
            if self.is_connect:
                return str(self.session.conf.get(_PYTHON_CONF, "python3"))
            return str(self.session.sparkContext.pythonExec)
        return "a Python"

    @property
    def closure_limit(self) -> int | None:
        """Most bytes of a pickled program, or None if Spark sets no limit."""
        return _CONNECT_MESSAGE_BYTES if self.is_connect else None

    def stage(
        self,
        size: int,
        task: ArrowTask,
        schema: StructType,
        profile: ResourceProfile | None = None,
        *,
        is_barrier: bool = True,
    ) -> DataFrame:
        """Make a DataFrame whose `collect` runs `task` in a stage of `size` tasks.

        The tasks start together if `is_barrier`, else as slots become free.
        """
        rows: DataFrame = self.session.range(0, size, 1, numPartitions=size)
        given = {} if profile is None else {"profile": profile}
        return rows.mapInArrow(task, schema, barrier=is_barrier, **given)

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Tag the jobs of this thread inside the block, for `cancel`."""
        # Classic sessions use the tags of the context: pyspark 3.5 has no tags of a session.
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
                # The application may have ended, and its tags with it.
                with contextlib.suppress(Exception):
                    self.session.sparkContext.removeJobTag(tag)

    @contextlib.contextmanager
    def described(self, text: str) -> Iterator[None]:
        """Append `text` to this thread's job description in Spark's UI. No effect on Connect."""
        if self.is_connect or not text:
            yield
            return
        context = self.session.sparkContext
        before = context.getLocalProperty("spark.job.description")
        context.setJobDescription(f"{before}: {text}" if before else text)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the application may have ended
                context.setJobDescription(before)

    def collect(
        self,
        stage: DataFrame,
        tag: str,
        description: str = "",
        interrupt: Callable[[], None] | None = None,
    ) -> list[Row]:
        """Collect the rows of a stage in a job with this tag. An interrupted wait cancels the job.

        Py4j cannot be interrupted in a call: pyspark's own handler of Ctrl-C fails on the busy connection and breaks
        it. An interrupted call of Connect ends its job. So another thread makes the call, with the Spark properties of
        the main thread, and the main thread waits.

        Args:
            stage: DataFrame to collect.
            tag: tag of the job.
            description: description in Spark's UI.
            interrupt: called at Ctrl-C before the job is cancelled.
        """
        with self.tagged(tag), self.described(description):
            try:
                if threading.current_thread() is not threading.main_thread():
                    return stage.collect()
                with plain_interrupts():
                    return _collect_beside(self, stage, tag, interrupt)
            except BaseException as e:  # noqa: BLE001 - raised again
                self.cancel(tag)
                if isinstance(e, Exception) and has_died(self.session):
                    raise SparkhvdError(
                        f"Spark's JVM has died while it ran {description or 'a job'!r}; look for the reason in its log (out of memory, "
                        "or killed). This session is lost. Start a new one, in a new process if that fails."
                    ) from e
                raise

    def call_in_worker(
        self, function: Callable[[], str], limit_s: float, is_held: Callable[[], bool]
    ) -> str:
        """Call a function in a Spark worker.

        Classic Spark uses an RDD, which works without pyarrow.

        Args:
            function: to call; it is pickled by value.
            limit_s: longest wait in seconds.
            is_held: as for `collect_within`.

        Raises:
            TimeoutError: there was no answer after `limit_s` seconds.
        """
        if not self.is_connect:
            rdd = self.session.sparkContext.parallelize([0], 1).map(lambda _: function())
            return str(self.collect_within(rdd, limit_s, is_held)[0])

        def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import pyarrow as pa

            for _ in batches:  # Spark discards a Python worker that leaves input unread
                pass
            yield pa.RecordBatch.from_pydict({"answer": [function()]})

        rows = self.session.range(0, 1, 1, numPartitions=1).mapInArrow(task, "answer string")
        return str(self.collect_within(rows, limit_s, is_held)[0].answer)

    def collect_within(
        self, df: DataFrame, limit_s: float, is_held: Callable[[], bool] = lambda: False
    ) -> list[Row]:
        """Collect the rows of a DataFrame, cancelling its jobs after a timeout.

        Args:
            df: DataFrame to collect.
            limit_s: longest wait in seconds.
            is_held: returns True while the slots are known to be in use; such time does not count.

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
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit
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

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with this tag. Never raises, because another error is already being raised."""
        with contextlib.suppress(Exception):
            if self.is_connect:
                self.session.interruptTag(tag)
            else:
                self.session.sparkContext.cancelJobsWithTag(tag)


def _collect_beside(
    shim: SparkShim, stage: DataFrame, tag: str, interrupt: Callable[[], None] | None
) -> list[Row]:
    """Collect the rows of a stage in another thread. An interrupt here cancels the job."""
    future: concurrent.futures.Future[list[Row]] = concurrent.futures.Future()
    tags = shim.session.getTags() if shim.is_connect else ()

    def collects() -> None:
        try:
            for inherited in tags:
                shim.session.addTag(inherited)
            future.set_result(stage.collect())
        except BaseException as e:  # noqa: BLE001 - raised again where the result is awaited
            future.set_exception(e)

    thread = job_thread(shim, collects, "sparkhvd-collect")
    thread.start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if interrupt is not None and not future.done():
            interrupt()
        raise
    finally:
        cancel_until_over(shim, tag, future, _CANCEL_WAIT_S)  # an interrupted job may still run
        if future.done():
            thread.join(_CANCEL_WAIT_S)
        else:  # a slow driver has yet to submit the job, which must still be cancelled
            rest = (shim, tag, future, _CANCEL_REST_S)
            job_thread(shim, lambda: cancel_until_over(*rest), "sparkhvd-cancel").start()


def cancel_until_over(
    shim: SparkShim, tag: str, future: concurrent.futures.Future[Any], limit_s: float
) -> None:
    """Cancel the jobs of a tag repeatedly: they may not have been submitted yet."""
    deadline = time.monotonic() + limit_s
    while not future.done() and time.monotonic() < deadline:
        shim.cancel(tag)
        concurrent.futures.wait([future], _CANCEL_AGAIN_S)


def job_thread(shim: SparkShim, target: Callable[[], None], name: str) -> threading.Thread:
    """Make a daemon thread. On classic Spark its jobs inherit the properties of this thread."""
    if shim.is_connect:
        return threading.Thread(target=target, name=name, daemon=True)
    from pyspark import InheritableThread

    return InheritableThread(target, name=name, daemon=True)


@contextlib.contextmanager
def plain_interrupts() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt inside the block, before pyspark's handler cancels all jobs."""
    handler: Any = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not getattr(handler, "__module__", "").startswith("pyspark."):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        handler(signal.SIGINT, None)
        raise
    finally:
        signal.signal(signal.SIGINT, handler)


# ----------------------------------------------------------------------------------------------------
# Sessions of classic Spark and of Spark Connect: checks, keys, and the active one.


def check_session(spark: object) -> None:
    """Check that a value is a session and has not been stopped.

    Raises:
        InvalidArgumentError: `spark` is not a SparkSession, or has been stopped.
    """
    if not (type(spark).__module__.startswith("pyspark.") and hasattr(spark, "range")):
        raise InvalidArgumentError(
            f"spark is {spark!r}; it must be a SparkSession, for example df.sparkSession."
        )
    if is_stopped(spark):
        raise InvalidArgumentError(
            "The Spark session has been stopped. Start a new one, and make the DataFrame from it."
        )


def is_stopped(session: Any) -> bool:
    """Whether a session (on classic: its application) has been stopped."""
    if is_connect(session):
        return bool(getattr(session, "is_stopped", False))
    return session.sparkContext._jsc is None


def check_dataframe(call: str, value: object) -> None:
    """Check that a value is a Spark DataFrame.

    Args:
        call: or argument that received it, for the message.
        value: given.

    Raises:
        InvalidArgumentError: it is not a DataFrame; the message says how to create one.
    """
    if is_dataframe(value):
        return
    kind = type(value)
    remedy = "create it with spark.createDataFrame(...)"
    if hasattr(value, "to_spark"):  # a frame of pandas on Spark
        remedy = "convert it with frame.to_spark()"
    elif kind.__module__.partition(".")[0] == "pandas":
        remedy = "convert it with spark.createDataFrame(frame)"
    raise InvalidArgumentError(
        f"{call} got a {kind.__module__.partition('.')[0]}.{kind.__name__}; it takes a DataFrame of Spark: {remedy}."
    )


def is_connect(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")


def session_key(spark: SparkSession) -> str:
    """Read the id of a session. All objects of the session have the same id."""
    session: Any = spark
    if is_connect(spark):
        return str(session.session_id)
    return str(session._jsparkSession.sessionUUID())


def has_died(spark: SparkSession) -> bool:
    """Whether a classic driver's JVM no longer answers."""
    if is_connect(spark):
        return False
    from py4j.protocol import Py4JError

    session: Any = spark
    try:
        session._jvm.java.lang.System.nanoTime()
    except (OSError, Py4JError):
        return True
    return False


def running_tasks(spark: SparkSession, tag: str) -> tuple[int, int] | None:
    """Count started tasks of jobs with a tag, and running tasks of the application's other jobs, or return None if unknown."""
    if is_connect(spark):
        return None
    context: Any = spark.sparkContext
    with contextlib.suppress(Exception):  # another Spark version, or the application has ended
        tracker = context.statusTracker()
        tagged = context._jsc.sc().statusTracker().getJobIdsForTag(tag)
        jobs = [tracker.getJobInfo(job) for job in tagged]
        mine = {stage for job in jobs if job is not None for stage in job.stageIds}
        own = others = 0
        for number in {*mine, *tracker.getActiveStageIds()}:
            stage = tracker.getStageInfo(number)
            if stage is None:
                continue
            if number in mine:
                own += stage.numActiveTasks + stage.numCompletedTasks + stage.numFailedTasks
            else:
                others += stage.numActiveTasks
        return (own, others) if mine else None
    return None


def ml_context(spark: SparkSession) -> SparkSession | SparkContext:
    """Argument of Spark ML's readers and writers of metadata: the session, before pyspark 4 its context."""
    import pyspark

    return spark.sparkContext if pyspark.__version__.startswith("3.") else spark


@contextlib.contextmanager
def needs_pyspark(what: str) -> Iterator[None]:
    """Turn a failed import of pyspark inside the block into SparkUnavailableError.

    Args:
        what: the name that needs it, for the message.

    Raises:
        SparkUnavailableError: it is not installed; the message has what to install.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        if isinstance(e, SparkUnavailableError) or e.name != "pyspark":
            raise
        raise SparkUnavailableError(
            f"{what} needs pyspark, which {sys.executable} does not have. Run `pip install 'sparkhvd[spark]'`, which brings Spark, too; `pip "
            "install pyspark-client` for a client of Spark Connect, or databricks-connect for one of Databricks. In a runtime that has a "
            "pyspark of its own, start the program with its Python.",
            name="pyspark",
        ) from e


def active_session() -> SparkSession:
    """Find the active session of this thread, classic or Connect, or else the default session.

    Raises:
        InvalidArgumentError: there is no active session.
        SparkUnavailableError: pyspark is not installed.
    """
    with needs_pyspark("A session of Spark"):
        from pyspark.sql import SparkSession

    session: SparkSession | None = SparkSession.getActiveSession()
    if session is None:  # other threads and connections have only the default session
        with contextlib.suppress(Exception):
            session = SparkSession.active()
    if session is None:
        with contextlib.suppress(ImportError):  # the client's packages may be absent
            from pyspark.sql.connect.session import SparkSession as ConnectSession

            session = cast("SparkSession | None", ConnectSession.getActiveSession())
    if session is None:
        raise InvalidArgumentError(
            "There is no active Spark session. Start one, or give spark=<session>."
        )
    return session


def connect_session() -> SparkSession | None:
    """Active or default session of Spark Connect in this process, or None."""
    module = sys.modules.get("pyspark.sql.connect.session")
    if module is None:
        return None
    kind = module.SparkSession
    for find in (kind.getActiveSession, getattr(kind, "_get_default_session", lambda: None)):
        with contextlib.suppress(NotImplementedError):  # Spark 3.4's client has no active session
            session: SparkSession | None = find()
            if session is not None:
                return session
    return None


def is_dataframe(value: object) -> TypeIs[DataFrame]:
    """Whether it is a DataFrame, classic or Connect."""
    return hasattr(value, "sparkSession") and hasattr(value, "schema")


# ----------------------------------------------------------------------------------------------------
# Operations of Spark Connect sessions: the server elsewhere, and progress of the tasks of their operations.


def server_host(session: Any) -> str:
    """Host name or address of the session's Spark Connect server.

    Raises:
        OSError: the session's channel does not provide it.
    """
    try:
        return str(session.client.host).strip("[]")
    except Exception as e:
        raise OSError(
            "the session's channel builder does not provide the host of the Spark Connect server"
        ) from e


def is_served_here(session: Any) -> bool:
    """Whether this process has started the session's server, as it does for `remote("local[*]")`."""
    context = sys.modules.get("pyspark.core.context") or sys.modules.get("pyspark.context")
    served: Any = context and context.SparkContext._active_spark_context
    return bool(served) and served.applicationId == session.conf.get("spark.app.id", None)


def conf(session: Any, keys: Iterable[str]) -> list[tuple[str, str | None]]:
    """Read the values of conf keys in one request to a session's server, or return None for unset keys."""
    names = list(keys)
    values = session.client.get_config_with_defaults(*((name, None) for name in names))
    return list(zip(names, values, strict=True))


def file_roots(df: Any) -> list[str]:
    """List the input paths of a DataFrame's scans, at most two per scan. Sends no request."""
    roots: list[str] = []
    messages = [df._plan.to_proto(df.sparkSession.client)]
    while messages:
        message = messages.pop()
        if message.DESCRIPTOR.name == "DataSource":
            # An empty format is Spark's default, Parquet. Other formats have no data files, or are tables with a log.
            if message.format in ("", "parquet", "orc", "avro"):
                by_option = [v for k, v in message.options.items() if k.lower() == "path"]
                roots += [*message.paths, *by_option][:2]
            continue
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            messages += [value] if hasattr(value, "DESCRIPTOR") else value
    return roots


def register_profile(session: Any, profile: ResourceProfile) -> None:
    """Register a resource profile at a session's server.

    pyspark itself would use the thread's active session.
    """
    from pyspark.sql.connect import proto

    tasks = {
        name: proto.TaskResourceRequest(resource_name=name, amount=request.amount)
        for name, request in profile.taskResources.items()
    }
    profile._id = session.client._create_profile(proto.ResourceProfile(task_resources=tasks))


@contextlib.contextmanager
def noticing_tasks(session: Any, size: int, notice: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly, from pyspark's threads, while a stage executed inside the block has running tasks.

    Args:
        session: executes the stage.
        size: number of the stage's tasks, which identifies it.
        notice: must not raise, which would end the operation.
    """

    def poll(
        stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        del operation_id
        if not done and inflight_tasks and any(stage.num_tasks == size for stage in stages or ()):
            notice()

    session.registerProgressHandler(poll)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user has cleared all handlers
            session.removeProgressHandler(poll)


if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession

    ArrowTask = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
