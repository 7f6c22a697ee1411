"""Event-driven launcher of an elastic job. It decides which processes to start and to remove."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkhvd.elastic import Coordinator, Decided, GenerationFormed, JoinToken
from sparkhvd.elastic.membership import FINISHED, Refusal
from sparkhvd.errors import SparkhvdError
from sparkhvd.runner.elastic.options import Discovered, ElasticOptions
from sparkhvd.runner.elastic.processes import ElasticProcesses
from sparkhvd.runner.elastic.slots import Cooldown, Offer, Slot, slots_of, slots_to_fill, surplus
from sparkhvd.runner.options import RankChange
from sparkhvd.runner.supervisor import (
    SIGNAL_S,
    HostLost,
    RankEnded,
    ShutdownSequence,
    SignalReceived,
    ended_how,
)

# An excluded process has this long to end by itself, once it runs again.
LEFT_OUT_S = 30.0
# Time after which processes that have not joined are first logged, and time between the later lines.
WAITING_S, WAITING_AGAIN_S = 30.0, 60.0
# How long a line waits for the exit statuses of the processes that it names.
_REPORT_S = 0.5
_FAILED = 1
# Status of a process lost with its host, like ssh's.
_LOST = 255


@dataclass(frozen=True)
class MemberRefused:
    """Event: the coordinator has refused a member."""

    number: int
    refusal: Refusal


@dataclass(frozen=True)
class ProcessesStopped:
    """Event: the owner of the processes has ended, and they end with it."""

    why: str


Event = (
    RankEnded
    | SignalReceived
    | HostLost
    | Discovered
    | Offer
    | Decided
    | GenerationFormed
    | MemberRefused
    | ProcessesStopped
)


@dataclass(frozen=True)
class JobResult:
    """End of a job.

    Attributes:
        has_finished: whether a process has succeeded.
        has_begun: whether a process was ever started.
        problem: why the job could not continue; "" if only its processes have failed.
        failed: ends of processes since the ranks last connected, in order.
        received: signal to this process; 0 without one.
        members: of the last connected generation, by rank, after those that had finished before it.
    """

    has_finished: bool
    has_begun: bool
    problem: str
    failed: tuple[RankEnded, ...]
    received: int
    members: tuple[int, ...]


@dataclass
class _Process:
    """Running process.

    Attributes:
        slot: its slot.
        started_at: when.
        refusal: why the coordinator has refused it; None while it has not.
        kill_at: when it is killed; None for never.
        is_surplus: whether it was asked to leave.
    """

    slot: Slot
    started_at: float
    refusal: Refusal | None = None
    kill_at: float | None = None
    is_surplus: bool = False


class ElasticLauncher:
    """Launcher of an elastic job's processes. One thread calls all methods.

    Args:
        options: limits of the job.
        slots: initial slots.
        processes: starts processes.
        coordinator: of the job.
        issue_token: creates the join token of a process, by its number.
        log: writes a line.
        save_s: how long processes may save after an interrupt.
    """

    def __init__(
        self,
        options: ElasticOptions,
        slots: Sequence[Slot],
        processes: ElasticProcesses,
        coordinator: Coordinator,
        issue_token: Callable[[int], JoinToken],
        log: Callable[[str], None],
        save_s: float = SIGNAL_S,
    ) -> None:
        self.changes: list[RankChange] = []
        self._options = options
        self._slots = tuple(slots)
        self._processes = processes
        self._coordinator = coordinator
        self._invite = issue_token
        self._log = log
        self._cooldown = Cooldown(*options.cooldown_s)
        self._ending = ShutdownSequence(processes.send, save_s)
        self._report = ChangeReport()
        self._lines: deque[tuple[float, GenerationFormed]] = deque()
        self._running: dict[int, _Process] = {}
        self._places: dict[int, str] = {}  # hosts of all processes so far
        self._ends: dict[int, str] = {}
        self._have_joined: set[int] = (
            set()
        )  # a generation, whether or not its members have connected
        self._have_met: set[int] = set()
        self._log_waiting_at = math.inf
        self._members: tuple[int, ...] = ()
        self._failed: list[RankEnded] = []  # since the ranks last connected
        self._has_finished = False
        self._problem = ""  # why the job cannot continue
        self._received = 0  # signal to this process
        self._deadline = time.monotonic() + options.start_timeout_s  # for a first process

    def run(self, events: queue.SimpleQueue[Event], limit_s: float = math.inf) -> JobResult:
        """Run the job to its end, or for `limit_s`."""
        until = time.monotonic() + limit_s
        self._fill()
        while self._is_running() and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._take(events.get(timeout=min(left, self._next_step_s())))
            self._ending.step()
            self._kill_excluded()
            self._write_lines()
            self._fill()
            self._log_awaited()
        self._write_lines(at_once=True)
        if self._has_finished and self._have_joined and (late := self._awaited()):
            named = listed(late, self._places, time.monotonic())
            self._log(f"the job has finished, and ends the processes that had not joined: {named}")
        return JobResult(
            self._has_finished,
            bool(self._places),
            self._problem,
            tuple(self._failed),
            self._received,
            self._members,
        )

    def _is_running(self) -> bool:
        if any(self._holds(number, process) for number, process in self._running.items()):
            return True
        return not (self._places or self._is_ending) and time.monotonic() < self._deadline

    @property
    def _is_ending(self) -> bool:
        return bool(self._has_finished or self._received or self._problem)

    def _holds(self, number: int, process: _Process) -> bool:
        """Whether the job waits for the end of a process. The other processes end with the launcher."""
        if self._has_finished and self._have_joined and number not in self._have_joined:
            return False  # if no process has joined, the program has no ranks
        if process.refusal is None:
            return True
        return self._is_ending and process.refusal.kind != "left out"

    # --- Events. ---

    def _take(self, event: Event) -> None:
        if isinstance(event, SignalReceived):
            self._received = self._received or event.number
            self._ending.interrupt(event.number)
        elif isinstance(event, RankEnded):
            self._record_end(event)
        elif isinstance(event, HostLost):
            if not event.ranks:
                self._log(f"the connection to {event.host} was lost: {event.why}")
            for number in event.ranks:
                self._record_end(RankEnded(number, _LOST), f"was lost with its host: {event.why}")
        elif isinstance(event, Decided):
            self._have_joined.update(event.members)
        elif isinstance(event, GenerationFormed):
            self._lines.append((time.monotonic() + _REPORT_S, event))
            if event.has_met:
                self._failed.clear()
                finished = [each for each in self._members if self._ends.get(each) == FINISHED]
                new = event.change.members
                self._members = (*(each for each in finished if each not in new), *new)
                self._have_met.update(new)
        elif isinstance(event, MemberRefused):
            self._record_refusal(event)
        elif isinstance(event, Discovered):
            self._record_hosts(event)
        elif isinstance(event, Offer):
            self._slots = event.slots
        else:
            self._stop(event.why)

    def _record_hosts(self, found: Discovered) -> None:
        if found.hosts is None:
            self._log(f"{found.problem} Keeping the last known hosts.")
            return
        self._slots = slots_of(found.hosts)
        if not self._slots:
            self._log(
                "--host-discovery-script printed no host. Keeping the last process with the state until another has copied it."
            )

    def _record_end(self, ended: RankEnded, how: str = "") -> None:
        process = self._running.pop(ended.rank)
        number, refusal = ended.rank, process.refusal
        how = how or ended.how or ended_how(ended.status)
        self._ends[number] = how if refusal is None else refusal.text
        if ended.status == 0 and refusal is None:
            self._ends[number] = FINISHED
            self._has_finished = True
            self._coordinator.finish(number)
            return
        self._coordinator.end(number, self._ends[number])
        if ended.status == 0 or self._ending.has_begun:
            return
        self._failed.append(ended)
        host = process.slot.host
        if ended.is_final and not self._have_met:
            self._ending.begin()
        if number not in self._have_met:  # no line of a change will report it
            self._log(f"process {number} on {host} {how} before it was a rank")
        seconds = self._cooldown.fail(host, time.monotonic())
        if seconds > self._options.cooldown_s[0]:
            self._log(
                f"{host} is left out for {seconds:.0f} s: process {number} there {how}, and other processes before."
            )

    def _record_refusal(self, refused: MemberRefused) -> None:
        if (process := self._running.get(refused.number)) is None:
            return
        process.refusal = refused.refusal
        if refused.refusal.kind == "left out":
            process.kill_at = time.monotonic() + LEFT_OUT_S
        elif refused.refusal.kind == "over":
            self._has_finished = True
        elif refused.refusal.kind == "failed":
            self._stop(refused.refusal.text)

    def _stop(self, problem: str) -> None:
        if not self._problem:
            self._problem = problem
            self._ending.begin()

    # --- Start and end of processes, lines that are due. ---

    def _next_step_s(self) -> float:
        now = time.monotonic()
        due = [process.kill_at for process in self._running.values()]
        due += [self._cooldown.next_end(now), self._ending.next_step_at()]
        due += [at for at, _ in self._lines]
        due.append(self._log_waiting_at)
        if not self._places:
            due.append(self._deadline)
        # Possibly nothing is due: the clock cannot represent an infinite wait.
        return max(0.0, min(now + 3600.0, *(at for at in due if at is not None)) - now)

    def _fill(self) -> None:
        """Start and remove processes to match the slots."""
        if self._ending.has_begun or self._has_finished or self._problem:
            return
        taken = {number: process.slot for number, process in self._running.items()}
        for number in surplus(self._slots, taken):
            if not self._running[number].is_surplus:
                self._running[number].is_surplus = True
                self._coordinator.remove(number, "left: its slot is gone")
        now = time.monotonic()
        count = Counter(slot.host for slot in self._slots)
        left_out = {host for host in count if self._cooldown.is_left_out(host, now)}
        if self._places and not self._running:
            return  # all processes are gone, and so is the job
        most = self._options.largest
        if all(process.is_surplus for process in self._running.values()):
            most = max(
                most, len(taken) + 1
            )  # the last process stays until another one has the state
        free = slots_to_fill(self._slots, set(taken.values()), most, left_out)
        new = dict(enumerate(free, len(self._places)))
        for number in new:  # before one of them asks to join: it must wait for the others
            self._coordinator.expect(number)
        for number, slot in new.items():
            self._start(number, slot, count[slot.host])

    def _start(self, number: int, slot: Slot, slots: int) -> None:
        self._places[number] = slot.host
        now = time.monotonic()
        self._running[number] = _Process(slot, now)
        self._log_waiting_at = min(self._log_waiting_at, now + WAITING_S)
        try:
            self._processes.start(slot, self._invite(number), slots)
        except (OSError, SparkhvdError) as error:
            if number == 0:  # nothing has begun
                raise
            self._log(f"process {number} cannot be started on {slot.host}: {error}")
            self._record_end(RankEnded(number, _FAILED))

    def _kill_excluded(self) -> None:
        now = time.monotonic()
        for number, process in self._running.items():
            if self._has_finished and process.refusal is not None and process.kill_at is None:
                process.kill_at = now + LEFT_OUT_S
            if process.kill_at is not None and process.kill_at <= now:
                self._processes.send(signal.SIGKILL, number)
                process.kill_at = now + LEFT_OUT_S

    def _awaited(self) -> dict[int, float]:
        """Collect the start times of processes yet to join, by number."""
        return {
            number: process.started_at
            for number, process in self._running.items()
            if number not in self._have_joined
            and process.refusal is None
            and not process.is_surplus
        }

    def _log_awaited(self) -> None:
        now = time.monotonic()
        if now < self._log_waiting_at:
            return
        since = self._awaited()
        if late := {number: at for number, at in since.items() if now >= at + WAITING_S}:
            self._log(f"still waiting for processes to join: {listed(late, self._places, now)}")
        next_at = now + WAITING_AGAIN_S if late else math.inf
        first = min(
            (at + WAITING_S for at in since.values() if at + WAITING_S > now), default=math.inf
        )
        self._log_waiting_at = min(next_at, first)

    def _write_lines(self, *, at_once: bool = False) -> None:
        """Log each change of the ranks once it is known how the lost processes ended, after `_REPORT_S`, or `at_once`."""
        while self._lines:
            at, formed = self._lines[0]
            is_known = all(number in self._ends for number in formed.change.lost)
            if not (is_known or at_once or time.monotonic() >= at):
                return
            self._lines.popleft()
            if change := self._report.describe(formed, self._places, self._ends):
                self._log(str(change))
                self.changes.append(replace(change, at=time.time()))


# ----------------------------------------------------------------------------------------------------
# Lines of the launcher about changes of the ranks.


@dataclass
class ChangeReport:
    """Describes changes. A change superseded before the ranks had connected is merged into the next one."""

    _before: int | None = None
    _lost: dict[int, str] = field(default_factory=dict)
    _seconds: float = 0.0

    def describe(
        self, formed: GenerationFormed, hosts: Mapping[int, str], ends: Mapping[int, str]
    ) -> RankChange | None:
        """Describe a change, or return None if it was superseded.

        Args:
            formed: the change.
            hosts: of processes, by number.
            ends: how processes have ended, by number.
        """
        change = formed.change
        self._before = change.before if self._before is None else self._before
        self._lost.update(change.lost)
        self._seconds += formed.seconds
        if not formed.has_met:
            return None
        before, lost, seconds = self._before, self._lost, self._seconds
        self._before, self._lost, self._seconds = None, {}, 0.0
        if before == 0:
            why = ", ".join(_counted(hosts[number] for number in change.members))
        else:
            parts = [
                f"process {number} on {hosts[number]} {ends.get(number, how)}"
                for number, how in sorted(lost.items())
            ]
            parts += [
                f"process {number} on {hosts[number]} joined as rank {change.members.index(number)}"
                for number in change.joined
            ]
            why = "; ".join(parts) or change.why or "requested"
        return RankChange(change.generation, before, len(change.members), seconds, why)


def listed(since: Mapping[int, float], hosts: Mapping[int, str], now: float) -> str:
    """List processes with their hosts and the seconds since their start.

    Args:
        since: when they were started, by number.
        hosts: of processes, by number.
        now: the time.
    """
    return ", ".join(
        f"process {number} on {hosts[number]} (started {now - at:.0f} s ago)"
        for number, at in sorted(since.items())
    )


def _counted(hosts: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host] = counts.get(host, 0) + 1
    return [f"{count} on {host}" for host, count in counts.items()]
