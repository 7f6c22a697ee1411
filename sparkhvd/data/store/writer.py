"""Write and delete files of a store, by the means that its file system has (see `atomic`)."""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs

from sparkhvd.data.store import addresses, atomic
from sparkhvd.data.store.place import TEMPORARY, Place
from sparkhvd.errors import SparkhvdError, StoreError

__all__ = ["Writer"]


class Writer:
    """Writes and deletes below the root of a store, which must exist."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._device: int | None = None
        self._is_sequential: bool | None = None

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[atomic.Sink]:
        """Open a file for sequential writing; it appears when the block ends without error."""
        place = self._place
        sink: atomic.Sink | None = None
        try:
            full = place.full(path)
            self._make_folder(posixpath.dirname(full))
            with self._output(full) as sink:
                yield sink
        except SparkhvdError:
            raise
        except Exception as e:  # noqa: BLE001 - drivers of fsspec raise what they like
            cause = e if sink is None or sink.is_whole else sink.error
            if cause is None:  # the caller's own
                raise
            staged_in = sink.staged_in if sink is not None and not sink.is_whole else ""
            raise place.error("written", path, cause, staged_in) from place.cause(cause)

    def _output(self, full: str) -> contextlib.AbstractContextManager[atomic.Sink]:
        parent, name = posixpath.split(full)
        temporary = posixpath.join(parent, f"{TEMPORARY}{uuid.uuid4().hex}-{name}")
        place = self._place
        if place.is_local:
            if self._is_sequential is None:
                self._is_sequential = addresses.is_sequential(place.root)
            if self._is_sequential:
                return atomic.staged_output(lambda file: atomic.copy_in(file, full, temporary))
            return atomic.local_output(full, temporary)
        filesystem = place.fs
        if addresses.has_atomic_writes(place.address.scheme):
            return atomic.staged_output(lambda file: atomic.upload(file, filesystem, full))
        return atomic.remote_output(filesystem, full, temporary)

    def _make_folder(self, folder: str) -> None:
        place = self._place
        if place.is_local:
            self._check_root()
            atomic.make_local_folder(folder, place.root)
        elif not addresses.has_atomic_writes(place.address.scheme):
            atomic.make_folder(place.fs, folder)

    def _check_root(self) -> None:
        """Refuse to write where the store's file system is no longer mounted: the folder there is another one."""
        place = self._place
        try:
            device = os.stat(f"{place.root}/.").st_dev  # the dot makes automounters mount
        except FileNotFoundError:
            raise StoreError(
                f"The store {place.url} is not there: {place.root} does not exist on this host. If it has vanished, mount "
                "it again; a new one is made by Store.create."
            ) from None
        if self._device is None:
            self._device = device
        elif device != self._device:
            raise StoreError(
                f"The store {place.url} has vanished: another file system is mounted at {place.root} than before. Mount "
                "it again, and try again: what is in it stays."
            )

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its content; does nothing if there is none."""
        place = self._place
        full = place.full(path)
        with (
            place.explained("cleaned", path),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            if not place.is_local:
                kind = place.fs.get_file_info(full).type
                if kind == pafs.FileType.Directory:
                    place.fs.delete_dir(full)
                elif kind != pafs.FileType.NotFound:
                    place.fs.delete_file(full)
            elif os.path.isdir(full) and not os.path.islink(full):
                # Another process may delete or still write in it; what stays is swept later.
                shutil.rmtree(full, ignore_errors=True)
            else:
                Path(full).unlink()

    def delete_if_empty(self, path: str) -> None:
        """Delete an empty folder in one step, where the file system has such a step."""
        place = self._place
        full = place.full(path)
        if place.is_local:
            with contextlib.suppress(OSError):
                os.rmdir(full)
        elif not addresses.has_atomic_writes(place.address.scheme):
            atomic.remove_empty_folder(place.fs, full)
