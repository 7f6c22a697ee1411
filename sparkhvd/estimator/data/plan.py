"""What a classic DataFrame's analyzed plan says about its data; nothing here starts a job.

The one place of the estimator that looks below the DataFrame API: no public call tells what a plan reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["PlanFacts", "plan_facts"]

# Every source file is looked at to see whether it changed; beyond this many that costs more than it saves.
_MAX_INPUT_FILES = 5000
# Leaves whose content is told by the state of files, or by the plan itself.
_FILE_LEAVES = frozenset({"LogicalRelation"})
_VALUE_LEAVES = frozenset({"LocalRelation", "Range", "OneRowRelation"})


@dataclass(frozen=True)
class PlanFacts:
    """What identifies the data of a plan; `obstacle` says why nothing can, else it is empty."""

    obstacle: str
    plan: str = ""
    files: tuple[tuple[str, int, int], ...] = ()


def plan_facts(df: Any) -> PlanFacts:
    """Facts that are equal for two DataFrames only if their data are equal.

    Applies only if every leaf of the plan is a file scan, local data or `range`, and no expression depends on
    anything but those.
    """
    # The type of the DataFrame decides: is_remote() is about the whole process.
    if "pyspark.sql.connect" in type(df).__module__:
        return PlanFacts("a Spark Connect client does not see what a plan reads")
    plan = df._jdf.queryExecution().analyzed()
    leaves = {_class_name(leaf) for leaf in _items(plan.collectLeaves())}
    others = sorted(leaves - _FILE_LEAVES - _VALUE_LEAVES)
    if others:
        return PlanFacts(f"the plan reads {', '.join(others)}")
    patterns = df.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    # The clock is no "non-deterministic" expression for Spark; a subquery hides its own leaves.
    if not plan.deterministic() or plan.containsPattern(patterns.CURRENT_LIKE()):
        return PlanFacts("the plan gives other values each time")
    if plan.containsPattern(patterns.PLAN_EXPRESSION()):
        return PlanFacts("the plan has a subquery")
    files: list[tuple[str, int, int]] = []
    if leaves & _FILE_LEAVES:
        urls = sorted(df.inputFiles())
        if len(urls) > _MAX_INPUT_FILES:
            return PlanFacts(f"the plan reads more than {_MAX_INPUT_FILES} files")
        for url in urls:
            state = _file_state(df, url)
            if state is None:
                return PlanFacts(f"the state of {url!r} is unknown")
            files.append((url, *state))
    # semanticHash has 32 bits; the canonical text tells more plans apart.
    canonical = f"{df.semanticHash()} {plan.canonicalized().toString()}"
    return PlanFacts("", canonical, tuple(files))


def _class_name(java_object: Any) -> str:
    return str(java_object.getClass().getSimpleName())


def _items(sequence: Any) -> Iterator[Any]:
    for i in range(sequence.size()):
        yield sequence.apply(i)


def _file_state(df: Any, url: str) -> tuple[int, int] | None:
    """(size, time of change) of a source file, or None if that cannot be told."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        try:
            stat = Path(unquote(parts.path)).stat()
        except OSError:
            return None
        return stat.st_size, stat.st_mtime_ns
    from py4j.protocol import Py4JJavaError

    session = df.sparkSession
    path = session._jvm.org.apache.hadoop.fs.Path(url)
    try:
        system = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        status = system.getFileStatus(path)
    except Py4JJavaError:
        return None
    return int(status.getLen()), int(status.getModificationTime())
