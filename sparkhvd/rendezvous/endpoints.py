"""Listening addresses of ranks, and the key and ranks of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sparkhvd.errors import InvalidArgumentError

KEY_BYTES = 32


@dataclass(frozen=True)
class Endpoint:
    """Listening address of a rank.

    Attributes:
        address: IPv4 or IPv6 address of one interface.
        port: TCP port.
        host_key: equal for processes that can reach each other's abstract Unix sockets; "" if unknown.
        unix_name: name of the abstract Unix socket in hex; "" if there is none.
    """

    address: str
    port: int
    host_key: str
    unix_name: str

    def to_dict(self) -> dict[str, str | int]:
        """Return a JSON object."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, str | int]) -> Endpoint:
        """Rebuild an endpoint from `to_dict`."""
        return cls(
            str(values["address"]),
            int(values["port"]),
            str(values["host_key"]),
            str(values["unix_name"]),
        )

    def __str__(self) -> str:
        return (
            f"[{self.address}]:{self.port}"
            if ":" in self.address
            else f"{self.address}:{self.port}"
        )


class Party(Protocol):
    """One side of a handshake: a rank of a job, or of a service with a key."""

    @property
    def key(self) -> bytes:
        """32 bytes that both sides know."""

    @property
    def job_id(self) -> str:
        """Name, the same on both sides."""

    @property
    def attempt(self) -> int:
        """Number that tells launches apart."""

    @property
    def rank(self) -> int:
        """Number of this side."""

    @property
    def size(self) -> int:
        """Above every side's number."""


@dataclass(frozen=True)
class Job:
    """Knowledge by which a rank finds the others of one attempt, and proves itself.

    Attributes:
        key: 32 random bytes that only the ranks of this attempt know.
        job_id: any name, the same on every rank.
        attempt: counts the launches of the job.
        rank: this rank.
        size: number of ranks.
        endpoints: where each rank listens, by rank.
    """

    key: bytes = field(repr=False)
    job_id: str
    attempt: int
    rank: int
    size: int
    endpoints: tuple[Endpoint, ...]

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise InvalidArgumentError(
                f"Job.key has {len(self.key)} bytes; it must have {KEY_BYTES}, from secrets.token_bytes()."
            )
        if not 0 <= self.rank < self.size or len(self.endpoints) != self.size:
            raise InvalidArgumentError(
                f"Job(rank={self.rank}, size={self.size}) with {len(self.endpoints)} endpoints; it needs one "
                "endpoint per rank and a rank below size."
            )

    def to_json(self) -> str:
        """Return JSON with the key in it: hand it over by pipe, never in argv, environment or a log."""
        values = {**vars(self), "key": self.key.hex()}
        values["endpoints"] = [endpoint.to_dict() for endpoint in self.endpoints]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Rebuild a job from `to_json`."""
        values = json.loads(text)
        return cls(
            key=bytes.fromhex(values["key"]),
            job_id=str(values["job_id"]),
            attempt=int(values["attempt"]),
            rank=int(values["rank"]),
            size=int(values["size"]),
            endpoints=tuple(Endpoint.from_dict(e) for e in values["endpoints"]),
        )
