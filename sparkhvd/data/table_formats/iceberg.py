"""Find the files, deletes, columns and partition values of an Iceberg snapshot with the package pyiceberg.

Columns are found in a file by their field ids. Position deletes and deletion vectors become masks of rows. Equality
deletes raise an error, because pyiceberg does not read them.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.data.manifest import TableVersion, committed_at
from sparkhvd.data.parquet.dataset import ParquetDataset, TableFiles
from sparkhvd.data.store import addresses
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
    of_iceberg,
    row_filter,
    text_of,
)
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import DataScan, FileScanTask, Table
    from pyiceberg.table.snapshots import Snapshot


def open_iceberg(
    table: Table,
    name: str,
    request: VersionRequest,
    options: Mapping[str, Any] | None,
    where: Condition | None,
) -> ParquetDataset:
    """Find the files of a snapshot of an Iceberg table.

    Args:
        table: table that pyiceberg has loaded.
        name: name of the table as the user gave it, for messages.
        request: requested snapshot.
        options: storage options of the store; None uses the options of the catalog.
        where: filter of the rows, or None.

    Raises:
        InvalidArgumentError: the snapshot does not exist, or the table needs a feature that this reader lacks.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    snapshot = _snapshot(table, name, request.of_format("Iceberg"))
    scan = table.scan(snapshot_id=snapshot.snapshot_id)
    columns = _columns(table, scan, name, request)
    schema = schema_to_pyarrow(columns, include_field_ids=False)
    rows = None if where is None else row_filter(where, schema, repr(name))
    tasks = _tasks(table, scan, columns, schema, where, name)
    root, paths = _common_root([task.file.file_path for task in tasks] or [table.location()])
    given = options if options is not None else storage.of_iceberg(root, table.io.properties)
    store = Store(root, given)
    version = TableVersion(
        "iceberg",
        name,
        addresses.without_secrets(table.location()),
        str(table.metadata.table_uuid),
        snapshot.snapshot_id,
        committed_at(snapshot.timestamp_ms),
        "" if where is None else text_of(where),
        addresses.without_secrets(table.metadata_location),
        columns.schema_id,
    )
    facts = TableFiles(
        version,
        _locator(table, columns, dict(zip(paths, tasks, strict=False)), name),
        _deleted(table, tasks, paths, name),
        rows,
        str(columns),  # names, ids and types
    )
    files = tuple(
        StoredFile(path, task.file.file_size_in_bytes, 0)
        for path, task in zip(paths, tasks, strict=False)
    )
    return ParquetDataset(store.url, store, files, {}, schema, "the table", table=facts)


def load_table(
    identifier: str, name: str, catalog: object, options: Mapping[str, Any] | None
) -> Table:
    """Load a table of a catalog.

    Args:
        identifier: name of the table in the catalog, with its namespace. If `catalog` is a dict of properties,
            "catalog.namespace.table" also names the catalog.
        name: name of the table as the user gave it, for messages.
        catalog: catalog object of pyiceberg, a dict of a catalog's properties, or a name in pyiceberg's configuration.
        options: storage options of the store, which replace the catalog's options.

    Raises:
        InvalidArgumentError: the catalog cannot be reached, or has no such table.
    """
    try:
        from pyiceberg.catalog import Catalog, load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    except ImportError as e:
        raise missing_extra(name, "pyiceberg", "iceberg") from e
    try:
        if isinstance(catalog, Catalog):
            opened: Catalog = catalog
        elif isinstance(catalog, Mapping):
            warehouse = str(catalog.get("warehouse", ""))
            more = storage.for_iceberg(warehouse, options) if options else {}
            given = {**catalog, **more}
            # A catalog that is stored in a database needs its name, because tables are looked up by it.
            if "name" not in given and identifier.count(".") > 1:
                given["name"], _, identifier = identifier.partition(".")
            opened = load_catalog(given.pop("name", None), **given)
        else:
            opened = load_catalog(str(catalog))
        return opened.load_table(identifier)
    except (NoSuchTableError, NoSuchNamespaceError):
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): the catalog has no table {identifier!r}. Give the table's name with the catalog and the "
            "namespace, as in 'catalog.db.table'."
        ) from None
    except InvalidArgumentError:
        raise
    except Exception as e:  # noqa: BLE001 - the libraries behind catalogs raise any class
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): the Iceberg catalog cannot be used: {type(e).__name__}: {short(e, _secrets(catalog, options))}. "
            "Give catalog={'type': 'rest', 'uri': ...} or a catalog object of pyiceberg, or configure pyiceberg."
        ) from None


