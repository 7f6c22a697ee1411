"""Requested version of a table, and errors common to all formats."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date, datetime, timezone

import pyarrow as pa

from sparkhvd.data.store import addresses
from sparkhvd.errors import InvalidArgumentError


@dataclass(frozen=True)
class VersionRequest:
    """Requested version of a table, set by at most one attribute. The default is the newest.

    Attributes:
        version: version number of a Delta table.
        snapshot_id: id of an Iceberg snapshot.
        ref: branch or tag of an Iceberg table.
        as_of: time in s since 1970, which requests the version that was current then.
        schema_id: id of the columns to read an Iceberg snapshot with, if not its own; may be set beside `snapshot_id`.
    """

    version: int | None = None
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: float | None = None
    schema_id: int | None = None

    @property
    def as_of_ms(self) -> int:
        """Time in whole ms since 1970, rounded because the float may be slightly below a whole ms."""
        assert self.as_of is not None
        return math.floor(self.as_of * 1000 + 0.001)

    def of_format(self, kind: str) -> VersionRequest:
        """Reject attributes of the other format. `kind` is "Delta" or "Iceberg".

        The result is this request.
        """
        if kind == "Delta" and (self.snapshot_id is not None or self.ref is not None):
            name = "snapshot_id" if self.snapshot_id is not None else "ref"
            raise InvalidArgumentError(
                f"fit_on_table: {name} is given, but this is a Delta table, which has numbered versions. Give version=<number> "
                "or as_of=<time>."
            )
        if kind == "Iceberg" and self.version is not None:
            raise InvalidArgumentError(
                f"fit_on_table: version is {self.version}, but this is an Iceberg table, which has snapshots. Give "
                "snapshot_id=<number>, ref=<branch or tag> or as_of=<time>."
            )
        return self

    @property
    def text(self) -> str:
        """Description of the request, for messages."""
        if self.as_of is not None:
            return f"as_of={_utc(self.as_of)}"
        given = {n: v for n, v in vars(self).items() if v is not None and n != "schema_id"}
        return (
            ", ".join(f"{name}={value!r}" for name, value in given.items()) or "the newest version"
        )


def requested(
    version: int | None = None,
    snapshot_id: int | None = None,
    ref: str | None = None,
    as_of: str | date | datetime | None = None,
) -> VersionRequest:
    """Check the user's version arguments and make the request.

    Raises:
        InvalidArgumentError: several arguments are given, or an argument is invalid.
    """
    given = {"version": version, "snapshot_id": snapshot_id, "ref": ref, "as_of": as_of}
    found = [name for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise InvalidArgumentError(
            f"fit_on_table: {' and '.join(found)} are given, but each chooses a version. Give only one of them."
        )
    for name in ("version", "snapshot_id"):
        value = given[name]
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63
        ):
            raise InvalidArgumentError(
                f"fit_on_table: {name} is {value!r:.40}. Give a whole number from 0 to 2**63 - 1."
            )
    if ref is not None and (not isinstance(ref, str) or not ref):
        raise InvalidArgumentError(
            f"fit_on_table: ref is {ref!r}. Give the name of a branch or tag."
        )
    return VersionRequest(version, snapshot_id, ref, None if as_of is None else _seconds(as_of))


def _seconds(as_of: object) -> float:
    moment = as_of
    if isinstance(as_of, str):
        try:
            moment = datetime.fromisoformat(as_of.strip().replace("Z", "+00:00"))
        except ValueError:
            moment = None
    elif isinstance(as_of, date) and not isinstance(as_of, datetime):
        moment = datetime(as_of.year, as_of.month, as_of.day)  # noqa: DTZ001 - UTC below
    if not isinstance(moment, datetime):
        raise InvalidArgumentError(
            f"fit_on_table: as_of is {as_of!r}. Give a date or a time, '2026-11-01' or '2026-11-01T12:00:00+01:00'; a time without an "
            "offset is in UTC."
        )
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="milliseconds")


def unsupported(name: str, feature: str, remedy: str = "") -> InvalidArgumentError:
    """Make the error for a table with an unsupported feature.

    Args:
        name: name of the table.
        feature: what the table needs, with the library and its version.
        remedy: another remedy, as a sentence.
    """
    return InvalidArgumentError(
        f"fit_on_table({name!r}): the table needs {feature}. {remedy}{' ' if remedy else ''}Spark reads it: "
        f"fit(spark.table(...)), or spark.read.format(...).load({name!r})."
    )


def missing_extra(name: str, package: str, extra: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"fit_on_table({name!r}): this is {'a Delta' if extra == 'delta' else 'an Iceberg'} table, and the package {package} is not "
        f"installed here, on the driver. Install it: pip install 'sparkhvd[{extra}]'. Ranks do not need it."
    )


def short(error: BaseException, secrets: Collection[str] = ()) -> str:
    """Shorten the text of a library's error to one line of at most 300 characters, without secrets."""
    text = " ".join(str(error).split())
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "<hidden>")
    return addresses.without_passwords(text)[:300]


def has_id(field: pa.Field) -> bool:
    """Whether a column of a Parquet file has a field id."""
    return b"PARQUET:field_id" in (field.metadata or {})
