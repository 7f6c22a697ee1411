"""A DataFrame written once and read by a training loop: sparkhvd.data beside Mosaic's streaming and MDS files.

    PYTHONPATH=. PYTHON benchmarks/loaders.py [--rows 400000] [--rounds 5] [--json FILE] [--write]

PYTHON has `mosaicml-streaming`, pyspark, pyarrow and this package's own requirements (its package imports torchvision; an empty module
of that name does). Rows are 32 columns of float32 and a label. Both write the same DataFrame from `local[2]`, and one process reads shuffled
batches of 1,024, by turns; the clock of a reader starts when it is made. Sizes are those of the folders.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import Report, Target, local_session, median_and_quartiles

BATCH, WIDTH = 1024, 32
WRITE_FASTER, READ_FASTER = 2, 10


def frame(spark: Any, rows: int) -> Any:
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

    # MDS takes no arrays of a DataFrame as they are.
    values = [(F.rand(n) * 2 - 1).cast("float").alias(f"x{n}") for n in range(WIDTH)]
    made = spark.range(rows).select(*values, (F.col("id") % 10).alias("label"))
    made = made.repartition(4).cache()
    made.count()
    return made


def write_mds(df: Any, folder: Path) -> None:
    from streaming.base.converters import dataframe_to_mds

    dataframe_to_mds(df, merge_index=True, mds_kwargs={"out": str(folder)})


def write_ours(df: Any, folder: Path) -> str:
    import sparkhvd.data

    return str(sparkhvd.data.prepare(df, folder, data_key=folder.name).path)


def read_mds(folder: Path) -> Iterable[Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0)


def timed(body: Callable[[], object]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def epoch(batches: Iterable[Any], rows: int) -> None:
    seen = sum(len(batch["label"]) for batch in batches)
    assert seen == rows, f"{seen} of {rows} rows"


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(spark: Any, rows: int, rounds: int, scratch: Path) -> dict[str, list[float]]:
    """Measure the seconds and bytes of both loaders, by operation."""
    import sparkhvd.data

    df = frame(spark, rows)
    found: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for number in range(rounds):
        mds, store = scratch / f"mds{number}", scratch / f"store{number}"
        paths: list[str] = []
        add("MDS, write", timed(lambda: write_mds(df, mds)))  # noqa: B023 - called at once
        add("sparkhvd, write", timed(lambda: paths.append(write_ours(df, store))))  # noqa: B023
        add("MDS, bytes", size_of(mds))
        add("sparkhvd, bytes", size_of(store))
        began = time.perf_counter()
        reader = read_mds(mds)
        epoch(reader, rows)
        add("MDS, first epoch", time.perf_counter() - began)
        add("MDS, later epoch", timed(lambda: epoch(reader, rows)))  # noqa: B023
        began = time.perf_counter()
        with sparkhvd.data.load(store, paths[0]).loader(0, 1, BATCH) as loader:
            epoch(loader, rows)
            add("sparkhvd, first epoch", time.perf_counter() - began)
            add("sparkhvd, later epoch", timed(lambda: epoch(loader, rows)))  # noqa: B023
        shutil.rmtree(mds)
        shutil.rmtree(store)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report(
        f"A DataFrame written and read: {given.rows:,} rows of {WIDTH} columns of float32 and a label"
    )
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder, local_session(2) as spark:
        found = measure(spark, given.rows, given.rounds, Path(folder))
    median = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
    rows: list[list[str | list[Target]]] = []
    for what, faster in (
        ("write", WRITE_FASTER),
        ("first epoch", READ_FASTER),
        ("later epoch", READ_FASTER),
    ):
        ours, theirs = f"sparkhvd, {what}", f"MDS, {what}"
        target = Target("MDS /", median[theirs] / median[ours], faster, at_least=True)
        rates = [f"{given.rows / median[name] / 1e6:.2f} M rows/s" for name in (ours, theirs)]
        cells = [median_and_quartiles(found[name]) for name in (ours, theirs)]
        rows.append([what, *cells, *rates, [target]])
    report.table(["", "sparkhvd.data", "MDS", "", "", "targets"], rows)
    sizes = [median[f"{name}, bytes"] / 2**20 for name in ("sparkhvd", "MDS")]
    report.note(f"{given.rounds} rounds. Files: {sizes[0]:.0f} MiB, MDS {sizes[1]:.0f} MiB.")
    report.raw.update(found)
    report.finish("benchmarks/loaders.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
