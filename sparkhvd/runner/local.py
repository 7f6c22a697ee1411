"""Run a function on processes of this host, without Spark, by the same trainers as `run`."""

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
from typing import TextIO, TypeVar

from sparkhvd import processors
from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.rendezvous import Endpoint, Job, Listener
from sparkhvd.runner import launching, preflight
from sparkhvd.runner.frames import Prologue
from sparkhvd.runner.gpu import agreement, decide
from sparkhvd.runner.horovod_arguments import check_hosts
from sparkhvd.runner.outcomes import Kind, Outcome, error_of, root_cause
from sparkhvd.runner.trainer import Trainer, inherited, interrupt
from sparkhvd.settings import Settings

__all__ = ["launch_local"]

R = TypeVar("R")

_ADDRESS = "127.0.0.1"
# After a failure the other ranks have this long to report. An exception explains everything; a crash may
# have been caused by an exception elsewhere; a lost peer surely has a cause, and the engine reports it within 2 s.
_WAIT_S = {Kind.EXCEPTION: 0.3, Kind.EXIT: 0.3, Kind.CRASH: 1.0, Kind.COLLECTIVE: 5.0}


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
) -> list[R]:
    """See `sparkhvd.runner.run_local`."""
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise InvalidArgumentError(
            f"num_proc is {num_proc!r}; it must be a whole number of at least 1."
        )
    check_hosts(hosts, num_proc)
    program = launching.dump_call(fn, args, kwargs)
    env = launching.check_env(env)
    chosen = launching.choose_settings(settings, env)
    settings = chosen.values
    gpu_plan = decide.decide({"spark.master": "local"}, use_gpu)
    hidden = decide.variables(gpu_plan.mode, (), None, None)
    variables = {**hidden, **env}
    modules = launching.preload(program)
    needed = preflight.address_space_needed(
        modules, settings.slots * settings.slot_bytes * num_proc
    )
    preflight.check_address_space(preflight.rank_facts((), needed_bytes=needed))
    job_id, key = secrets.token_hex(8), secrets.token_bytes(32)
    threads = max(1, int(processors.allowed() / num_proc))

    def log(line: str) -> None:
        if stream is not None or verbose > 0:
            to = sys.stderr if stream is None else stream
            to.write(launching.line_of(line, timestamp=timestamps))
            to.flush()

    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        endpoints: list[Endpoint] = []
        trainers: list[Trainer] = []
        for rank in range(num_proc):
            with Listener.bind(_ADDRESS, settings) as listener:
                endpoints.append(listener.endpoint())
                prologue = Prologue(
                    env=variables,
                    sys_path=list(sys.path),
                    cwd=os.getcwd(),
                    num_threads=threads,
                    keep_freed_memory=settings.keep_freed_memory,
                    nursery=settings.nursery != "0",
                    preload=modules,
                    gpu_views=decide.views(gpu_plan.mode, None),
                    cuda_library=settings.cuda_library,
                    listener=listener.filenos(),
                    endpoint=listener.endpoint().to_dict(),
                )
                trainer = Trainer(rank, prologue, program, log, functools.partial(ended.put, rank))
                trainers.append(stack.enter_context(trainer))
        gpus = _gather_gpus(gpu_plan, trainers, variables)
        with _interruptible(trainers), launching.reserved_port(_ADDRESS) as port:
            for rank, trainer in enumerate(trainers):
                job = Job(
                    key=key,
                    job_id=job_id,
                    attempt=0,
                    rank=rank,
                    size=num_proc,
                    endpoints=tuple(endpoints),
                )
                gpu = agreement.own_gpu(gpu_plan.mode, gpus, rank, (), None)
                trainer.send(launching.job_frame(job, chosen, (_ADDRESS, port), gpu))
            outcomes = _outcomes(trainers, ended)
    cause = root_cause(outcomes)
    if cause is not None:
        raise error_of(cause, num_proc, others=outcomes)
    return [launching.load_result(trainer.result) for trainer in trainers]


@contextlib.contextmanager
def _interruptible(trainers: Sequence[Trainer]) -> Iterator[None]:
    """Pass Ctrl-C on to the functions, which may save; a second one ends the wait for them."""
    try:
        yield
    except KeyboardInterrupt:
        interrupt(trainers)
        raise


def _gather_gpus(
    plan: decide.GpuPlan, trainers: Sequence[Trainer], env: Mapping[str, str]
) -> list[agreement.RankGpus]:
    """Return the GPUs that the ranks' processes see.

    Raises:
        PreflightError: they are not the GPUs that the ranks need.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES", inherited("CUDA_VISIBLE_DEVICES"))
    gpus = [
        agreement.RankGpus(socket.gethostname(), rank, *trainer.gpus(), visible)
        for rank, trainer in enumerate(trainers)
    ]
    if problem := agreement.check_gpus(plan.mode, gpus, is_required=plan.is_required):
        raise PreflightError(problem)
    return gpus


def _outcomes(trainers: Sequence[Trainer], ended: queue.SimpleQueue[int]) -> list[Outcome]:
    """Wait for all trainers, or after a failure for those that end soon; return their outcomes."""
    outcomes: list[Outcome] = []
    deadline: float | None = None
    host = socket.gethostname()
    while len(outcomes) < len(trainers):
        left = None if deadline is None else deadline - time.monotonic()
        try:
            rank = ended.get(timeout=_poll(trainers, left))
        except queue.Empty:
            if left is not None and left <= 0:
                break
            continue
        outcomes.append(trainers[rank].outcome(host=host))
        if outcomes[-1].kind != Kind.OK:
            until = time.monotonic() + _WAIT_S[outcomes[-1].kind]
            deadline = until if deadline is None else min(deadline, until)
    return outcomes


def _poll(trainers: Sequence[Trainer], left: float | None) -> float:
    for trainer in trainers:
        trainer.enforce_grace()
    return 1.0 if left is None else max(0.0, min(1.0, left))
