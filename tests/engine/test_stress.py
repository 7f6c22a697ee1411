"""Random operations in real processes, each rank in its own order and at its own pace.

All features of the engine are compared with NumPy. `tests/torch/test_stress.py` does the same for the torch API.
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from sparkhvd.settings import Settings
from tests.harness.rank_process import rank_processes
from tests.harness.soak import SOAK, amount, left_to_soak

pytestmark = pytest.mark.processes

# Over all layouts.
ENGINE_SECONDS = amount(3, 180)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one host": {},
    "two hosts": {"hosts": (0, 0, 1, 1)},
    "uneven hosts": {"hosts": (0, 0, 0, 1)},
    "four hosts": {"tcp_only": True},
}


@pytest.mark.timeout(ENGINE_SECONDS + 100)
@pytest.mark.parametrize(
    "layout",
    [
        "one host",
        "uneven hosts",
        "four hosts",
        *left_to_soak("uneven hosts, here: several ranks on several hosts", "two hosts"),
    ],
)
def test_random_operations_of_four_ranks_equal_numpy(layout: str) -> None:
    """All kinds of operations, sizes, dtypes, reductions and process sets run at once.

    Every bit equals NumPy's where ranks are added one by one, and is the same on all ranks.
    """
    share = {"one host": 0.4}.get(layout, 0.2)
    first = secrets.randbelow(10**6) if SOAK else 0
    settings = Settings(slot_bytes=65536, stall_shutdown_s=60, connect_timeout_s=60)
    body = "tests.engine.stress:work"
    with rank_processes(body, 4, settings=settings, **LAYOUTS[layout]) as ranks:
        for rank in ranks:
            rank.tell([first, ENGINE_SECONDS * share, layout in ("one host", "four hosts")])
        reports = [rank.expect(ENGINE_SECONDS + 60) for rank in ranks]
    assert len({report["rounds"] for report in reports}) == 1, first
    assert len({report["checksum"] for report in reports}) == 1, first
    for report in reports:
        assert report["rounds"] >= 2, report
        assert sum(report.values()) - report["checksum"] > 20, report
