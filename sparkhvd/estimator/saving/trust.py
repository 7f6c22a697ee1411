"""Trust in saved files that may run code when loaded, or decide where a fit writes.

A file with the user's classes or functions is a program. A file with a store or the path of a log decides
where data go and which files are replaced. It is loaded only with explicit trust:
`load(path, trust=True)`, inside `with trust():`, or for the path prefixes in the conf `spark.sparkhvd.trust`.

Programs written for Horovod have no such call. Classes with `_trusts_own_files` trust files that this process saved, if every
byte is unchanged: the process has run that code already.
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

# A ContextVar limits trust to its thread.
_is_trusted: ContextVar[bool] = ContextVar("sparkhvd_trust", default=False)


class OwnFiles:
    """Files that this process has saved, by their bytes."""

    # Saves with equal metadata may differ in their code: two functions of one name, two modules of one class.
    _of_process: dict[str, set[str]] = {}

    @classmethod
    def add(cls, content: Mapping[str, Any], code: bytes) -> None:
        """Add a save: its part of the metadata, as JSON data, and its pickles."""
        digests = cls._of_process.setdefault(_digest_of(content), set())
        digests.add(hashlib.sha256(code).hexdigest())

    @classmethod
    def digests_of_code(cls, content: Mapping[str, Any]) -> frozenset[str]:
        """SHA-256, in hex, of the pickles in this process's saves with this metadata."""
        return frozenset(cls._of_process.get(_digest_of(content), ()))


def _digest_of(content: Mapping[str, Any]) -> str:
    # Normalized by a round trip through JSON, whose keys are texts.
    plain = read_json(json.dumps(content), most_bytes=None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def trust() -> Iterator[None]:
    """Trust everything loaded inside the block to run code: `with sparkhvd.trust(): PipelineModel.load(path)`."""
    token = _is_trusted.set(True)
    try:
        yield
    finally:
        _is_trusted.reset(token)


def is_trusted(path: str, spark: SparkSession | None, *, trusted: bool = False) -> bool:
    """Arguments as in `check_trusted`."""
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
    """Reject an action that needs a trusted file.

    Args:
        path: the saved directory.
        what: name of the class or function to load, or the value to use.
        spark: session whose conf may name trusted path prefixes, or None.
        trusted: `load` was called with trust.
        why: its effect, for the message.

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
    """Whether the path equals a prefix or is below it; commas separate the prefixes."""
    path = posixpath.normpath(path)
    for part in prefixes.split(","):
        if prefix := part.strip():
            prefix = posixpath.normpath(prefix)
            if path == prefix or path.startswith(prefix.rstrip("/") + "/"):
                return True
    return False
