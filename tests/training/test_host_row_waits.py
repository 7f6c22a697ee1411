"""Waits of ranks that share the rows of their host."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.errors import CollectiveTimeoutError
from sparkhvd.settings import Settings
from sparkhvd.torch.context import use_engine
from sparkhvd.training.host_memory import HostRows
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_timeout_names_the_rank_that_still_reads_host_rows() -> None:
    has_failed = threading.Event()

    def body(engine: Engine) -> str:
        if engine.topology.rank == 1:  # still reading
            assert has_failed.wait(30)
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            HostRows("training rows").gather({"x": np.arange(3)})
        has_failed.set()
        return str(caught.value)

    settings = Settings(stall_shutdown_s=0.5, stall_warning_s=0)
    message = run_ranks(2, body, using=use_engine, settings=settings)[0]
    assert re.fullmatch(
        r"allgather\('allgather_object\.training rows\.sizes'\): rank 1 did not submit it within [\d.]+ s, while rank 0 "
        r"waited\. Look at what the missing rank does, or raise stall_shutdown_s\.",
        message,
    )
