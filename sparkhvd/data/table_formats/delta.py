"""Find the files, deletion vectors, columns and partition values of a Delta version with the package deltalake."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.data.manifest import TableVersion, committed_at
from sparkhvd.data.parquet.dataset import ParquetDataset, TableFiles, store_of
from sparkhvd.data.store.store import Store, StoredFile
from sparkhvd.data.table_formats import storage
from sparkhvd.data.table_formats.version import (
    VersionRequest,
    has_id,
    missing_extra,
    short,
    unsupported,
)
from sparkhvd.data.table_formats.where import (
    Condition,
    columns_of,
    for_pruning,
    null_columns_of,
    row_filter,
    text_of,
)
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.wire import read_json

if TYPE_CHECKING:
    from deltalake import DeltaTable

# Reader features of Delta that this module supports. With any other feature, the files could have another meaning.
_FEATURES = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
_MAPPING_MODE = "delta.columnMapping.mode"
_PHYSICAL_NAME = "delta.columnMapping.physicalName"
_FIELD_ID = "delta.columnMapping.id"


def open_delta(
    url: str,
    name: str,
    request: VersionRequest,
    options: Mapping[str, Any] | None,
    where: Condition | None,
) -> ParquetDataset:
    """Find the files of a version of a Delta table.

    Args:
        url: URL of the table's folder.
        name: name of the table as the user gave it, for messages.
        request: requested version.
        options: storage options of the store.
        where: filter of the rows, or None.

    Raises:
        InvalidArgumentError: the table or version does not exist, the package is missing, or the table needs a feature
            that this reader lacks.
    """
    table, committed_ms = _load(url, name, request.of_format("Delta"), options)
    _check_features(table, name)
    store = store_of(url, options)
    schema = pa.schema(table.schema().to_arrow())
    rows = None if where is None else row_filter(where, schema, repr(name))
    found = pa.table(table.get_add_actions(flatten=True))
    chosen = _chosen(table, found, schema, where)
    files, values = [], {}
    constants = {c: f"partition.{c}" for c in table.metadata().partition_columns}
    for row in found.select(["path", "size_bytes", *constants.values()]).to_pylist():
        path = unquote(row["path"])
        if urlsplit(row["path"]).scheme or path.startswith("/"):
            raise unsupported(name, f"files outside its folder, as a shallow clone has: {path!r}")
        if path in chosen:
            files.append(StoredFile(path, row["size_bytes"], 0))
            values[path] = {column: row[key] for column, key in constants.items()}
    version = TableVersion(
        "delta",
        name,
        store.url,
        str(table.metadata().id),
        table.version(),
        committed_at(committed_ms),
        "" if where is None else text_of(where),
        store.url,
    )
    facts = TableFiles(
        version,
        _locator(schema, table.metadata().configuration.get(_MAPPING_MODE, "none"), values),
        _deleted(table, name, found, storage.secrets(url, options)),
        rows,
        schema.to_string(show_field_metadata=True, show_schema_metadata=False),
    )
    schema = pa.schema([field.remove_metadata() for field in schema])
    return ParquetDataset(store.url, store, tuple(files), {}, schema, "the table", table=facts)


def _load(
    url: str, name: str, request: VersionRequest, options: Mapping[str, Any] | None
) -> tuple[DeltaTable, int | None]:
    """Load the table at the requested version and return it and the time of its commit in ms since 1970, if known."""
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as e:
        raise missing_extra(name, "deltalake", "delta") from e
    given = storage.for_delta(url, options)
    plain = url.partition("?")[0] if "://" in url else url
    secrets = storage.secrets(url, options)
    try:
        table = DeltaTable(plain, storage_options=given or None)
    except (DeltaError, OSError, ValueError) as e:
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): deltalake cannot open the table: {short(e, secrets)}. Give the folder that holds '_delta_log', and "
            "storage_options to reach it; if the table needs a newer reader, update deltalake or call fit(spark.table(...))."
        ) from None
    newest, store = table.version(), store_of(url, options)
    version = request.version
    if request.as_of is not None:
        version = _version_at(store, newest, request, name)
    try:
        if version is not None:
            table.load_as_version(version)
    except (DeltaError, OSError, ValueError) as e:
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): {request.text} does not exist; the newest version is {newest}. The log keeps old versions for "
            f"delta.logRetentionDuration. Give a version that DESCRIBE HISTORY lists. ({short(e, secrets)})"
        ) from None
    return table, _committed_ms(store, table.version())


def _version_at(store: Store, newest: int, request: VersionRequest, name: str) -> int:
    """Find the newest version committed by the time of the request.

    The times inside the commits are used. The times of the log's files change when a table is copied. deltalake's
    history leaves out commits without a time, which makes its version numbers wrong.
    """
    first = None
    for version in range(newest, -1, -1):
        committed = _committed_ms(store, version)
        if committed is None:
            break
        if committed <= request.as_of_ms:
            return version
        first = f"{version} of {committed_at(committed)}"
    if committed is None and store.exists(_commit(version)):
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): {request.text} cannot be found, because the log has no commit time of version {version}. Give "
            "version=<number>."
        )
    raise InvalidArgumentError(
        f"fit_on_table({name!r}): {request.text} is before the first version in the log, {first or newest}. Give a later time."
    )


def _commit(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


def _committed_ms(store: Store, version: int) -> int | None:
    """Read the time of a commit in ms since 1970, or None if it is not in the log."""
    try:
        lines = store.read_bytes(_commit(version)).splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        action = read_json(line, most_bytes=None) if b'"commitInfo"' in line else None
        if isinstance(action, dict) and isinstance(info := action.get("commitInfo"), dict):
            found = info.get("inCommitTimestamp", info.get("timestamp"))
            return found if isinstance(found, int) else None
    return None


def _check_features(table: DeltaTable, name: str) -> None:
    import deltalake

    protocol = table.protocol()
    others = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if others or protocol.min_reader_version > 3:
        needs = f"the reader features {', '.join(map(repr, others))}" if others else ""
        needs = needs or f"reader version {protocol.min_reader_version}"
        raise unsupported(
            name, f"{needs}, which are not read here (deltalake {deltalake.__version__})"
        )


def _chosen(
    table: DeltaTable, found: pa.Table, schema: pa.Schema, where: Condition | None
) -> set[str]:
    """Select files with possible rows of the filter, or all files if deltalake cannot tell."""
    every = {unquote(path) for path in found.column("path").to_pylist()}
    if where is None:
        return every
    types = {name: schema.field(name).type for name in columns_of(where)}
    # In Delta, the partition value "" of a text column means null, but the library does not compare it as null.
    text = {
        c for c in table.metadata().partition_columns if pa.types.is_string(schema.field(c).type)
    }
    exact = for_pruning(where, types)
    if exact is None or text & null_columns_of(where):
        return every
    try:
        uris = table.file_uris(file_pruning_predicate=text_of(exact))
    except Exception:  # noqa: BLE001 - pruning only saves reading: without it the rows of all files are compared
        return every
    root = _path_of(table.table_uri)
    kept = {posixpath.relpath(_path_of(uri, is_quoted=False), root) for uri in uris}
    return kept if kept <= every else every


def _deleted(
    table: DeltaTable,
    name: str,
    actions: pa.Table,
    secrets: Collection[str],
) -> dict[str, Callable[[], npt.NDArray[np.bool_]]]:
    """Read the deletion vectors, as path -> function to make the mask (rows,) of remaining rows."""
    from deltalake.exceptions import DeltaError

    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    if not hasattr(table, "deletion_vectors"):
        import deltalake

        raise unsupported(
            name, f"deletion vectors, which deltalake {deltalake.__version__} does not list"
        )
    root = _path_of(table.table_uri)
    every = {unquote(path) for path in actions.column("path").to_pylist()}
    found: dict[str, Callable[[], npt.NDArray[np.bool_]]] = {}
    try:
        for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
            for uri, mask in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
                kept = mask.values.to_numpy(zero_copy_only=False)
                path = posixpath.relpath(_path_of(uri), root)
                if path not in every:
                    raise unsupported(
                        name, f"the deletion vector of {path!r}, which is not a file of the version"
                    )
                found[path] = partial(_same, kept)
    except InvalidArgumentError:
        raise
    except (OSError, ValueError, DeltaError) as e:
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): the deletion vectors of the version cannot be read: {short(e, secrets)}. If VACUUM has deleted a "
            "file, give a newer version. Spark may be able to read the version: fit(spark.table(...))."
        ) from None
    return found


def _same(kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    return kept


def _path_of(uri: str, *, is_quoted: bool = True) -> str:
    """Extract host and path from a URI of deltalake."""
    _, mark, rest = uri.partition("://")
    path = rest if mark else uri
    return posixpath.normpath(unquote(path) if mark and is_quoted else path)


def _locator(
    schema: pa.Schema, mode: str, values: Mapping[str, Mapping[str, Any]]
) -> Callable[[str, pa.Schema], tuple[dict[str, str], dict[str, Any]]]:
    """Make the function `TableFiles.locate` for the table's columns."""

    @cache
    def facts() -> dict[str, tuple[str, str]]:
        found = {}
        for field in schema:
            metadata = {k.decode(): v.decode() for k, v in (field.metadata or {}).items()}
            found[field.name] = (
                metadata.get(_PHYSICAL_NAME, field.name),
                metadata.get(_FIELD_ID, ""),
            )
        return found

    def locate(path: str, stored: pa.Schema) -> tuple[dict[str, str], dict[str, Any]]:
        ids = {f.metadata[b"PARQUET:field_id"].decode(): f.name for f in stored if has_id(f)}
        there, names, lacking = set(stored.names), {}, dict(values[path])
        without_id = there - set(ids.values())
        for column, (physical, number) in facts().items():
            if column in lacking:
                continue
            if mode == "id" and number in ids:
                names[column] = ids[number]
            elif mode == "none" and column in there:
                names[column] = column
            # Without ids, deltalake finds columns by physical names, too. That is safe: a physical name is never
            # reused.
            elif (mode == "name" and physical in there) or (
                mode == "id" and physical in without_id
            ):
                names[column] = physical
            else:
                lacking[column] = None
        return names, lacking

    return locate
