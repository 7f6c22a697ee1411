"""Facts from a DataFrame's plan: identity for reuse, small partitions, tables read without their logs, names of vectors."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from sparkhvd import spark as connect
from sparkhvd.data.manifest import TableVersion, committed_at
from sparkhvd.data.parquet.dataset import TABLE_FOLDERS, table_of
from sparkhvd.data.store.addresses import without_secrets
from sparkhvd.data.store.remote import RemoteStore
from sparkhvd.data.store.store import Store
from sparkhvd.spark import is_connect
from sparkhvd.wire import read_json

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject, JavaPackage, JVMView
    from pyspark.sql import DataFrame, SparkSession


# Number of a plan's folders to check. A remote folder costs some round trips, or a Spark task if only executors see it.
_FOLDERS = 8
_UNSEEN_FOLDERS = 1
# Longest wait for the Spark task of a Connect client. It is short, because the check is optional.
_LIMIT_S = 10.0
# Hash of the Java object with which Iceberg names a table by its path; it differs in every process.
_IDENTITY = re.compile(r"(?<=PathIdentifier)@[0-9a-f]+")
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*:(?://[^/]*)?)?(.*)", re.DOTALL)


def warn_of_tables(df: DataFrame, store: Store) -> None:
    """Warn if a DataFrame reads files of a table without the table's log, so that deleted rows reappear.

    The check covers local paths, and file systems of the store's scheme, which it opens with the store's options. A
    Connect client without access to the store checks in a Spark task; nothing else starts a job. It never fails.
    """
    found: dict[str, str] = {}
    # Ignore any error of pyspark, file systems or another version's plan: the check is optional.
    with contextlib.suppress(Exception):
        found.update(_found(df, store))
    for text in found.values():
        warnings.warn(text, stacklevel=2)


def _found(df: DataFrame, store: Store) -> Iterator[tuple[str, str]]:
    """Yield the folder of each table, with the warning for the user."""
    spark = df.sparkSession
    roots = connect.file_roots(df) if is_connect(spark) else file_roots(df)
    limit = _FOLDERS if store.is_seen else _UNSEEN_FOLDERS
    for root in list(dict.fromkeys(roots))[:limit]:
        beginning, path = _parts(root)
        # `list_above` looks beside and above a path. The made-up name "_" lets it look inside the folder, too.
        url = f"{beginning}{quote(path) if beginning else path}/_"
        place = Store(url)
        if not place.is_local:
            if place._place.address.scheme != store.direct._place.address.scheme:
                continue
            place = Store(url, store.direct._place.options)
        if not store.is_seen:
            place = RemoteStore(place, spark, _LIMIT_S)
        for table in filter(None, map(table_of, place.list_above(TABLE_FOLDERS))):
            folder, log = posixpath.split(posixpath.normpath(f"{path}/_/{table.log}"))
            if log == "_spark_metadata" and folder == path:
                continue  # Spark itself reads this log
            folder = beginning + folder
            yield (
                folder,
                f"The DataFrame reads files in {folder!r} without the log {log!r}, which shows that the folder is {table.kind}. Only the log "
                "tells which files hold the table's rows; other files may hold deleted or earlier rows, and the fit would train on them, "
                f"too. Read the table instead: {table.reader}({folder!r}).",
            )
            break


def _parts(url: str) -> tuple[str, str]:
    """Split an unquoted Hadoop path or URL into "scheme://host" (or "") and the path."""
    match = _URL.fullmatch(url)
    assert match is not None
    return match[1] or "", posixpath.normpath(match[2]) if match[2] else ""


# ----------------------------------------------------------------------------------------------------
# Identify a classic DataFrame's data by its analyzed plan, without a job.
# This is the only module of `data` that uses Spark's JVM objects, because no public call returns the sources of a plan.

# Obstacle to reuse of a plan that calls rand() or reads the clock.
OTHER_VALUES = "the plan gives other values each time"
# The state of every source file is read. Above this number of files that costs more than reuse saves.
_MAX_INPUT_FILES = 5000
# One task writes this much in about 0.1 s (docs/results/materialize.md); each further task costs a Python call and a
# file.
_SMALL_BYTES = 8 << 20
_PARTITIONS_PER_SLOT = 4
# Leaves whose content is in the plan itself. LocalRelation is not one of them: its text has columns but no rows, and
# the plan's hash of the rows has so few bits that rows with other signs collide.
_VALUE_LEAVES = frozenset({"Range", "OneRowRelation"})
# Any SQL conf may change the rows of a plan, except confs with these names, which only affect location and speed.
_SQL_CONF = "spark.sql."
_OTHER_CONFS = tuple(
    _SQL_CONF + name
    for name in (
        "adaptive.",
        "artifact.",
        "autoBroadcastJoinThreshold",
        "broadcastTimeout",
        # Iceberg sets these two confs when it reads a path. They need no place in the key, which has the ids of tables.
        "catalog.default_cache_iceberg",
        "catalog.default_iceberg",
        "catalogImplementation",
        "debug.",
        "execution.arrow.",
        "files.maxPartitionBytes",
        "files.maxPartitionNum",
        "files.minPartitionNum",
        "files.openCostInBytes",
        "inMemoryColumnarStorage.",
        "maxPlanStringLength",
        "pyspark.",
        "repl.",
        "shuffle.",
        "sources.parallelPartitionDiscovery.",
        "streaming.",
        "ui.",
        "warehouse.dir",
    )
)
# A LogicalRelation is any source of Spark's first data source API, including JDBC. The state of its files identifies
# its content only for plain files, because the log of a table format may delete rows in files.
_FILE_RELATION = "HadoopFsRelation"
_FILE_INDEXES = frozenset({"InMemoryFileIndex", "CatalogFileIndex"})
# File formats without state of their own: the options and schemas of a relation describe them completely.
_FILE_FORMATS = frozenset(
    {
        "org.apache.spark.ml.source.image.ImageFileFormat",
        "org.apache.spark.ml.source.libsvm.LibSVMFileFormat",
        "org.apache.spark.sql.avro.AvroFileFormat",
        "org.apache.spark.sql.execution.datasources.binaryfile.BinaryFileFormat",
        "org.apache.spark.sql.execution.datasources.csv.CSVFileFormat",
        "org.apache.spark.sql.execution.datasources.json.JsonFileFormat",
        "org.apache.spark.sql.execution.datasources.orc.OrcFileFormat",
        "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat",
        "org.apache.spark.sql.execution.datasources.text.TextFileFormat",
        "org.apache.spark.sql.execution.datasources.xml.XmlFileFormat",
    }
)
# Names in Spark of expressions that run code, which may read anything. Some versions of Spark lack some names.
_CODE_PATTERNS = (
    "PYTHON_UDF",
    "EVAL_PYTHON_UDF",
    "EVAL_PYTHON_UDTF",
    "TRANSPILED_PYTHON_UDF",
    "EXTERNAL_UDF",
    "USER_DEFINED_AGGREGATION",
    "DESERIALIZE_TO_OBJECT",
    "TYPED_FILTER",
)
# Expressions with random or otherwise changing values.
_NONDETERMINISTIC = "org.apache.spark.sql.catalyst.expressions.Nondeterministic"
# Transformers of Spark ML run Scala functions of these packages, which are known to read nothing else.
_ML_PACKAGES = ("org.apache.spark.ml.", "org.apache.spark.sql.ml.")


@dataclass(frozen=True)
class PlanFacts:
    """Facts that identify the rows that a plan reads, to decide whether written data can be reused.

    Attributes:
        obstacle: reason why the data have no identity; "" if they have one.
        plan: JSON of everything that decides the rows, except the content of files.
        files: URL, size and time of change of every source file.
        tables: version of every Delta and Iceberg table that is scanned.
    """

    obstacle: str
    plan: str = ""
    files: tuple[tuple[str, int, int], ...] = ()
    tables: tuple[TableVersion, ...] = ()


def plan_facts(df: DataFrame) -> PlanFacts:
    """Collect facts of a DataFrame. Two DataFrames with equal facts have equal data.

    Other plans have an obstacle: the leaves must be file scans, scans of Delta and Iceberg tables or `range`, and no
    expression may depend on anything else.
    """
    # The class of the DataFrame decides, because is_remote() describes the whole process.
    if "pyspark.sql.connect" in type(df).__module__:
        return PlanFacts("a Spark Connect client does not see what a plan reads")
    plan = df._jdf.queryExecution().analyzed()
    leaves = [_leaf(leaf) for leaf in _items(plan.collectLeaves())]
    others = sorted({name for name, is_known in leaves if not is_known})
    if others:
        return PlanFacts(f"the plan reads {', '.join(others)}")
    patterns = _jvm(df.sparkSession).org.apache.spark.sql.catalyst.trees.TreePattern
    # Spark counts the clock as deterministic, so it needs its own check. A subquery hides its leaves.
    if plan.containsPattern(patterns.CURRENT_LIKE()) or not _is_repeatable(plan, df.sparkSession):
        return PlanFacts(OTHER_VALUES)
    if not plan.deterministic():
        return PlanFacts("Spark counts a stage of Spark ML in the plan as nondeterministic")
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
    has_functions = plan.containsPattern(patterns.SCALA_UDF())
    try:
        scans = _table_scans(df, plan)
    except _UnknownVersionError as e:
        return PlanFacts(str(e))
    description = _description(df, plan, has_functions)
    details = [[table.identity, detail] for table, detail in scans]
    versions = tuple(table for table, _ in scans)
    return PlanFacts("", json.dumps([*description, details]), tuple(files), versions)


def has_small_partitions(df: DataFrame) -> bool:
    """Whether a DataFrame of few rows on a local master has many partitions.

    Each partition costs a task and a file.

    True only if the plan shows it: `repartition` or `range` sets the number of partitions, no user code is above it,
    and the sources are small. Then one task takes less time than many. On a cluster it would not, because there the
    tasks on other hosts also import the modules that ranks need.
    """
    if is_connect(df.sparkSession):
        return False
    from py4j.protocol import Py4JJavaError

    context = df.sparkSession.sparkContext
    if not re.match(r"local(\[|$)", context.master or ""):
        return False
    plan = node = df._jdf.queryExecution().analyzed()
    while (name := _class_name(node)) in ("Project", "Filter", "SubqueryAlias"):
        node = node.child()
    if name == "Range":
        given = node.numSlices()
        num_partitions = int(given.get()) if given.isDefined() else 0
    # If the user gave no number of partitions, adaptive execution joins small partitions.
    elif name == "Repartition" or (
        name == "RepartitionByExpression" and node.optNumPartitions().isDefined()
    ):
        num_partitions = int(node.numPartitions())
    else:
        return False
    if num_partitions <= _PARTITIONS_PER_SLOT * context.defaultParallelism:
        return False
    try:
        if int(str(plan.stats().sizeInBytes())) > _SMALL_BYTES:
            return False
    except Py4JJavaError:  # some sources have no statistics yet
        return False
    patterns = _jvm(df.sparkSession).org.apache.spark.sql.catalyst.trees.TreePattern
    return not any(
        _contains(plan, patterns, name) for name in (*_CODE_PATTERNS, "SCALA_UDF", "GENERATE")
    )


# Stages of Spark ML that change the values of a vector, drop its elements' names and keep their order.
_ELEMENTWISE = re.compile(
    r"org\.apache\.spark\.ml\.feature\."
    r"(StandardScalerModel|MinMaxScalerModel|MaxAbsScalerModel|RobustScalerModel|Normalizer|ElementwiseProduct)\b"
)


def element_names(df: DataFrame, column: str) -> dict[int, str]:
    """Find a vector's element names in Spark ML's metadata, by index, or {} without names.

    A scaler of Spark ML drops them: the names are then of the vector before it, as far as the plan of a classic DataFrame shows it.
    """
    names = _attribute_names(df.schema[column].metadata or {})
    if names or is_connect(df.sparkSession):
        return names
    plan = df._jdf.queryExecution().analyzed()
    matching = [each for each in _items(plan.output()) if each.name() == column]
    attribute = matching[0] if len(matching) == 1 else None
    made: dict[int, JavaObject] = {}
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        nodes += _items(node.children())
        if _class_name(node) == "Project":
            made |= {
                each.exprId().id(): each.child()
                for each in _items(node.projectList())
                if _class_name(each) == "Alias"
            }
    while attribute is not None and not names:
        source = made.get(attribute.exprId().id())
        if source is not None and _class_name(source) == "ScalaUDF":
            is_elementwise = _ELEMENTWISE.match(_java_name(source.function()))
            inputs = list(_items(source.children())) if is_elementwise else []
            source = inputs[0] if len(inputs) == 1 else None
        is_column = source is not None and _class_name(source) == "AttributeReference"
        attribute = source if is_column else None
        if attribute is not None:
            names = _attribute_names(read_json(attribute.metadata().json(), most_bytes=None))
    return names


def _attribute_names(metadata: Mapping[str, Any]) -> dict[int, str]:
    groups = metadata.get("ml_attr", {}).get("attrs", {}).values()
    return {a["idx"]: a["name"] for group in groups for a in group if "idx" in a and "name" in a}


def file_roots(df: DataFrame) -> list[str]:
    """List the paths of a classic DataFrame's scans, at most two per scan.

    It starts no job and lists no files.
    """
    roots = []
    for leaf in _items(df._jdf.queryExecution().analyzed().collectLeaves()):
        if _is_relation(leaf) and _leaf(leaf) == (_FILE_RELATION, True):
            given = leaf.relation().location().rootPaths()
            # Two are enough, because several paths of one scan are usually parts of one table.
            roots += [str(given.apply(i).toString()) for i in range(min(2, given.size()))]
    return roots


def _description(df: DataFrame, plan: JavaObject, has_functions: bool) -> list[object]:
    """Describe everything that decides the rows of a plan, except the content of its files.

    The description is equal in every process. `semanticHash()` of the plan is not: it includes the identity of a
    relation's file format object, which differs in every JVM.
    """
    session = df.sparkSession
    canonical = plan.canonicalized()
    relations = [
        _relation(leaf, session)
        for leaf in _items(plan.collectLeaves())
        if _is_relation(leaf) and not _is_delta(leaf)
    ]
    return [
        str(session.version),
        _text(canonical),
        _structure(canonical, session),
        _hashes(canonical),
        # A canonical plan has no names of its columns, nor of the columns of its files.
        str(plan.schema().json()),
        relations,
        # Functions are compared by object identity, which is valid only in this application.
        session.sparkContext.applicationId if has_functions else "",
        _caches(df),
        _sql_confs(df),
    ]


def _jvm(session: SparkSession) -> JVMView:
    jvm: JVMView | None = session._jvm
    assert jvm is not None  # a classic session has a JVM
    return jvm


def _class_name(java_object: JavaObject) -> str:
    return str(java_object.getClass().getSimpleName())


def _text(plan: JavaObject) -> str:
    """Format a plan as complete text. Its `toString` stops after 25 columns."""
    from py4j.protocol import Py4JError

    whole = (True, False, 2**31 - 1, False)  # verbose, suffix, most fields, operator ids
    try:
        text = str(plan.treeString(*whole, False))
    except Py4JError:  # the method has one argument less in Spark 3.5
        text = str(plan.treeString(*whole))
    return _IDENTITY.sub("", text)


def _structure(canonical: JavaObject, session: SparkSession) -> str:
    """Convert a plan to JSON, because its text has no quotes and no types: '1' and 1 look alike."""
    from py4j.protocol import Py4JJavaError

    try:
        text = str(canonical.toJSON())
    except Py4JJavaError:
        # Some nodes do not support JSON: then the plan is valid only in this application.
        return str(session.sparkContext.applicationId)
    text = re.sub(r'"jvmId":"[^"]*"', "", text)
    # In JSON, binary literals are memory addresses; the plan's text has their bytes.
    return re.sub(r'"value":"\[B@[0-9a-f]+"', "", text)


def _hashes(node: JavaObject) -> list[object]:
    """Hash every node's expressions, with facts missing in text and JSON, such as ANSI mode."""
    below = [_hashes(child) for child in _items(node.children())]
    return [int(node.expressions().hashCode()), below]


