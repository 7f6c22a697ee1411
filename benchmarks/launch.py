"""Time of a launch: `run(fn)` with one allreduce, beside the same with pyspark's TorchDistributor.

    .venv/bin/python benchmarks/launch.py [--rounds 5] [--write]

2 ranks, a warm `local[2]` session, alternating: forks of the zygote, fresh processes (`SPARKHVD_NURSERY=0`), and `import torch` in a new
interpreter. Then TorchDistributor, which starts fresh processes and needs new Python workers after each job. Target: a later launch takes
at most 0.6 s and 0.4 x `import torch`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
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


def sparkhvd_once(spark: Any, nursery: str) -> float:
    from sparkhvd.runner import run

    began = time.monotonic()
    results = run(one_allreduce, num_proc=RANKS, spark=spark, env={"SPARKHVD_NURSERY": nursery})
    seconds = time.monotonic() - began
    assert results == [3.0, 3.0], results
    return seconds


def import_once() -> float:
    """Import torch in a new interpreter."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


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
        table.add("sparkhvd.runner.run, first", {"wall": sparkhvd_once(spark, "1")})
        for _ in range(options.rounds):
            table.add("sparkhvd.runner.run, later", {"wall": sparkhvd_once(spark, "1")})
            table.add("sparkhvd.runner.run, fresh processes", {"wall": sparkhvd_once(spark, "0")})
            table.add("import torch", {"wall": import_once()})
        for _ in range(options.rounds):  # last: it costs Spark its Python workers
            table.add("pyspark TorchDistributor", {"wall": torch_distributor_once()})
    table.finish("benchmarks/launch.py", write=options.write)


if __name__ == "__main__":
    main()
