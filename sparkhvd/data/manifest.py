"""Manifest of a fit's data: its files and columns. Readers ignore all other files."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.data.store.locks import dump_sealed, load_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.wire import rebuild

# Version 1 had only rows of one size, and version 2 had no checksums of blocks; both can still be read.
FORMAT_VERSION = 3
# Version for the files of a table: an earlier sparkhvd, which would read deleted rows, refuses it.
TABLE_VERSION = 4
READABLE_VERSIONS = (1, 2, 3, 4)
# Spark, pandas and pyarrow skip names that begin with "_" when they read a folder of Parquet files.
MANIFEST_NAME = "_manifest.json"
# Marker file beside data that a reader found damaged; no fit reuses these data.
DAMAGED_NAME = "_damaged"
PACKED, PARQUET = "packed", "parquet"
# (smallest value, largest value)
Range = tuple[int, int]


def joined_ranges(parts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, Range]:
    """Find each column's smallest and largest value over the parts. A part may lack a column."""
    joined: dict[str, Range] = {}
    for part in parts:
        for name, (least, most) in part.items():
            low, high = joined.get(name, (least, most))
            joined[name] = (min(low, least), max(high, most))
    return joined


def packed_rows(are_kept: npt.NDArray[np.bool_]) -> str:
    """Encode a mask (rows,) of a file's rows in at most a sixth of a byte per row."""
    return base64.b64encode(zlib.compress(np.packbits(are_kept).tobytes())).decode()


def unpacked_rows(text: str, rows: int) -> npt.NDArray[np.bool_]:
    """Decode the mask (rows,) of `packed_rows`.

    Raises:
        ValueError: the text is not a mask of `rows` rows.
    """
    size = -(-rows // 8)
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), size + 1)
    except (binascii.Error, zlib.error) as e:
        raise ValueError(f"a mask of rows: {e}") from e
    if len(data) != size or not unpacker.eof:
        raise ValueError(f"a mask of other than {rows} rows")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=rows).astype(np.bool_)