def _is_relation(leaf: JavaObject) -> bool:
    return _class_name(leaf) == "LogicalRelation"


def _relation(leaf: JavaObject, session: SparkSession) -> list[object]:
    """Describe a scan's format, options, schemas and partitions."""
    relation = leaf.relation()
    form = relation.fileFormat()
    name = str(form.getClass().getName())
    state: list[object] = []
    # The format may have unknown state: identify its object, in this application only.
    if name not in _FILE_FORMATS:
        state = [session.sparkContext.applicationId, int(form.hashCode())]
    index = relation.location()
    roots = str(index.rootPaths().mkString("\n"))
    if _class_name(index) == "CatalogFileIndex":  # the catalog holds the values of the partitions
        nil = getattr(_jvm(session).scala.collection.immutable, "Nil$")
        index = index.filterPartitions(getattr(nil, "MODULE$"))
    partitions = index.partitionSpec().partitions()
    return [
        name,
        state,
        roots,
        [str(s.json()) for s in (relation.dataSchema(), relation.partitionSchema(), leaf.schema())],
        sorted(str(relation.options().toSeq().mkString("\0")).split("\0")),
        [str(partitions.mkString("\n")), int(partitions.hashCode())],
    ]


def _sql_confs(df: DataFrame) -> list[str]:
    """List the SQL confs that are set and may change the rows of a plan."""
    confs = df._jdf.sparkSession().sessionState().conf().getAllConfs()
    pairs = str(confs.toSeq().mkString("\0")).split("\0")  # entries are "(name,value)"
    return sorted(
        pair
        for pair in (p[1:-1] for p in pairs)
        if pair.startswith(_SQL_CONF) and not pair.startswith(_OTHER_CONFS)
    )


