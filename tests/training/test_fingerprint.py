from __future__ import annotations

import json

import pytest

from sparkhvd.training.checkpoints.resume import differences

pytestmark = pytest.mark.pure


def test_fingerprint_comparison_names_every_difference() -> None:
    before = {
        "rows": 7,
        "same": [1],
        "files": [1000] * 40,
        "gone": 1,
        "model": {"a": [[6, 2], "f"], "b": [[6], "f"], "c": [[1], "f"]},
    }
    now = {
        "rows": 8,
        "same": [1],
        "files": [1000] * 39,
        "new": None,
        "model": {"a": [[8, 2], "f"], "c": [[1], "f"], "d": [[1], "f"]},
    }
    assert differences(json.dumps(before), json.dumps(before)) == ""
    assert differences(json.dumps(before), json.dumps(now)) == (
        "rows was 7 and is 8; files differs; model: 'a' was [[6, 2], \"f\"] and is [[8, 2], \"f\"], 'd' is new, "
        "'b' is gone; gone was 1 and is null"
    )


def test_differences_of_a_large_model_are_summarized() -> None:
    before = {"model": {f"layer.{i}": [[i], "f"] for i in range(1000)}}
    now = {"model": {f"layer.{i}": [[i + 1], "f"] for i in range(1000)}}
    text = differences(json.dumps(before), json.dumps(now))
    assert text.endswith('\'layer.7\' was [[7], "f"] and is [[8], "f"], and 992 more')
