"""Run a function on processes of this host, without Spark, with the same trainers as `run`."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TextIO, TypeVar

from sparkhvd import cpus
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.interfaces import loopback
from sparkhvd.rendezvous import Endpoint, Job, Listener
from sparkhvd.runner import launching, preflight
from sparkhvd.runner.gpu import agreement, decide
from sparkhvd.runner.horovod_arguments import check_hosts
from sparkhvd.runner.orphans import OrphanReaper
from sparkhvd.runner.outcomes import Outcome, OutcomeKind, error_of, root_cause
from sparkhvd.runner.protocol import Prologue, own_threads
from sparkhvd.runner.trainer import Trainer, inherited, interrupt
from sparkhvd.settings import ZYGOTE_STAYS_S, JobSettings, Settings

R = TypeVar("R")

# After a failure the other ranks have this long to report. An exception is a root cause; a crash may
# have been caused by an exception elsewhere; a lost peer always has a cause, which the engine reports within 2 s.
_WAIT_S = {
    OutcomeKind.EXCEPTION: 0.3,
    OutcomeKind.EXIT: 0.3,
    OutcomeKind.CRASH: 1.0,
    OutcomeKind.LOST: 1.0,
    OutcomeKind.COLLECTIVE: 5.0,
}


def launch_local(
    fn: Callable[..., R],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    num_proc: int,
    *,
    env: Mapping[str, str],
    settings: Settings | None,
    verbose: int,
    use_gpu: bool | None = None,
    hosts: str | None = None,
    stream: TextIO | None = None,
    timestamps: bool = False,
    metrics: Callable[[int, str], None] | None = None,
) -> list[R]:
    """Run a function on ranks of this host. See `sparkhvd.runner.run_local`.

    `metrics` takes ranks and their entries of `log_metrics`, as JSON.
    """
    check_num_proc(num_proc)
    program = launching.dump_call(fn, args, kwargs)
    check_hosts(hosts, num_proc)
    env = launching.check_env(env)
    chosen = launching.choose_settings(settings, env)
    log = launching.log_to(stream, verbose=verbose, timestamps=timestamps)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    host = socket.gethostname()
    plan = TrainersPlan(env, sys.path, os.getcwd(), chosen, use_gpu)
    here = loopback()
    given = (range(num_proc), here, plan, program, log, ended.put, metrics)
    with launching.within_open_files(num_proc), Trainers(*given) as trainers:
        gpus = trainers.gpus(host)
        required = trainers.gpu_plan.is_required
        if problem := agreement.check_gpus(trainers.gpu_plan.mode, gpus, is_required=required):
            raise PreflightError(problem)
        key, job_id = secrets.token_bytes(32), secrets.token_hex(8)
        job = Job(key, job_id, 0, 0, num_proc, tuple(trainers.endpoints))

        def take(timeout_s: float) -> Outcome:
            for trainer in trainers.all:
                trainer.enforce_grace()
            return trainers.all[ended.get(timeout=timeout_s)].outcome(host=host)

        with _interruptible(trainers.all), launching.reserved_port(here) as port:
            trainers.start(job, (here, port))
            outcomes = collect(take, num_proc)
    return results_of(outcomes, [trainer.result for trainer in trainers.all])


def check_num_proc(num_proc: int) -> None:
    """Reject an invalid number of ranks.

    Raises:
        InvalidArgumentError: it is not a whole number of at least 1.
    """
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise InvalidArgumentError(
            f"num_proc is {num_proc!r}; it must be a whole number of at least 1."
        )


@contextlib.contextmanager
def _interruptible(trainers: Sequence[Trainer]) -> Iterator[None]:
    """Forward Ctrl-C to the functions, so that they can save. A second Ctrl-C ends the wait."""
    try:
        yield
    except KeyboardInterrupt:
        interrupt(trainers)
        raise


def collect(take: Callable[[float], Outcome], size: int) -> list[Outcome]:
    """Wait for the outcomes of all ranks. After a failure, wait only a short time.

    Args:
        take: returns the next outcome, or raises `queue.Empty` after a timeout in seconds.
        size: number of ranks.
    """
    outcomes: list[Outcome] = []
    deadline: float | None = None
    while len(outcomes) < size:
        left = 1.0 if deadline is None else deadline - time.monotonic()
        try:
            outcomes.append(take(max(0.0, min(1.0, left))))
        except queue.Empty:
            if left <= 0:
                break
            continue
        if outcomes[-1].kind != OutcomeKind.OK:
            until = time.monotonic() + _WAIT_S[outcomes[-1].kind]
            deadline = until if deadline is None else min(deadline, until)
    return outcomes


def results_of(outcomes: Sequence[Outcome], results: Sequence[bytes]) -> list[R]:
    """Unpickle the results if every rank has succeeded.

    Args:
        outcomes: of the ranks.
        results: pickled, by rank.

    Raises:
        RankError: a rank failed.
    """
    cause = root_cause(outcomes)
    if cause is not None:
        raise error_of(cause, len(results), others=outcomes)
    return [launching.load_result(result) for result in results]


# ----------------------------------------------------------------------------------------------------
# Trainers of the ranks of one host, without Spark.


@dataclass(frozen=True)
class TrainersPlan:
    """What trainers need besides their rank and program.

    Attributes:
        env: variables of the ranks.
        sys_path: search path of their modules.
        cwd: their working directory.
        settings: of the launch.
        use_gpu: of `run_local`.
        may_fork: whether a zygote of this process may fork them.
        num_threads: of each, unless the user has set OMP_NUM_THREADS; None for an equal share of the processors.
    """

    env: Mapping[str, str]
    sys_path: Sequence[str]
    cwd: str
    settings: JobSettings
    use_gpu: bool | None = None
    may_fork: bool = True
    num_threads: int | None = None


class Trainers:
    """Trainers of some ranks. The context manager kills the remaining trainers at its end.

    Args:
        ranks: their numbers, consecutive.
        address: at which they listen.
        plan: what they need.
        program: pickled call.
        log: called with each line of their output, from threads.
        on_end: called with a rank when its trainer has ended, from threads.
        metrics: called with the rank and each entry of `log_metrics`, from threads; None passes it to `log`.

    Raises:
        PreflightError: the processes may have too little address space for torch.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        address: str,
        plan: TrainersPlan,
        program: bytes,
        log: Callable[[str], None],
        on_end: Callable[[int], None],
        metrics: Callable[[int, str], None] | None = None,
    ) -> None:
        self._settings = plan.settings
        settings = plan.settings.values
        self.gpu_plan = decide.decide({"spark.master": "local"}, plan.use_gpu)
        hidden = decide.variables(self.gpu_plan.mode, (), None, None)
        self._env = {**hidden, **launching.thread_variables({}), **plan.env}
        modules = launching.preload(program)
        num_bytes = settings.slots * settings.slot_bytes * len(ranks)
        needed = preflight.address_space_needed(modules, num_bytes)
        preflight.check_address_space(preflight.rank_facts((), needed_bytes=needed))
        is_forked = plan.may_fork and settings.nursery != "0"
        # The zygote ends with this process.
        idle_s = (settings.nursery_idle_s or ZYGOTE_STAYS_S) if is_forked else 0.0
        prologue = Prologue(
            env=self._env,
            sys_path=list(plan.sys_path),
            cwd=plan.cwd,
            num_threads=own_threads(self._env)
            or plan.num_threads
            or max(1, int(cpus.allowed() / len(ranks))),
            keep_freed_memory=settings.keep_freed_memory,
            lazy_compiler=settings.lazy_compiler,
            zygote_idle_s=idle_s,
            preload=modules,
            gpu_views=decide.views(self.gpu_plan.mode, None),
            cuda_library=settings.cuda_library,
        )
        self.endpoints: list[Endpoint] = []
        self.all: list[Trainer] = []
        self._gpus: list[agreement.RankGpus] = []
        with contextlib.ExitStack() as stack:
            mark = stack.enter_context(OrphanReaper()).mark
            for rank in ranks:
                with Listener.bind(address, settings) as listener:
                    self.endpoints.append(listener.endpoint())
                    own = replace(
                        prologue,
                        listener=listener.filenos(),
                        endpoint=listener.endpoint().to_dict(),
                    )
                    ended = functools.partial(on_end, rank)
                    trainer = Trainer(
                        rank,
                        own,
                        program,
                        log,
                        ended,
                        f"{mark}.{rank}",
                        metrics=metrics and functools.partial(metrics, rank),
                    )
                    self.all.append(stack.enter_context(trainer))
            self._stack = stack.pop_all()

    def gpus(self, host: str) -> list[agreement.RankGpus]:
        """Wait for the ranks' processes to report their visible GPUs."""
        visible = self._env.get("CUDA_VISIBLE_DEVICES", inherited("CUDA_VISIBLE_DEVICES"))
        self._gpus = [
            agreement.RankGpus(host, number, *trainer.gpus(), visible)
            for number, trainer in enumerate(self.all)
        ]
        return self._gpus

    def start(self, job: Job, master: tuple[str, int]) -> None:
        """Start the functions, once `gpus` are known and valid.

        Args:
            job: of the first of these ranks; the others follow it.
            master: address for torch.distributed.
        """
        for number, trainer in enumerate(self.all):
            gpu = agreement.own_gpu(self.gpu_plan.mode, self._gpus, number, (), None)
            own = replace(job, rank=job.rank + number)
            trainer.send(launching.job_frame(own, self._settings, master, gpu))

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
