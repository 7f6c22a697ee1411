"""Members of these tests' jobs are forks."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def members_are_forks(request: pytest.FixtureRequest) -> None:
    """Start the server before the first test's leak check."""
    if request.node.get_closest_marker("processes") is not None:
        request.getfixturevalue("fork_server")
