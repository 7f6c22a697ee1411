"""Ranks as real processes without Spark: `with rank_processes("tests.engine.bodies:fn", 2) as ranks:`.

Each process runs `fn(engine, talk)` with an engine over a SocketRendezvous. `talk.say(x)` sends a value to the
test, and `talk.hear()` waits for a value from it. The result or exception of `fn` is the process's outcome. A killed process
has none. Members of an elastic job (`tests.harness.elastic`) run `fn(rendezvous, talk)`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sparkhvd.elastic import ElasticRendezvous, JoinToken
from sparkhvd.engine.engine import Engine
from sparkhvd.rendezvous import Endpoint, Job, Listener, SocketRendezvous
from sparkhvd.settings import Settings
from sparkhvd.wire import rebuild
from tests.harness import fork_server
from tests.harness.fork_server import ForkedProcess, ForkServer

DEADLINE_S = 30.0


class RankProcess:
    """Rank in a separate process, as the test sees it."""

    def __init__(
        self,
        target: str,
        rank: int,
        listener: Listener,
        settings: Settings,
        server: ForkServer | None = None,
        job: Job | None = None,
        **start: Any,
    ) -> None:
        self.rank = rank
        self.job = job
        filenos = listener.filenos()
        inherited = [fd for fd in filenos if fd >= 0]
        self._process: ForkedProcess | subprocess.Popen[str]
        if server is not None:
            self._process = server.start(inherited)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.rank_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                pass_fds=inherited,
                start_new_session=True,  # so that it goes with what it has forked
            )
        self.tell(
            {
                **start,
                "target": target,
                "job": job and job.to_json(),
                "settings": settings.to_json(),
                "filenos": filenos,
                "endpoint": listener.endpoint().to_dict(),
            }
        )
        self._listen()

    def _listen(self) -> None:
        """Start to read the output of the process."""
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_closed = False
        self._reader = threading.Thread(target=self._read, name=f"test-reader-{self.rank}")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, value: Any) -> None:
        """Send a value that `talk.hear()` returns."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def expect(self, timeout_s: float = DEADLINE_S) -> Any:
        """Return the next value that the rank sends, or its result at the end."""
        message = self._said.get(timeout=timeout_s)
        if "value" in message:
            return message["value"]
        raise AssertionError(f"rank {self.rank}: {message.get('error', 'ended without a word')}")

    def has_spoken(self) -> bool:
        """Return whether the rank has sent something that the test has not received yet."""
        return not self._said.empty()

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next value or error as sent. Empty after the end, None if nothing arrives in time."""
        try:
            return self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def error(self, timeout_s: float = DEADLINE_S) -> dict[str, str]:
        """Return the exception that ended the rank: kind, text and traceback."""
        message = self._said.get(timeout=timeout_s)
        assert "error" in message, f"rank {self.rank} said {message} instead of failing"
        return message

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)

    def wait(self) -> None:
        """Wait until the process has ended and the kernel has freed all of its resources."""
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        """Kill the rank and its children. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        # Children of a rank that was killed hold its output open until they notice.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        if isinstance(self._process, ForkedProcess):
            self._process.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
            else:  # of a library, such as NCCL's warnings
                sys.stderr.write(line)
        self._said.put({})


class Talk:
    """The test, as a rank sees it."""

    def say(self, value: Any) -> None:
        print(json.dumps({"value": value}), flush=True)

    def hear(self) -> Any:
        return json.loads(sys.stdin.readline())


@contextlib.contextmanager
def rank_processes(
    target: str,
    size: int,
    *,
    settings: Settings | None = None,
    tcp_only: bool = False,
    hosts: Sequence[int] | None = None,
    with_engine: bool = True,
    server: ForkServer | None = None,
) -> Iterator[list[RankProcess]]:
    """Start `size` ranks of `target` ("module:function"), and kill all at the end.

    Args:
        target: called as fn(engine, talk), or with `with_engine=False` as fn(rendezvous, talk).
        size: number of ranks.
        settings: for all ranks.
        tcp_only: use TCP, as if every rank had its own host.
        hosts: index of the host of each rank, to simulate several. None puts all on one.
        with_engine: whether the rank makes an engine before it calls `target`.
        server: forks the ranks. None for the module's server, or fresh processes.
    """
    server = server or fork_server.default()
    settings = settings or Settings(connect_timeout_s=DEADLINE_S)
    listeners = [Listener.bind("127.0.0.1", settings) for _ in range(size)]
    ranks: list[RankProcess] = []
    try:
        if tcp_only:
            for listener in listeners:
                endpoint = listener.endpoint()
                listener._endpoint = Endpoint(endpoint.address, endpoint.port, "", "")
        for host, listener in zip(hosts or (), listeners, strict=False):
            endpoint = listener.endpoint()
            listener._endpoint = replace(endpoint, host_key=f"{endpoint.host_key} {host}")
        endpoints = tuple(listener.endpoint() for listener in listeners)
        key = secrets.token_bytes(32)
        for rank, listener in enumerate(listeners):
            job = Job(key, "test", 0, rank, size, endpoints)
            ranks.append(
                RankProcess(target, rank, listener, settings, server, job, with_engine=with_engine)
            )
        for listener in listeners:  # only the rank itself keeps its port open
            listener.close()
        yield ranks
    finally:
        for listener in listeners:
            listener.close()
        for process in ranks:
            process.close()


def main(filenos: Sequence[int] | None = None) -> None:
    """Run a rank.

    Args:
        filenos: descriptors of its listener. None for those in its first message.
    """
    talk = Talk()
    start = talk.hear()
    endpoint = rebuild(Endpoint, start["endpoint"])
    listener = Listener.from_filenos(*(filenos or start["filenos"]), endpoint)
    settings = Settings.from_json(start["settings"])
    module, _, name = start["target"].partition(":")
    body = getattr(importlib.import_module(module), name)
    parent = os.getpid()
    try:
        if "join_token" in start:
            join_token = rebuild(JoinToken, start["join_token"])
            talk.say(body(ElasticRendezvous(join_token, listener, lambda: settings), talk))
            return
        rendezvous = SocketRendezvous(Job.from_json(start["job"]), listener, settings)
        if not start["with_engine"]:
            talk.say(body(rendezvous, talk))
            return
        with Engine(rendezvous.connect(), settings) as engine:
            talk.say(body(engine, talk))
    except BaseException as error:  # noqa: BLE001 - it is the outcome
        if os.getpid() != parent:
            raise
        text = traceback.format_exc()
        message = {"error": f"{type(error).__name__}: {error}", "kind": type(error).__name__}
        message["lost"] = dict(getattr(error, "lost", {}))
        print(json.dumps({**message, "text": str(error), "traceback": text}), flush=True)


if __name__ == "__main__":
    main()
