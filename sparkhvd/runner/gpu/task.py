"""GPUs as a barrier task meets them: what Spark gave it, what its trainer's process sees, what the ranks agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkhvd.rendezvous import Endpoint
from sparkhvd.runner import launching
from sparkhvd.runner.gpu import agreement, decide
from sparkhvd.runner.preflight import RankFacts
from sparkhvd.runner.trainer import Trainer, inherited

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

__all__ = ["own_gpu", "rank_gpus", "variables", "views"]


def variables(barrier: BarrierTaskContext, mode: str) -> dict[str, str]:
    """The variables that decide which GPUs the trainer sees, before it knows of the other ranks'."""
    gpu = barrier.resources().get("gpu")
    return decide.variables(
        mode,
        gpu.addresses if gpu else (),
        inherited(decide.VISIBLE),
        inherited("CUDA_DEVICE_ORDER"),
    )


def views(mode: str) -> list[dict[str, str | None]]:
    """With which variables the trainer is to say which GPUs it sees."""
    return decide.views(mode, inherited(decide.VISIBLE))


def rank_gpus(
    ranks: Sequence[RankFacts], endpoints: Sequence[Endpoint]
) -> list[agreement.RankGpus]:
    """What the ranks' processes see, by rank."""
    return [
        agreement.RankGpus(
            facts.host, local_rank, facts.gpus, facts.gpu_error, facts.visible, facts.cpu_torch
        )
        for facts, local_rank in zip(ranks, launching.local_ranks(endpoints), strict=True)
    ]


def own_gpu(
    mode: str,
    rank: int,
    found: Sequence[agreement.RankGpus],
    endpoints: Sequence[Endpoint],
    trainer: Trainer,
    env: Mapping[str, str],
) -> agreement.OwnGpu:
    """Where the rank's process finds its GPU.

    Args:
        mode: of `gpus.Mode`.
        rank: this rank.
        found: `rank_gpus(...)`.
        endpoints: by rank.
        trainer: its process.
        env: the user's variables for the ranks.
    """
    host = endpoints[rank].host_key
    neighbours = [
        one for one, place in zip(found, endpoints, strict=True) if place.host_key == host
    ]
    # Where the user has said what the ranks see, that is what they see. Who did not answer once is not waited for again.
    asks = mode == decide.Mode.TASK and decide.VISIBLE not in env and bool(found[rank].uuids)
    seen = trainer.gpus(view=1)[0] if asks else ()
    return agreement.own_gpu(
        mode, neighbours, found[rank].local_rank, seen, inherited(decide.VISIBLE)
    )
