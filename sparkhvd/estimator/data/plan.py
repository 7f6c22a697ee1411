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
# Leaves whose content is told by the plan itself. Not LocalRelation: its text has columns and no rows, and of these
# the plan's hash has so few bits that rows with other signs have the same.
_VALUE_LEAVES = frozenset({"Range", "OneRowRelation"})
# Confs that change what a scan gives; those that a version lacks are None.
_SCAN_CONFS = (
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.legacy.timeParserPolicy",
    "spark.sql.parquet.datetimeRebaseModeInRead",
    "spark.sql.parquet.int96RebaseModeInRead",
    "spark.sql.avro.datetimeRebaseModeInRead",
)
# A LogicalRelation is anything that a data source of Spark's first interface reads, JDBC too. Its content is told by the
# state of its files if it reads files, and nothing but those: a table format's log may say that rows in them are deleted.
_FILE_RELATION = "HadoopFsRelation"
_FILE_INDEXES = frozenset({"InMemoryFileIndex", "CatalogFileIndex"})
# Code that may read anything (Spark's names; not every version has all).
_CODE_PATTERNS = (
    "PYTHON_UDF",
    "EVAL_PYTHON_UDF",
    "EVAL_PYTHON_UDTF",
    "TRANSPILED_PYTHON_UDF",
    "EXTERNAL_UDF",
    "USER_DEFINED_AGGREGATION",
    "DESERIALIZE_TO_OBJECT",
)
# Transformers of Spark ML are Scala functions of its own.
_ML_PACKAGES = ("org.apache.spark.ml.", "org.apache.spark.sql.ml.")


@dataclass(frozen=True)
class PlanFacts:
    """What identifies the data of a plan; `obstacle` says why nothing can, else it is empty."""

    obstacle: str
    plan: str = ""
    files: tuple[tuple[str, int, int], ...] = ()


def plan_facts(df: Any) -> PlanFacts:
    """Facts that are equal for two DataFrames only if their data are equal.

    Applies only if every leaf of the plan is a file scan or `range`, and no expression depends on anything but those.
    """
    # The type of the DataFrame decides: is_remote() is about the whole process.
    if "pyspark.sql.connect" in type(df).__module__:
        return PlanFacts("a Spark Connect client does not see what a plan reads")
    plan = df._jdf.queryExecution().analyzed()
    leaves = [_leaf(leaf) for leaf in _items(plan.collectLeaves())]
    others = sorted({name for name, is_known in leaves if not is_known})
    if others:
        return PlanFacts(f"the plan reads {', '.join(others)}")
    patterns = df.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    # The clock is no "non-deterministic" expression for Spark; a subquery hides its own leaves.
    if not plan.deterministic() or plan.containsPattern(patterns.CURRENT_LIKE()):
        return PlanFacts("the plan gives other values each time")
    if plan.containsPattern(patterns.PLAN_EXPRESSION()):
        return PlanFacts("the plan has a subquery")
    if any(_contains(plan, patterns, name) for name in _CODE_PATTERNS) or (
        plan.containsPattern(patterns.SCALA_UDF()) and not _is_ml_code(plan, patterns)
    ):
        return PlanFacts("the plan calls a user-defined function, which may read anything")
    files: list[tuple[str, int, int]] = []
    if any(name == _FILE_RELATION for name, _ in leaves):
        urls = sorted(df.inputFiles())
        if len(urls) > _MAX_INPUT_FILES:
            return PlanFacts(f"the plan reads more than {_MAX_INPUT_FILES} files")
        for url in urls:
            state = _file_state(df, url)
            if state is None:
                return PlanFacts(f"the state of {url!r} is unknown")
            files.append((url, *state))
    confs = [df.sparkSession.conf.get(name, None) for name in _SCAN_CONFS]
    # semanticHash has 32 bits; the canonical text tells more plans apart.
    canonical = f"{df.semanticHash()} {_text(plan.canonicalized())} {_caches(df)} {confs}"
    return PlanFacts("", canonical, tuple(files))


def _class_name(java_object: Any) -> str:
    return str(java_object.getClass().getSimpleName())


def _text(plan: Any) -> str:
    """The whole text of a plan; its `toString` leaves out what comes after 25 columns."""
    from py4j.protocol import Py4JError

    whole = (True, False, 2**31 - 1, False)  # verbose, suffix, most fields, operator ids
    try:
        return str(plan.treeString(*whole, False))
    except Py4JError:  # Spark 3.5 has one argument less
        return str(plan.treeString(*whole))


def _items(sequence: Any) -> Iterator[Any]:
    for i in range(sequence.size()):
        yield sequence.apply(i)


def _leaf(leaf: Any) -> tuple[str, bool]:
    """(what a leaf reads, whether its content can be told)."""
    name = _class_name(leaf)
    if name != "LogicalRelation":
        return name, name in _VALUE_LEAVES
    relation = leaf.relation()
    source = _class_name(relation)
    if source != _FILE_RELATION:
        return source, False
    index = _class_name(relation.location())
    return (source, True) if index in _FILE_INDEXES else (index, False)


def _contains(plan: Any, patterns: Any, name: str) -> bool:
    from py4j.protocol import Py4JError

    try:
        pattern = getattr(patterns, name)()
    except (Py4JError, TypeError):  # of another version
        return False
    return bool(plan.containsPattern(pattern))


def _is_ml_code(plan: Any, patterns: Any) -> bool:
    """Whether every Scala function in a plan belongs to Spark ML."""
    scala = patterns.SCALA_UDF()

    def is_ml(expression: Any) -> bool:
        if _class_name(expression) == "ScalaUDF" and not (
            str(expression.function().getClass().getName()).startswith(_ML_PACKAGES)
        ):
            return False
        below = _items(expression.children())
        return all(is_ml(child) for child in below if child.containsPattern(scala))

    own = (e for e in _items(plan.expressions()) if e.containsPattern(scala))
    below = (child for child in _items(plan.children()) if child.containsPattern(scala))
    return all(map(is_ml, own)) and all(_is_ml_code(child, patterns) for child in below)


def _caches(df: Any) -> list[str | int]:
    """Which caches the plan is answered from: they hold what the sources were when they were filled.

    A cache is named by the identity of its object, which nothing outside this application shares.
    """
    session = df.sparkSession
    leaves = _items(df._jdf.queryExecution().withCachedData().collectLeaves())
    builders = [leaf.cacheBuilder() for leaf in leaves if _class_name(leaf) == "InMemoryRelation"]
    if not builders:
        return []
    own = [session._jvm.java.lang.System.identityHashCode(b) for b in builders]
    return [session.sparkContext.applicationId, *own]


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
