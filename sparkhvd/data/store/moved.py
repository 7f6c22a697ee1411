"""Store with a separate folder for its runs in the same file system."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from sparkhvd.data.store import addresses
from sparkhvd.data.store.store import Store, StoreFilesystem, StoreWriter
from sparkhvd.errors import InvalidArgumentError

_RUNS = "runs"


class _MovedFilesystem(StoreFilesystem):
    """Folder of a store. Paths beginning with "runs" map to a separate folder."""

    def __init__(self, url: str, options: Mapping[str, object], runs: str) -> None:
        super().__init__(url, options)
        self.runs = addresses.parse(runs)
        ours, theirs = urlsplit(self.address.full), urlsplit(self.runs.full)
        if (ours.scheme, ours.netloc) != (theirs.scheme, theirs.netloc):
            raise InvalidArgumentError(
                f"The folder for runs, {self.runs.url}, is in another file system than the store {self.url}. Give a folder in the store's file system."
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _MovedFilesystem)
            and self.runs == other.runs
            and super().__eq__(other)
        )

    __hash__ = StoreFilesystem.__hash__

    @property
    def _runs_root(self) -> str:
        if self.runs.root is not None:
            return self.runs.root
        # `root` is in fsspec's own form. Both URLs have the same beginning, so only the path at its end is replaced.
        below = urlsplit(self.address.full).path.rstrip("/")
        return self.root.removesuffix(below) + urlsplit(self.runs.full).path.rstrip("/")

    def full(self, path: str) -> str:
        full = super().full(path)
        first, _, rest = path.strip("/").partition("/")
        if first != _RUNS:
            return full
        return posixpath.join(
            self._runs_root, *[p for p in rest.split("/") if p and p != "."]
        ).rstrip("/")

    def relative(self, full: str) -> str:
        root, ours = self._runs_root, super().full("")
        # The folder of the runs may contain the folder of the store.
        is_ours = _is_in(ours, root) and _is_in(full, ours)
        if _is_in(full, root) and not is_ours:
            return posixpath.normpath(posixpath.join(_RUNS, posixpath.relpath(full, root)))
        return super().relative(full)


class StoreWithRuns(Store):
    """Store with an optional separate folder for runs in its file system."""

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, object] | None = None,
        runs: str | None = None,
    ) -> None:
        """Use a store at a URL. `runs` is the URL of the folder of its runs, or None."""
        super().__init__(url, storage_options)
        if runs is not None:
            self._move_runs(runs)

    def described(self) -> dict[str, Any]:
        """Describe the store besides its URL as JSON data, for saving."""
        place = self._place
        return {"runs": place.runs.url if isinstance(place, _MovedFilesystem) else None}

    @classmethod
    def from_description(cls, store: str, runs: str | None = None, **_: Any) -> Store:
        """Make a store from a URL and a description. Entries of other store classes are ignored."""
        return Store(store) if runs is None else StoreWithRuns(store, runs=runs)

    def _move_runs(self, runs: str) -> None:
        """Use another folder for the runs.

        Raises:
            InvalidArgumentError: the folder is in another file system.
        """
        place = self._place
        moved = _MovedFilesystem(place.address.full, place.options, runs)
        self._place, self._writer = moved, StoreWriter(moved)

    def full_url(self, path: str) -> str:
        first, _, rest = path.partition("/")
        if first != _RUNS or not isinstance(self._place, _MovedFilesystem):
            return super().full_url(path)
        url, mark, query = self._place.runs.url.partition("?")
        return f"{url}/{rest}{mark}{query}" if rest else self._place.runs.url

    def below(self, path: str) -> Store:
        first, _, rest = path.partition("/")
        if first != _RUNS or not isinstance(self._place, _MovedFilesystem):
            return super().below(path)
        runs = Store(self._place.runs.full, self._place.options)
        return runs.below(rest) if rest else runs

    def __reduce__(self) -> tuple[Any, ...]:
        place = self._place
        if isinstance(place, _MovedFilesystem):
            return StoreWithRuns, (place.address.full, place.options, place.runs.full)
        return Store, (place.address.full, place.options)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
