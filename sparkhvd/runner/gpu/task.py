"""GPUs of a barrier task: as given by Spark, as seen by its trainer, and as agreed by the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkhvd.rendezvous import Endpoint
from sparkhvd.runner.gpu import agreement, decide
from sparkhvd.runner.gpu.probe import VISIBLE
from sparkhvd.runner.preflight import RankFacts
from sparkhvd.runner.trainer import Trainer, inherited
from sparkhvd.topology import topology

if TYPE_CHECKING:
    from pyspark import TaskContext


def variables(context: TaskContext, mode: str) -> dict[str, str]:
    """Variables for the GPUs of a trainer, before the GPUs of other ranks are known."""
    gpu = context.resources().get("gpu")
    return decide.variables(
        mode,
        gpu.addresses if gpu else (),
        inherited(VISIBLE),
        inherited("CUDA_DEVICE_ORDER"),
    )


def views(mode: str) -> list[dict[str, str | None]]:
    """List the environments for a trainer's GPU search. See `decide.views`."""
    return decide.views(mode, inherited(VISIBLE))


def rank_gpus(
    ranks: Sequence[RankFacts], endpoints: Sequence[Endpoint]
) -> list[agreement.RankGpus]:
    """GPUs as the ranks' processes see them, by rank."""
    hosts = [endpoint.host_key for endpoint in endpoints]
    return [
        agreement.RankGpus(
            facts.host,
            topology(rank, hosts).local_rank,
            facts.gpus,
            facts.gpu_error,
            facts.visible,
            facts.cpu_torch,
        )
        for rank, facts in enumerate(ranks)
    ]


def own_gpu(
    mode: str,
    rank: int,
    ranks: Sequence[agreement.RankGpus],
    endpoints: Sequence[Endpoint],
    trainer: Trainer,
    env: Mapping[str, str],
) -> agreement.OwnGpu:
    """GPU of one rank. See `agreement.own_gpu`.

    Args:
        mode: of `decide.GpuMode`.
        rank: this rank.
        ranks: `rank_gpus(...)`.
        endpoints: by rank.
        trainer: process of the rank.
        env: the user's variables for the ranks.
    """
    host = endpoints[rank].host_key
    neighbours = [
        gpus for gpus, place in zip(ranks, endpoints, strict=True) if place.host_key == host
    ]
    # The user's own variable wins. A driver that has not answered once is not queried again.
    asks = mode == decide.GpuMode.TASK and VISIBLE not in env and bool(ranks[rank].uuids)
    seen = trainer.gpus(view=1)[0] if asks else ()
    return agreement.own_gpu(mode, neighbours, ranks[rank].local_rank, seen, inherited(VISIBLE))
