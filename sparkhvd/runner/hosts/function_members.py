"""Processes of an elastic job that call a function, on the host where this runs: the launcher's own, or an agent's."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

from sparkhvd import processors
from sparkhvd.elastic import Invitation
from sparkhvd.errors import PreflightError
from sparkhvd.runner.frames import JobFrame
from sparkhvd.runner.gpu import agreement
from sparkhvd.runner.outcomes import Kind, Outcome
from sparkhvd.runner.script_ranks import member_variables
from sparkhvd.runner.trainer import Trainer
from sparkhvd.runner.trainers import Trainers, TrainersPlan

__all__ = ["FunctionMembers"]


class FunctionMembers:
    """Trainers of members; a context manager that leaves none.

    **Threads**: one per process, which waits for it beside its trainer's.

    Args:
        plan: what they need.
        program: pickled call.
        address: where they listen.
        host: name of this host.
        log: called with each line of their output, from threads.
        on_end: called with the outcome of a process and its pickled result, from threads.
    """

    def __init__(
        self,
        plan: TrainersPlan,
        program: bytes,
        address: str,
        host: str,
        log: Callable[[str], None],
        on_end: Callable[[Outcome, bytes], None],
    ) -> None:
        self._plan = plan
        self._program = program
        self._address = address
        self._host = host
        self._log = log
        self._on_end = on_end
        # Guards those that run.
        self._lock = threading.Lock()
        self._running: dict[int, Trainer] = {}
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def start(self, invitation: Invitation, slot: int, slots: int) -> None:
        """Start a process; see `Members.start`."""
        thread = threading.Thread(target=self._live, args=(invitation, slot, slots), daemon=True)
        self._threads.append(thread)
        thread.start()

    def send(self, number: int, member: int | None = None) -> None:
        """Raise KeyboardInterrupt in all processes, or in one, or kill them."""
        with self._lock:
            for each, trainer in self._running.items():
                if member in (None, each):
                    trainer.kill() if number == signal.SIGKILL else trainer.interrupt()

    def __enter__(self) -> FunctionMembers:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.send(signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def _live(self, invitation: Invitation, slot: int, slots: int) -> None:
        """Run a process to its end, and tell of it."""
        number, result = invitation.number, b""
        try:
            outcome, result = self._run(invitation, slot, slots)
        except Exception as error:  # noqa: BLE001 - door: the launcher must learn of every end
            text = str(error) if isinstance(error, PreflightError) else repr(error)
            outcome = Outcome(number, Kind.PREFLIGHT, exit="not started", message=text)
        self._on_end(replace(outcome, host=self._host), result)

    def _run(self, invitation: Invitation, slot: int, slots: int) -> tuple[Outcome, bytes]:
        number = invitation.number
        plan = replace(self._plan, num_threads=max(1, int(processors.allowed() / slots)))
        given = ([number], self._address, plan, self._program, self._log, lambda _: None)
        with Trainers(*given) as trainers:
            (trainer,) = trainers.all
            with self._lock:
                self._running[number] = trainer
            if self._is_over:
                trainer.kill()
            try:
                mode = trainers.gpu_plan.mode
                (seen,) = trainers.gpus(self._host)
                seen = agreement.RankGpus(self._host, slot, seen.uuids, seen.error)
                required = trainers.gpu_plan.is_required
                if problem := agreement.check_gpus(mode, [seen], is_required=required):
                    raise PreflightError(problem)
                trainer.send(
                    JobFrame(
                        json.dumps(invitation.to_dict()),
                        plan.settings.to_json(),
                        local_rank=slot,
                        gpu=agreement.own_gpu(mode, [seen], slot, (), None).ordinal,
                        env=member_variables(slot),
                        is_elastic=True,
                    )
                )
                trainer.wait()
            finally:
                with self._lock:
                    del self._running[number]
            return trainer.outcome(host=self._host), trainer.result
