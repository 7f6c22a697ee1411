"""`sparkhvdrun` of an elastic job, or a program that calls a function as one (`"-c", text`), whose lines a test waits for: `with elastic_run(folder, "-np", "2") as job: job.ranks(2)`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from tests.harness.paths import ROOT
from tests.harness.waiting import wait_until

SCRIPT = ROOT / "tests" / "launchers" / "elastic_script.py"


class ElasticRun:
    """A launcher that runs.

    Attributes:
        stop: the script ends when this file is there.
        hosts: file of the discovery script.
        lines: of the launcher's two streams.
    """

    def __init__(
        self,
        folder: Path,
        flags: tuple[str, ...],
        script: tuple[str, ...],
        variables: Mapping[str, str],
    ) -> None:
        self.stop = folder / "stop"
        self.lines: list[str] = []
        command = [sys.executable, "-m", "sparkhvd.runner.command", *flags]
        command += [
            sys.executable,
            "-W",
            "error::ResourceWarning",
            str(SCRIPT),
            str(self.stop),
            *script,
        ]
        if flags[0] == "-c":  # a program that calls a function, whose argument is the file
            command = [sys.executable, *flags, str(self.stop)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            # As if a rank of another job had started this one.
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOROVOD_RANK": "7", **variables},
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), name="test-reader")
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Wait until so many lines match the pattern, and return the matches."""

        def found() -> list[re.Match[str]]:
            matches = [match for line in list(self.lines) if (match := re.search(pattern, line))]
            return matches if len(matches) >= count else []

        try:
            return wait_until(found, pattern, within_s=20)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *self.lines])) from error

    def ranks(self, size: int, count: int | None = None) -> dict[int, int]:
        """Wait until this many ranks of a generation work, and return their processes by member number."""
        pattern = rf"^\[(\d+)\] rank \d+ of {size} pid (\d+)"
        matches = self.wait_for(pattern, size if count is None else count)
        return {int(match[1]): int(match[2]) for match in matches}

    def end(self) -> int:
        """Let the script stop, and return the launcher's exit status."""
        self.stop.touch()
        return self.wait()

    def wait(self, timeout_s: float = 20.0) -> int:
        """Wait for the end of the launcher, and return its exit status."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(["the launcher has not ended", *self.lines])) from None
        for reader in self._readers:
            reader.join()
        return status

    def changes(self) -> list[str]:
        """Return the launcher's lines about changes."""
        return [
            line.partition(": ")[2]
            for line in self.lines
            if re.match(r"sparkhvdrun: \d+ (ranks?|->) ", line)
        ]

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))  # noqa: PERF401 - one after the other


@contextlib.contextmanager
def elastic_run(
    folder: Path, *flags: str, script: tuple[str, ...] = (), **variables: str
) -> Iterator[ElasticRun]:
    """Start a job, and kill it at the end if it still runs."""
    run = ElasticRun(folder, flags, script, variables)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            run.wait()