def _items(sequence: JavaObject) -> Iterator[JavaObject]:
    for i in range(sequence.size()):
        yield sequence.apply(i)


def _leaf(leaf: JavaObject) -> tuple[str, bool]:
    """Name a leaf's source, and tell whether the source's content can be identified."""
    if _is_iceberg(leaf):
        return _ICEBERG, True
    if not _is_relation(leaf):
        name = _class_name(leaf)
        return name, name in _VALUE_LEAVES
    if _is_delta(leaf):
        return _DELTA_INDEX, True
    relation = leaf.relation()
    source = _class_name(relation)
    if source != _FILE_RELATION:
        return source, False
    index = _class_name(relation.location())
    return (source, True) if index in _FILE_INDEXES else (index, False)


# -- tables ------------------------------------------------------------------------------------------

_ICEBERG = "an Iceberg table"
_ICEBERG_TABLE = "org.apache.iceberg.spark.source.SparkTable"
_ICEBERG_SCAN = "org.apache.iceberg.spark.source.SparkBatchQueryScan"
# Class of Iceberg's data tables. Metadata tables have other classes; their rows change with every commit.
_ICEBERG_DATA = "org.apache.iceberg.BaseTable"
_DELTA_INDEX = "TahoeLogFileIndex"


class _UnknownVersionError(Exception):
    """Raised for a scan of a table without a known version. The text becomes the obstacle."""


