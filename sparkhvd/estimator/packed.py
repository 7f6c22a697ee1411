"""Packed Parquet: one FIXED_LEN_BYTE_ARRAY column per DataFrame column, a row's little-endian values each."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt

__all__ = ["read_packed"]


def read_packed(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Read a packed Parquet file, or a data directory with a manifest, into numpy arrays by column name."""
    raise NotImplementedError
