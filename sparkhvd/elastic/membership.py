"""Membership in the next generation of an elastic job. Pure: no sockets, clock or processes.

A *member* is a process with a number that no other process of the job ever has. Its rank may change between
generations. The coordinator alone decides for all. So two halves of a job can never both continue, and a member that
wakes up after it was left out learns of it from the coordinator.

**A round** starts when the first member of the current generation asks for the next one. It ends when every other
member has asked, or has ended, or has delayed the others for `Limits.patience_s` and is left out for good. New members
wait for a round, and are in the next decision. A process that starts while a generation runs first sends an `Arrival`,
and asks when it is ready: the members continue until then. No member waits for a process that is still starting, unless
there are too few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkhvd.rendezvous import Endpoint
from sparkhvd.wire import rebuild

FINISHED = "has finished"
STATE_IS_GONE = (
    "every rank that had the training's state is gone. Start the job again, from a checkpoint"
)


@dataclass(frozen=True)
class Limits:
    """Limits of an elastic job.

    Attributes:
        first: members that the first generation waits for, up to `start_timeout_s`.
        least: least members of a generation.
        most: most members of a generation.
        resets: generations after the first; None for any number.
        start_timeout_s: longest wait for `first` members.
        timeout_s: longest wait for `least` members.
        patience_s: longest wait for a live member that does not ask.
    """

    first: int
    least: int
    most: int
    resets: int | None = None
    start_timeout_s: float = 600.0
    timeout_s: float = 600.0
    patience_s: float = 30.0


@dataclass(frozen=True)
class Change:
    """Change of the members between two generations.

    Attributes:
        generation: the new one.
        before: number of members of the previous one; 0 for the first.
        members: the new ones, by rank.
        lost: numbers of lost members, with reasons.
        joined: numbers of new members.
        asked_at: when the first member asked.
        why: what ended the previous generation, as reported by members.
        sync: whether all get rank 0's state.
    """

    generation: int
    before: int
    members: tuple[int, ...]
    lost: dict[int, str]
    joined: tuple[int, ...]
    asked_at: float
    why: str
    sync: bool


@dataclass
class Membership:
    """Members of an elastic job. Methods take the current time, and add to `outbox` and `changes`.

    Attributes:
        outbox: messages to members, by number; consumed by the caller.
        changes: decisions not yet consumed by the caller.
        generation: the current one; 0 before the first.
        members: of the current generation, by rank.
        failure: why the job cannot continue; "" while it can.
    """

    limits: Limits
    outbox: list[tuple[int, Message]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    generation: int = 0
    members: tuple[int, ...] = ()
    failure: str = ""
    _finished: set[int] = field(default_factory=set)
    _starting: set[int] = field(default_factory=set)
    _running: set[int] = field(default_factory=set)
    _asked: dict[int, JoinRequest] = field(default_factory=dict)
    _gone: dict[int, str] = field(default_factory=dict)  # reason of each ended member
    _refused: dict[int, Refusal] = field(default_factory=dict)
    _removing: dict[int, str] = field(default_factory=dict)
    _announced: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    _began: float | None = None  # start of the round
    _with_state: set[int] = field(default_factory=set)  # members that have had the state

    def expect(self, number: int) -> None:
        """Record a starting process: it will ask to join."""
        self._starting.add(number)

    def receive(self, number: int, message: Message, now: float) -> None:
        """Handle a member's message."""
        if isinstance(message, JoinRequest):
            self._receive_ask(number, message, now)
        elif isinstance(message, Arrival):
            self._receive_arrival(number)
        elif isinstance(message, MemberReport) and message.kind == "synced":
            self._with_state.add(number)
            self.step(now)  # a member that had to stay until now may leave
        elif isinstance(message, MemberReport) and message.kind == "finished":
            self._finished.add(number)
            self._running.discard(number)
            self.step(now)
        elif isinstance(message, MemberReport) and message.kind == "running":
            self._finished.discard(number)
            if number in self.members and number not in self._gone:
                self._running.add(number)

    def end(self, number: int, why: str, now: float) -> None:
        """Record that a member has ended or left the job. The first reason counts."""
        self._gone.setdefault(number, why)
        self._starting.discard(number)
        self._running.discard(number)
        self._asked.pop(number, None)
        self.step(now)

    def remove(self, number: int, why: str, now: float) -> None:
        """Have a member leave at the next commit. The last member with the state leaves once others have it."""
        if number not in self._gone:
            self._removing.setdefault(number, why)
            self.step(now)

    def fail(self, text: str, now: float) -> None:
        """End the job, because it cannot continue. Members learn this when they ask."""
        self.failure = self.failure or text
        self.step(now)

    def step(self, now: float) -> None:
        """Apply due timeouts, removals and joins."""
        self._refuse_ineligible()
        if not self._asked:
            self._began = None
            if self._running:
                self._announce()
            return
        veterans = self._asked.keys() & set(self.members)
        if self._running and not veterans:
            self._announce()
            return
        if self._began is None:
            self._began = now
        if self._running:
            if now < self._began + self.limits.patience_s:
                return
            for number in sorted(self._running):
                self._leave_out(number)
        self._decide(now)

    def next_step_at(self) -> float | None:
        """Compute the due time of `step`. None means not before the next message."""
        if self._began is None:
            return None
        if self._running:
            return self._began + self.limits.patience_s
        if self.generation == 0 and len(self._asked) >= self.limits.least:
            return self._began + self.limits.start_timeout_s
        return self._began + self._longest_wait_s

    @property
    def is_finished(self) -> bool:
        """Whether a member's function has returned and no other started. Then no process joins."""
        return bool(self._finished)

    def waiting(self) -> tuple[int, ...]:
        """Numbers of members with an unanswered request."""
        return tuple(sorted(self._asked))

    # --- Asking. ---

    def _receive_arrival(self, number: int) -> None:
        if (refusal := self._refusal_of(number)) is not None:
            self._refuse(number, refusal)
        else:
            size = sum(member not in self._gone for member in self.members)
            self.outbox.append((number, Running(max(1, size) if self.generation else 0)))

    def _receive_ask(self, number: int, ask: JoinRequest, now: float) -> None:
        if number in self._refused:
            self.outbox.append((number, self._refused[number]))
            return
        if number in self._gone:
            text = f"it has left the job: {self._gone[number]}"
            self.outbox.append((number, Refusal("left out", text)))
            return
        for group in (self._starting, self._running, self._finished):
            group.discard(number)
        self._asked[number] = ask
        if ask.has_state:
            self._with_state.add(number)
        for dead in ask.dead:  # engines notice a death before the launcher does
            if dead in self.members and dead not in self._gone and dead not in self._asked:
                self._gone[dead] = "has died"
                self._running.discard(dead)
        self.step(now)

    def _refuse(self, number: int, refusal: Refusal) -> None:
        self._refused[number] = refusal
        self._gone.setdefault(number, refusal.text)
        self._asked.pop(number, None)
        self._running.discard(number)
        self._starting.discard(number)
        self.outbox.append((number, refusal))

    def _refuse_ineligible(self) -> None:
        for number in self.waiting():
            if (refusal := self._refusal_of(number)) is not None:
                self._refuse(number, refusal)

    def _refusal_of(self, number: int) -> Refusal | None:
        if self.failure:
            return Refusal("failed", self.failure)
        if number in self._removing and number != self._holder():
            return Refusal("removed", self._removing[number])
        if self.is_finished and number not in self.members:
            return Refusal("over", "the others have finished")
        return None

    def _leave_out(self, number: int) -> None:
        self._refuse(
            number,
            Refusal(
                "left out",
                f"the others waited {self.limits.patience_s:g} s for it and continued without it",
            ),
        )

    def _announce(self) -> None:
        """Notify running members of pending joins and removals."""
        here, holder = self._here(), self._holder()
        leaving = tuple(n for n in here if n in self._removing and n != holder)
        staying = len(here) - len(leaving)
        joining = self.waiting()[: max(0, self._most() - staying)]
        if (joining, leaving) == self._announced or not (joining or leaving):
            return
        self._announced = (joining, leaving)
        for number in sorted(self._running):
            self.outbox.append((number, Update(only_removals=not joining)))

    def _here(self) -> tuple[int, ...]:
        return tuple(number for number in self.members if number not in self._gone)

    def _holder(self) -> int | None:
        """Find a member to keep despite its removal, because no remaining member has the state."""
        here = self._here()
        if self.is_finished or self._with_state & set(here) - self._removing.keys():
            return None
        return next((number for number in here if number in self._removing), None)

    def _most(self) -> int:
        return self.limits.most if self._holder() is None else max(2, self.limits.most)

    # --- Deciding. ---

    @property
    def _longest_wait_s(self) -> float:
        return self.limits.timeout_s if self.generation else self.limits.start_timeout_s

    def _decide(self, now: float) -> None:
        """Decide the next generation, unless more members must join."""
        assert self._began is not None
        self._refuse_ineligible()
        candidates = self._candidates()
        if not candidates:
            return
        if self.generation == 0 and len(candidates) < self.limits.first:
            is_patient = now < self._began + self.limits.start_timeout_s
            if self._starting and is_patient:
                return
        if len(candidates) < self.limits.least and not self.is_finished:
            if now >= self._began + self._longest_wait_s:
                self.fail(self._too_few(len(candidates)), now)
            return
        if problem := self._problem(candidates):
            self.fail(problem, now)
            return
        self._form(candidates)

    def _candidates(self) -> tuple[int, ...]:
        """Candidates by rank: the newest state first, then the order of the previous generation."""
        newest = max((ask.version for ask in self._asked.values() if ask.has_state), default=0)
        places = {number: rank for rank, number in enumerate(self.members)}

        def order(number: int) -> tuple[object, ...]:
            ask = self._asked[number]
            is_newest = ask.has_state and ask.version == newest
            return (not is_newest, not ask.has_state, places.get(number, len(places)), number)

        return tuple(sorted(self._asked, key=order)[: self._most()])

    def _problem(self, candidates: tuple[int, ...]) -> str:
        """Find why these members cannot continue, or return ""."""
        if self._with_state and not any(self._asked[number].has_state for number in candidates):
            return STATE_IS_GONE
        if self.limits.resets is not None and self.generation > self.limits.resets:
            return (
                f"the job was reset {self.limits.resets} times, as often as its reset limit allows (--reset-limit, reset_limit=). "
                "Find out what ends its ranks, or raise the limit"
            )
        return ""

    def _too_few(self, found: int) -> str:
        name = "elastic_timeout=" if self.generation else "start_timeout="
        return (
            f"after {self._longest_wait_s:g} s (--elastic-timeout, {name}) it has {found} of the {self.limits.least} ranks that it "
            "needs (--min-np, min_num_proc=)"
        )

    def _form(self, members: tuple[int, ...]) -> None:
        assert self._began is not None
        former = self.members
        asks = {number: self._asked.pop(number) for number in members}
        sync = self.generation == 0 or any(a.needs_sync or not a.has_state for a in asks.values())
        self.generation += 1
        endpoints = tuple(asks[number].endpoint for number in members)
        decision = Decision(self.generation, members, endpoints, sync)
        self.outbox += [(number, decision) for number in members]
        self.changes.append(
            Change(
                generation=self.generation,
                before=len(former),
                members=members,
                lost=dict(self._reasons(former, members)),
                joined=tuple(number for number in members if number not in former),
                asked_at=self._began,
                why=next((ask.why for ask in asks.values() if ask.why), ""),
                sync=sync,
            )
        )
        self.members = members
        self._running = set(members)
        self._announced = ((), ())
        self._began = None
        if self._asked:  # members beyond `most` still wait
            self._announce()

    def _reasons(
        self, former: tuple[int, ...], members: tuple[int, ...]
    ) -> Iterator[tuple[int, str]]:
        for number in former:
            if number in self._finished:
                yield number, FINISHED
            elif number not in members:
                yield number, self._gone.get(number, "waits for a slot")


