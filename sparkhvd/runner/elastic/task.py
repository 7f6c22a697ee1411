"""Task of an elastic job on Spark. It runs one process after another for the coordinator.

    coordinator -> task   start   a process: its join token, and its slot
    coordinator -> task   signal  a signal for it
    coordinator -> task   leave   the job is over
    task -> coordinator   hello   facts about this task
    task -> coordinator   result  a part of the process's result
    task -> coordinator   ended   the outcome of the process

**Threads**: the task's own thread reads messages; a thread per process waits for its end. **Failure**: a process that
dies does not end its task, which waits for the next start. Both end with the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkhvd.errors import PreflightError
from sparkhvd.interfaces import address_on
from sparkhvd.rendezvous import Listener
from sparkhvd.runner import preflight
from sparkhvd.runner.gpu import agreement
from sparkhvd.runner.hosts.protocol import Channel
from sparkhvd.runner.local_processes import member_variables
from sparkhvd.runner.outcomes import Outcome, OutcomeKind, chunks
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.runner.prewarm import task_prologue
from sparkhvd.runner.processes import stat_of
from sparkhvd.runner.protocol import JobFrame
from sparkhvd.runner.task import TaskSpec, output_of
from sparkhvd.runner.trainer import Trainer, inherited
from sparkhvd.settings import JobSettings

if TYPE_CHECKING:
    from pyspark import TaskContext


# Purpose of the proof at the coordinator's port for tasks; every task is number 1 there.
PURPOSE = "elastic tasks"
# Most processes from a Python worker up to the JVM: its daemon, and possible wrappers.
_ANCESTORS = 3
# How long to wait for the thread of a killed process; it is a daemon thread.
_KILLED_S = 30.0


class TaskSlot:
    """Task with a connected coordinator.

    Args:
        context: of the task.
        spec: of the attempt.
        program: the pickled call.
        files: shared by client and tasks; None if ranks use the driver's port.
        sock: connection to the coordinator.
    """

    def __init__(
        self,
        context: TaskContext,
        spec: TaskSpec,
        program: bytes,
        files: SharedFiles | None,
        sock: socket.socket,
    ) -> None:
        self._context = context
        self._spec = spec
        self._program = program
        self._files = files
        self._chosen = JobSettings.from_json(spec.settings)
        # The connection to the coordinator uses this address, so the other tasks reach it, too.
        own = str(sock.getsockname()[0])
        choice = self._chosen.values.interfaces
        self._address = address_on(choice) if choice else own
        self._coordinator = str(sock.getpeername()[0])
        self._channel = Channel(sock.fileno(), sock.fileno())
        self._facts = preflight.rank_facts(
            spec.requirements,
            needed_bytes=preflight.address_space_needed(
                (*spec.requirements, *spec.preload),
                self._chosen.values.slots * self._chosen.values.slot_bytes,
            ),
        )
        # Guards the process, and signals before its start.
        self._lock = threading.Lock()
        self._trainer: Trainer | None = None
        self._signals: list[int] = []
        self._thread: threading.Thread | None = None

    def serve(self) -> None:
        """Run the coordinator's requests until it releases this task or is gone."""
        try:
            self._channel.send(
                "hello", facts=self._facts.to_dict(), executor=executor_option("--executor-id")
            )
            while (message := self._channel.receive()) is not None and message.kind != "leave":
                if message.kind == "start":
                    self._start(message.values)
                else:
                    self._signal(int(message.values["number"]))
        except OSError:  # the coordinator is gone
            pass
        finally:
            self._signal(signal.SIGKILL)
            if self._thread is not None:
                self._thread.join(_KILLED_S)

    def _start(self, values: Mapping[str, Any]) -> None:
        if self._thread is not None:  # of the previous process, whose end was reported
            self._thread.join(_KILLED_S)
        self._signals = []
        self._thread = threading.Thread(target=self._run_process, args=(values,), daemon=True)
        self._thread.start()

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._trainer is None:
                self._signals.append(number)
            elif number == signal.SIGKILL:
                self._trainer.kill()
            else:
                self._trainer.interrupt()

    # --- The thread of a process. ---

    def _run_process(self, values: Mapping[str, Any]) -> None:
        """Run a process to its end, and report it to the coordinator."""
        member, result = int(values["join_token"]["number"]), b""
        try:
            outcome, result = self._run(member, values)
        except Exception as error:  # noqa: BLE001 - the coordinator must be notified of every end
            text = str(error) if isinstance(error, PreflightError) else repr(error)
            outcome = Outcome(member, OutcomeKind.PREFLIGHT, exit="not started", message=text)
        finally:
            with self._lock:
                self._trainer = None
        outcome = replace(outcome, host=self._facts.host, attempt=self._spec.attempt)
        with contextlib.suppress(OSError):  # it is gone, and this task will end
            for part in chunks(result):
                self._channel.send("result", part, member=member)
            self._channel.send("ended", outcome.to_json().encode(), member=member)

    def _run(self, member: int, values: Mapping[str, Any]) -> tuple[Outcome, bytes]:
        spec, slot = self._spec, int(values["slot"])
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(output_of(spec, member, self._files))
            with Listener.bind(self._address, self._chosen.values) as listener:
                prologue = replace(
                    task_prologue(
                        self._context,
                        self._chosen,
                        spec.env,
                        spec.fixed_threads,
                        spec.gpu_mode,
                        spec.preload,
                    ),
                    listener=listener.filenos(),
                    endpoint=listener.endpoint().to_dict(),
                )
                trainer = Trainer(
                    member,
                    prologue,
                    self._program,
                    output.line,
                    notify=output.message,
                    metrics=output.metrics,
                    progress=output.progress,
                )
                stack.enter_context(trainer)
            with self._lock:
                self._trainer = trainer
                before = list(self._signals)
            if before:
                trainer.kill()
            visible = prologue.env.get("CUDA_VISIBLE_DEVICES", inherited("CUDA_VISIBLE_DEVICES"))
            gpu = self._gpu(trainer, slot, visible)
            join_token = dict(values["join_token"])
            # The coordinator's own address may not lead to it from this host, so use the address of the connection.
            join_token["coordinator"] = {**join_token["coordinator"], "address": self._coordinator}
            trainer.send(
                JobFrame(
                    json.dumps(join_token),
                    spec.settings,
                    local_rank=slot,
                    attempt=spec.attempt,
                    gpu=gpu,
                    env=member_variables(slot),
                    is_elastic=True,
                )
            )
            trainer.wait()
            outcome = trainer.outcome(host=self._facts.host, attempt=spec.attempt)
            return replace(outcome, unsent=output.close(), job_id=spec.job_id), trainer.result

    def _gpu(self, trainer: Trainer, slot: int, visible: str | None) -> int | None:
        """Ordinal of the process's GPU: the task's only GPU, or the GPU of its slot.

        Raises:
            PreflightError: a required GPU is missing.
        """
        facts, mode = self._facts, self._spec.gpu_mode
        seen = agreement.RankGpus(facts.host, slot, *trainer.gpus(), visible, facts.cpu_torch)
        agreed = agreement.agree(mode, [seen], is_required=self._spec.needs_gpu)
        if agreed.problem:
            raise PreflightError(agreed.problem)
        return agreement.own_gpu(agreed.mode, [seen], slot, (), None).ordinal


def executor_option(name: str) -> str:
    """Read an option from the command line of this executor's JVM.

    Return "" without the option, as on a local master.
    """
    pid = os.getppid()
    for _ in range(_ANCESTORS):
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if name in words:
                return words[words.index(name) + 1]
            stat = stat_of(pid)
            pid = 0 if stat is None else stat.parent
    return ""