def load_files(metadata: str, name: str, options: Mapping[str, Any] | None) -> Table:
    """Load a table without a catalog.

    Args:
        metadata: URL of a metadata file, or of the folder of a table with `metadata/version-hint.text`.
        name: name of the table as the user gave it, for messages.
        options: storage options of the store.

    Raises:
        InvalidArgumentError: the table cannot be read.
    """
    try:
        from pyiceberg.table import StaticTable
    except ImportError as e:
        raise missing_extra(name, "pyiceberg", "iceberg") from e
    try:
        # A URL of a store is quoted, but a location of Iceberg is not.
        address = addresses.parse(metadata)
        location = address.root
        # Without the URL's user, because the options have the credentials.
        if address.scheme in ("s3", "gs"):
            location = f"{address.scheme}://{location}"
        elif address.scheme != "file":
            location = unquote(address.url.partition("?")[0])
        return StaticTable.from_metadata(str(location), storage.for_iceberg(metadata, options))
    except InvalidArgumentError:
        raise
    except Exception as e:  # noqa: BLE001 - the libraries behind file systems raise any class
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): pyiceberg cannot open {addresses.without_secrets(metadata)!r}: {type(e).__name__}: "
            f"{short(e, storage.secrets(metadata, options))}. Give the table's name and catalog=, or the path of its newest metadata file."
        ) from None


def _secrets(catalog: object, options: Mapping[str, Any] | None) -> frozenset[str]:
    """Collect the secrets of a catalog and of options.

    The name of a catalog is looked up in pyiceberg's configuration.
    """
    properties = getattr(catalog, "properties", catalog)
    if isinstance(properties, str):
        from pyiceberg.utils.config import Config

        properties = Config().get_catalog_config(properties)
    known = properties if isinstance(properties, Mapping) else {}
    return storage.secrets("", known) | storage.secrets("", options)


# -- the snapshot ------------------------------------------------------------------------------------


def _snapshot(table: Table, name: str, request: VersionRequest) -> Snapshot:
    metadata = table.metadata
    if request.snapshot_id is not None:
        found = table.snapshot_by_id(request.snapshot_id)
    elif request.ref is not None:
        found = table.snapshot_by_name(request.ref)
    elif request.as_of is not None:
        found = table.snapshot_as_of_timestamp(request.as_of_ms)
    else:
        found = table.current_snapshot()
    if found is not None:
        return found
    if request.ref is not None:
        known = f"its branches and tags are {', '.join(sorted(metadata.refs)) or 'none'}"
    else:
        last = [
            f"{s.snapshot_id} of {committed_at(s.timestamp_ms)}" for s in metadata.snapshots[-3:]
        ]
        known = (
            f"its newest snapshots are {', '.join(last)}"
            if last
            else "the table has no snapshot and so no rows"
        )
    raise InvalidArgumentError(
        f"fit_on_table({name!r}): {request.text} does not exist. The snapshot has expired, or it never existed: {known}. Give a snapshot "
        "that the table has."
    )


