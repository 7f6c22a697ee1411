"""Arrow arrays of plain values, built from buffers.

`pa.array` checks for pandas objects and imports pandas for that, which costs a second of CPU in every Python worker of
Spark that has not imported it.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def int32_array(*values: int) -> pa.Array:
    import pyarrow as pa

    buffer = pa.py_buffer(struct.pack(f"={len(values)}i", *values))
    return pa.Array.from_buffers(pa.int32(), len(values), [None, buffer])


def binary_array(*values: bytes) -> pa.Array:
    """Build an array of byte strings. They must be less than 2 GiB in total."""
    import pyarrow as pa

    ends = list(accumulate(map(len, values), initial=0))
    offsets = pa.py_buffer(struct.pack(f"={len(ends)}i", *ends))
    content = pa.py_buffer(values[0] if len(values) == 1 else b"".join(values))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, offsets, content])