def _java_name(java_object: JavaObject) -> str:
    return str(java_object.getClass().getName())


def _is_iceberg(leaf: JavaObject) -> bool:
    name = _class_name(leaf)
    return name == "DataSourceV2Relation" and _java_name(leaf.table()) == _ICEBERG_TABLE


def _is_delta(leaf: JavaObject) -> bool:
    if not _is_relation(leaf) or _class_name(leaf.relation()) != _FILE_RELATION:
        return False
    return _class_name(leaf.relation().location()) == _DELTA_INDEX


def _table_scans(df: DataFrame, plan: JavaObject) -> list[tuple[TableVersion, str]]:
    """Find every scanned table's version, with a text to identify the scan's columns.

    Raises:
        _UnknownVersionError: the version of a scanned table is unknown.
    """
    from py4j.protocol import Py4JError

    leaves = list(_items(plan.collectLeaves()))
    icebergs = [leaf for leaf in leaves if _is_iceberg(leaf)]
    try:
        found = [_delta_scan(leaf) for leaf in leaves if _is_delta(leaf)]
        if icebergs:
            scans = _iceberg_scans(df)
            # The optimizer may change the order of scans. The requested version of each leaf distinguishes two
            # snapshots of one table.
            asked = [
                [
                    str(leaf.table().snapshotId()),
                    str(leaf.table().branch()),
                    str(leaf.options().asCaseSensitiveMap()),
                ]
                for leaf in icebergs
            ]
            found += [(version, f"{detail} {asked}") for version, detail in scans]
    except (Py4JError, AttributeError, TypeError) as e:
        # Another version of the library lacks a method.
        raise _UnknownVersionError("the plan reads a table whose version is unknown") from e
    if len(found) != sum(map(_is_delta, leaves)) + len(icebergs):
        raise _UnknownVersionError("the plan reads a table in a way that has no version")
    return found


