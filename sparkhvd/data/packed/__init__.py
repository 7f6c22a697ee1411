"""Packed Parquet: each DataFrame column is a FIXED_LEN_BYTE_ARRAY column of the rows' little-endian values.

A column with rows of variable size is a BYTE_ARRAY column of each row's values (for sparse vectors two:
`<name>.indices` and the values), preceded by a fixed column `<name>.ends`: elements of the row group up to the row's
end. The column of ends gives the position of any row without reading earlier rows.

Columns are required, uncompressed, PLAIN and one page per row group, so a row group's values are
one array in the file: a reader finds it by the footer, and reads exactly the wanted rows. Files
rewritten by another writer (several pages, compression) are decoded by pyarrow instead.

Failure: checksums of blocks (`checksums`) verify every read; a damaged file raises an error that names file, row group
and column.

Each module imports only those above it:

    checksums  checksums of a file's blocks
    file       values of an open file, in place
    rows       rows by number
    writer     writes files
"""

from sparkhvd.data.packed.file import METADATA_KEY
from sparkhvd.data.packed.rows import RowSource, read_packed
from sparkhvd.data.packed.writer import ROW_GROUP_BYTES, PackedWriter, write_packed

__all__ = [
    "METADATA_KEY",
    "ROW_GROUP_BYTES",
    "PackedWriter",
    "RowSource",
    "read_packed",
    "write_packed",
]
