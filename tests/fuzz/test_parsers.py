"""Parsers of files and sockets: outputs of their writers, and malformed input (`tests/harness/parsers.py`)."""

from __future__ import annotations

import hashlib
import io
import struct
import time
import tracemalloc
import zlib
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rendezvous import Endpoint
from sparkhvd.training.checkpoints.checkpoint import DamagedError, read_checkpoint
from sparkhvd.wire import rebuild
from tests.harness.parsers import PARSERS, Parser, cut, example, mutated
from tests.harness.soak import amount

pytestmark = pytest.mark.pure

BY_NAME = pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
# Limit of one parser with one input, on a busy machine. Each takes well below a millisecond.
LIMIT_S = 5.0
# Beyond the input itself: a parsed text takes up to 30 times its bytes.
LIMIT_BYTES = 100 << 20


@BY_NAME
def test_parsers_read_the_output_of_their_writers(parser: Parser) -> None:
    @settings(max_examples=amount(10), deadline=None, suppress_health_check=list(HealthCheck))
    @given(parser.valid)
    def check(value: Any) -> None:
        found = parser.parse(parser.dump(value))
        if parser.restored is not None:
            assert found == parser.restored(value)

    check()


@BY_NAME
def test_mutated_json_fields_raise_only_documented_errors(parser: Parser) -> None:
    if parser.body is None:
        pytest.skip("it has no JSON")
    written = example(parser)
    survived = [
        parser.survives(parser.wrap(text))
        for text in mutated(parser.body(written), amount(120, 10**9))
    ]
    assert len(survived) > 20
    assert parser.survives(written)
    if parser.errors:
        assert not all(survived)


@BY_NAME
def test_truncated_input_raises_only_documented_errors(parser: Parser) -> None:
    for data in cut(example(parser), amount(15)):
        parser.survives(data)


@BY_NAME
def test_large_inputs_take_bounded_time_and_memory(parser: Parser) -> None:
    million = amount(100_000, 1_000_000)
    texts = [
        b"[" * million,
        b"[1," * (million // 3),
        b"9" * million,
        b'{"a":' * (million // 5),
        b'"' + b"x" * million + b'"',
    ]
    inputs = [*texts, *map(parser.wrap, texts if parser.body is not None else [])]
    for data in inputs:
        tracemalloc.start()
        began = time.monotonic()
        try:
            parser.survives(data)
            assert time.monotonic() - began < LIMIT_S
            assert tracemalloc.get_traced_memory()[1] < LIMIT_BYTES
        finally:
            tracemalloc.stop()


@BY_NAME
@settings(max_examples=amount(20), deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_only_documented_errors(parser: Parser, data: bytes) -> None:
    parser.survives(data)


# Inputs that raised other errors before.
FOUND = [
    ("error of a store in a task", b"[sparkhvd-store:5b]"),
    ("weights", b"X"),
    ("settings of a job", b"null"),
    ("settings of a job", b'["{\\"sharud_memory\\": 1}", []]'),
    ("choice of autotune", b'{"format": 1, "world": [2], "choice": {"pieces": Infinity}}'),
    ("message of an elastic job", b"\0\0\0\0\0\0\0\x16" + b'{"message": ["report"]}'[:22]),
    ("profile.json", b'{"epochs": [1], "every": 1, "load": 5, "generations": 3}'),
    # Its CRC matches, but its length is not a multiple of a CRC's.
    (
        "checksums of a packed file",
        b"abc" + struct.pack("<QI4s", 0, zlib.crc32(bytes(8), zlib.crc32(b"abc")), b"SHB1"),
    ),
    ("lease", b'{"owner": "a", "renewed": 1e400}'),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_parsers_survive_inputs_found_by_fuzzing(name: str, data: bytes) -> None:
    (parser,) = [each for each in PARSERS if each.name == name]
    parser.survives(data)


@pytest.mark.parametrize("content", [b"\x80\x02X\x04\0\0\0abc\xdf.", b"", b"\x80\x02]."])
def test_checkpoint_of_arbitrary_bytes_with_a_valid_hash_is_damaged(content: bytes) -> None:
    seal = f"\nsparkhvd-sha256 {hashlib.sha256(content).hexdigest()}\n".encode()
    with pytest.raises(DamagedError, match="here is not a checkpoint"):
        read_checkpoint(io.BytesIO(content + seal), "here")


def test_error_names_a_checkpoint_class_that_torch_does_not_load() -> None:
    sink = io.BytesIO()
    torch.save({"epoch": Fraction(1, 2)}, sink)
    seal = f"\nsparkhvd-sha256 {hashlib.sha256(sink.getvalue()).hexdigest()}\n".encode()
    with pytest.raises(InvalidArgumentError, match=r"Unsupported global.*fractions\.Fraction"):
        read_checkpoint(io.BytesIO(sink.getvalue() + seal), "here")


def test_endpoint_with_an_out_of_range_port_is_refused() -> None:
    fields = {"address": "::1", "port": 10**400, "host_key": "", "unix_name": ""}
    with pytest.raises(ValueError, match="a port out of range"):
        rebuild(Endpoint, fields)