def _iceberg_scans(df: DataFrame) -> list[tuple[TableVersion, str]]:
    """Find the snapshot of each scan of an Iceberg table, with the scan's text.

    Only the optimized plan has the scans, which know the snapshot chosen by options, SQL, branch or tag. The table's
    current snapshot may be newer.
    """
    found = []
    for leaf in _items(df._jdf.queryExecution().optimizedPlan().collectLeaves()):
        if _class_name(leaf) != "DataSourceV2ScanRelation":
            continue
        scan = leaf.scan()
        table = leaf.relation().table()
        if _java_name(scan) != _ICEBERG_SCAN or _java_name(table.table()) != _ICEBERG_DATA:
            raise _UnknownVersionError(f"the plan reads {_class_name(scan)} of {table.name()}")
        snapshot = _field(scan, "scan").snapshot()
        if snapshot is None:
            raise _UnknownVersionError(f"the plan reads {table.name()}, which has no snapshot")
        version = TableVersion(
            "iceberg",
            str(table.name()),
            without_secrets(str(table.table().location())),
            str(table.table().uuid()),
            int(snapshot.snapshotId()),
            committed_at(int(snapshot.timestampMillis())),
        )
        # The text has the ids of columns. They matter because replacing a column by another column of the same name
        # makes no snapshot.
        found.append((version, str(scan.toString())))
    return found


