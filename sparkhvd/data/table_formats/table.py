"""Open a table of any format by path, URL or name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkhvd.data.parquet.dataset import ParquetDataset, store_of, table_of
from sparkhvd.data.store import addresses
from sparkhvd.data.store.store import Store
from sparkhvd.data.table_formats import delta, iceberg
from sparkhvd.data.table_formats.version import VersionRequest
from sparkhvd.data.table_formats.where import Where, parse
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HINT = "version-hint.text"
_NUMBER = re.compile(r"v?(\d+)\b.*\.metadata\.json(\.gz)?")


def open_table(
    table: str | os.PathLike[str],
    request: VersionRequest,
    spark: SparkSession,
    *,
    where: Where | None = None,
    catalog: object = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ParquetDataset:
    """Find the files of a version of a table, without a Spark job.

    Args:
        table: path or URL of a Delta table's folder, of an Iceberg table's folder or metadata file; or a name,
            "catalog.database.table".
        request: requested version.
        spark: session, whose configuration may have the catalog.
        where: filter of the rows.
        catalog: Iceberg catalog: an object of pyiceberg, a dict of properties, or a name.
        storage_options: as for `Store.create`.

    Raises:
        InvalidArgumentError: the table or version does not exist, a package is missing, or the table needs a feature
            that this package lacks.
    """
    condition = None if where is None else parse(where)
    text = os.fspath(table)
    if not isinstance(text, str) or not text.strip():
        raise InvalidArgumentError(
            f"fit_on_table({table!r}): give a path, a URL, or a name like 'catalog.database.table'."
        )
    name = addresses.without_secrets(text)
    if catalog is None and (isinstance(table, os.PathLike) or "/" in text):
        return _by_path(text, name, request, storage_options, condition)
    if catalog is not None:
        loaded = iceberg.load_table(text, name, catalog, storage_options)
        return iceberg.open_iceberg(loaded, name, request, storage_options, condition)
    first, _, rest = text.partition(".")
    if found := _spark_catalog(spark, first):
        loaded = iceberg.load_table(rest, name, found, storage_options)
        return iceberg.open_iceberg(loaded, name, request, storage_options, condition)
    if (location := _delta_location(spark, text)) is not None:
        return delta.open_delta(location, name, request, storage_options, condition)
    loaded = iceberg.load_table(rest or text, name, first if rest else "default", storage_options)
    return iceberg.open_iceberg(loaded, name, request, storage_options, condition)


def _by_path(
    url: str,
    name: str,
    request: VersionRequest,
    options: Mapping[str, Any] | None,
    condition: Any,
) -> ParquetDataset:
    if re.search(r"\.metadata\.json(\.gz)?$", url.partition("?")[0]):
        loaded = iceberg.load_files(_absolute(url), name, options)
        return iceberg.open_iceberg(loaded, name, request, options, condition)
    store = store_of(url, options)
    if store.list("_delta_log"):
        return delta.open_delta(_absolute(url), name, request, options, condition)
    names = [path.rpartition("/")[2] for path in store.list("metadata")]
    if _HINT in names:
        loaded = iceberg.load_files(_absolute(url), name, options)
        return iceberg.open_iceberg(loaded, name, request, options, condition)
    if versions := sorted((int(m[1]), n) for n in names if (m := _NUMBER.fullmatch(n))):
        newest = store.full_url(f"metadata/{versions[-1][1]}")
        raise InvalidArgumentError(
            f"fit_on_table({name!r}): this Iceberg table belongs to a catalog, and only the catalog knows the newest metadata file. "
            f"Give the table's name and catalog=, or the path of a metadata file, such as {newest!r}."
        )
    raise _not_a_table(store, name)


def _not_a_table(store: Store, name: str) -> InvalidArgumentError:
    above = next(filter(None, map(table_of, store.list_above(("_delta_log", "metadata")))), None)
    beside = f" It is a part of {above.kind}: give the table's own folder." if above else ""
    there = "has neither '_delta_log' nor 'metadata'" if store.list("") else "is empty or not there"
    return InvalidArgumentError(
        f"fit_on_table({name!r}): the folder {there}, so it is not a Delta or Iceberg table.{beside} The table may have been moved. "
        "For Parquet without a log call fit_on_parquet(path)."
    )


def _absolute(url: str) -> str:
    return url if ":" in url.partition("/")[0] else os.path.abspath(url)


def _spark_catalog(spark: SparkSession, name: str) -> dict[str, str] | None:
    """Read the properties of an Iceberg catalog from the session's configuration, for pyiceberg, or return None without it."""
    prefix = f"spark.sql.catalog.{name}"
    kind = str(spark.conf.get(prefix, None) or "")
    if "org.apache.iceberg" not in kind:
        return None
    found = {}
    for key in ("type", "uri", "warehouse", "credential", "token", "scope", "oauth2-server-uri"):
        if (value := spark.conf.get(f"{prefix}.{key}", None)) is not None:
            found[key] = str(value)
    if found.get("type") not in ("rest", "hive", "glue"):
        raise InvalidArgumentError(
            f"fit_on_table: the session's catalog {name!r} has the type {found.get('type')!r}, but pyiceberg can only take over the "
            "types rest, hive and glue. Give catalog={...} with pyiceberg's properties, or the table's path."
        )
    return found


def _delta_location(spark: SparkSession, name: str) -> str | None:
    """Find the folder of a Delta table in the session's catalog, or return None if the catalog has no such table."""
    try:
        rows = spark.sql(
            f"DESCRIBE TABLE EXTENDED {name}"
        ).collect()  # the catalog answers without a job
    except Exception:  # noqa: BLE001 - the table does not exist, or the name belongs to another catalog
        return None
    facts = {row[0]: row[1] for row in rows}
    if str(facts.get("Provider", "")).lower() != "delta" or not facts.get("Location"):
        return None
    return str(facts["Location"])
