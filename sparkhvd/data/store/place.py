"""The file system behind a store: opened on first use, with its errors in the store's words."""

from __future__ import annotations

import contextlib
import errno
import posixpath
import threading
from collections.abc import Iterator, Mapping

import pyarrow.fs as pafs

from sparkhvd.data.store import addresses
from sparkhvd.errors import InvalidArgumentError, SparkhvdError, StoreError

__all__ = ["TEMPORARY", "Place"]

# Prefix of files that are still being written; listings leave them out.
TEMPORARY = ".sparkhvd-tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Place:
    """The folder of a store in its file system; every path is relative to it.

    Attributes:
        address: the parsed URL.
        options: storage options, secrets included.
        url: the URL without secrets: for messages, manifests and saved models.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.address = addresses.parse(url)
        self.options = dict(options)
        self.url = self.address.url
        self._filesystem: pafs.FileSystem | None = None
        self._opened = threading.local()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place):
            return NotImplemented
        return (self.address, self.options) == (other.address, other.options)

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def is_local(self) -> bool:
        """True if this process sees the folder as a path."""
        return self.address.scheme == "file"

    @property
    def fs(self) -> pafs.FileSystem:
        """The opened file system."""
        if self.address.root is not None:
            if self._filesystem is None:
                self._filesystem, _ = self._open()
            return self._filesystem
        # One per thread: connections of fsspec are not shared between threads.
        filesystem = getattr(self._opened, "filesystem", None)
        if filesystem is None:
            filesystem, root = self._open()
            self._opened.filesystem, self._opened.root = filesystem, root
        filesystem.handler.fs.invalidate_cache()  # other processes write, too
        return filesystem

    def _open(self) -> tuple[pafs.FileSystem, str]:
        try:
            return addresses.open_filesystem(self.address, self.options)
        except SparkhvdError:
            raise
        except Exception as e:  # noqa: BLE001 - drivers of fsspec raise what they like
            raise self.error("opened", "", e) from self.cause(e)

    @property
    def root(self) -> str:
        """The folder's path in the file system."""
        if self.address.root is not None:
            return self.address.root
        self.fs  # noqa: B018 - opens it
        root: str = self._opened.root
        return root

    def full(self, path: str) -> str:
        """Return a path in the file system.

        Raises:
            InvalidArgumentError: the path is absolute or leads out of the folder.
        """
        parts = path.split("/")
        if path.startswith("/") or "\\" in path or ".." in parts:
            raise InvalidArgumentError(
                f"{path!r} is not a path inside a store. Give a relative path without '..', for example "
                "'runs/1/metrics.jsonl'."
            )
        if not path:
            return self.root
        return posixpath.join(self.root, *[p for p in parts if p and p != "."])

    def info(self, path: str) -> pafs.FileInfo:
        """Return type, size and time of a file or folder, which may not exist."""
        with self.explained("read", path):
            return self.fs.get_file_info(self.full(path))

    def relative(self, full: str) -> str:
        """Return the path in the folder of a path in the file system."""
        return posixpath.relpath(full, self.root)

    @contextlib.contextmanager
    def explained(self, doing: str, path: str) -> Iterator[None]:
        """Raise errors of the file system as `StoreError`; `FileNotFoundError` keeps its class.

        Args:
            doing: participle for the message: "read", "written", "cleaned", "opened".
            path: the path for the message.
        """
        try:
            yield
        except SparkhvdError:
            raise
        except (FileNotFoundError, NotADirectoryError) as e:
            if self.cause(e) is not None:
                raise
            raise type(e)(self.hide(str(e))) from None
        except Exception as e:  # noqa: BLE001 - drivers of fsspec raise what they like
            raise self.error(doing, path, e) from self.cause(e)

    def error(self, doing: str, path: str, cause: Exception, staged_in: str = "") -> StoreError:
        """Return the error for an operation that the file system refused.

        Args:
            doing: participle for the message, as for `explained`.
            path: the path for the message.
            cause: the file system's error.
            staged_in: folder on this host's disk that refused a staged file; "" if the store refused.
        """
        number = getattr(cause, "errno", None)
        where = (
            f", on this host's disk in {staged_in}, from where it would be copied"
            if staged_in
            else ""
        )
        remedy = (
            f"It is full: free space in {staged_in or 'it'}"
            if number in _FULL
            else "Look whether it is there and may be written from this host"
        )
        # Before the first checkpoint, as when data are materialized, no training can be lost.
        is_checkpoint = path.startswith("runs/") and "/checkpoints" in path
        then = (
            "; a fit with the same run_id goes on from the last checkpoint"
            if is_checkpoint
            else ", and try again"
        )
        error = StoreError(
            f"The store {self.url} cannot be {doing} ({path or 'its folder'}{where}): {type(cause).__name__}: "
            f"{self.hide(str(cause))}. {remedy}{then}."
        )
        error.errno = number
        return error

    def cause(self, error: Exception) -> Exception | None:
        """Return the error to show as a cause: None if its chain holds a secret."""
        link: BaseException | None = error
        while link is not None:
            for text in (str(link), repr(link)):
                if self.hide(text) != text:
                    return None
            link = link.__cause__ or link.__context__
        return error

    def hide(self, text: str) -> str:
        """Mask passwords, keys and tokens of the store in a text."""
        secrets = addresses.secrets_of(self.address.full, self.options)
        for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
            text = text.replace(secret, "***")
        return text
