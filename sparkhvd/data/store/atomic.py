"""How a file gets into a store whole or not at all.

    local folders, HDFS, most of fsspec    written under a temporary name, then renamed
    FUSE mounts, Databricks' Volumes       written on this host's disk, copied in one pass under a temporary name, renamed
    object stores                          written on this host's disk, uploaded when its writer has ended well

Where a mount cannot rename, the copy takes the file's own name.
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
from typing import IO, Any

import pyarrow.fs as pafs

__all__ = [
    "COPY_BYTES",
    "Sink",
    "copy_in",
    "local_output",
    "make_folder",
    "make_local_folder",
    "make_root",
    "remote_output",
    "remove_empty_folder",
    "staged_output",
    "upload",
]

COPY_BYTES = 16 << 20
# How often folders are made again that another process removes while they are empty.
_TRIES = 100
# What a FUSE mount answers that does not implement rename.
_NO_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV)


class Sink(io.RawIOBase):
    """A file to be written once from start to end; keeps the store's own error, which others may hide."""

    def __init__(self, file: Any, place: str = "") -> None:
        self._file = file
        self._position = 0
        self.error: Exception | None = None
        # Set when its writer has ended well: what fails from then on is the store's failure.
        self.is_whole = False
        # Where it is collected, if that is not the store.
        self.place = place

    def writable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def write(self, data: Any) -> int:
        """Write all of it."""
        with self._kept():
            self._file.write(data)
        size = memoryview(data).nbytes
        self._position += size
        return size

    def flush(self) -> None:
        """Hand on what is buffered."""
        if not self.closed and not self._file.closed:
            with self._kept():
                self._file.flush()

    def finish(self) -> None:
        """Close the file; an error of the store is raised here at the latest."""
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
def local_output(target: str, temporary: str) -> Iterator[Sink]:
    """A file of a local folder: `temporary` while it is written, then `target`."""
    # Nothing is flushed to the device: a store outlives processes, and a lost machine loses the run anyway.
    sink = Sink(open(temporary, "wb"))  # noqa: SIM115
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
    """Copy a file of this host to an object, also over an older one."""
    with filesystem.open_output_stream(target) as sink:
        try:
            shutil.copyfileobj(source, sink, COPY_BYTES)
        except KeyboardInterrupt:
            # Closing completes the upload, and nothing aborts it: so the rest must be in it.
            source.seek(sink.tell())
            shutil.copyfileobj(source, sink, COPY_BYTES)
            raise


def copy_in(source: IO[bytes], target: str, temporary: str) -> None:
    """Copy a file of this host to a mount that takes one sequential pass."""
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


def _copy(source: IO[bytes], sink: Any) -> None:
    while chunk := source.read(COPY_BYTES):
        view = memoryview(chunk)
        while view:
            view = view[sink.write(view) :]


@contextlib.contextmanager
def staged_output(deliver: Callable[[IO[bytes]], None]) -> Iterator[Sink]:
    """A file on this host's disk; when the block has ended without error, `deliver` copies it into the store."""
    with tempfile.TemporaryFile(prefix="sparkhvd-staged-") as file:
        sink = Sink(file, tempfile.gettempdir())
        yield sink
        sink.flush()
        sink.is_whole = True
        file.seek(0)
        deliver(file)


@contextlib.contextmanager
def remote_output(filesystem: pafs.FileSystem, target: str, temporary: str) -> Iterator[Sink]:
    """A file of another file system: `temporary` while it is written, then `target`."""
    sink = Sink(filesystem.open_output_stream(temporary))
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
    """Rename over what may be there. Some file systems refuse that, by an error or in silence.

    What is there is then moved aside, and deleted or moved back: errors do not tell a refusal from a lost connection.
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
        except Exception:  # noqa: BLE001 - drivers of fsspec raise what they like
            raise OSError(f"{e}; what was there before is now {older}") from e
        raise
    with contextlib.suppress(Exception):
        filesystem.delete_file(older)


def make_folder(filesystem: pafs.FileSystem, folder: str) -> None:
    """Make a folder and those above it, unless they are there."""
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pafs.FSSpecHandler):
        handler.fs.makedirs(folder, exist_ok=True)
    else:
        filesystem.create_dir(folder, recursive=True)


def make_local_folder(folder: str, root: str) -> None:
    """Make a folder below a root that must be there."""
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
            # Another process found one of them empty and removed it; or the root is gone, or a file is in the way.
            if not tries_left or not os.path.isdir(root):
                raise


def remove_empty_folder(filesystem: pafs.FileSystem, folder: str) -> None:
    """Remove a folder if the file system has a call that refuses one with something in it."""
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pafs.FSSpecHandler):
        with contextlib.suppress(
            Exception
        ):  # each driver has its own way to say that it is not empty
            handler.fs.rmdir(folder)


def make_root(root: str) -> str:
    """Make a folder for this user alone, with those above it; returns the topmost that was made, or "".

    One that is there keeps its permissions.
    """
    missing = ""
    here = root
    while here != "/" and not os.path.lexists(here):
        missing, here = here, posixpath.dirname(here)
    # Those above get the usual permissions, as `mkdir -p -m` gives them.
    Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
    return missing
