"""Messages between processes: frames of any size and cut, and refused messages of another process."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd import wire
from sparkhvd.elastic import coordinator
from sparkhvd.runner.live import frames
from sparkhvd.runner.live.frames import Record

pytestmark = pytest.mark.pure

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 50))
def test_frames_arrive_whole_for_any_cut(payloads: list[bytes], size: int) -> None:
    sent = b"".join(map(wire.frame_of, payloads))
    came, found = bytearray(), []
    for start in range(0, len(sent), size):
        came += sent[start : start + size]
        while (payload := wire.take_frame(came)) is not None:
            found.append(payload)
    assert found == payloads
    assert not came


@pytest.mark.parametrize("size", [0, 1, 3_000_001])
def test_frames_pass_through_pipes(size: int) -> None:
    reader, writer = os.pipe()
    payload = os.urandom(size)
    thread = threading.Thread(target=wire.write_frame, args=(writer, payload))
    thread.start()
    assert wire.read_frame(reader) == payload
    thread.join(10)
    os.write(writer, wire.LENGTH.pack(5) + b"cut")
    os.close(writer)
    assert wire.read_frame(reader) is None
    os.close(reader)


@given(
    st.text(),
    st.dictionaries(st.text(), JSON, max_size=4),
    st.binary(),
)
def test_messages_survive_packing_and_unpacking(
    kind: str, values: dict[str, object], data: bytes
) -> None:
    message = wire.unpack(wire.pack(kind, data, values))
    assert (message.kind, message.values, message.data) == (kind, values, data)


HOSTILE = [
    b"",
    b"\xff",
    b"[]",
    b"1",
    b"{}",
    b"[1, {}]",
    b'["a", []]',
    b'["a", {}, 1]',
    b'["a", {"n": NaN}]',
    b'["a", {"n": -Infinity}]',
    b'["a", {"n":' * 100_000,
    b"[" * 200_000,
]


@pytest.mark.parametrize("payload", HOSTILE)
def test_malformed_messages_raise_valueerror(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - also of json
        wire.unpack(payload)
    with pytest.raises(ValueError):  # noqa: PT011
        frames.record_of(payload)
    with pytest.raises(ValueError):  # noqa: PT011
        coordinator.take(bytearray(wire.frame_of(payload)))


@pytest.mark.parametrize(
    "text",
    [
        b'{"message": "decision", "members": [1e400], "endpoints": []}',
        b'{"message": "ask", "endpoint": [], "dead": []}',
        b'{"message": "arrival", "more": 1}',
        b'{"message": "report", "kind": "formed", "generation": "1"}',
        b'{"message": "report", "kind": null, "generation": 1}',
        b'{"message": "running", "size": true}',
        b'{"message": ["ask"]}',
        b'{"message": "none of these"}',
    ],
)
def test_malformed_message_raises_only_valueerror_in_coordinator(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        coordinator.take(bytearray(wire.frame_of(text)))


def test_oversized_frames_are_refused_before_their_content_arrives() -> None:
    with pytest.raises(ValueError, match="a message of 11 bytes"):
        wire.take_frame(bytearray(wire.LENGTH.pack(11)), 10)
    with pytest.raises(ValueError, match="a message of 18446744073709551615 bytes"):
        coordinator.take(bytearray(b"\xff" * 8))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2**63), st.text(), st.booleans()), max_size=4))
def test_records_survive_packing_and_unpacking(given_records: list[tuple[int, str, bool]]) -> None:
    records = [Record(n, text, is_metrics=m) for n, text, m in given_records]
    expected = [
        Record(n, text.encode(errors="replace").decode(), is_metrics=m)
        for n, text, m in given_records
    ]
    assert list(frames.unpack(frames.pack(records))) == expected


def test_shown_frame_accepts_only_an_integer_number() -> None:
    came = bytearray(frames.shown(7) + frames.shown(8)[:-1])
    assert (frames.take_shown(came), frames.take_shown(came)) == (7, None)
    for number in ("7", None, 1.5):
        came = bytearray(wire.frame_of(wire.pack("shown", b"", {"number": number})))
        with pytest.raises(ValueError, match="number"):
            frames.take_shown(came)
