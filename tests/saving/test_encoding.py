"""Values of Params as JSON and back."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.data.columns.decoders import pad
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, UntrustedError
from sparkhvd.estimator.saving import encoding
from sparkhvd.estimator.saving.encoding import Archive, Decoder
from sparkhvd.settings import Settings

pytestmark = pytest.mark.pure

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
def test_plain_dicts_survive_encoding_unchanged(value: Any) -> None:
    assert round_trip(value) == value


def test_values_of_this_package_load_without_trust() -> None:
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
    """Another class, with its own code."""


@pytest.mark.parametrize("value", [Own, pad(Own)])  # type: ignore[arg-type]
def test_values_that_imitate_this_package_require_trust(value: Any) -> None:
    with pytest.raises(UntrustedError):
        round_trip(value)


def test_defaultdict_keeps_its_default_and_requires_trust() -> None:
    archive = Archive()
    archive.encode("decoders", {"level": defaultdict(int, {"low": 1})})
    assert archive.code["decoders.level"]["unknown"] == 0
    with pytest.raises(UntrustedError):
        round_trip({"level": defaultdict(int)})


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("settings", Settings(timeline="/home/me/precious"), "timeline='/home/me/precious'"),
        ("settings", Settings(autotune_file="/home/me/x"), "autotune_file='/home/me/x'"),
        ("store", Store("ftp://user:pa55word@elsewhere/x"), "the store ftp://elsewhere/x"),
        ("store", "s3://elsewhere/x", "the store s3://elsewhere/x"),
        ("store", Path("/elsewhere"), "the store /elsewhere"),
        ("decoders", {"x": [Store("s3://elsewhere/x")]}, "the store s3://elsewhere/x"),
    ],
)
def test_settings_that_decide_where_a_fit_writes_require_trust(
    name: str, value: Any, shown: str
) -> None:
    encoded = json.loads(json.dumps(Archive().encode(name, value)))
    with pytest.raises(UntrustedError) as failed:
        Decoder("/saved", SPARK, trusted=False).decode(name, encoded)
    assert f"{shown}, and that file would decide where a fit writes" in str(failed.value)
    assert "trust=True" in str(failed.value)
    found = Decoder("/saved", SPARK, trusted=True).decode(name, encoded)
    if not isinstance(value, Store):
        assert found == value


def test_weights_require_trust_where_torch_cannot_load_them_safely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    archive = Archive()
    encoded = archive.encode("model", torch.nn.Linear(2, 1))

    def decode(*, trusted: bool) -> Any:
        decoder = Decoder("/saved", SPARK, trusted=trusted)
        decoder._tensors = archive.tensors
        return decoder.decode("model", encoded)

    monkeypatch.setattr(encoding, "SAFE_TORCH", (2, 4))
    assert type(decode(trusted=False)) is torch.nn.Linear
    monkeypatch.setattr(encoding, "SAFE_TORCH", (99, 1))
    with pytest.raises(UntrustedError, match=r"can run code where torch is below 99\.1"):
        decode(trusted=False)
    assert type(decode(trusted=True)) is torch.nn.Linear


def test_settings_without_paths_load_without_trust() -> None:
    for name, value in (("settings", Settings(slots=5)), ("store", None)):
        encoded = json.loads(json.dumps(Archive().encode(name, value)))
        assert Decoder("/saved", SPARK, trusted=False).decode(name, encoded) == value


@pytest.mark.parametrize(
    "odd",
    [
        {},
        [{"dict": []}],
        {"pairs": [1]},
        {"settings": {"no_such": 1}},
        {"settings": []},
        {"settings": {"slots": 0}},
        {"torch": 5},
        {"torch": "torch.optim.optimizer"},
        {"module": {}},
        {"module": {"class": "Linear"}},
        {"optimizer": {"class": "torch.optim.SGD"}},
        {"code": "x"},
        {"bytes": "xyz"},
        {"path": 1},
        {"powersgd": {"rank": "x"}},
        {"unheard of": 1},
    ],
)
def test_error_names_entries_of_unknown_form(odd: Any, tmp_path: Path) -> None:
    decoder = Decoder(str(tmp_path), SPARK, trusted=False)
    decoder._tensors = {}
    with pytest.raises(InvalidArgumentError):
        decoder.decode("param", odd)
    with pytest.raises(
        InvalidArgumentError, match="entry 'param' in a form that sparkhvd does not save"
    ):
        decoder.decode("param", {})