def _columns(table: Table, scan: DataScan, name: str, request: VersionRequest) -> Schema:
    """Choose the columns to read.

    For the newest version these are the table's columns, which may be newer than its snapshot.
    """
    if request.schema_id is not None:
        found = table.schemas().get(request.schema_id)
        if found is None:
            raise InvalidArgumentError(
                f"fit_on_table({name!r}): the table no longer has schema {request.schema_id}, which the earlier fit used. "
                "Give the metadata file of that time, or a copy of the table."
            )
        return found
    is_newest = request.snapshot_id is None and request.ref is None and request.as_of is None
    return table.schema() if is_newest else scan.projection()


def _tasks(
    table: Table,
    scan: DataScan,
    columns: Schema,
    schema: pa.Schema,
    where: Condition | None,
    name: str,
) -> list[FileScanTask]:
    """Plan the files of a scan, except files ruled out by pyiceberg for the filter."""
    # pyiceberg looks up a filter's columns in the newest schema. Filter only if the names mean the same columns there.
    newest = {field.name: field.field_id for field in table.schema().fields}
    ours = {field.name: field.field_id for field in columns.fields}
    names = set() if where is None else columns_of(where)
    if where is not None and all(newest.get(column) == ours.get(column) for column in names):
        types = {column: schema.field(column).type for column in names}
        try:
            return _planned(table, scan.filter(of_iceberg(where, types)), name)
        except InvalidArgumentError:
            raise
        except Exception:  # noqa: BLE001 - pruning only saves reading: without it the rows of all files are compared
            pass
    return _planned(table, scan, name)


def _planned(table: Table, scan: DataScan, name: str) -> list[FileScanTask]:
    """Plan the files of a scan, each with its delete files, and refuse equality deletes."""
    import pyiceberg

    secrets = storage.secrets("", table.io.properties)
    try:
        tasks = sorted(scan.plan_files(), key=lambda task: task.file.file_path)
    except (ValueError, NotImplementedError) as e:
        if "equality delete" not in str(e):
            raise
        raise unsupported(
            name,
            f"equality deletes, which pyiceberg {pyiceberg.__version__} does not read",
            "Compact the table (rewrite_data_files), which applies them.",
        ) from None
    except OSError as e:
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): a manifest of the snapshot cannot be read: {short(e, secrets)}. The snapshot has expired, or the "
            "table was moved: Iceberg's metadata hold absolute paths. Give a newer snapshot, or move the table back."
        ) from None
    for task in tasks:
        kind = str(getattr(task.file.file_format, "value", task.file.file_format)).upper()
        if kind != "PARQUET":
            raise unsupported(name, f"a reader of {kind} files, but ranks read only Parquet")
    return tasks


def _common_root(urls: Sequence[str]) -> tuple[str, list[str]]:
    """Find the folder above all files and return it as the URL of a store, and the files' paths relative to it."""
    parts = [_split(url) for url in urls]
    if len({host for host, _ in parts}) > 1:
        raise InvalidArgumentError(
            f"The table's files are on several file systems: {', '.join(sorted({h or 'local' for h, _ in parts}))}. Ranks read only "
            "one file system. Call fit(spark.table(...))."
        )
    host = parts[0][0]
    paths = [path.split("/") for _, path in parts]
    common = len(os.path.commonprefix([path[:-1] for path in paths]))
    while common > 1 and not paths[0][common - 1]:  # the URL of a store must not end with "/"
        common -= 1
    root = "/".join(paths[0][:common])
    if not host and not root:
        raise InvalidArgumentError(
            f"The table's files have no common folder, for example {urls[0]!r} and {urls[-1]!r}. Ranks read only below one folder. "
            "Call fit(spark.table(...))."
        )
    if any("" in path[common:] for path in paths):
        raise InvalidArgumentError(
            f"The table has files in several folders with '//' in their keys below {host}{root}, for example {urls[0]!r}, and ranks "
            "cannot read them. Call fit(spark.table(...))."
        )
    # URLs of a store are quoted, but locations of Iceberg are not.
    url = f"{host}{quote(root) or '/'}" if host else root
    return url, ["/".join(path[common:]) for path in paths]