# ----------------------------------------------------------------------------------------------------
# Messages between the members of an elastic job and its coordinator.


@dataclass(frozen=True)
class Arrival:
    """Question of a new process whether a generation runs. It asks to join later, when it is ready."""


@dataclass(frozen=True)
class Running:
    """Answer to an arrival.

    Attributes:
        size: number of members of the running generation; 0 if none has started.
    """

    size: int


@dataclass(frozen=True)
class JoinRequest:
    """Request of a member to join the next generation.

    Attributes:
        generation: its last one; 0 for none.
        endpoint: its listening address.
        has_state: whether it has the training's state.
        version: of its last commit; the state with the highest version wins.
        needs_sync: whether it must get the state before it continues.
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
    """Members of a generation, sent to each of them.

    Attributes:
        generation: counts from 1.
        members: their numbers, by rank.
        endpoints: their listening addresses, by rank.
        sync: whether every member gets rank 0's state before it continues.
    """

    generation: int
    members: tuple[int, ...]
    endpoints: tuple[Endpoint, ...]
    sync: bool


@dataclass(frozen=True)
class Refusal:
    """Answer to a member outside the next generation.

    Attributes:
        kind: "left out", "removed" (it should exit with 0), "over" (the others have finished), or "failed".
        text: why, in a sentence.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Update:
    """Notice to change the members at the next commit.

    Attributes:
        only_removals: whether no member joins, so that the state need not be sent again.
    """

    only_removals: bool


@dataclass(frozen=True)
class MemberReport:
    """Report of a member.

    Attributes:
        kind: "formed" (it has connected to the others), "synced" (it has the training's state), "finished" (its
            function has returned) or "running" (it has started another function since).
        generation: the member's.
    """

    kind: str
    generation: int


Message = Arrival | Running | JoinRequest | Decision | Refusal | Update | MemberReport
_KINDS: dict[str, type[Message]] = {
    "arrival": Arrival,
    "running": Running,
    "ask": JoinRequest,
    "decision": Decision,
    "refusal": Refusal,
    "update": Update,
    "report": MemberReport,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_dict(message: Message) -> dict[str, Any]:
    return {"message": _NAMES[type(message)], **dataclasses.asdict(message)}


def from_dict(values: Mapping[str, Any]) -> Message:
    """Rebuild a message from `to_dict`.

    Raises:
        ValueError: it is not a valid message.
    """
    fields = dict(values)
    name = fields.pop("message", None)
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"no message of an elastic job: {name!r:.100}")
    return rebuild(_KINDS[name], fields)
