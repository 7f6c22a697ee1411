"""Time of `TorchEstimator.fit` and `transform`, phase by phase, beside TorchDistributor with DDP.

    .venv/bin/python benchmarks/estimator.py [--rounds 3] [--write] [--json PATH] [--scale 1.0]

One vector column of 32 numbers and a label in Parquet, an MLP 32-64-1, SGD, 2 ranks on `local[2]`:

- 200,000 rows, 3 epochs, batches of 256 per rank: fit <= 9 s;
- 1,000,000 rows, 1 epoch, batches of 1024 per rank: fit <= 14 s, and transform of these rows <= 5 s.

In every fit the loop waits for batches in less than 2 % of the time of its epochs (`data wait`). Rows are read into
memory while a rank imports torch; what is left of that is in the first epoch's wait.

Each round of `fit` materializes its data again. The peer is a Spark user's program without an estimator: pyspark's
TorchDistributor (local_mode=False) starts two processes, each reads the same files with pyarrow, keeps its half of
the rows in memory and trains with DDP over gloo. It has no shuffle across ranks, no checkpoints, and no model that
transforms; its time is from the call of `run` to its return. Horovod's own estimator (0.28.1, on the newest stack that
it runs on) took 35.3 and 60.5 s for the two fits, and 116 s for the transform, on a machine with two cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from common import Report, Target, local_session, spread

WIDTH, HIDDEN, RANKS, LEARNING_RATE = 32, 64, 2, 0.01
PHASES = ("materialize", "launch", "train", "total", "transform")
PEER_PHASES = ("read", "train", "total")
# The largest share of an epoch's time that training may wait for its batches, in per cent.
WAIT_PERCENT = 2.0


@dataclass(frozen=True)
class Case:
    """Training to measure: its size, and its time limits in seconds."""

    name: str
    rows: int
    epochs: int
    batch: int
    fit_s: float
    transform_s: float | None

    def describe(self, rows: int) -> str:
        """Describe the case, with the actual number of rows."""
        plural = "s" * (self.epochs != 1)
        return f"{rows:,} rows x {WIDTH}, {self.epochs} epoch{plural}, batch {self.batch}"


CASES = (
    Case("small", 200_000, 3, 256, 9.0, None),
    Case("large", 1_000_000, 1, 1024, 14.0, 5.0),
)


def write_input(spark: Any, folder: str, rows: int) -> str:
    """Write the input as a user has it: Parquet files with an ML vector and a double."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.ml.functions import array_to_vector

    generator = np.random.default_rng(1)
    features = generator.standard_normal((rows, WIDTH), dtype=np.float32)
    labels = features @ generator.standard_normal(WIDTH, dtype=np.float32)
    lists = pa.FixedSizeListArray.from_arrays(features.ravel().astype("f8"), WIDTH)
    table = pa.table({"features": lists.cast(pa.list_(pa.float64())), "label": labels.astype("f8")})
    pq.write_table(table, f"{folder}/plain-{rows}.parquet", row_group_size=max(1, rows // 4))
    plain = spark.read.parquet(f"{folder}/plain-{rows}.parquet")
    vectors = plain.select(array_to_vector("features").alias("features"), "label")
    path = f"{folder}/input-{rows}"
    vectors.repartition(RANKS).write.parquet(path)
    return path


def network() -> nn.Module:
    """Build the same module with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


def one_fit(spark: Any, path: str, case: Case) -> dict[str, float]:
    """Measure the phases of a fit, a transform over all rows, and the loss of the last epoch."""
    from sparkhvd import Store, TorchEstimator

    df = spark.read.parquet(path)
    model = network()
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        estimator = TorchEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            loss=nn.MSELoss(),
            feature_cols=["features"],
            label_cols=["label"],
            batch_size=case.batch,
            epochs=case.epochs,
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
    phases = {name: fitted.timings[name] for name in ("materialize", "launch", "train")}
    history = fitted.history
    wait = 100 * sum(r["data_wait_s"] for r in history) / sum(r["seconds"] for r in history)
    return {
        **phases,
        "total": total,
        "transform": transform,
        "data wait, %": wait,
        "first epoch's wait": history[0]["data_wait_s"],
        "loss": history[-1]["loss"],
    }


def one_peer(spark: Any, path: str, case: Case) -> dict[str, float]:
    """Measure rank 0's phases and last loss of the same training by TorchDistributor and DDP."""
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
    began = time.monotonic()
    seconds = distributor.run(peer_rank, path, network(), case.epochs, case.batch, LEARNING_RATE)
    return {**seconds, "total": time.monotonic() - began}


def peer_rank(path: str, model: Any, epochs: int, batch: int, lr: float) -> dict[str, float]:
    """Train in a rank of the peer. Self-contained, because it is pickled by value."""
    import time

    import pyarrow.parquet as pq
    import torch
    import torch.distributed as dist
    from torch import nn

    # As many threads as TorchDistributor's own examples leave: one rank per core.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    began = time.monotonic()
    table = pq.read_table(path).combine_chunks()
    values = table.column("features").combine_chunks().field("values").flatten().to_numpy()
    x = torch.from_numpy(values.reshape(table.num_rows, -1)[rank::size]).float()
    y = torch.from_numpy(table.column("label").to_numpy()[rank::size]).float().reshape(-1, 1)
    read = time.monotonic() - began
    began = time.monotonic()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(x), generator=generator)
        total = torch.zeros(())
        # Equal steps on every rank, or DDP waits for ever.
        steps = -(-(table.num_rows // size) // batch)
        for step in range(steps):
            rows = order[step * batch : (step + 1) * batch]
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.detach()
    dist.barrier()
    train = time.monotonic() - began
    dist.destroy_process_group()
    return {"read": read, "train": train, "loss": float(total / steps)}


def median(rounds: Sequence[Mapping[str, float]], phase: str) -> float:
    """Compute the median of one phase over the rounds."""
    return statistics.median(one[phase] for one in rounds)


def add_tables(report: Report, results: Mapping[str, Any], rows: Mapping[str, int]) -> None:
    """Add the tables of both sides' phases, with targets only for cases of full size."""
    lines: list[list[Any]] = []
    peers: list[list[Any]] = []
    for case in CASES:
        ours, theirs = results[case.name]["sparkhvd"], results[case.name]["TorchDistributor"]
        cells = [spread([one[phase] for one in ours]) for phase in PHASES]
        targets = []
        if rows[case.name] == case.rows:
            targets = [Target("fit", median(ours, "total"), case.fit_s, at_least=False, unit="s")]
        if targets:
            wait = Target(
                "data wait", median(ours, "data wait, %"), WAIT_PERCENT, at_least=False, unit="%"
            )
            targets.append(wait)
        if targets and case.transform_s is not None:
            found = median(ours, "transform")
            targets.append(Target("transform", found, case.transform_s, at_least=False, unit="s"))
        what = case.describe(rows[case.name])
        waited = f"{median(ours, 'data wait, %'):.2f}"
        lines.append([what, *cells, waited, f"{median(ours, 'loss'):.3g}", targets])
        cells = [spread([one[phase] for one in theirs]) for phase in PEER_PHASES]
        ratio = median(ours, "total") / median(theirs, "total")
        peers.append([what, *cells, f"{median(theirs, 'loss'):.3g}", f"{ratio:.2f}"])
    seconds = [f"{phase}, s" for phase in PHASES]
    header = ["TorchEstimator", *seconds, "data wait, %", "last loss", "targets"]
    report.table(header, lines)
    seconds = [f"{phase}, s" for phase in PEER_PHASES]
    header = ["TorchDistributor + DDP", *seconds, "last loss", "our fit / its total"]
    report.table(header, peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results/")
    parser.add_argument("--json", metavar="PATH", help="write the raw numbers there")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows, for a trial")
    options = parser.parse_args()
    report = Report("TorchEstimator: fit and transform, beside TorchDistributor with DDP")
    rows = {case.name: max(RANKS, int(case.rows * options.scale)) for case in CASES}
    with (
        tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder,
        local_session(RANKS) as spark,
    ):
        for case in CASES:
            path = write_input(spark, folder, rows[case.name])
            # The rounds of both alternate, so that both see the same noise.
            for number in range(options.rounds):
                for name, run in (("sparkhvd", one_fit), ("TorchDistributor", one_peer)):
                    found = run(spark, path, case)
                    shown = ", ".join(f"{phase} {value:.2f}" for phase, value in found.items())
                    print(f"{case.name}, round {number + 1}, {name}: {shown}", flush=True)
                    report.raw.setdefault(case.name, {}).setdefault(name, []).append(found)
    add_tables(report, report.raw, rows)
    report.note(
        "Median (smallest to largest) of the rounds. `total` is the whole call. In each round sparkhvd writes the data again, "
        "shuffles rows across ranks, and writes a checkpoint per epoch. With DDP each rank keeps its half of the rows."
    )
    report.finish("benchmarks/estimator.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
