"""A Delta table of a million rows as the training set: `fit_on_table` beside data that `fit` has written, and MDS files.

    PYTHONPATH=. PYTHON benchmarks/tables.py [--rows 1000000] [--rounds 3] [--json FILE] [--write]

PYTHON has `deltalake` and, for the comparison, `mosaicml-streaming`; without it that part is left out. Rows are 32 columns of float32 and a label in
ten files. A first batch is the time from the call of the fit to the end of the first step of rank 0, by the report of the fit, with two ranks on
`local[2]` whose trainers are warm. The epochs are those of one process that reads shuffled batches of 1,024; that of the table begins with opening it. MDS is written first, of a tenth of the rows, and
its times are shown for all rows.
"""

from __future__ import annotations

import argparse
import importlib.util
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
    """Return seconds from the call of a fit to the end of its first step, and the model."""
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
    deltalake.write_deltalake(table, pa.table({**columns, "label": values[:, 0]}), mode="append")
    found["footers, 1 % appended"], found["footers read, 1 % appended"] = [
        [float(v)] for v in read()
    ]


def table_epoch(table: Path, rows: int) -> float:
    """Return seconds of opening the table and reading every row once, shuffled."""
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
    """Return seconds of writing MDS files and of the first epoch over them."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report(
        f"A Delta table as the training set: {given.rows:,} rows of {WIDTH} columns of float32 and a label"
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
        f"{given.rounds} rounds. Bytes written: fit {found['bytes written by fit'][0] / 2**20:.0f} MiB, fit_on_table none but the run. "
        f"Footers read after an append of one file: {found['footers read, 1 % appended'][0]:.0f} of "
        f"{found['footers read, all files'][0] + 1:.0f} files ({share:.0%} of those before)."
    )
    report.raw.update(found)
    report.finish("benchmarks/tables.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
