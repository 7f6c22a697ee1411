"""Fixtures of launches on this host.

Most launches need no torch, whatever earlier ranks have imported.
"""

from __future__ import annotations

import pytest

from sparkhvd.runner.zygote_client import of_this_process


@pytest.fixture(autouse=True)
def no_useful_modules(request: pytest.FixtureRequest) -> None:
    """Let zygotes that a test starts import nothing before its ranks do."""
    if request.node.get_closest_marker("processes") is not None:
        of_this_process._useful.clear()


@pytest.fixture
def torch_in_the_zygote(no_useful_modules: None) -> None:
    """Let the zygote import torch once, where each rank of a test would."""
    of_this_process._useful.update(("torch", "sparkhvd.torch"))