def _field(java_object: JavaObject, name: str) -> JavaObject:
    """Read a private field of a Java object, also one declared by a base class."""
    kind = java_object.getClass()
    while kind is not None:
        for field in kind.getDeclaredFields():
            if field.getName() == name:
                field.setAccessible(True)
                return field.get(java_object)
        kind = kind.getSuperclass()
    raise AttributeError(name)


def _delta_scan(leaf: JavaObject) -> tuple[TableVersion, str]:
    """Find the version read by a scan of a Delta table, by Delta's public methods.

    It is untested with Delta's jar.
    """
    index = leaf.relation().location()
    snapshot = index.getSnapshot()
    metadata = snapshot.metadata()
    path = without_secrets(str(index.path().toString()))
    version = TableVersion("delta", path, path, str(metadata.id()), int(snapshot.version()))
    filters = str(index.partitionFilters().mkString("\n"))
    # The schema has the ids and stored names of columns.
    return version, f"{metadata.schemaString()}\n{filters}\n{leaf.schema().json()}"


def _contains(plan: JavaObject, patterns: JavaPackage, name: str) -> bool:
    from py4j.protocol import Py4JError

    try:
        pattern = getattr(patterns, name)()
    except (Py4JError, TypeError):  # another version of Spark lacks the pattern
        return False
    return bool(plan.containsPattern(pattern))


