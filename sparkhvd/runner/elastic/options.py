"""Limits of an elastic job, from the flags of the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError

__all__ = ["ElasticOptions"]

# As many as anybody asks for.
_MOST = 1 << 20


@dataclass(frozen=True)
class ElasticOptions:
    """Limits of an elastic job; None means the default.

    Attributes:
        num_proc: ranks to begin with (`-np`); `least` by default.
        least: ranks without which there is no training (`--min-np`); `num_proc` by default.
        most: ranks that are never exceeded (`--max-np`).
        timeout_s: longest wait for `least` ranks (`--elastic-timeout`).
        reset_limit: changes of the ranks after the first generation, of which one more ends the job (`--reset-limit`).
        cooldown_s: shortest and longest time for which a host is left out after failures (`--blacklist-cooldown-range`).

    Raises:
        InvalidArgumentError: a limit is wrong, or two contradict each other.
    """

    num_proc: int | None = None
    least: int | None = None
    most: int | None = None
    timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] = (1.0, 600.0)

    def __post_init__(self) -> None:
        for flag, value in (
            ("-np", self.num_proc),
            ("--min-np", self.least),
            ("--max-np", self.most),
        ):
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{flag} is {value}; it must be at least 1.")
        if self.num_proc is None and self.least is None:
            raise InvalidArgumentError(
                "an elastic job needs -np or --min-np, as in sparkhvdrun -np 4 --min-np 2 --max-np 8 python train.py"
            )
        least, first, most = self.smallest, self.first, self.largest
        if not least <= first <= most:
            raise InvalidArgumentError(
                f"--min-np is {least}, -np is {first} and --max-np is {most}; each must be at most the next one."
            )
        if self.reset_limit is not None and self.reset_limit < 0:
            raise InvalidArgumentError(
                f"--reset-limit is {self.reset_limit}; it must be 0 or more changes of the ranks."
            )
        if not 0 < self.timeout_s < math.inf:
            raise InvalidArgumentError(
                f"--elastic-timeout is {self.timeout_s:g}; it must be a number of seconds above 0, such as 600."
            )
        shortest, longest = self.cooldown_s
        if not 0 < shortest <= longest < math.inf:
            raise InvalidArgumentError(
                f"--blacklist-cooldown-range is {shortest:g} {longest:g}; it must be two numbers of seconds above 0, the shorter one first."
            )

    @property
    def first(self) -> int:
        """Ranks to begin with."""
        return self.num_proc or self.least or 1

    @property
    def smallest(self) -> int:
        """Ranks without which there is no training."""
        return self.least or self.first

    @property
    def largest(self) -> int:
        """Ranks that are never exceeded."""
        return self.most or max(_MOST, self.first)
