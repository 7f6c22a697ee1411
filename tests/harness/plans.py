"""Row numbers of a plan by rank and step, for the whole epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparkhvd.data.reading.sampler import SamplingPlan


def rank_rows(plan: SamplingPlan, rank: int) -> npt.NDArray[np.int64]:
    """Return all row numbers of a rank, in order."""
    pieces = [window.row_numbers() for window in plan.windows(rank)]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def batch_rows(plan: SamplingPlan, rank: int, step: int) -> npt.NDArray[np.int64]:
    """Return the row numbers of a rank's batch."""
    start = plan.rows_before(rank, step)
    return rank_rows(plan, rank)[start : start + plan.rows_per_rank(step)[rank]]