def _is_repeatable(plan: JavaObject, session: SparkSession) -> bool:
    """Whether a plan gives the same values each time it is computed.

    StringIndexer and VectorAssembler mark their functions as nondeterministic only to run once per row.
    """
    if plan.deterministic():
        return True
    from py4j.java_gateway import is_instance_of

    gateway = session.sparkContext._gateway

    def gives_same(expression: JavaObject) -> bool:
        if expression.deterministic():
            return True
        below = list(_items(expression.children()))
        if _class_name(expression) == "ScalaUDF":
            name = str(expression.function().getClass().getName())
            return name.startswith(_ML_PACKAGES) and all(map(gives_same, below))
        is_source = is_instance_of(gateway, expression, _NONDETERMINISTIC) or all(
            c.deterministic() for c in below
        )
        return not is_source and all(map(gives_same, below))

    below = (_is_repeatable(child, session) for child in _items(plan.children()))
    return all(map(gives_same, _items(plan.expressions()))) and all(below)


def _is_ml_code(plan: JavaObject, patterns: JavaPackage) -> bool:
    """Whether every Scala function in a plan belongs to Spark ML."""
    scala = patterns.SCALA_UDF()

    def is_ml(expression: JavaObject) -> bool:
        if _class_name(expression) == "ScalaUDF" and not (
            str(expression.function().getClass().getName()).startswith(_ML_PACKAGES)
        ):
            return False
        below = _items(expression.children())
        return all(is_ml(child) for child in below if child.containsPattern(scala))

    here = (e for e in _items(plan.expressions()) if e.containsPattern(scala))
    below = (child for child in _items(plan.children()) if child.containsPattern(scala))
    return all(map(is_ml, here)) and all(_is_ml_code(child, patterns) for child in below)


def _caches(df: DataFrame) -> list[str | int]:
    """List the caches used by the plan. A cache holds rows of the time when it was filled.

    A cache is identified by its Java object, so the name is valid only in this application.
    """
    session = df.sparkSession
    leaves = _items(df._jdf.queryExecution().withCachedData().collectLeaves())
    builders = [leaf.cacheBuilder() for leaf in leaves if _class_name(leaf) == "InMemoryRelation"]
    if not builders:
        return []
    identities = [_jvm(session).java.lang.System.identityHashCode(b) for b in builders]
    return [session.sparkContext.applicationId, *identities]


def _file_state(df: DataFrame, url: str) -> tuple[int, int] | None:
    """Read size and time of change of a source file, or None if unknown.

    The time is in ns for local files, else in ms.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        try:
            stat = Path(unquote(parts.path)).stat()
        except OSError:
            return None
        return stat.st_size, stat.st_mtime_ns
    from py4j.protocol import Py4JJavaError

    session = df.sparkSession
    path = _jvm(session).org.apache.hadoop.fs.Path(url)
    try:
        system = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        status = system.getFileStatus(path)
    except Py4JJavaError:
        return None
    return int(status.getLen()), int(status.getModificationTime())
