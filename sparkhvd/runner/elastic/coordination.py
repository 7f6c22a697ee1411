"""What decides in an attempt of an elastic job on Spark: coordinator, launcher and the tasks' port, in the driver or in a task.

**Threads**: the caller's runs the launcher; one has the coordinator and one the tasks. **Shutdown**: the end of the block lets every task leave.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
from collections.abc import Callable

from sparkhvd.elastic import Coordinator, Invitation
from sparkhvd.rank_settings import JobSettings
from sparkhvd.rendezvous import Listener
from sparkhvd.runner.driver_port import proof_between
from sparkhvd.runner.elastic.attempt_result import AttemptResult
from sparkhvd.runner.elastic.launcher import Event, Launcher, Refused, Stopped
from sparkhvd.runner.elastic.options import Terms
from sparkhvd.runner.elastic.task import PURPOSE
from sparkhvd.runner.elastic.tasks import Tasks
from sparkhvd.runner.preflight import RankFacts
from sparkhvd.runner.task import TaskSpec
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S
from sparkhvd.runner.watching import Signalled

__all__ = ["MARGIN_S", "Coordination"]

# How long interrupted ranks may take, beyond their grace, to be killed and reported.
MARGIN_S = 2.0


class Coordination:
    """Coordinator of an attempt with all that it needs; a context manager.

    Args:
        spec: what the tasks get, too.
        listening: where tasks reach this process; closed at the end.
        listener: where their processes do; likewise.
        say: writes a line.
        replace: called from a thread for each task that shall be started in place of one that leaves.

    Attributes:
        tasks: the tasks.
    """

    def __init__(
        self,
        spec: TaskSpec,
        listening: socket.socket,
        listener: Listener,
        say: Callable[[str], None],
        replace: Callable[[], None] = lambda: None,
    ) -> None:
        terms = Terms.from_dict(spec.elastic)
        self._limits, self._job_id = terms.limits, spec.job_id
        self._key = bytes.fromhex(spec.key)
        self._patience_s = JobSettings.from_json(spec.settings).values.elastic_patience_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._refused = ""  # why the first task cannot take part
        put = self._events.put
        with contextlib.ExitStack() as stack:
            proof = proof_between(PURPOSE, spec.key, spec.job_id, spec.attempt, 0, 2)
            facts = RankFacts.from_dict(spec.driver)
            self.tasks = stack.enter_context(
                Tasks(listening, proof, facts, terms.wanted, put, self._refuse, replace, say)
            )
            self._coordinator = stack.enter_context(
                Coordinator(
                    self._key,
                    spec.job_id,
                    listener,
                    self._limits.limits(self._patience_s),
                    on_decided=put,
                    on_formed=put,
                    on_refused=lambda number, refusal: put(Refused(number, refusal)),
                )
            )
            self._stack = stack.pop_all()
        self._launcher = Launcher(
            self._limits, (), self.tasks, self._coordinator, self._invite, say, INTERRUPT_GRACE_S
        )

    def run(self) -> AttemptResult:
        """Run the job to its end; Ctrl-C interrupts the ranks, and is raised when they have ended."""
        try:
            verdict = self._launcher.run(self._events)
        except KeyboardInterrupt:
            self.interrupt()
            with contextlib.suppress(Exception):  # it came while something was being noted
                self._launcher.run(self._events, INTERRUPT_GRACE_S + MARGIN_S)
            raise
        return AttemptResult(
            verdict,
            self.tasks.outcomes,
            self.tasks.results,
            self._refused,
            changes=tuple(self._launcher.changes),
        )

    def interrupt(self) -> None:
        """Interrupt the ranks, and kill those that do not end; from any thread."""
        self._events.put(Signalled(signal.SIGINT))

    def stop(self, why: str) -> None:
        """End the job: its tasks have ended; from any thread."""
        self._events.put(Stopped(why))

    def __enter__(self) -> Coordination:
        return self

    def __exit__(self, *_: object) -> None:
        self.tasks.dismiss()
        self._stack.close()

    def _refuse(self, problem: str) -> None:
        self._refused = problem
        self.stop(problem)

    def _invite(self, number: int) -> Invitation:
        return self._limits.invitation(
            self._key, self._job_id, number, self._coordinator.endpoint, self._patience_s
        )
