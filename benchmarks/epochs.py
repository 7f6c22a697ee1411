"""What an epoch costs late in a fit: many short epochs, beside a plain loop over the same batches.

    .venv/bin/python benchmarks/epochs.py [--epochs 1500] [--write]

7 steps of 32 rows on each of 2 ranks, a warm `local[2]`, no loggers, checkpoints as by default. Tenths of the fit, by rank 0's clock at the end of each
epoch: wall time and CPU of rank 0 per epoch, and what it has written, also by a fit with a checkpoint of each epoch. Beside: a plain loop of one process, and the same loop with `DistributedOptimizer` on
2 ranks, which is what 7 distributed steps take. Targets: at most 3 ms of CPU per epoch above the plain loop, in the last tenth as in the second; 20 MB
per 5,000 epochs, which is 4 KB per epoch, on average and in the tenth that writes most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from common import Report, Target, local_session

RANKS, STEPS, BATCH, COLUMNS = 2, 7, 32, 8
LIMIT_MS, LIMIT_BYTES = 3.0, 4_000  # CPU per epoch above a plain loop, written per epoch


def network() -> Any:
    """Build the model of both loops."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, 16), nn.ReLU(), nn.Linear(16, 1))


def loop_ms(epochs: int, *, is_distributed: bool) -> float:
    """Measure the CPU milliseconds per epoch of a loop without `fit`."""
    import torch
    from torch import nn

    import sparkhvd.torch as hvd

    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if is_distributed:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    rows = torch.randn(STEPS, BATCH, COLUMNS)
    began = time.process_time()
    for _ in range(epochs):
        for batch in rows:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
            optimizer.step()
    return (time.process_time() - began) / epochs * 1e3


def fit(spark: Any, epochs: int, **options: Any) -> tuple[list[tuple[float, float, int]], float]:
    """Train and return wall clock, CPU and bytes written of rank 0 at the end of each epoch, and the driver's CPU seconds."""
    import numpy as np
    import pandas as pd
    import torch
    from torch import nn

    from sparkhvd import Callback, TorchEstimator

    class Clock(Callback):
        """Logs rank 0's clocks."""

        ranks = 0

        def on_epoch_end(self, ctx: Any, record: Any) -> None:
            """Add the clocks to the record."""
            io = Path("/proc/self/io").read_text()
            wrote = next(x.split()[1] for x in io.splitlines() if x.startswith("wchar"))
            record |= {"at": time.monotonic(), "cpu": time.process_time(), "wrote": float(wrote)}

    values = (
        np.random.default_rng(0).normal(size=(RANKS * STEPS * BATCH, COLUMNS)).astype("float32")
    )
    names = [f"x{i}" for i in range(COLUMNS)]
    table = pd.DataFrame({**dict(zip(names, values.T, strict=True)), "y": values.sum(1)})
    model = network()
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        feature_cols=names,
        label_cols=["y"],
        batch_size=BATCH,
        epochs=epochs,
        num_proc=RANKS,
        callbacks=[Clock()],
        verbose=0,
        **options,
    )
    df = spark.createDataFrame(table)
    began = time.process_time()
    history = estimator.fit(df).history
    driver_s = time.process_time() - began
    return [(r["at"], r["cpu"], r["wrote"]) for r in history], driver_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1500)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    given = parser.parse_args()
    report = Report(f"epochs: {given.epochs:,} epochs of {STEPS} steps on {RANKS} ranks")
    with local_session(RANKS) as spark:
        from sparkhvd import run

        fit(spark, 3)
        found, driver_s = fit(spark, given.epochs)
        saved, _ = fit(spark, given.epochs, keep_checkpoints=2)
        distributed = statistics.median(
            run(loop_ms, (200,), {"is_distributed": True}, num_proc=RANKS, spark=spark)[0]
            for _ in range(3)
        )
    plain = statistics.median(loop_ms(200, is_distributed=False) for _ in range(3))
    tenth = given.epochs // 10
    rows = []
    sizes = []
    saved_sizes = []
    for number in range(10):
        (at, cpu, wrote), (at_end, cpu_end, wrote_end) = (
            found[max(0, number * tenth - 1)],
            found[(number + 1) * tenth - 1],
        )
        over = (cpu_end - cpu) / tenth * 1e3 - plain
        sizes.append((wrote_end - wrote) / tenth)
        first, last = saved[max(0, number * tenth - 1)], saved[(number + 1) * tenth - 1]
        saved_sizes.append((last[2] - first[2]) / tenth)
        saved_ms = (last[1] - first[1]) / tenth * 1e3
        targets = []
        if number in (1, 9):
            targets = [Target("above the plain loop", over, LIMIT_MS, at_least=False, unit="ms")]
        rows.append(
            [
                f"{number + 1}",
                f"{(at_end - at) / tenth * 1e3:.1f} ms",
                f"{over + plain:.1f} ms",
                f"{sizes[-1]:,.0f} bytes",
                f"{saved_sizes[-1]:,.0f} bytes, {saved_ms:.1f} ms of CPU",
                targets,
            ]
        )
    report.table(
        [
            "tenth",
            "wall per epoch",
            "CPU of rank 0 per epoch",
            "written per epoch",
            "with a checkpoint of each epoch",
            "target",
        ],
        rows,
    )
    total = found[-1][2] - found[0][2]
    written = [
        Target("after the first epoch", total / 1e6, LIMIT_BYTES * given.epochs / 1e6, False, "MB"),
        Target("largest tenth", max(sizes) / 1e3, LIMIT_BYTES / 1e3, False, "KB per epoch"),
    ]
    report.table(["written by rank 0"], [[written]])
    report.note(
        f"CPU per epoch of loops without fit: {plain:.1f} ms in one process, {distributed:.1f} ms on each of {RANKS} ranks. The driver took "
        f"{driver_s:.1f} s of CPU in all."
    )
    report.finish("benchmarks/epochs.py", write=given.write, json_path=None)


if __name__ == "__main__":
    main()
