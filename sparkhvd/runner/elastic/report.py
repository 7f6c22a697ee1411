"""What the launcher says: a line for each change of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparkhvd.elastic import Formed

__all__ = ["Report"]


@dataclass
class Report:
    """Makes the lines. A change that another one has overtaken before the ranks had met is told of with that one."""

    _before: int | None = None
    _lost: dict[int, str] = field(default_factory=dict)
    _seconds: float = 0.0

    def line(self, formed: Formed, hosts: Mapping[int, str], ends: Mapping[int, str]) -> str:
        """Return the line of a change; "" if another one has overtaken it.

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
            return ""
        now = len(change.members)
        before, lost, seconds = self._before, self._lost, self._seconds
        self._before, self._lost, self._seconds = None, {}, 0.0
        took = f"in {seconds:.2f} s"
        if before == 0:
            named = ", ".join(_counted(hosts[number] for number in change.members))
            return f"{now} {_ranks(now)} {took}: {named}"
        parts = [
            f"process {number} on {hosts[number]} {ends.get(number, why)}"
            for number, why in sorted(lost.items())
        ]
        parts += [
            f"process {number} on {hosts[number]} joined as rank {change.members.index(number)}"
            for number in change.joined
        ]
        return f"{before} -> {now} {_ranks(now)} {took}: {'; '.join(parts) or change.why or 'asked for'}"


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _counted(hosts: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host] = counts.get(host, 0) + 1
    return [f"{count} on {host}" for host, count in counts.items()]
