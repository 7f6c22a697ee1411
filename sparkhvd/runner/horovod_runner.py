"""Databricks' `HorovodRunner`, over `run` and `run_local`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import run, run_local

R = TypeVar("R")
_VERBOSITIES = ("all", "log_callback_only")


class HorovodRunner:
    """Run a function on ranks and return rank 0's result, like Databricks' class of this name.

    Args:
        np: number of ranks. Negative: -np processes of this host, as started by `run_local`. Positive: np tasks of one
            barrier stage of the active Spark session, as started by `run`. 0: every task slot.
        driver_log_verbosity: "all": the driver's stdout shows the ranks' output live. "log_callback_only": stderr shows
            only their `sparkhvd.log_to_driver`; the rest stays in the executors' logs. Output of processes of this host
            is always shown.

    Raises:
        InvalidArgumentError: an argument is wrong.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if not isinstance(np, int) or isinstance(np, bool):
            raise InvalidArgumentError(
                f"HorovodRunner(np={np!r}): it must be an integer: negative for processes of this host, positive for Spark tasks, 0 "
                "for every task slot."
            )
        if driver_log_verbosity not in _VERBOSITIES:
            raise InvalidArgumentError(
                f"HorovodRunner(driver_log_verbosity={driver_log_verbosity!r}): it must be one of {', '.join(_VERBOSITIES)}."
            )
        self.num_processor = np
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., R], **kwargs: object) -> R:
        """Call `main(**kwargs)` on every rank and return rank 0's result.

        Args:
            main: any picklable function; in it `sparkhvd.torch.init()` connects the ranks.
            **kwargs: its arguments.

        Raises:
            RankError: `main` failed on a rank.
            InvalidArgumentError, PreflightError: as `run` and `run_local` do.
        """
        if self.num_processor < 0:
            return run_local(main, kwargs=kwargs, num_proc=-self.num_processor)[0]
        num_proc = self.num_processor or None
        if self.driver_log_verbosity == "all":
            return run(main, kwargs=kwargs, num_proc=num_proc, stdout=sys.stdout)[0]
        env = {"SPARKHVD_LIVE_OUTPUT": "messages"}
        return run(main, kwargs=kwargs, num_proc=num_proc, env=env)[0]
