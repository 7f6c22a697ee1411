"""Limits of an elastic job, from flags or arguments, and discovery of its hosts."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkhvd.elastic import JoinToken, Limits
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.rendezvous import Endpoint
from sparkhvd.runner import orphans
from sparkhvd.runner.host_names import Host, parse_hosts
from sparkhvd.settings import check_seconds, is_number

# Effectively no limit.
_MOST = 1 << 20
# Added to a member's wait, so that the coordinator's own limit ends first: its refusal has a reason.
_MARGIN_S = 60.0
_FLAGS = (
    "-np",
    "--min-np",
    "--max-np",
    "--reset-limit",
    "--elastic-timeout",
    "--blacklist-cooldown-range",
)
# Names of the same limits as arguments of a call.
_ARGUMENTS = (
    "num_proc",
    "min_num_proc",
    "max_num_proc",
    "reset_limit",
    "elastic_timeout",
    "cooldown_range",
)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else repr(value)


@dataclass(frozen=True)
class ElasticOptions:
    """Limits of an elastic job. None means the default.

    Attributes:
        num_proc: initial number of ranks (`-np`); `least` by default.
        least: smallest number of ranks (`--min-np`); with fewer the training waits. `num_proc` by default.
        most: largest number of ranks (`--max-np`).
        timeout_s: longest wait for `least` ranks (`--elastic-timeout`).
        wait_to_start_s: the same before the first generation; `timeout_s` by default.
        reset_limit: changes of the ranks after the first generation; one more ends the job (`--reset-limit`).
        cooldown_s: shortest and longest exclusion of a host after failures (`--blacklist-cooldown-range`).
        names: names of these limits in errors.

    Raises:
        InvalidArgumentError: a limit is wrong, or two contradict each other.
    """

    num_proc: int | None = None
    least: int | None = None
    most: int | None = None
    timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] = (1.0, 600.0)
    wait_to_start_s: float | None = None
    names: tuple[str, ...] = _FLAGS

    def __post_init__(self) -> None:
        ranks, fewest, highest, resets, timeout, cooldown = self.names
        for name, value in ((ranks, self.num_proc), (fewest, self.least), (highest, self.most)):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidArgumentError(
                    f"{name} is {value!r}; it must be a whole number of at least 1."
                )
        if self.num_proc is None and self.least is None:
            raise InvalidArgumentError(
                "an elastic job needs -np or --min-np, as in sparkhvdrun -np 4 --min-np 2 --max-np 8 python train.py"
            )
        least, first, most = self.smallest, self.first, self.largest
        if not least <= first <= most:
            raise InvalidArgumentError(
                f"{fewest} is {least}, {ranks} is {first} and {highest} is {most}; each must be at most the next one."
            )
        limit = self.reset_limit
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidArgumentError(f"{resets} is {limit!r}. Give a whole number of at least 0.")
        check_seconds(timeout, self.timeout_s, 600)
        pair = self.cooldown_s
        if not all(map(is_number, pair)) or not 0 < pair[0] <= pair[1] < math.inf:
            raise InvalidArgumentError(
                f"{cooldown} is {' '.join(map(_shown, pair))}; it must be two numbers of seconds above 0, the shorter one first."
            )

    @property
    def first(self) -> int:
        """Initial number of ranks."""
        return self.num_proc or self.least or 1

    @property
    def smallest(self) -> int:
        return self.least or self.first

    @property
    def largest(self) -> int:
        return self.most or max(_MOST, self.first)

    @property
    def start_timeout_s(self) -> float:
        """Longest wait for the initial ranks."""
        return self.timeout_s if self.wait_to_start_s is None else self.wait_to_start_s

    def limits(self, patience_s: float) -> Limits:
        return Limits(
            first=self.first,
            least=self.smallest,
            most=self.largest,
            resets=self.reset_limit,
            start_timeout_s=self.start_timeout_s,
            timeout_s=self.timeout_s,
            patience_s=patience_s,
        )

    def join_token(
        self, key: bytes, job_id: str, number: int, coordinator: Endpoint, patience_s: float
    ) -> JoinToken:
        """Make the token of a process. The arguments are those of `JoinToken`."""
        wait_s = max(self.timeout_s, self.start_timeout_s) + patience_s + _MARGIN_S
        return JoinToken(key, job_id, number, coordinator, wait_s, patience_s)


@dataclass(frozen=True)
class CoordinatorTerms:
    """Limits of a job for the coordinator of its tasks, sent as JSON.

    Attributes:
        limits: of the job.
        wanted: tasks to wait for briefly before the first process starts.
    """

    limits: ElasticOptions
    wanted: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankRange:
    """Numbers of ranks and other limits given by the caller. None means the default.

    Attributes:
        num_proc: initial number of ranks; by default the configured slots.
        least: smallest number of ranks; by default `num_proc`.
        most: largest number of ranks; by default `num_proc`.
        timeout_s: longest wait for `least` ranks.
        reset_limit: changes of the ranks.
        cooldown_s: shortest and longest exclusion of a host after failures.
    """

    num_proc: int | None = None
    least: int | None = None
    most: int | None = None
    timeout_s: float | None = None
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None

    def largest(self) -> int | None:
        """Get the largest given number of ranks, or None without a number.

        Raises:
            InvalidArgumentError: a number is wrong, or two contradict each other.
        """
        given = [each for each in (self.num_proc, self.least, self.most) if each is not None]
        if given:
            is_known = self.num_proc is not None or self.least is not None
            self.options(self.num_proc if is_known else self.most, 1.0)
        return max(given, default=None)

    def first(self, slots: int) -> int:
        """Initial number of ranks: by default the slots, within the limits."""
        if self.num_proc is not None:
            return self.num_proc
        least = max(slots, self.least or 1)
        return least if self.most is None else min(least, self.most)

    def options(self, num_proc: int | None, start_timeout_s: float) -> ElasticOptions:
        """Replace missing limits by their defaults.

        Args:
            num_proc: initial number of ranks.
            start_timeout_s: longest wait for them.
        """
        return ElasticOptions(
            num_proc=num_proc,
            least=num_proc if self.least is None else self.least,
            most=num_proc if self.most is None else self.most,
            timeout_s=600.0 if self.timeout_s is None else self.timeout_s,
            reset_limit=self.reset_limit,
            cooldown_s=(1.0, 600.0) if self.cooldown_s is None else self.cooldown_s,
            wait_to_start_s=start_timeout_s,
            names=_ARGUMENTS,
        )


# ----------------------------------------------------------------------------------------------------
# Discovery of hosts and slots by a script of the user.

# Timeout of the script.
LIMIT_S = 10.0
# Pause between the script's end and its next start.
EVERY_S = 1.0
_SHOWN = 300


@dataclass(frozen=True)
class Discovered:
    """Result of a run of the discovery script.

    Attributes:
        hosts: hosts with slots; None if it has failed, which keeps the known ones.
        problem: its failure; "" if it succeeded.
    """

    hosts: tuple[Host, ...] | None
    problem: str = ""


class DiscoveryScript:
    """Runner of the discovery script, repeated in a thread. A context manager.

    Args:
        path: program that prints a line `host` or `host:slots` for each available host.
        slots: of a host whose line has no number; None if every line must have one.
        env: variables of the script.
    """

    def __init__(self, path: str, slots: int | None, env: Mapping[str, str]) -> None:
        self._path = path
        self._slots = slots
        self._env = orphans.marked(env, "")
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def first(self) -> tuple[Host, ...]:
        """Run the script once.

        Raises:
            PreflightError: it cannot be started, fails, hangs, or prints anything but hosts.
        """
        return self._run()

    def follow(self, known: Sequence[Host], notify: Callable[[Discovered], None]) -> None:
        """Run it every second from now on.

        Args:
            known: result of the last run.
            notify: called when a result differs from the previous one.
        """

        def repeat() -> None:
            last = Discovered(tuple(known))
            while not self._closing.wait(EVERY_S):
                try:
                    found = Discovered(self._run())
                except PreflightError as error:
                    found = Discovered(None, str(error))
                if found != last and not self._closing.is_set():
                    notify(found)
                last = found

        self._thread = threading.Thread(target=repeat, name="sparkhvd-discovery", daemon=True)
        self._thread.start()

    def _run(self) -> tuple[Host, ...]:
        what = f"--host-discovery-script {self._path!r}"
        try:
            process = subprocess.Popen(
                [os.path.abspath(self._path) if os.path.exists(self._path) else self._path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=self._env,
                start_new_session=True,
            )
        except OSError as error:
            raise PreflightError(
                f"{what} cannot be started: {error}. Give a program that may be executed (chmod +x, and #!/bin/sh in its first line)."
            ) from error
        self._process = process
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise PreflightError(
                f"{what} has not ended within {LIMIT_S:g} s. It is run every second, and must print the available hosts and exit."
            ) from None
        finally:
            self._end()
        if process.returncode != 0:
            said = errors.strip()[-_SHOWN:] or "nothing"
            raise PreflightError(
                f"{what} exited with {process.returncode}. It must print the available hosts and exit with 0. Its errors: {said}"
            )
        return self._parse(what, output)

    def _parse(self, what: str, output: str) -> tuple[Host, ...]:
        found: list[Host] = []
        for line in filter(None, map(str.strip, output.splitlines())):
            try:
                (host,) = parse_hosts(line)
            except (InvalidArgumentError, ValueError) as error:
                raise PreflightError(
                    f"{what} printed {line[:_SHOWN]!r}; each of its lines must be `host` or `host:slots`."
                ) from error
            if ":" not in line:
                if self._slots is None:
                    raise PreflightError(
                        f"{what} printed {line!r} without slots. Print host:slots, or give --slots-per-host (slots=)."
                    )
                host = Host(host.name, self._slots)
            if host.name in {other.name for other in found}:
                raise PreflightError(f"{what} printed {host.name!r} twice. Print each host once.")
            found.append(host)
        return tuple(found)

    def _end(self) -> None:
        """Kill the script and what it has started, if they still run."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:  # closes its pipes and waits for it
            pass

    def __enter__(self) -> DiscoveryScript:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._thread is not None:
            self._thread.join()
