"""Run a function on processes of this host, without Spark, by the same trainers as `run`."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO, TypeVar

from sparkhvd.errors import InvalidArgumentError, PreflightError
from sparkhvd.interfaces import LOOPBACK
from sparkhvd.rendezvous import Job
from sparkhvd.runner import launching
from sparkhvd.runner.gpu import agreement
from sparkhvd.runner.horovod_arguments import check_hosts
from sparkhvd.runner.outcomes import Kind, Outcome, error_of, root_cause
from sparkhvd.runner.trainer import Trainer, interrupt
from sparkhvd.runner.trainers import Trainers, TrainersPlan
from sparkhvd.settings import Settings

__all__ = ["check_num_proc", "collect", "launch_local", "results_of"]

R = TypeVar("R")

# After a failure the other ranks have this long to report. An exception explains everything; a crash may
# have been caused by an exception elsewhere; a lost peer surely has a cause, and the engine reports it within 2 s.
_WAIT_S = {
    Kind.EXCEPTION: 0.3,
    Kind.EXIT: 0.3,
    Kind.CRASH: 1.0,
    Kind.LOST: 1.0,
    Kind.COLLECTIVE: 5.0,
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
) -> list[R]:
    """See `sparkhvd.runner.run_local`."""
    check_num_proc(num_proc)
    program = launching.dump_call(fn, args, kwargs)
    check_hosts(hosts, num_proc)
    env = launching.check_env(env)
    chosen = launching.choose_settings(settings, env)
    log = launching.log_to(stream, verbose=verbose, timestamps=timestamps)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    host = socket.gethostname()
    plan = TrainersPlan(env, sys.path, os.getcwd(), chosen, use_gpu)
    with Trainers(range(num_proc), LOOPBACK, plan, program, log, ended.put) as trainers:
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

        with _interruptible(trainers.all), launching.reserved_port(LOOPBACK) as port:
            trainers.start(job, (LOOPBACK, port))
            outcomes = collect(take, num_proc)
    return results_of(outcomes, [trainer.result for trainer in trainers.all])


def check_num_proc(num_proc: int) -> None:
    """Refuse a number of ranks that is none.

    Raises:
        InvalidArgumentError: it is no whole number of at least 1.
    """
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise InvalidArgumentError(
            f"num_proc is {num_proc!r}; it must be a whole number of at least 1."
        )


@contextlib.contextmanager
def _interruptible(trainers: Sequence[Trainer]) -> Iterator[None]:
    """Pass Ctrl-C on to the functions, which may save; a second one ends the wait for them."""
    try:
        yield
    except KeyboardInterrupt:
        interrupt(trainers)
        raise


def collect(take: Callable[[float], Outcome], size: int) -> list[Outcome]:
    """Wait for all ranks, or after a failure for those that end soon; return their outcomes.

    Args:
        take: returns the next outcome, or raises `queue.Empty` after so many seconds.
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
        if outcomes[-1].kind != Kind.OK:
            until = time.monotonic() + _WAIT_S[outcomes[-1].kind]
            deadline = until if deadline is None else min(deadline, until)
    return outcomes


def results_of(outcomes: Sequence[Outcome], results: Sequence[bytes]) -> list[R]:
    """Return the ranks' results.

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
