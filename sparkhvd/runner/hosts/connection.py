"""The launcher's connection to the agent of a host: over ssh, or to a child process on this host."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import IO

from sparkhvd import __version__
from sparkhvd.runner.host_names import PLAIN_SSH, HostSlots, is_here
from sparkhvd.runner.hosts.agent import BOOTSTRAP, MARK
from sparkhvd.runner.hosts.protocol import Channel
from sparkhvd.runner.orphans import OrphanReaper
from sparkhvd.runner.processes import FreshProcess, ProcessGroup
from sparkhvd.wire import Message

# How long a host may take to answer by ssh and start a Python: all failures are reported within 10 s.
CONNECT_S = 9.5
# How long an agent may take to end with its connection, before ssh is killed.
END_S = 2.0
# ssh's own, shorter limit, so that ssh reports why it does not reach a host.
_SSH_S = 8.0
_SAID_LINES = 5
_OF_RANKS = ("line", "ended", "outcome")


class HostError(Exception):
    """A host cannot run its ranks. The text has the reason."""


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    Attributes:
        ssh_command: OpenSSH's client, with any options.
        port: of ssh; None for ssh's configuration.
        identity_file: private key; None likewise.
        start_timeout_s: longest wait for each step of the start, after the first answer.
    """

    ssh_command: str = "ssh"
    port: int | None = None
    identity_file: str | None = None
    start_timeout_s: float = 30.0

    def is_here(self, host: str) -> bool:
        """Whether the host is this one and needs no ssh."""
        given = (self.ssh_command, self.port, self.identity_file)
        return is_here(host, by_ssh=given != PLAIN_SSH)

    def command(self, host: str) -> list[str]:
        """Command line of an agent on a host.

        Raises:
            HostError: the ssh command has invalid shell syntax.
        """
        if self.is_here(host):
            return [sys.executable, "-c", BOOTSTRAP]
        options = {
            "BatchMode": "yes",  # there is no user to type a password
            "ConnectTimeout": f"{_SSH_S:g}",
            "ControlMaster": "no",  # a master process would stay and keep the pipes open
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
        }
        try:
            words = [*shlex.split(self.ssh_command), "-T", "-x"]
        except ValueError as error:
            raise HostError(
                f"SPARKHVD_SSH is {self.ssh_command!r}: {error}. Write it as in a shell, such as: ssh -F file"
            ) from error
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        agent = f"exec {shlex.quote(os.path.abspath(sys.executable))} -c {shlex.quote(BOOTSTRAP)}"
        return [*words, host, agent]


class HostConnection:
    """Connection to the agent of a host. Closing it ends the ranks there.

    Args:
        place: host and its ranks.
        reach: how it is reached.
        reaper: ends ssh with this process.

    Raises:
        HostError: ssh is missing here.
    """

    def __init__(self, place: HostSlots, reach: Reach, reaper: OrphanReaper) -> None:
        self.place = place
        self.host = place.host
        command = reach.command(place.host)
        try:
            # The process has its own session, so a terminal's Ctrl-C reaches it only through this process.
            started = FreshProcess(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise HostError(
                f"{command[0]!r} cannot be started: {error}. Install OpenSSH's client, or set SPARKHVD_SSH."
            ) from error
        reaper.add(started.pid)
        self._process = started.process
        self._has_agent = False
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._writer = self._process.stdin
        self._channel = Channel(self._process.stdout.fileno(), self._writer.fileno())
        self._said: deque[str] = deque(maxlen=_SAID_LINES)
        self._early: deque[Message] = deque()
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stderr,), daemon=True
        )
        self._listener.start()
        self._group = ProcessGroup(started, "", f"sparkhvd-ssh-{self.host}", 0.0)
        self._group.watch([self._listener], lambda _: None, lambda: reaper.remove(started.pid))

    def _listen(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            if text := line.decode(errors="replace").strip():
                self._said.append(text)

    def said(self) -> str:
        """Collect the last error lines of ssh or the agent."""
        self._listener.join(END_S)
        return " | ".join(self._said) or "it ended without a message"

    def _silence(self, text: str) -> str:
        return " ".join([text, *([" | ".join(self._said)] if self._said else [])])

    def greet(self, timeout_s: float) -> None:
        """Compare the versions of Python and sparkhvd on both hosts.

        Raises:
            HostError: there is no answer, or the host has other versions.
        """
        own = f"{sys.version_info[0]}.{sys.version_info[1]}"
        try:
            line = self._channel.read_line(MARK, CONNECT_S)
        except TimeoutError:
            text = f"no answer within {CONNECT_S:g} s. Its shell runs start-up files first (.bashrc), and one of them may wait."
            raise HostError(self._silence(text)) from None
        if line is None:
            raise HostError(self.said())
        self._has_agent = True
        version, _, executable = line.decode(errors="replace").partition(" ")
        if version != own:
            raise HostError(
                f"{executable} there is Python {version}, and {sys.executable} here is {own}; ranks need the same minor version."
            )
        path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]  # noqa: TID251 - Python's own variable
        with contextlib.suppress(BrokenPipeError):
            self._writer.write(json.dumps(path).encode() + b"\n")
            self._writer.flush()
        try:
            found = self.expect("hello", timeout_s).values["version"]
        except HostError as error:
            if "No module named 'sparkhvd'" not in str(error):
                raise
            raise HostError(
                f"sparkhvd is not installed there for {executable}. Install version {__version__}, or have it on PYTHONPATH here and "
                "there."
            ) from None
        if found != __version__:
            raise HostError(
                f"sparkhvd {found} is installed there for {executable}, and {__version__} here; install the same version."
            )

    def send(self, kind: str, data: bytes = b"", **values: object) -> None:
        """Send a message, without an error if the agent is gone. `receive` reports that."""
        with contextlib.suppress(OSError, ValueError):  # the pipe is broken or closed
            self._channel.send(kind, data, **values)

    def receive(self) -> Message | None:
        """Receive a message, without a timeout, or return None if the connection is lost."""
        if self._early:
            return self._early.popleft()
        with contextlib.suppress(OSError, ValueError):
            return self._channel.receive()
        return None

    def expect(self, kind: str, timeout_s: float) -> Message:
        """Receive a message of one kind. Earlier messages of ranks are kept for `receive`.

        Raises:
            HostError: the agent has failed or ended, or does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while message := self._channel.receive(max(0.0, deadline - time.monotonic())):
                if message.kind not in _OF_RANKS:
                    break
                self._early.append(message)
        except TimeoutError:
            raise HostError(
                self._silence(f"no answer within {timeout_s:g} s ({kind}). Raise --start-timeout.")
            ) from None
        if message is None:
            raise HostError(self.said())
        if message.kind == "failed":
            raise HostError(str(message.values["text"]))
        if message.kind != kind:
            raise HostError(f"its agent sent {message.kind!r} instead of {kind!r}.")
        return message

    def end(self) -> None:
        """Close the connection to end its agent."""
        with contextlib.suppress(OSError):
            self._writer.close()

    def kill(self, deadline: float) -> None:
        """Wait for the end of the agent, or kill ssh. Call this after `end`."""
        left = deadline - time.monotonic() if self._has_agent else 0.0
        if not self._group.join(max(0.0, left)):
            self._group.signal(signal.SIGKILL)
            self._group.join(END_S)

    def close(self) -> None:
        """Close the pipes. Call this after `kill`."""
        self._listener.join(END_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and not self._listener.is_alive():
                pipe.close()
