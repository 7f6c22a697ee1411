"""Threads of ranks in tests of Spark.

A zygote serves one number of threads. By default this number depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkhvd.runner import job

_BY_DEFAULT = job._fixed_threads


@pytest.fixture(scope="module", autouse=True)
def one_thread_per_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let launches of one rank and of two in the shared session have the same zygote."""
    if request.node.get_closest_marker("spark") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_fixed_threads", lambda *_: 1)
        yield


@pytest.fixture
def threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of a test have as many threads as a user's."""
    monkeypatch.setattr(job, "_fixed_threads", _BY_DEFAULT)
