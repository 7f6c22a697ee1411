"""Line on a stage that waits because other jobs of its application have the task slots.

**Threads**: one, which ends with the stage's wait. **Failure**: a session that tells nothing leaves the line out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from sparkhvd.runner.planning import Plan, print_line
from sparkhvd.sessions import running_tasks

__all__ = ["announce_slot_wait"]

# Time between two looks at whether a stage has begun.
_LATE_S = 5.0


@contextlib.contextmanager
def announce_slot_wait(plan: Plan, tag: str) -> Iterator[None]:
    """Say once if Spark has not begun the stage of the jobs with this tag after some seconds, and other jobs have task slots."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LATE_S):
            begun, others = running_tasks(plan.shim.session, tag) or (0, 0)
            if begun:
                return
            if others:  # without others it is slow to begin, which has no use for the user
                print_line(
                    plan.options.verbose,
                    f"Waiting for task slots: the ranks need {plan.size} at once. {others} task{'s' * (others != 1)} of other jobs "
                    f"of this application run{'s' * (others == 1)}.",
                )
                return

    if plan.options.verbose > 0 and not plan.shim.is_connect:  # whose client is not told of tasks
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at its end
            threading.Thread(target=look, name="sparkhvd-waits", daemon=True).start()
    try:
        yield
    finally:
        over.set()
