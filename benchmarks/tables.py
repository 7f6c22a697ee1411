"""A table of a million rows as the training set: `fit_on_table` beside data that `fit` has written, MDS, and datasets' reader.

    PYTHONPATH=. PYTHON benchmarks/tables.py [--rows 1000000] [--rounds 3] [--json FILE] [--write]

PYTHON has `deltalake` and, for the comparisons, `mosaicml-streaming`, and `pyiceberg` with `datasets` 5 or newer; without
them these parts are left out. Rows are 32 columns of float32 and a label in
ten files. A first batch is the time from the call of the fit to the end of the first step of rank 0, by the report of the fit, with two ranks on
`local[2]` whose trainers are warm. The epochs are those of one process that reads shuffled batches of 1,024; that of the table begins with opening it. MDS is written first, of a tenth of the rows, and
its times are shown for all rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common import Report, Target, local_session, median_and_quartiles

BATCH, WIDTH = 1024, 32
MOST_LATER_S, EPOCH_FASTER, LEAST_APPENDED = 0.5, 5, 0.02


def write_table(folder: Path, rows: int) -> None:
    import deltalake
    import pyarrow as pa

    for part in range(10):
        values = np.random.default_rng(part).random((rows // 10, WIDTH), np.float32)
        columns = {f"x{n}": values[:, n] for n in range(WIDTH)}
        table = pa.table({**columns, "label": values[:, 0] - values[:, 1]})
        deltalake.write_deltalake(folder, table, mode="append")


def estimator(store: Path) -> Any:
    import torch

    from sparkhvd import TorchEstimator

    names = [f"x{n}" for n in range(WIDTH)]
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return TorchEstimator(
        model=model,
        optimizer="sgd",
        loss="mse",
        feature_cols=names,
        label_cols=["label"],
        num_proc=2,
        batch_size=BATCH,
        verbose=0,
        store=str(store),
    )


def first_batch(fit: Callable[[], Any]) -> tuple[float, Any]:
    """Run a fit, and return the seconds to the end of its first step, and the model."""
    began = time.perf_counter()
    model = fit()
    seconds = time.perf_counter() - began
    phases = model.report().document["phases"]
    names = [phase["name"] for phase in phases]
    return seconds - sum(p["seconds"] for p in phases[names.index("first step") + 1 :]), model


def materialize(model: Any) -> float:
    return float(
        next(p["seconds"] for p in model.report().document["phases"] if p["name"] == "materialize")
    )


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def fits(spark: Any, table: Path, store: Path, rounds: int, found: dict[str, list[float]]) -> None:
    """Fit on the table and on the same rows as written data, by turns."""
    made = estimator(store)
    df = spark.read.parquet(*sorted(map(str, table.glob("*.parquet"))))
    began = time.perf_counter()
    made.fit(df)  # writes the data, and warms the trainers
    found["fit that writes, whole fit"] = [time.perf_counter() - began]
    written = size_of(store)
    for number in range(rounds):
        seconds, of_table = first_batch(lambda: made.fit_on_table(table))
        name = "fit_on_table" if number else "fit_on_table, first of the process"
        found.setdefault(name, []).append(seconds)
        found.setdefault("materialize of fit_on_table", []).append(materialize(of_table))
        found.setdefault("fit, data there", []).append(first_batch(lambda: made.fit(df))[0])
    found["bytes written by fit"] = [written]


def incremental(table: Path, store: Path, rows: int, found: dict[str, list[float]]) -> None:
    """Read the footers of the table, append one row of a hundred, and read again."""
    import deltalake
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sparkhvd.data.columns.check import check_schema
    from sparkhvd.data.parquet.manifest import KnownFooters, read_manifest
    from sparkhvd.data.store.store import Store
    from sparkhvd.data.table_formats.table import open_table
    from sparkhvd.data.table_formats.version import requested

    place = Store.create(store)

    def read() -> tuple[float, int]:
        dataset = open_table(table, requested(), None)  # type: ignore[arg-type]
        names = [f"x{n}" for n in range(WIDTH)]
        schema = check_schema(dataset.schema, feature_cols=names, label_cols=["label"])
        known = KnownFooters(place, dataset, schema)
        began = time.perf_counter()
        read_manifest(dataset, schema, known)
        return time.perf_counter() - began, known.num_read

    found["footers, all files"], found["footers read, all files"] = [[float(v)] for v in read()]
    values = np.random.default_rng(99).random((rows // 100, WIDTH), np.float32)
    columns = {f"x{n}": values[:, n] for n in range(WIDTH)}
    before = set(table.glob("*.parquet"))
    found["bytes of the table"] = [float(sum(file.stat().st_size for file in before))]
    deltalake.write_deltalake(table, pa.table({**columns, "label": values[:, 0]}), mode="append")
    found["footers, 1 % appended"], found["footers read, 1 % appended"] = [
        [float(v)] for v in read()
    ]
    new = set(table.glob("*.parquet")) - before
    found["bytes of new footers"] = [float(sum(pq.read_metadata(f).serialized_size for f in new))]


def table_epoch(table: Path, rows: int) -> float:
    """Measure the seconds to open the table and read every row once, shuffled."""
    from sparkhvd.data.columns.check import check_schema
    from sparkhvd.data.parquet.manifest import read_manifest
    from sparkhvd.data.reading.reader import Reader
    from sparkhvd.data.table_formats.table import open_table
    from sparkhvd.data.table_formats.version import requested

    began = time.perf_counter()
    dataset = open_table(table, requested(), None)  # type: ignore[arg-type]
    names = [f"x{n}" for n in range(WIDTH)]
    schema = check_schema(dataset.schema, feature_cols=names, label_cols=["label"])
    manifest = read_manifest(dataset, schema)
    seen = 0
    with Reader(dataset.store, manifest, rank=0, size=1, batch_size=BATCH, seed=1) as reader:
        for batch in reader.epoch(0):
            seen += batch.num_rows
    assert seen == rows, f"{seen} of {rows} rows"
    return time.perf_counter() - began


def mds_epoch(spark: Any, table: Path, folder: Path, rows: int) -> tuple[float, float]:
    """Measure the seconds to write MDS files, and of the first epoch over them."""
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.converters import dataframe_to_mds

    df = spark.read.parquet(min(map(str, table.glob("*.parquet"))))  # a tenth: it is slow
    began = time.perf_counter()
    dataframe_to_mds(df, merge_index=True, mds_kwargs={"out": str(folder)})
    wrote = time.perf_counter()
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0)
    seen = sum(len(batch["label"]) for batch in loader)
    assert seen == rows, f"{seen} of {rows} rows"
    return wrote - began, time.perf_counter() - wrote


def iceberg_epochs(table: Path, folder: Path, rows: int, found: dict[str, list[float]]) -> None:
    """Read an epoch of the rows as an Iceberg table, here and with Hugging Face's datasets."""
    import datasets
    import pyarrow.parquet as pq
    from pyiceberg.catalog.sql import SqlCatalog

    os.environ["HF_DATASETS_OFFLINE"] = "1"
    datasets.disable_progress_bars()
    folder.mkdir()
    os.chdir(folder)  # load_dataset looks through the current folder for files
    properties = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    catalog = SqlCatalog("bench", **properties)
    catalog.create_namespace("db")
    part = pq.read_table(min(map(str, table.glob("*.parquet"))))  # a tenth, as for MDS
    iceberg = catalog.create_table("db.t", part.schema)
    iceberg.append(part)
    # The first epoch of each is thrown away: it imports.
    for number in range(3):
        cache = folder / f"cache{number}"
        began = time.perf_counter()
        data = datasets.load_dataset(
            "iceberg", catalog=catalog, table="db.t", split="train", cache_dir=str(cache)
        )
        seen = sum(
            len(batch["label"])
            for batch in data.shuffle(seed=number).with_format("torch").iter(BATCH)
        )
        mapped = time.perf_counter() - began
        assert seen == rows, f"{seen} of {rows} rows"
        began = time.perf_counter()
        data = datasets.load_dataset(
            "iceberg", catalog=catalog, table="db.t", split="train", streaming=True
        )
        stream = data.shuffle(seed=number, buffer_size=10_000).with_format("torch")
        seen = sum(len(batch["label"]) for batch in stream.iter(BATCH))
        streamed = time.perf_counter() - began
        assert seen == rows, f"{seen} of {rows} rows"
        ours = table_epoch(Path(iceberg.metadata_location.removeprefix("file://")), rows)
        if number:
            found.setdefault("datasets", []).append(mapped)
            found.setdefault("datasets, streaming", []).append(streamed)
            found.setdefault("epoch of the Iceberg table", []).append(ours)
            found["bytes written by datasets"] = [size_of(cache)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report(
        f"A table as the training set: {given.rows:,} rows of {WIDTH} columns of float32 and a label"
    )
    found: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as scratch,
        local_session(2) as spark,
    ):
        table = Path(scratch) / "table"
        write_table(table, given.rows)
        fits(spark, table, Path(scratch) / "store", given.rounds + 1, found)
        found["epoch of the table"] = [table_epoch(table, given.rows) for _ in range(given.rounds)]
        has_mds = importlib.util.find_spec("streaming") is not None
        if has_mds:
            found["MDS, write"], found["MDS, first epoch"] = [
                [10 * v] for v in mds_epoch(spark, table, Path(scratch) / "mds", given.rows // 10)
            ]
        has_datasets = all(importlib.util.find_spec(name) for name in ("datasets", "pyiceberg"))
        if has_datasets:
            iceberg_epochs(table, Path(scratch) / "iceberg", given.rows // 10, found)
        incremental(table, Path(scratch) / "footers", given.rows, found)
    median = {name: statistics.median(values) for name, values in found.items()}
    later = median["fit_on_table"] - median["fit, data there"]
    lines: list[list[Any]] = [
        [
            "first batch, fit on data that are there",
            median_and_quartiles(found["fit, data there"]),
            [],
        ],
        [
            "first batch, fit_on_table",
            median_and_quartiles(found["fit_on_table"]),
            [Target("later by", later, MOST_LATER_S, at_least=False, unit="s")],
        ],
        [
            "first batch, first fit_on_table of the process",
            median_and_quartiles(found["fit_on_table, first of the process"]),
            [],
        ],
        [
            "materialize phase, fit_on_table",
            median_and_quartiles(found["materialize of fit_on_table"]),
            [],
        ],
        [
            "whole fit that writes the rows",
            median_and_quartiles(found["fit that writes, whole fit"]),
            [],
        ],
        ["open the table and read an epoch", median_and_quartiles(found["epoch of the table"]), []],
    ]
    if has_mds:
        faster = median["MDS, first epoch"] / median["epoch of the table"]
        lines.append(
            ["MDS: write, ten times that of a tenth", median_and_quartiles(found["MDS, write"]), []]
        )
        lines.append(
            [
                "MDS: first epoch, likewise",
                median_and_quartiles(found["MDS, first epoch"]),
                [Target("table", faster, EPOCH_FASTER, at_least=True)],
            ]
        )
    written = ""
    if has_datasets:
        ours = median["epoch of the Iceberg table"]
        lines.append(
            [
                "open a tenth as an Iceberg table and read an epoch",
                median_and_quartiles(found["epoch of the Iceberg table"]),
                [],
            ]
        )
        for name in ("datasets", "datasets, streaming"):
            faster = Target("table", median[name] / ours, EPOCH_FASTER, at_least=True)
            lines.append(
                [
                    f"Hugging Face {name}: load the tenth and read an epoch",
                    median_and_quartiles(found[name]),
                    [faster],
                ]
            )
        written = f", datasets {found['bytes written by datasets'][0] / 2**20:.0f} MiB, its streaming none"
    share = found["footers read, 1 % appended"][0] / found["footers read, all files"][0]
    lines += [
        ["footers of all files", median_and_quartiles(found["footers, all files"]), []],
        [
            "footers after 1 % was appended, incremental",
            median_and_quartiles(found["footers, 1 % appended"]),
            [],
        ],
    ]
    report.table(["", "seconds", "targets"], lines)
    report.note(
        f"{given.rounds} rounds. Bytes written: fit {found['bytes written by fit'][0] / 2**20:.0f} MiB, fit_on_table none but the run{written}. "
        f"Footers read after an append of one file: {found['footers read, 1 % appended'][0]:.0f} of "
        f"{found['footers read, all files'][0] + 1:.0f} files ({share:.0%} of those before), "
        f"{found['bytes of new footers'][0] / 1024:.1f} KiB of a table of {found['bytes of the table'][0] / 2**20:.0f} MiB."
    )
    report.raw.update(found)
    report.finish("benchmarks/tables.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
