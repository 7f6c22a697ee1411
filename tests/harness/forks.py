"""Fixtures of ranks that are forks. Ranks import `fork_server.py`, which must not import pytest."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.harness import fork_server as servers
from tests.harness.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Processes of `tests.harness.elastic` are forks of one that has imported torch."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed: make test-wheels tests the engine without it")
    with servers.as_running() as server:
        yield server


@pytest.fixture(scope="session")
def engine_server() -> Iterator[ForkServer]:
    """Starts ranks that need no torch."""
    with servers.of_engines() as server:
        yield server


@pytest.fixture(scope="module")
def ranks_are_forks(engine_server: ForkServer) -> Iterator[None]:
    """Let ranks of `rank_processes` in this module be forks, where a test names no other server."""
    with servers.as_default(engine_server):
        yield
