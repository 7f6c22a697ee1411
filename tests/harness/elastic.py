"""Elastic jobs of real processes: `with elastic_job("tests...:fn", 3) as job:`. Each process runs `fn(rendezvous, talk)`."""

from __future__ import annotations

import contextlib
import queue
import secrets
from collections.abc import Iterator
from dataclasses import replace

from sparkhvd.elastic import Coordinator, GenerationFormed, JoinToken, Limits
from sparkhvd.elastic.membership import Refusal
from sparkhvd.rendezvous import Endpoint, Listener
from sparkhvd.settings import Settings
from tests.harness import fork_server
from tests.harness.rank_process import DEADLINE_S, RankProcess


class ElasticJob:
    """Members and their coordinator, which is in this process."""

    def __init__(self, target: str, limits: Limits, settings: Settings, tcp_only: bool) -> None:
        self.target = target
        self.limits = limits
        self.settings = settings
        self.tcp_only = tcp_only
        self.formed: queue.SimpleQueue[GenerationFormed] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[tuple[int, Refusal]] = queue.SimpleQueue()
        self.members: list[RankProcess] = []
        self._key, self._job_id = secrets.token_bytes(32), secrets.token_hex(4)
        self.coordinator = Coordinator(
            self._key,
            self._job_id,
            Listener.bind("127.0.0.1", settings),
            limits,
            on_formed=self.formed.put,
            on_refused=lambda number, refusal: self.refused.put((number, refusal)),
        )

    def start(self, count: int = 1, target: str | None = None) -> list[RankProcess]:
        """Start members, with increasing numbers."""
        made = []
        numbers = range(len(self.members), len(self.members) + count)
        for number in numbers:  # before one of them asks, because it would not wait for the others
            self.coordinator.expect(number)
        for number in numbers:
            with Listener.bind("127.0.0.1", self.settings) as listener:
                if self.tcp_only:
                    endpoint = listener.endpoint()
                    listener._endpoint = Endpoint(endpoint.address, endpoint.port, "", "")
                coordinator = self.coordinator.endpoint
                if self.tcp_only:
                    coordinator = replace(coordinator, host_key="", unix_name="")
                join_token = JoinToken(
                    self._key, self._job_id, number, coordinator, 120.0, self.limits.patience_s
                )
                made.append(
                    RankProcess(
                        target or self.target,
                        number,
                        listener,
                        self.settings,
                        fork_server.running(),
                        join_token=join_token.to_dict(),
                    )
                )
            self.members.append(made[-1])
        return made

    def next_change(self, timeout_s: float = DEADLINE_S) -> GenerationFormed:
        """Return the next change that the members have carried out, or that a later change has replaced."""
        return self.formed.get(timeout=timeout_s)


@contextlib.contextmanager
def elastic_job(
    target: str,
    size: int,
    *,
    limits: Limits | None = None,
    settings: Settings | None = None,
    tcp_only: bool = False,
) -> Iterator[ElasticJob]:
    """Start `size` members of `target` ("module:function"), and kill all at the end."""
    limits = limits or Limits(first=size, least=1, most=16, patience_s=DEADLINE_S)
    job = ElasticJob(target, limits, settings or Settings(connect_timeout_s=DEADLINE_S), tcp_only)
    try:
        job.start(size)
        yield job
    finally:
        for member in job.members:
            member.close()
        job.coordinator.close()
