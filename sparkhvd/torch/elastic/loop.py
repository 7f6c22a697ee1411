"""The loop around an elastic training function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.elastic.rendezvous import HostsUpdatedInterrupt
from sparkhvd.errors import CollectiveError, NotInitializedError
from sparkhvd.torch.context import Context, context, is_initialized, shut_down
from sparkhvd.torch.elastic.state import State, rendezvous

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function to continue when ranks join, leave or fail.

    The function's first argument is the `State`. It is called with the state of rank 0, which always has the current state. When
    another rank is lost (`HorovodInternalError`) this rank restores its last commit. When the ranks should change at a commit
    (`HostsUpdatedInterrupt`) it continues from that commit. Then the ranks rendezvous again, reset callbacks run, and the function is
    called again. Call `hvd.init()` before.

    In a job whose ranks cannot change (mpirun, `sparkhvd.runner.run`) it continues after failures that left all ranks alive.

    Raises:
        LeftOutError: the other ranks continued without this rank.
        ElasticError: the job cannot continue.
        SystemExit: this rank should leave, or the other ranks have finished.
        CollectiveError: a rank was lost, and the ranks of this job cannot change.
    """
    return run_fn(func, reset)


def run_fn(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], object]
) -> Callable[Concatenate[S, P], R]:
    """Wrap a training function as `run` does, with `reset` as the function for the next rendezvous."""

    @functools.wraps(func)
    def loop(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        must_sync, is_new = True, _begin()
        must_reset = is_new
        while True:
            try:
                if must_reset:
                    # All ranks must decide together whether to sync, because only some of them may have failed.
                    must_sync = bool(reset()) or must_sync
                    must_reset = False
                    if not is_new:
                        state.on_reset()
                    is_new = False
                if must_sync:
                    state.sync()
                    _record_sync()
                result = func(state, *args, **kwargs)
                _finish()
            except HostsUpdatedInterrupt as interrupt:
                must_sync = not interrupt.skip_sync
                _record_end(state, must_sync, None)
            except CollectiveError as error:
                if isinstance(error, NotInitializedError):  # the user's mistake, not a failure
                    raise
                if must_reset and not isinstance(_former().rendezvous, ElasticRendezvous):
                    raise  # a rank is lost, and the ranks cannot change
                must_sync = True
                if not must_reset:
                    _stop_reducing()
                    state.restore()
                _record_end(state, must_sync, error)
            else:
                return result
            must_reset = True

    return loop  # type: ignore[return-value]  # mypy takes a first argument of `wraps` for one with a name


def _begin() -> bool:
    """Join a running job if this process is new in it and return whether it joined."""
    if (member := rendezvous()) is None:
        return False
    member.begin()
    return member.joins_later


def reset() -> bool:
    """Rendezvous with the other ranks again and return whether all of them need rank 0's state."""
    former = _former()
    shut_down()
    assert former.again is not None
    former.again()
    current = context()
    _left[:] = []
    # Register all followers before any of them communicates. If that fails, they can follow to the next engine.
    current.followers[:0] = former.followers
    for reference in former.followers:
        if (follower := reference()) is not None:
            follower.follow(current)
    # Free the old engine's memory and file descriptors now, because reference cycles with buckets keep the engine
    # alive until the next garbage collection.
    former.engine.release()
    member = rendezvous()
    return member is None or member.must_sync


# The last context. `init()` may fail after a shutdown, and then there is no current context.
_left: list[Context] = []


def _former() -> Context:
    if is_initialized():
        _left[:] = [context()]
    if not _left:
        raise NotInitializedError(
            "hvd.elastic.run: sparkhvd has not been initialized; use hvd.init()."
        )
    return _left[0]


def _stop_reducing() -> None:
    """Reset the optimizers' operations in flight, because they will never complete."""
    for reference in _former().followers:
        if (follower := reference()) is not None:
            follower.detach()


def _record_end(state: State, must_sync: bool, error: CollectiveError | None) -> None:
    """Record why this rank left the training function, for its report to the coordinator."""
    member = _former().rendezvous
    if not isinstance(member, ElasticRendezvous):
        return
    member.standing.version = getattr(state, "_version", 0)
    member.standing.needs_sync = must_sync
    if error is not None:
        member.standing.lost = dict(error.lost)
        member.standing.why = str(error)
        sys.stderr.write(f"sparkhvd: rank {member.rank} restores its last commit: {error}\n")


def _record_sync() -> None:
    if (member := rendezvous()) is not None:
        member.note_synced()


def _finish() -> None:
    if (member := rendezvous()) is not None:
        member.finish()
