"""List the files and folders of a store."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.fs as pafs

from sparkhvd.data.store.place import TEMPORARY, Place
from sparkhvd.errors import StoreError

__all__ = [
    "Paths",
    "StoredFile",
    "data_directories",
    "last_change",
    "list_above",
    "list_files",
    "list_paths",
    "unfinished",
]

Paths = list[str]  # a class with a method `list` needs another name for the type
# Folders above a root that are looked at: deeper paths hardly exist, and each level costs a round trip.
_LEVELS = 16


@dataclass(frozen=True)
class StoredFile:
    """A file of a store: its path, its bytes, and when it changed in ns since 1970; 0 if unknown."""

    path: str
    size: int
    modified_ns: int


def list_paths(place: Place, path: str, *, recursive: bool) -> Paths:
    """List a folder, sorted, without unfinished files; empty if it does not exist.

    Args:
        place: of the store.
        path: the folder.
        recursive: list all files below it, instead of the files and folders directly in it.
    """
    return sorted(
        place.relative(info.path)
        for info in _infos(place, path, recursive=recursive)
        if not info.base_name.startswith(TEMPORARY)
        and (not recursive or info.type == pafs.FileType.File)
    )


def list_files(place: Place) -> tuple[StoredFile, ...]:
    """List every file below the root with size and time, sorted by path; a root that is a file is ".".

    Raises:
        FileNotFoundError: the root does not exist.
    """
    with place.explained("read", ""):
        root = place.fs.get_file_info(place.root)
        if root.type == pafs.FileType.File:
            infos = [root]
        else:
            infos = place.fs.get_file_info(pafs.FileSelector(place.root, recursive=True))
    files = [
        StoredFile(place.relative(info.path), info.size or 0, info.mtime_ns or 0)
        for info in infos
        if info.type == pafs.FileType.File
    ]
    return tuple(sorted(files, key=lambda file: file.path))


def list_above(place: Place, names: Sequence[str]) -> Paths:
    """List the files directly in folders of these names that lie beside or above the root, as "../name/file".

    Only the names are asked for: a folder above may have very many entries. A level that may not be read counts as one without them.
    """
    with place.explained("read", ""):
        fs, root = place.fs, place.root
    found = []
    for folder in _folders_above(place, root):
        try:
            infos = fs.get_file_info([posixpath.join(folder, name) for name in names])
            for info in infos:
                if info.type == pafs.FileType.Directory:
                    found += [i.path for i in fs.get_file_info(pafs.FileSelector(info.path))]
        except Exception:  # noqa: BLE001, S112 - drivers of fsspec raise what they like
            continue
    return sorted(posixpath.relpath(path, root) for path in found)


def last_change(place: Place, path: str) -> float | None:
    """Return the time of the last change in a folder, in s since 1970; None if it is unknown."""
    infos = [place.info(path), *_infos(place, path, recursive=True)]
    times = [info.mtime_ns for info in infos if info.mtime_ns]
    return max(times) / 1e9 if times else None


def data_directories(place: Place) -> Paths:
    """List the folders `data/<key>/<owner>`; a key that may not be listed stands for its owners."""
    directories = []
    for key in _folders(place, "data"):
        try:
            directories += _folders(place, key)
        except StoreError:  # its user lets nobody list it
            directories.append(key)
    return directories


def unfinished(place: Place, path: str) -> Paths:
    """List the files directly in a folder that were never finished."""
    return [
        place.relative(info.path)
        for info in _infos(place, path)
        if info.base_name.startswith(TEMPORARY) and info.type == pafs.FileType.File
    ]


def _folders_above(place: Place, root: str) -> Paths:
    """List the folders above a root, the nearest first; of a local root also those where links lead to."""
    folders: dict[str, None] = {}
    for path in (root, os.path.realpath(root)) if place.is_local else (root,):
        for _ in range(_LEVELS):
            above = posixpath.dirname(path)
            if above in ("", path):
                break
            path = above
            folders[path] = None
    return list(folders)


def _folders(place: Place, path: str) -> Paths:
    infos = _infos(place, path)
    return sorted(place.relative(i.path) for i in infos if i.type == pafs.FileType.Directory)


def _infos(place: Place, path: str, *, recursive: bool = False) -> list[pafs.FileInfo]:
    selector = pafs.FileSelector(place.full(path), recursive=recursive, allow_not_found=True)
    with place.explained("read", path):
        infos: list[pafs.FileInfo] = place.fs.get_file_info(selector)
    return infos
