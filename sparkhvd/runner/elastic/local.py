"""A function on processes of this host that come and go.

**Threads**: the caller's decides, the coordinator has one, each process one that waits for it beside its trainer's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from sparkhvd import processors
from sparkhvd.elastic import Coordinator, Invitation
from sparkhvd.errors import PreflightError
from sparkhvd.interfaces import LOOPBACK
from sparkhvd.rendezvous import Listener
from sparkhvd.runner import launching
from sparkhvd.runner.elastic.ends import Ends, end_of
from sparkhvd.runner.elastic.launcher import Event, Launcher, Refused
from sparkhvd.runner.elastic.options import RankRange
from sparkhvd.runner.elastic.slots import Slot, slots_of
from sparkhvd.runner.frames import JobFrame
from sparkhvd.runner.gpu import agreement
from sparkhvd.runner.host_names import Host
from sparkhvd.runner.outcomes import Kind, Outcome
from sparkhvd.runner.script_ranks import member_variables
from sparkhvd.runner.trainer import Trainer, interrupt
from sparkhvd.runner.trainers import Trainers, TrainersPlan
from sparkhvd.settings import Settings

__all__ = ["launch_elastic_local"]

R = TypeVar("R")


def launch_elastic_local(
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    ranks: RankRange,
    *,
    slots: int | None = None,
    start_timeout_s: float | None = None,
    env: Mapping[str, str],
    settings: Settings | None = None,
    verbose: int = 1,
    use_gpu: bool | None = None,
    stream: TextIO | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` on processes of this host that come and go; return the results by rank.

    Args:
        fn: any function that pickles.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.
        ranks: numbers of ranks.
        slots: processes that may run; None for the largest number of ranks.
        start_timeout_s: longest wait for the ranks to begin with.
        env: of `run_local`.
        settings: of `run_local`.
        verbose: of `run_local`.
        use_gpu: of `run_local`.
        stream: gets the ranks' output.

    Raises:
        InvalidArgumentError: an argument is wrong, or `fn` cannot be pickled. Nothing has started.
        ElasticError: there were too few ranks for too long, or they have changed too often.
        RankError: every process has failed.
    """
    ranks.largest()
    program = launching.dump_call(fn, args, kwargs)
    env = launching.check_env(env)
    chosen = launching.choose_settings(settings, env)
    wait_s = chosen.values.start_timeout_s if start_timeout_s is None else start_timeout_s
    limits = ranks.options(ranks.first(slots or ranks.largest() or 1), wait_s)
    places = slots_of([Host(socket.gethostname(), slots or limits.largest)])
    threads = max(1, int(processors.allowed() / limits.largest))
    plan = TrainersPlan(env, sys.path, os.getcwd(), chosen, use_gpu, num_threads=threads)
    log = launching.log_to(stream, verbose=verbose, timestamps=False)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    key, job_id, patience_s = (
        secrets.token_bytes(32),
        secrets.token_hex(8),
        chosen.values.elastic_patience_s,
    )

    def say(text: str) -> None:
        if verbose > 0:
            sys.stderr.write(f"sparkhvd: {text}\n")
            sys.stderr.flush()

    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(_Processes(plan, program, log, events.put))
        coordinator = stack.enter_context(
            Coordinator(
                key,
                job_id,
                Listener.bind(LOOPBACK, chosen.values),
                limits.limits(patience_s),
                on_decided=events.put,
                on_formed=events.put,
                on_refused=lambda number, refusal: events.put(Refused(number, refusal)),
            )
        )
        invite = functools.partial(limits.invitation, key, job_id)

        def invitation(number: int) -> Invitation:
            return invite(number, coordinator.endpoint, patience_s)

        launcher = Launcher(limits, places, processes, coordinator, invitation, say)
        try:
            verdict = launcher.run(events)
        except KeyboardInterrupt:
            processes.interrupt()
            raise
    ends = Ends(verdict, processes.outcomes)
    if not verdict.has_finished:
        raise ends.failure(verdict.problem).error
    return [launching.load_result(processes.results[number]) for number in ends.order()]


class _Processes:
    """Processes of a function on this host; a context manager that leaves none.

    Attributes:
        outcomes: of processes that have ended, by number.
        results: pickled, likewise.
    """

    def __init__(
        self,
        plan: TrainersPlan,
        program: bytes,
        log: Callable[[str], None],
        tell: Callable[[Any], None],
    ) -> None:
        self._plan = plan
        self._program = program
        self._log = log
        self._tell = tell
        self.outcomes: dict[int, Outcome] = {}
        self.results: dict[int, bytes] = {}
        # Guards those that run.
        self._lock = threading.Lock()
        self._running: dict[int, Trainer] = {}
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def start(self, slot: Slot, invitation: Invitation, slots: int) -> None:
        """Start a process; its end is told as an event."""
        del slots
        thread = threading.Thread(target=self._live, args=(slot, invitation), daemon=True)
        self._threads.append(thread)
        thread.start()

    def send(self, number: int, member: int | None = None) -> None:
        """Raise KeyboardInterrupt in all processes, or in one, or kill them."""
        with self._lock:
            for each, trainer in self._running.items():
                if member in (None, each):
                    trainer.kill() if number == signal.SIGKILL else trainer.interrupt()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in all processes, and wait for their end."""
        with self._lock:
            running = list(self._running.values())
        interrupt(running)

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.send(signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def _live(self, slot: Slot, invitation: Invitation) -> None:
        """Run a process to its end, and tell of it."""
        number, result = invitation.number, b""
        try:
            outcome, result = self._run(slot, invitation)
        except Exception as error:  # noqa: BLE001 - door: the launcher must learn of every end
            text = str(error) if isinstance(error, PreflightError) else repr(error)
            outcome = Outcome(number, Kind.PREFLIGHT, exit="not started", message=text)
        self.outcomes[number], self.results[number] = outcome, result
        self._tell(end_of(outcome))

    def _run(self, slot: Slot, invitation: Invitation) -> tuple[Outcome, bytes]:
        number = invitation.number
        given = ([number], LOOPBACK, self._plan, self._program, self._log, lambda _: None)
        with Trainers(*given) as trainers:
            (trainer,) = trainers.all
            with self._lock:
                self._running[number] = trainer
            if self._is_over:
                trainer.kill()
            try:
                mode = trainers.gpu_plan.mode
                (seen,) = trainers.gpus(slot.host)
                seen = agreement.RankGpus(slot.host, slot.number, seen.uuids, seen.error)
                required = trainers.gpu_plan.is_required
                if problem := agreement.check_gpus(mode, [seen], is_required=required):
                    raise PreflightError(problem)
                trainer.send(
                    JobFrame(
                        json.dumps(invitation.to_dict()),
                        self._plan.settings.to_json(),
                        local_rank=slot.number,
                        gpu=agreement.own_gpu(mode, [seen], slot.number, (), None).ordinal,
                        env=member_variables(slot.number),
                        is_elastic=True,
                    )
                )
                trainer.wait()
            finally:
                with self._lock:
                    del self._running[number]
            return trainer.outcome(host=slot.host), trainer.result
