"""Documents of reports for tests of their pages."""

from __future__ import annotations

import math
from typing import Any


def document(ranks: int = 2, epochs: int = 3, **entries: Any) -> dict[str, Any]:
    """Make a document in which rank 1 is late, and all ranks wait a tenth of the time for data."""
    history = [
        {
            "epoch": epoch,
            "loss": 1.0 / epoch,
            "accuracy": 0.5 + 0.1 * epoch,
            "val_loss": math.nan if epoch == 2 else 1.5 / epoch,
            "rows": 1000,
            "seconds": 2.0,
            "rows_per_s": 500.0,
            "data_wait_s": 0.2,
            "comm_wait_s": 0.1,
            "rank_wait_s": 0.8,
            "slowest_rank": 1,
            "lr": 0.1,
        }
        for epoch in range(1, epochs + 1)
    ]
    waits = [0.1 if rank == 1 else 0.9 for rank in range(ranks)]
    times = [
        {
            "epoch": epoch,
            "rows": [1000 / ranks] * ranks,
            "seconds": [2.0] * ranks,
            "data_wait_s": [0.2] * ranks,
            "gradient_wait_s": waits,
        }
        for epoch in range(1, epochs + 1)
    ]
    counts = [0.0] * 100
    counts[40], counts[41], counts[60] = 90, 8, 2
    return {
        "run_id": "mine",
        "store": "/data/store",
        "state": "finished",
        "began": "2026-11-27T09:00:00+00:00",
        "seconds": 10.0,
        "phases": [{"name": "materialize", "seconds": 4.0}, {"name": "train", "seconds": 6.0}],
        "history": history,
        "epochs": times,
        "load": [
            {
                "host": f"host-{rank}",
                "time": [100.0, 101.0, 102.0],
                "cpu_percent": [90.0, 150.0 + rank, 100.0],
                "rss_megabytes": [300.0, 310.0, 320.0],
                "gpu_percent": [None] * 3,
                "gpu_megabytes": [None] * 3,
            }
            for rank in range(ranks)
        ],
        "steps": {"first_s": 16e-6, "per_octave": 4, "counts": counts},
        "collectives": [
            {
                "collective": "allreduce",
                "algorithm": "shared",
                "operations": 100,
                "failures": 0,
                "bytes": 4_000_000,
                "negotiation_us": 1000,
                "queue_us": 0,
                "run_us": 50_000,
            }
        ],
        "buckets": [{"name": "grads.0", "kind": "Dense", "parameters": 4, "bytes": 40_000}],
        "ranks": [
            {"host": f"host-{r}", "device": "cpu", "peak_rss_bytes": 300 << 20}
            for r in range(ranks)
        ],
        "relaunches": [{"cause": "rank 1 was killed", "seconds": 3.0}],
        "params": {"batch_size": "32"},
        "settings": {"isa": "avx2"},
        "versions": {"torch": "2.13.0"},
        **entries,
    }
