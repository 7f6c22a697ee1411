"""Packed Parquet: one FIXED_LEN_BYTE_ARRAY column per DataFrame column, a row's little-endian values each.

A column whose rows take as many bytes as they need is a BYTE_ARRAY column with a row's values (of sparse vectors two:
`<name>.indices` and the values), behind a fixed column `<name>.ends`: elements of the row group up to the row's end.
With it a reader knows where any row lies without looking at the rows before.

Columns are required, uncompressed, PLAIN and one page per row group, so a row group's values lie in the file as
one array: a reader asks the footer where, and reads exactly the rows it wants. Files that another writer has
rewritten (several pages, compression) are decoded by pyarrow instead.

Failure: what is read is verified by checksums of blocks (`blocks`); a damaged file is an error that names file, row group and column.

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
