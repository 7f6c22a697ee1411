"""What only sessions of Spark Connect have: a server elsewhere, and news of the tasks of their operations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

__all__ = [
    "conf",
    "file_roots",
    "is_served_here",
    "noticing_tasks",
    "register_profile",
    "server_host",
]


def server_host(session: Any) -> str:
    """Return the host of a session's server, a name or an address.

    Raises:
        OSError: the session's channel was built in a way that does not tell it.
    """
    try:
        return str(session.client.host).strip("[]")
    except Exception as e:
        raise OSError(
            "the session's channel builder does not tell the host of the Spark Connect server"
        ) from e


def is_served_here(session: Any) -> bool:
    """Return True if this process has started the session's server, as it does for `remote("local[*]")`."""
    context = sys.modules.get("pyspark.core.context") or sys.modules.get("pyspark.context")
    served: Any = context and context.SparkContext._active_spark_context
    return bool(served) and served.applicationId == session.conf.get("spark.app.id", None)


def conf(session: Any, keys: Iterable[str]) -> list[tuple[str, str | None]]:
    """Read the values of conf keys in one request to a session's server; None for those that are not set."""
    names = list(keys)
    values = session.client.get_config_with_defaults(*((name, None) for name in names))
    return list(zip(names, values, strict=True))


def file_roots(df: Any) -> list[str]:
    """List paths that the scans of a DataFrame were given, two of each scan; asks no server."""
    roots: list[str] = []
    messages = [df._plan.to_proto(df.sparkSession.client)]
    while messages:
        message = messages.pop()
        if message.DESCRIPTOR.name == "DataSource":
            # Spark's default is Parquet; other formats are no data files of tables, or tables with their logs.
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
    """Register a resource profile at a session's server; by itself it would use the thread's active session."""
    from pyspark.sql.connect import proto

    tasks = {
        name: proto.TaskResourceRequest(resource_name=name, amount=request.amount)
        for name, request in profile.taskResources.items()
    }
    profile._id = session.client._create_profile(proto.ResourceProfile(task_resources=tasks))


@contextlib.contextmanager
def noticing_tasks(session: Any, size: int, notice: Callable[[], None]) -> Iterator[None]:
    """Call a function again and again, from pyspark's threads, while tasks of a stage run that is executed inside the block.

    Args:
        session: that executes it.
        size: number of the stage's tasks, by which it is known.
        notice: must not raise: it would end the operation.
    """

    def look(
        stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        del operation_id
        if not done and inflight_tasks and any(stage.num_tasks == size for stage in stages or ()):
            notice()

    session.registerProgressHandler(look)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user has cleared all handlers
            session.removeProgressHandler(look)
