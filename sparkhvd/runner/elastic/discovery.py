"""Hosts and their slots, now and later: a script of the user's that prints them, or a list that stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.runner import leftovers
from sparkhvd.runner.host_names import Host, parse_hosts

__all__ = ["Discovered", "DiscoveryScript"]

# How long the script may take.
LIMIT_S = 10.0
# Between its end and its next start.
EVERY_S = 1.0
_SHOWN = 300


@dataclass(frozen=True)
class Discovered:
    """Result of a run of the discovery script.

    Attributes:
        hosts: hosts with slots; None where it has failed, and what was known counts.
        problem: how; "" if it has not.
    """

    hosts: tuple[Host, ...] | None
    problem: str = ""


class DiscoveryScript:
    """Runs the script again and again, from a thread; a context manager.

    Args:
        path: program that prints a line `host` or `host:slots` for each host that is there.
        slots: of a host whose line has none; None where every line must have them.
        env: variables of the script.
    """

    def __init__(self, path: str, slots: int | None, env: Mapping[str, str]) -> None:
        self._path = path
        self._slots = slots
        self._env = leftovers.marked(env, "")
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def first(self) -> tuple[Host, ...]:
        """Run it once.

        Raises:
            PreflightError: it cannot be started, fails, hangs, or prints something else than hosts.
        """
        return self._run()

    def follow(self, known: Sequence[Host], tell: Callable[[Discovered], None]) -> None:
        """Run it every second from now on.

        Args:
            known: result of the last run.
            tell: called when the result of a run is another one than the last one's.
        """

        def repeat() -> None:
            last = Discovered(tuple(known))
            while not self._closing.wait(EVERY_S):
                try:
                    found = Discovered(self._run())
                except PreflightError as error:
                    found = Discovered(None, str(error))
                if found != last and not self._closing.is_set():
                    tell(found)
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
                f"{what} has not ended within {LIMIT_S:g} s. It is run every second, and must print the hosts that are there and end."
            ) from None
        finally:
            self._end()
        if process.returncode != 0:
            said = errors.strip()[-_SHOWN:] or "nothing"
            raise PreflightError(
                f"{what} exited with {process.returncode}. It must print the hosts that are there and exit with 0. Its errors: {said}"
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
        with process:  # its pipes are closed, and it is waited for
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
