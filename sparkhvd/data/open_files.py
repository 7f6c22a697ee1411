"""Cache of open files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["OpenFiles"]

# Rows in random order go back and forth between files; a process may have few descriptors, and a file of a remote store
# holds a buffer.
LIMIT = 16


class _Closes(Protocol):
    def close(self) -> None: ...


Key = TypeVar("Key")
File = TypeVar("File", bound=_Closes)


class OpenFiles(Generic[Key, File]):
    """Cache of open files: keeps those that were used last; not for several threads at once."""

    def __init__(self, open_file: Callable[[Key], File]) -> None:
        """Begin with no open file.

        Args:
            open_file: opens the file of a key, or raises.
        """
        self._open_file = open_file
        self._files: OrderedDict[Key, File] = OrderedDict()

    def get(self, key: Key) -> File:
        """Return the file of a key, opened if need be."""
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = self._open_file(key)
        self._files.move_to_end(key)
        while len(self._files) > LIMIT:
            self._files.popitem(last=False)[1].close()
        return file

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._files.popitem()[1].close()