def _split(url: str) -> tuple[str, str]:
    """Split a location into "scheme://host" ("" if local) and path. s3a and s3n become s3."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "", posixpath.normpath(url.removeprefix("file:"))
    host, slash, path = rest.partition("/")
    if scheme == "file":
        return "", posixpath.normpath(slash + path)
    return f"{'s3' if scheme in ('s3a', 's3n') else scheme}://{host}", slash + path


# -- deletes and columns of a file -------------------------------------------------------------------


def _deleted(
    table: Table, tasks: Sequence[FileScanTask], paths: Sequence[str], name: str
) -> dict[str, Callable[[], npt.NDArray[np.bool_]]]:
    """Read the delete files, as path -> function to make the mask (rows,) of remaining rows."""
    having = [task for task in tasks if task.delete_files]
    if not having:
        return {}
    import pyiceberg

    try:
        # The function is private, but it is the library's only reader for all formats of delete files.
        from pyiceberg.io.pyarrow import _read_deletes
    except ImportError as e:
        raise unsupported(
            name,
            f"a reader of delete files, which this pyiceberg {pyiceberg.__version__} does not have where it is expected",
        ) from e
    secrets = storage.secrets("", table.io.properties)
    try:
        read = {
            delete.file_path: _read_deletes(table.io, delete)
            for task in having
            for delete in task.delete_files
        }
    except OSError as e:
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): a delete file of the snapshot cannot be read: {short(e, secrets)}. The snapshot has expired, or the "
            "table was moved. Give a newer snapshot."
        ) from None
    except (ValueError, NotImplementedError) as e:
        raise unsupported(
            name,
            f"delete files that pyiceberg {pyiceberg.__version__} does not read ({short(e, secrets)})",
        ) from None

    def mask(task: FileScanTask) -> npt.NDArray[np.bool_]:
        kept = np.ones(task.file.record_count, np.bool_)
        # Use only the task's own delete files, because a file of deletion vectors may hold an outdated vector of
        # another task.
        for delete in task.delete_files:
            positions = read[delete.file_path].get(task.file.file_path)
            if positions is not None:
                there = positions.to_numpy()
                kept[there[there < len(kept)]] = False
        return kept

    return {
        path: partial(mask, task)
        for path, task in zip(paths, tasks, strict=True)
        if task.delete_files
    }


def _locator(
    table: Table, columns: Schema, tasks: Mapping[str, FileScanTask], name: str
) -> Callable[[str, pa.Schema], tuple[dict[str, str], dict[str, Any]]]:
    """Make the function `TableFiles.locate` for the table's columns."""
    from pyiceberg.transforms import IdentityTransform

    mapping = table.metadata.name_mapping()
    aliases = {n: each.field_id for each in mapping.root for n in each.names} if mapping else {}
    specs = table.metadata.specs()

    @cache
    def identities(spec_id: int) -> dict[int, int]:
        """Map the field id of each identity-partitioned column to the position of its partition value."""
        fields = specs[spec_id].fields if spec_id in specs else ()
        return {
            field.source_id: at
            for at, field in enumerate(fields)
            if isinstance(field.transform, IdentityTransform)
        }

    def locate(path: str, stored: pa.Schema) -> tuple[dict[str, str], dict[str, Any]]:
        ids = {int(f.metadata[b"PARQUET:field_id"]): f.name for f in stored if has_id(f)}
        if not ids:
            ids = {aliases[f.name]: f.name for f in stored if f.name in aliases}
        if not ids and len(stored):
            raise unsupported(
                name,
                "a name mapping, because its files have no field ids (as in a migrated table)",
                "",
            )
        data_file, names, lacking = tasks[path].file, {}, {}
        for field in columns.fields:
            if field.field_id in ids:
                names[field.name] = ids[field.field_id]
            elif (at := identities(data_file.spec_id).get(field.field_id)) is not None:
                lacking[field.name] = data_file.partition[at]
            else:
                lacking[field.name] = field.initial_default
        return names, lacking

    return locate
