"""How long `TorchEstimator.fit` and `transform` take on 200,000 rows of 32 floats.

    .venv/bin/python benchmarks/fit.py [--rounds 3] [--write]

One vector column and a label, an MLP 32-64-1, 3 epochs, batches of 256 per rank, 2 ranks on `local[2]`. A
round materializes its data anew. Target: total <= 12 s, transform <= 2 s. Horovod's own estimator (0.28.1,
on the newest stack that it runs on) took 35.3 s and 24.7 s for the same on a machine with two cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from common import Table, local_session

ROWS, WIDTH, EPOCHS, BATCH, RANKS = 200_000, 32, 3, 256, 2


def data_frame(spark: Any, folder: str) -> Any:
    """The input as a user has it: a Parquet file with an ML vector and a double."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.ml.functions import array_to_vector

    generator = np.random.default_rng(1)
    features = generator.standard_normal((ROWS, WIDTH), dtype=np.float32)
    labels = features @ generator.standard_normal(WIDTH, dtype=np.float32)
    table = pa.table(
        {
            "features": pa.FixedSizeListArray.from_arrays(
                features.ravel().astype("f8"), WIDTH
            ).cast(pa.list_(pa.float64())),
            "label": labels.astype("f8"),
        }
    )
    pq.write_table(table, f"{folder}/plain.parquet", row_group_size=ROWS // 4)
    plain = spark.read.parquet(f"{folder}/plain.parquet")
    vectors = plain.select(array_to_vector("features").alias("features"), "label")
    vectors.repartition(RANKS).write.parquet(f"{folder}/input")
    return spark.read.parquet(f"{folder}/input")


def one_round(spark: Any, df: Any) -> dict[str, float]:
    """Seconds of the phases of one fit and one transform over all rows."""
    from sparkhvd import Store, TorchEstimator

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        estimator = TorchEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss=nn.MSELoss(),
            feature_cols=["features"],
            label_cols=["label"],
            batch_size=BATCH,
            epochs=EPOCHS,
            num_proc=RANKS,
            store=Store.create(folder),
            random_seed=0,
            verbose=0,
        )
        began = time.monotonic()
        fitted = estimator.fit(df)
        total = time.monotonic() - began
        began = time.monotonic()
        # The no-op sink computes every output row and keeps none.
        fitted.transform(df).write.format("noop").mode("overwrite").save()
        transform = time.monotonic() - began
    seconds = fitted.timings
    return {
        "materialize": seconds["materialize"],
        "launch": seconds["launch"],
        "train": seconds["train"],
        "total": total,
        "transform": transform,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    table = Table(
        f"fit: {ROWS:,} rows x {WIDTH} floats, {EPOCHS} epochs, batch {BATCH}, {RANKS} ranks",
        ["materialize", "launch", "train", "total", "transform"],
    )
    with (
        tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder,
        local_session(RANKS) as spark,
    ):
        df = data_frame(spark, folder)
        for _ in range(options.rounds):
            table.add("sparkhvd", one_round(spark, df))
    table.finish("benchmarks/fit.py", write=options.write)


if __name__ == "__main__":
    main()
