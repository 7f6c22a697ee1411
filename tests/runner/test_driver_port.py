from __future__ import annotations

from typing import Any, cast

import pytest

from sparkhvd.runner.driver_port import address_of_one_interface

pytestmark = pytest.mark.pure


class Session:
    def __init__(self, own: str, host: str) -> None:
        self._addresses = own, host

    def own_addresses(self) -> tuple[str, str]:
        return self._addresses


@pytest.mark.parametrize(
    ("own", "host", "expected"),
    [
        ("127.0.0.2", "no.such.invalid", "127.0.0.2"),
        ("0.0.0.0", "127.0.0.3", "127.0.0.3"),
        ("::", "::1", "::1"),
        ("localhost", "no.such.invalid", "127.0.0.1"),
        ("fe80::1%lo", "no.such.invalid", "fe80::1%lo"),
    ],
)
def test_ranks_get_the_address_of_one_driver_interface(own: str, host: str, expected: str) -> None:
    found = address_of_one_interface(cast("Any", Session(own, host)))
    assert found in (expected, "::1" if own == "localhost" else expected)
