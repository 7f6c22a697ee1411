"""How an attempt of an elastic job has ended, as its coordinator tells the one who launched it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sparkhvd.runner.elastic.launcher import Verdict
from sparkhvd.runner.hosts.channel import pack, unpack
from sparkhvd.runner.options import RankChange
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.runner.watching import Ended

__all__ = ["AttemptResult"]

_KIND = "result"


@dataclass(frozen=True)
class AttemptResult:
    """End of an attempt.

    Attributes:
        verdict: of its launcher.
        outcomes: of its processes, by number.
        results: of those that have returned one, by number; pickled.
        refused: why the first task could not take part; "" if it could.
        unsent: lines of the coordinator that may not have been shown, as `Outcome.unsent`.
        changes: of the ranks.
    """

    verdict: Verdict
    outcomes: Mapping[int, Outcome]
    results: Mapping[int, bytes]
    refused: str = ""
    unsent: tuple[tuple[int, str, int], ...] = ()
    changes: tuple[RankChange, ...] = ()

    def to_bytes(self) -> bytes:
        """Return bytes from which `from_bytes` rebuilds this."""
        values = {
            "verdict": asdict(self.verdict),
            "outcomes": [[number, each.to_json()] for number, each in self.outcomes.items()],
            "results": [[number, len(data)] for number, data in self.results.items()],
            "refused": self.refused,
            "unsent": self.unsent,
            "changes": [asdict(change) for change in self.changes],
        }
        return pack(_KIND, b"".join(self.results.values()), values)

    @classmethod
    def from_bytes(cls, content: bytes) -> AttemptResult:
        """Rebuild a result from `to_bytes`."""
        message = unpack(content)
        values, verdict = message.values, message.values["verdict"]
        results, at = {}, 0
        for number, size in values["results"]:
            results[number] = message.data[at : at + size]
            at += size
        failed = tuple(Ended(**each) for each in verdict["failed"])
        members = tuple(verdict["members"])
        return cls(
            Verdict(**{**verdict, "failed": failed, "members": members}),
            {number: Outcome.from_json(text) for number, text in values["outcomes"]},
            results,
            values["refused"],
            tuple((number, text, lines) for number, text, lines in values["unsent"]),
            tuple(RankChange(**each) for each in values["changes"]),
        )
