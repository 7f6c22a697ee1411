"""Members of these tests' jobs are forks."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def members_are_forks(fork_server: object) -> None:
    """Start the server before the first test's leak check."""
