"""What launches of these tests share: a zygote serves one number of threads, which by default depends on the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkhvd.runner import job

_BY_DEFAULT = job._fixed_threads


@pytest.fixture(scope="package", autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    """Let launches of one rank and of two in the shared session have the same zygote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_fixed_threads", lambda *_: 1)
        yield


@pytest.fixture
def threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of a test have as many threads as a user's."""
    monkeypatch.setattr(job, "_fixed_threads", _BY_DEFAULT)
