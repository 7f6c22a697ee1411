"""Messages between the members of an elastic job and its coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkhvd.rendezvous import Endpoint

__all__ = [
    "Arrival",
    "Ask",
    "Decision",
    "Message",
    "Refusal",
    "Report",
    "Running",
    "Update",
    "from_dict",
    "to_dict",
]


@dataclass(frozen=True)
class Arrival:
    """Question of a new process whether a generation runs already. It asks to take part later, when it is ready."""


@dataclass(frozen=True)
class Running:
    """Answer to an arrival.

    Attributes:
        size: number of members of the generation that runs; 0 if none has begun.
    """

    size: int


@dataclass(frozen=True)
class Ask:
    """Wish of a member to take part in the next generation.

    Attributes:
        generation: the last one that it was in; 0 for none.
        endpoint: its listening address.
        has_state: whether it has the training's state.
        version: of its last commit; the state of the highest one counts.
        needs_sync: whether it must get the state before it goes on.
        dead: numbers of members whose processes have ended, as its engine knows.
        why: what ended the generation for it.
    """

    generation: int
    endpoint: Endpoint
    has_state: bool = False
    version: int = 0
    needs_sync: bool = True
    dead: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Decision:
    """Members of a generation, as one of them is told.

    Attributes:
        generation: counts from 1.
        members: their numbers, by rank.
        endpoints: their listening addresses, by rank.
        sync: whether every member gets rank 0's state before it goes on.
    """

    generation: int
    members: tuple[int, ...]
    endpoints: tuple[Endpoint, ...]
    sync: bool


@dataclass(frozen=True)
class Refusal:
    """Answer to a member that takes no part.

    Attributes:
        kind: "left out", "removed" (it should end well), "over" (the others have finished), or "failed".
        text: why, in a sentence.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Update:
    """News that the set of members should change at the next commit.

    Attributes:
        only_removals: whether nobody joins, so that the state need not be sent anew.
    """

    only_removals: bool


@dataclass(frozen=True)
class Report:
    """News from a member.

    Attributes:
        kind: "formed" (it has met the others), "synced" (it has the training's state), "finished" (its function has returned) or "running"
            (after that it has begun another one).
        generation: the member's.
    """

    kind: str
    generation: int


Message = Arrival | Running | Ask | Decision | Refusal | Update | Report
_KINDS: dict[str, type[Message]] = {
    "arrival": Arrival,
    "running": Running,
    "ask": Ask,
    "decision": Decision,
    "refusal": Refusal,
    "update": Update,
    "report": Report,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_dict(message: Message) -> dict[str, Any]:
    """Return a JSON object."""
    return {"message": _NAMES[type(message)], **dataclasses.asdict(message)}


def from_dict(values: Mapping[str, Any]) -> Message:
    """Rebuild a message from `to_dict`.

    Raises:
        ValueError: it is none.
    """
    fields = dict(values)
    try:
        kind = _KINDS[fields.pop("message")]
        if kind is Ask:
            fields["endpoint"] = Endpoint.from_dict(fields["endpoint"])
            fields["dead"] = tuple(map(int, fields["dead"]))
        if kind is Decision:
            fields["members"] = tuple(map(int, fields["members"]))
            fields["endpoints"] = tuple(map(Endpoint.from_dict, fields["endpoints"]))
        return kind(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of an elastic job: {error!r}") from error
