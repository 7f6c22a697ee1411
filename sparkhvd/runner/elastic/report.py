"""What the launcher tells of each change of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparkhvd.elastic import Formed
from sparkhvd.runner.options import RankChange

__all__ = ["Report", "listed"]


@dataclass
class Report:
    """Describes changes. One that another has overtaken before the ranks had met is told of with that one."""

    _before: int | None = None
    _lost: dict[int, str] = field(default_factory=dict)
    _seconds: float = 0.0

    def describe(
        self, formed: Formed, hosts: Mapping[int, str], ends: Mapping[int, str]
    ) -> RankChange | None:
        """Describe a change; None if another one has overtaken it.

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
            why = "; ".join(parts) or change.why or "asked for"
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
