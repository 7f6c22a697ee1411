"""Values of Params as JSON and back."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sparkhvd.torch as hvd
from sparkhvd.errors import UntrustedError
from sparkhvd.estimator.data.functions import pad
from sparkhvd.estimator.encoding import Archive, Decoder

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


def test_what_is_ours_needs_no_trust() -> None:
    for value in (
        {"tokens": pad(0), "image": pad(-1.5, length=7)},
        hvd.Compression.none,
        hvd.Compression.fp16,
        hvd.Compression.bf16,
        Path("/shared/store"),
    ):
        assert round_trip(value) == value
    assert repr(round_trip(hvd.Compression.powersgd(rank=2, warm_up_steps=5))) == (
        "Compression.powersgd(rank=2, warm_up_steps=5)"
    )


class Own(hvd.Compression.fp16):
    """Another class, with code of its own."""


@pytest.mark.parametrize("value", [Own, pad(Own)])  # type: ignore[arg-type]
def test_what_only_looks_like_ours_needs_trust(value: Any) -> None:
    with pytest.raises(UntrustedError):
        round_trip(value)


def test_a_dict_that_answers_for_other_keys_stays_one() -> None:
    archive = Archive()
    archive.encode("decoders", {"level": defaultdict(int, {"low": 1})})
    assert archive.code["decoders.level"]["unknown"] == 0
    with pytest.raises(UntrustedError):
        round_trip({"level": defaultdict(int)})
