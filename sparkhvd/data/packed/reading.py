"""Read a whole file or folder into numpy arrays, for people."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from sparkhvd.data.columns.ragged import Array, SparseRows, Values
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.manifest import MANIFEST_NAME, DataFile, Manifest
from sparkhvd.data.packed.file import PackedFile
from sparkhvd.data.packed.rows import RowSource
from sparkhvd.data.store import addresses
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError

__all__ = ["read_packed"]


def read_packed(path: str | os.PathLike[str], **storage_options: Any) -> dict[str, Any]:
    """Read a packed Parquet file, or a data directory with its manifest, into numpy arrays by column name.

    Args:
        path: a path or URL, as `Store.create` takes it, of a `.parquet` file or of a folder `data/<key>/<app>`.
        **storage_options: as for `Store.create`.

    Returns:
        For every column an array of shape (rows, *shape of a row's value); where rows differ in length, an object array
        of arrays, bytes or strings; of sparse vectors an object array of pairs (indices, values).
    """
    text = os.fspath(path)
    folder, name = addresses.split(text)
    store = Store(folder, storage_options)
    if name.endswith(".parquet"):
        manifest = _manifest_of_file(store, name)
    elif store.exists(f"{name}/{MANIFEST_NAME}"):
        manifest = _manifest_of_folder(store, name)
    else:
        raise InvalidArgumentError(
            f"read_packed({addresses.without_secrets(text)!r}): there is no {MANIFEST_NAME} in that folder, and it is "
            "no .parquet file. Give a folder data/<key>/<app> of a store, or one of its files."
        )
    with RowSource(store, manifest) as source:
        values = source.read([c.name for c in manifest.schema.columns])
    return {c.name: _as_objects(c, values[c.name]) for c in manifest.schema.columns}


def _manifest_of_file(store: Store, name: str) -> Manifest:
    file = PackedFile(store, name)
    try:
        columns = file.columns()
        meta = file.metadata
        groups = tuple(meta.row_group(g).num_rows for g in range(meta.num_row_groups))
    finally:
        file.close()
    files = (DataFile(name, sum(groups), groups),)
    return Manifest(files, DataSchema(tuple(columns), ()), sum(groups))


def _manifest_of_folder(store: Store, name: str) -> Manifest:
    """Load a manifest, with the paths of its files in the folder as it is named now."""
    stored = Manifest.load(store, name)
    moved = tuple(replace(f, path=f"{name}/{PurePosixPath(f.path).name}") for f in stored.files)
    return replace(stored, files=moved)


def _as_objects(column: Column, values: Values) -> Array:
    """Return rows of different lengths as an object array."""
    if isinstance(values, np.ndarray):
        return values
    out = np.empty(len(values), object)
    for i in range(len(values)):
        if isinstance(values, SparseRows):
            out[i] = values.indices.row(i), values.values.row(i)
        elif column.kind == "ragged":
            out[i] = values.row(i)
        else:
            data = values.row(i).tobytes()
            out[i] = data if column.kind == "binary" else data.decode()
    return out
