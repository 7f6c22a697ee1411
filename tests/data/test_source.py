"""Sources of rows without Spark: Parquet read in place, and the paths of prepared data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.parquet.dataset import open_dataset
from sparkhvd.data.reading.source import open_source
from sparkhvd.data.source import DataSource, ParquetFiles, Target
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.inputs import FitSources, check_split

pytestmark = pytest.mark.pure


def parquet(folder: Path, session: Any = None) -> ParquetFiles:
    folder.mkdir()
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0]}), folder / "a.parquet")
    return ParquetFiles(open_dataset(folder), session)


def test_parquet_is_read_in_place_and_only_a_manifest_is_written(tmp_path: Path) -> None:
    source: DataSource = parquet(tmp_path / "data")
    store = Store.create(tmp_path / "store")
    schema = check_schema(source.schema, feature_cols=["x"], label_cols=[], data_name=source.name)
    prepared = source.prepare(schema, Target(store, "runs/a", role="validation"))
    assert [f.relative_to(tmp_path) for f in (tmp_path / "store").rglob("*.*")] == [
        Path("store/runs/a/validation/_manifest.json")
    ]
    assert prepared.reused
    assert not prepared.is_other_each_time
    manifest = Manifest.load(store, prepared.data_dir)
    assert manifest.num_rows == 3
    assert prepared.files is not None
    with open_source(prepared.files, manifest) as rows:
        assert rows.read(["x"])["x"].tolist() == [1.0, 2.0, 3.0]


def test_validation_source_has_a_separate_folder_and_key(tmp_path: Path) -> None:
    target = Target(Store(str(tmp_path)), "runs/a", data_key="mine")
    beside = replace(target, role="validation")
    assert (target.manifest_dir, target.key) == ("runs/a/data", "mine")
    assert (beside.manifest_dir, beside.key) == ("runs/a/validation", "mine/validation")
    assert replace(beside, data_key=None).key is None


def test_validation_exists_with_a_source_or_a_nonzero_split(tmp_path: Path) -> None:
    source = parquet(tmp_path / "data")
    assert not FitSources(source).has_validation
    assert not FitSources(source, split=0.0).has_validation
    assert FitSources(source, split="flag").has_validation
    assert FitSources(source, source).has_validation


@pytest.mark.parametrize(
    ("marked", "split", "full_step", "message"),
    [
        (None, 0.5, 50, ""),
        (None, "flag", 1000, ""),  # not counted
        (10, "flag", 90, ""),
        (0, "flag", 1, "column 'flag' marks none of 100 rows"),
        (100, "flag", 1, "column 'flag' marks all 100 rows"),
        (10, "flag", 91, "the 90 training rows are fewer than one full step of"),
        (None, None, 101, "the 100 training rows are fewer than"),
    ],
)
def test_split_without_training_or_validation_rows_raises(
    tmp_path: Path, marked: int | None, split: float | str | None, full_step: int, message: str
) -> None:
    source = parquet(tmp_path / "data")
    schema = check_schema(source.schema, feature_cols=["x"], label_cols=[])
    manifest = Manifest((), schema, 100, marked)
    if not message:
        check_split(manifest, split, full_step)
        return
    with pytest.raises(InvalidArgumentError) as raised:
        check_split(manifest, split, full_step)
    assert message in str(raised.value)
