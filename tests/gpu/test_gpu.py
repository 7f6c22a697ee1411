"""The checks of `make gpu` under pytest."""

from __future__ import annotations

import pytest

from tests.gpu.parts import PARTS, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=f"needs a GPU: {why_not()}"),
]


@pytest.mark.parametrize("name", PARTS)
def test_on_a_gpu(name: str) -> None:
    PARTS[name]()