@dataclass(frozen=True)
class DataFile:
    """Parquet file of a data set.

    An external file also has its size and time, to detect changes, and the values of columns that only folder names
    hold.

    Attributes:
        path: path in the store.
        rows: number of rows, without deleted rows.
        row_groups: number of rows of each row group, with deleted rows.
        size: bytes of the file; 0 for packed files.
        modified_ns: time of change in ns since 1970; 0 for packed files, or if unknown.
        partition: (column, value) of every enclosing folder `column=value`; for a table's file, of every column that
            the file lacks.
        footer_crc: CRC-32 of the end of a packed file, starting at its footer; None if unknown.
        values_crc: CRC-32 of the checksums of a packed file's blocks, which cover everything before them; None if
            unknown.
        kept: mask of the rows that remain after a table's deletes and filter, see `packed_rows`; "" keeps all rows.
        names: (column, name in the file) of the columns that have another name in the file.
    """

    path: str
    rows: int
    row_groups: tuple[int, ...]
    size: int = 0
    modified_ns: int = 0
    partition: tuple[tuple[str, int | float | str | None], ...] = ()
    footer_crc: int | None = None
    values_crc: int | None = None
    kept: str = ""
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TableVersion:
    """Version of a table as read by a fit.

    Attributes:
        format: "delta" or "iceberg".
        name: name of the table as the user gave it, without secrets.
        url: URL of the table's folder, without secrets.
        uuid: id of the table; a table that replaces it has another id.
        version: number of the Delta version, or id of the Iceberg snapshot.
        committed: time of the commit in ISO 8601, UTC; "" if unknown.
        where: filter of the rows as SQL; "" without one.
        source: argument of `fit_on_table` that reads this version again: the folder of a Delta table or the metadata
            file of an Iceberg table; "" for a table that Spark has read.
        schema_id: id of the columns of an Iceberg table; None if unknown.
    """

    format: str
    name: str
    url: str
    uuid: str
    version: int
    committed: str = ""
    where: str = ""
    source: str = ""
    schema_id: int | None = None

    @property
    def text(self) -> str:
        """Table and version, for messages."""
        kind = "version" if self.format == "delta" else "snapshot"
        return f"{kind} {self.version} of {self.name!r}"

    @property
    def identity(self) -> str:
        """Identity of the rows: table, version and filter, without the user's table name."""
        return f"{self.format} {self.uuid} {self.version} {self.where}".strip()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def committed_at(milliseconds: int | None) -> str:
    """Convert ms since 1970 to ISO 8601 in UTC, or None to ""."""
    if milliseconds is None:
        return ""
    moment = datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    return moment.isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Manifest:
    """Data of a fit in row order. Materialized rows are ordered by partition index, then position in the partition.

    Attributes:
        files: files in the order of their rows.
        schema: columns with their shapes.
        num_rows: number of rows in all files.
        num_validation: rows marked by the validation column; None without such a column, or if not counted.
        variable_bytes: bytes of all values of each column whose rows differ in length; an estimate for ordinary
            Parquet.
        num_skipped: rows of the DataFrame skipped by `handle_invalid="skip"`.
        ranges: smallest and largest known value of each integer feature and label; both occur in the data.
        format_version: format version of the files.
        layout: "packed", or "parquet" for ordinary Parquet.
        tables: versions of the Delta and Iceberg tables that the rows come from, as far as known.
    """

    files: tuple[DataFile, ...]
    schema: DataSchema
    num_rows: int
    num_validation: int | None = None
    variable_bytes: Mapping[str, int] = field(default_factory=dict)
    num_skipped: int = 0
    ranges: Mapping[str, Range] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    layout: str = PACKED
    tables: tuple[TableVersion, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return self.num_rows * self.schema.row_bytes + sum(self.variable_bytes.values())

    @functools.cached_property
    def digest(self) -> str:
        """Digest of columns and files, equal for equal data in equal files at any location."""
        columns = [(column.name, column.dtype, column.shape) for column in self.schema.columns]
        files = [
            (f.rows, f.size, f.modified_ns, f.partition, f.values_crc, *filter(None, [f.kept]))
            for f in self.files
        ]
        facts: list[Any] = [columns, files]
        if self.tables and self.layout == PARQUET:
            # Files of a table have no checksums; the table's version and the names of its files identify the rows.
            facts.append([table.identity for table in self.tables])
            facts.append([(f.path, f.names) for f in self.files])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def row_bytes(self, names: Iterable[str]) -> int:
        """Compute the bytes in memory per row of these columns, on average if lengths differ."""
        columns = [self.schema.column(name) for name in names]
        fixed = sum(c.row_bytes if c.is_fixed else 16 for c in columns)
        variable = sum(self.variable_bytes.get(c.name, 0) for c in columns if not c.is_fixed)
        return fixed + -(-variable // max(self.num_rows, 1))

    def to_json(self) -> str:
        """Encode the manifest as JSON with a checksum, for `from_json`."""
        values = {
            "format_version": self.format_version,
            "num_rows": self.num_rows,
            "num_validation": self.num_validation,
            "variable_bytes": dict(self.variable_bytes),
            "num_skipped": self.num_skipped,
            "ranges": dict(self.ranges),
            "layout": self.layout,
            "tables": [table.to_dict() for table in self.tables],
            "schema": self.schema.to_dict(),
            "files": [asdict(f) for f in self.files],
        }
        return dump_sealed(values).decode()

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Rebuild the manifest from `to_json`.

        Raises:
            InvalidArgumentError: it is damaged, or has another format version.
        """
        # Manifests of earlier versions have no checksum.
        values = load_sealed(text.encode(errors="surrogateescape"), required=False)
        if values is None or "format_version" not in values:
            raise InvalidArgumentError(
                "The list of the data's files is damaged: its checksum does not match. Fit again: the data are materialized "
                "again."
            )
        if values["format_version"] not in READABLE_VERSIONS:
            raise InvalidArgumentError(
                f"The data have format version {values['format_version']}, but this sparkhvd reads "
                f"{', '.join(map(str, READABLE_VERSIONS))}. Materialize them again."
            )
        try:
            return rebuild(cls, values, is_strict=False)
        except ValueError as e:
            raise InvalidArgumentError(
                f"The list of the data's files is damaged: {e}. Fit again: the data are materialized again."
            ) from e

    def save(self, store: Store, data_dir: str) -> None:
        """Write the manifest. From then on, readers can find the data."""
        store.write_bytes(f"{data_dir}/{MANIFEST_NAME}", self.to_json().encode())

    @classmethod
    def load(cls, store: Store, data_dir: str) -> Manifest:
        """Read the manifest of a data directory.

        Raises:
            InvalidArgumentError: the manifest is damaged or has another format version; the message names its file.
        """
        path = f"{data_dir}/{MANIFEST_NAME}"
        try:
            return cls.from_json(store.read_bytes(path).decode(errors="surrogateescape"))
        except InvalidArgumentError as e:
            raise InvalidArgumentError(f"{store.full_url(path)}: {e}") from None
