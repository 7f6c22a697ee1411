"""How a file is cut into rows of Spark's text writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkhvd.data.store import spark_files

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("data", "separator"),
    [
        (b"", b"\n"),
        (b"a\nb\0c", b"\n"),
        (bytes(100), b"\0"),
        (b"x" * 100, b"\n"),
        (b"\n" * 100, b"\n"),
        (bytes(50) + b"\n" * 2 + bytes(50), b"\0"),
    ],
)
def test_file_is_cut_into_bounded_rows_that_join_unchanged(
    data: bytes, separator: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_files, "CHUNK_BYTES", 8)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert spark_files._separator(str(path)) == separator
    rows = [data[start:end] for start, end in spark_files._rows(data, separator)]
    assert separator.join(rows) == data
    assert b"x" in data or max(map(len, rows)) <= 8
