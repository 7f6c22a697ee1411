"""Trust in saved files that may run code when loaded, or decide where a fit writes.

Loading a file with the user's classes or functions runs code. A file with a store or the path of a log decides where
data are written and which files are replaced. Such files are loaded only with explicit trust:
`load(path, trust=True)`, inside `with trust():`, or for the path prefixes in the conf `spark.sparkhvd.trust`.

Programs written for Horovod do not trust files explicitly. So classes with `_trusts_own_files` trust files that this
process has saved, if every byte is unchanged, because the process has already run that code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sparkhvd.errors import UntrustedError
from sparkhvd.wire import read_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TRUST_CONF = "spark.sparkhvd.trust"

# A ContextVar limits the trust to the thread of the block.
_is_trusted: ContextVar[bool] = ContextVar("sparkhvd_trust", default=False)


class OwnFiles:
    """Registry of the digests of files saved by this process."""

    # Digest of the metadata -> digests of pickles. Saves with equal metadata may have different code, such as two
    # functions of the same name.
    _of_process: dict[str, set[str]] = {}

    @classmethod
    def add(cls, content: Mapping[str, Any], code: bytes) -> None:
        """Register a save: its entry in the metadata as JSON data, and its pickles."""
        digests = cls._of_process.setdefault(_digest_of(content), set())
        digests.add(hashlib.sha256(code).hexdigest())

    @classmethod
    def digests_of_code(cls, content: Mapping[str, Any]) -> frozenset[str]:
        """Find the SHA-256 in hex of the pickles saved by this process with this metadata."""
        return frozenset(cls._of_process.get(_digest_of(content), ()))


def _digest_of(content: Mapping[str, Any]) -> str:
    # A round trip through JSON normalizes the content, because JSON has only text as keys.
    plain = read_json(json.dumps(content), most_bytes=None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def trust() -> Iterator[None]:
    """Let files loaded in the block run code: `with sparkhvd.trust(): PipelineModel.load(path)`."""
    token = _is_trusted.set(True)
    try:
        yield
    finally:
        _is_trusted.reset(token)


def is_trusted(path: str, spark: SparkSession | None, *, trusted: bool = False) -> bool:
    """Whether a saved directory is trusted. The arguments are as in `check_trusted`."""
    if trusted or _is_trusted.get():
        return True
    return spark is not None and _has_trusted_prefix(path, spark.conf.get(TRUST_CONF, "") or "")


def check_trusted(
    path: str,
    what: str,
    spark: SparkSession | None,
    *,
    trusted: bool = False,
    why: str = "loading it runs code from that file",
) -> None:
    """Raise UntrustedError unless a saved directory is trusted.

    Args:
        path: saved directory.
        what: name of the class or function to load, or the value to use.
        spark: session whose conf may name trusted path prefixes, or None.
        trusted: True if `load` was called with trust.
        why: why that needs trust, for the message.

    Raises:
        UntrustedError: the file is not trusted.
    """
    if is_trusted(path, spark, trusted=trusted):
        return
    conf = "" if spark is None else f", or set {TRUST_CONF} to a prefix of the path"
    raise UntrustedError(
        f"{path!r} holds {what}, and {why}. If you trust the file, load it with "
        f"trust=True, or inside `with sparkhvd.trust():`{conf}."
    )


def _has_trusted_prefix(path: str, prefixes: str) -> bool:
    """Whether a path equals or is below one of the comma-separated prefixes."""
    path = posixpath.normpath(path)
    for part in prefixes.split(","):
        if prefix := part.strip():
            prefix = posixpath.normpath(prefix)
            if path == prefix or path.startswith(prefix.rstrip("/") + "/"):
                return True
    return False
