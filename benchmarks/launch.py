"""Time of a launch: `run(fn)` with one allreduce, beside the same with pyspark's TorchDistributor.

    .venv/bin/python benchmarks/launch.py [--rounds 5] [--write]

2 ranks, a warm `local[2]` session, the two sides by turns. Target: <= 5 s.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import Table, local_session

RANKS = 2


def one_allreduce() -> float:
    """Add up 1 + 2 over two ranks, through sparkhvd."""
    import torch

    import sparkhvd.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    hvd.shutdown()
    return float(total)


def one_allreduce_with_gloo() -> float:
    """Add up 1 + 2 through torch.distributed, as TorchDistributor sets it up."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def sparkhvd_once(spark: Any) -> float:
    from sparkhvd.runner import run

    began = time.monotonic()
    results = run(one_allreduce, num_proc=RANKS, spark=spark)
    seconds = time.monotonic() - began
    assert results == [3.0, 3.0], results
    return seconds


def torch_distributor_once() -> float:
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
    began = time.monotonic()
    result = distributor.run(one_allreduce_with_gloo)
    seconds = time.monotonic() - began
    assert result == 3.0, result
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    table = Table(f"launch: one allreduce on {RANKS} ranks, warm local[{RANKS}]", ["wall"])
    with local_session(RANKS) as spark:
        for _ in range(options.rounds):
            table.add("sparkhvd.runner.run", {"wall": sparkhvd_once(spark)})
            table.add("pyspark TorchDistributor", {"wall": torch_distributor_once()})
    table.finish("benchmarks/launch.py", write=options.write)


if __name__ == "__main__":
    main()
