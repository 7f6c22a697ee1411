"""Write files of a store atomically.

    local folders, HDFS, most of fsspec    written under a temporary name, then renamed
    FUSE mounts, Databricks' Volumes       written on this host's disk, copied in one pass to a temporary name, renamed
    object stores                          written on this host's disk, uploaded when the writer has succeeded

On a mount without rename, the copy is written under the file's own name.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pyarrow as pa
import pyarrow.fs as pafs

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


COPY_BYTES = 16 << 20
# Number of attempts to create a folder: another process may remove it while it is empty.
_TRIES = 100
# Errors of a FUSE mount that does not implement rename.
_NO_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV)


class AtomicFile(io.RawIOBase):
    """File for one sequential write. It keeps the first error, as callers may wrap errors.

    Attributes:
        error: the first error of the file, or None.
        is_whole: True once the writer has succeeded, so that later errors come from the store.
        staged_in: staging folder on this host's disk; "" if the file is written directly in the store.
    """

    def __init__(self, file: IO[bytes] | pa.NativeFile, staged_in: str = "") -> None:
        self._file = file
        self._position = 0
        self.error: Exception | None = None
        self.is_whole = False
        self.staged_in = staged_in

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: ReadableBuffer) -> int:
        """Write all of the data."""
        with self._kept():
            self._file.write(data)
        size = memoryview(data).nbytes
        self._position += size
        return size

    def flush(self) -> None:
        if not self.closed and not self._file.closed:
            with self._kept():
                self._file.flush()

    def finish(self) -> None:
        """Close the file, and raise store errors revealed by closing."""
        with self._kept():
            self._file.close()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.error = self.error or e
            raise


@contextlib.contextmanager
def local_output(target: str, temporary: str) -> Iterator[AtomicFile]:
    """Write a file of a local folder as `temporary`, then rename it to `target`."""
    # No fsync: without it files survive killed processes, and if the machine is lost, so is the run.
    sink = AtomicFile(open(temporary, "wb"))  # noqa: SIM115
    try:
        yield sink
        sink.is_whole = True
        sink.finish()
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(Exception):
            sink.finish()
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def upload(source: IO[bytes], filesystem: pafs.FileSystem, target: str) -> None:
    """Copy a file of this host to an object, replacing an older object."""
    with filesystem.open_output_stream(target) as sink:
        try:
            shutil.copyfileobj(source, sink, COPY_BYTES)
        except KeyboardInterrupt:
            # Closing completes the upload and cannot be aborted. So copy the rest first, or the object would be
            # truncated.
            source.seek(sink.tell())
            shutil.copyfileobj(source, sink, COPY_BYTES)
            raise


def copy_in(source: IO[bytes], target: str, temporary: str) -> None:
    """Copy a file of this host to a mount with sequential writes only."""
    try:
        with open(temporary, "wb", buffering=0) as file:
            _copy(source, file)
        os.replace(temporary, target)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if e.errno not in _NO_RENAME:
            raise
        source.seek(0)
        with open(target, "wb", buffering=0) as file:
            _copy(source, file)


def _copy(source: IO[bytes], sink: io.RawIOBase) -> None:
    while chunk := source.read(COPY_BYTES):
        view = memoryview(chunk)
        while view:
            view = view[sink.write(view) or 0 :]


@contextlib.contextmanager
def staged_output(deliver: Callable[[IO[bytes]], None]) -> Iterator[AtomicFile]:
    """Write a file on this host's disk. `deliver` copies it to the store if the block succeeds."""
    with tempfile.TemporaryFile(prefix="sparkhvd-staged-") as file:
        sink = AtomicFile(file, tempfile.gettempdir())
        yield sink
        sink.flush()
        sink.is_whole = True
        file.seek(0)
        deliver(file)


@contextlib.contextmanager
def remote_output(filesystem: pafs.FileSystem, target: str, temporary: str) -> Iterator[AtomicFile]:
    """Write a file of another file system as `temporary`, then rename it to `target`."""
    sink = AtomicFile(filesystem.open_output_stream(temporary))
    try:
        yield sink
        sink.is_whole = True
        sink.finish()
        _move(filesystem, temporary, target)
    except BaseException:
        with contextlib.suppress(Exception):
            sink.finish()
        with contextlib.suppress(Exception):
            filesystem.delete_file(temporary)
        raise


def _move(filesystem: pafs.FileSystem, source: str, target: str) -> None:
    """Rename a file over an older file. Some file systems refuse that with an error, others silently.

    After a refusal, the older file is moved aside and the rename repeated; then the older file is deleted, or moved
    back if that fails, too. This is safe even if the error was a lost connection, which looks the same.
    """
    try:
        filesystem.move(source, target)
        if filesystem.get_file_info(source).type == pafs.FileType.NotFound:
            return
    except Exception:
        if filesystem.get_file_info(target).type == pafs.FileType.NotFound:
            raise
    older = f"{source}-older"
    filesystem.move(target, older)
    try:
        filesystem.move(source, target)
    except BaseException as e:
        try:
            filesystem.move(older, target)
        except Exception:  # noqa: BLE001 - fsspec drivers raise any exception
            raise OSError(f"{e}; the earlier file is now {older}") from e
        raise
    with contextlib.suppress(Exception):
        filesystem.delete_file(older)


def make_folder(filesystem: pafs.FileSystem, folder: str) -> None:
    """Make a folder and its parents, unless they exist."""
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pafs.FSSpecHandler):
        handler.fs.makedirs(folder, exist_ok=True)
    else:
        filesystem.create_dir(folder, recursive=True)


def make_local_folder(folder: str, root: str) -> None:
    """Make a folder below an existing root."""
    for tries_left in reversed(range(_TRIES)):
        missing = []
        here = Path(folder)
        while str(here) != root and not here.is_dir():
            missing.append(here)
            here = here.parent
        try:
            for path in reversed(missing):
                path.mkdir(exist_ok=True)
            return
        except (FileNotFoundError, FileExistsError):
            # Another process has removed an empty folder, the root is gone, or a file has the same name.
            if not tries_left or not os.path.isdir(root):
                raise


def remove_empty_folder(filesystem: pafs.FileSystem, folder: str) -> None:
    """Remove a folder if it is empty, on file systems with a call for empty folders only."""
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pafs.FSSpecHandler):
        with contextlib.suppress(Exception):  # each driver has its own error for a nonempty folder
            handler.fs.rmdir(folder)


def make_root(root: str) -> str:
    """Make a folder with access for this user alone, and its parents, and return the topmost new folder, or "".

    An existing folder keeps its permissions.
    """
    missing = ""
    here = root
    while here != "/" and not os.path.lexists(here):
        missing, here = here, posixpath.dirname(here)
    # Parents get the usual permissions, as with `mkdir -p -m`.
    Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
    return missing
