"""Plain torch.distributed programs under Spark through `HorovodRunner`: DDP and FSDP2 over Gloo, without sparkhvd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sparkhvd import HorovodRunner
from tests.harness.by_value import by_value

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)


def train(steps: int) -> dict[str, Any]:
    """Train a network by DDP, by FSDP2, and in one process, as a user's script does."""
    import os

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are there
    rank, size = dist.get_rank(), dist.get_world_size()
    assert [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE")] == [str(rank), str(size)]

    def network() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def weights(kind: str) -> list[float]:
        net = network()
        wrapped: Any = net
        if kind == "ddp":
            wrapped = DistributedDataParallel(net)
        elif kind == "fsdp2":
            wrapped = fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            x = torch.randn(4 * size, 6, generator=generator)
            own = x if kind == "one process" else x[4 * rank : 4 * rank + 4]
            optimizer.zero_grad()
            (wrapped(own) - own.sum(dim=1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
        last: Any = list(net.parameters())[-2].detach()
        return [float(x) for x in (last.full_tensor() if kind == "fsdp2" else last).flatten()]

    found = {kind: weights(kind) for kind in ("ddp", "fsdp2", "one process")}
    dist.destroy_process_group()
    return {"rank": rank, "size": size, **found}


def test_ddp_and_fsdp2_over_spark_equal_one_process(spark: SparkSession) -> None:
    found = HorovodRunner(np=0).run(train, steps=3)  # every slot
    assert (found["rank"], found["size"]) == (0, 2)
    for kind in ("ddp", "fsdp2"):
        assert found[kind] == pytest.approx(found["one process"], rel=1e-5)


def test_positive_np_starts_as_many_spark_tasks(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(text: str) -> str:
        print(f"a line of {text}", flush=True)
        return text

    assert HorovodRunner(np=1, driver_log_verbosity="all").run(main, text="x") == "x"
    assert "[0] a line of x" in capsys.readouterr().out
