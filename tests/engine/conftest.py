"""Rank processes of these tests are forks, because a fresh process imports for half a second."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def forks(request: pytest.FixtureRequest) -> None:
    """Start the server before the first test's leak check."""
    if request.node.get_closest_marker("processes") is not None:
        request.getfixturevalue("ranks_are_forks")
