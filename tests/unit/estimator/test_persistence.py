"""Values of Params as JSON and back."""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from sparkhvd.errors import UntrustedError
from sparkhvd.estimator.persistence import Archive, Decoder

SPARK = SimpleNamespace(conf=SimpleNamespace(get=lambda _name, default: default))


def round_trip(value: Any) -> Any:
    archive = Archive()
    encoded = json.loads(json.dumps(archive.encode("decoders", value)))
    return Decoder("/saved", SPARK, trusted=False).decode("decoders", encoded)


@pytest.mark.parametrize(
    "value",
    [
        {"level": {"low": 0, "high": 1}},
        {"image": {b"\x00\xff": 0.5, b"b": [1, 2]}},
        {0: "zero", True: None, 2.5: b"bytes"},
        {"x": {"code": 1, "dict": 2, "pairs": 3}},
        {},
    ],
)
def test_plain_dicts_come_back_as_they_were(value: Any) -> None:
    assert round_trip(value) == value


def test_a_dict_that_answers_for_other_keys_stays_one() -> None:
    archive = Archive()
    archive.encode("decoders", {"level": defaultdict(int, {"low": 1})})
    assert archive.code["decoders.level"]["unknown"] == 0
    with pytest.raises(UntrustedError):
        round_trip({"level": defaultdict(int)})
