"""The layout of columns in a packed file: its Parquet fields and their sizes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sparkhvd.data.columns.ragged import Ragged, SparseRows
from sparkhvd.data.columns.schema import Column

__all__ = [
    "CHECKSUMS_KEY",
    "MAGIC",
    "METADATA_KEY",
    "PAGE_BYTES",
    "PREFIX_BYTES",
    "little_endian",
    "parquet_fields",
    "payload_types",
    "payloads",
]

METADATA_KEY = b"sparkhvd"
# In that description: true if blocks have checksums, see `blocks`.
CHECKSUMS_KEY = "block_checksums"
# A Parquet file begins with it, and ends with its footer, the footer's length (4 bytes) and it again.
MAGIC = b"PAR1"
# A page's size is an int32 in Parquet; one row group must stay below it in every column.
PAGE_BYTES = 1 << 30
# A BYTE_ARRAY value stands behind its length.
PREFIX_BYTES = 4


def little_endian(dtype: str) -> np.dtype[np.generic]:
    """Return the type as files store it, on any machine."""
    return np.dtype(dtype).newbyteorder("<")


def payload_types(column: Column) -> list[np.dtype[np.generic]]:
    """Return the types of the BYTE_ARRAY columns of a column whose rows differ: of sparse vectors indices and values."""
    if column.is_fixed:
        return []
    values = little_endian(column.dtype)
    return [np.dtype("<i4"), values] if column.kind == "sparse" else [values]


def payloads(values: Ragged | SparseRows) -> list[Ragged]:
    """Return the rows of the BYTE_ARRAY columns of a column, in the order of `payload_types`."""
    return [values.indices, values.values] if isinstance(values, SparseRows) else [values]


def parquet_fields(column: Column) -> list[pa.Field]:
    """Return the Parquet columns of a column. Required fields: no definition levels stand before the values."""
    if column.is_fixed:
        return [pa.field(column.name, pa.binary(column.row_bytes), nullable=False)]
    names = [f"{column.name}.indices", column.name] if column.kind == "sparse" else [column.name]
    ends = pa.field(f"{column.name}.ends", pa.binary(8), nullable=False)
    return [ends, *(pa.field(n, pa.binary(), nullable=False) for n in names)]
