"""This rank's device, and checks of what `Trainer(devices=, num_nodes=)` says against the ranks that there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.rank_context import context
from sparkhvd.topology import Topology

__all__ = ["check_size", "own_device"]


def check_size(
    num_devices: int, num_hosts: int, is_gpu: bool, place: Topology, asker: str = "Trainer"
) -> None:
    """Refuse numbers that are not those of the job.

    Lightning does not tell a strategy whether the user gave a number. One device is what it makes of "auto" on a CPU, all that
    the process sees on a GPU: these agree with every job.

    Args:
        num_devices: `Trainer(devices=)`, or Lightning's choice.
        num_hosts: `Trainer(num_nodes=)`.
        is_gpu: whether the devices are GPUs.
        place: this rank's, in the job.
        asker: class of Lightning's that has the numbers.

    Raises:
        InvalidArgumentError: the user asks for more or fewer ranks than were started.
    """
    is_any = num_devices == 1 or (is_gpu and num_devices == torch.cuda.device_count())
    hosts = len(set(place.hosts))
    if num_devices * num_hosts == place.size or (is_any and num_hosts in (1, hosts)):
        return
    asked = f"{asker}(devices={num_devices}, num_nodes={num_hosts}, strategy='sparkhvd')"
    if place.size == 1:
        raise InvalidArgumentError(
            f"{asked}: this process was started alone, and the strategy starts no others. Start {num_devices * num_hosts} ranks: "
            f"`sparkhvdrun -np {num_devices * num_hosts} python script.py`, `sparkhvd.run_local(fn, num_proc={num_devices * num_hosts})`, "
            "or `sparkhvd.run(fn)` on Spark; or leave devices and num_nodes out."
        )
    raise InvalidArgumentError(
        f"{asked} makes {num_devices * num_hosts} ranks, and {place.size} were started, on {hosts} host(s). Leave devices and num_nodes "
        "out, or give numbers whose product is the number of ranks."
    )


def own_device(devices: Sequence[torch.device], place: Topology) -> torch.device:
    """Return this rank's device.

    Args:
        devices: of the trainer.
        place: this rank's, in the job.

    Raises:
        InvalidArgumentError: there are GPUs, and none for this rank.
    """
    if devices[0].type != "cuda":
        return devices[0]
    launched = context()
    if launched is not None and launched.gpu is not None:
        return torch.device("cuda", launched.gpu)
    if len(devices) > place.local_rank:
        return devices[place.local_rank]
    # One that was asked for, or is seen: the rank's own, or the first where all see all.
    visible = torch.cuda.device_count()
    number = 0 if visible == 1 else place.local_rank
    if number >= visible:
        raise InvalidArgumentError(
            f"SparkhvdStrategy: rank {place.rank} is number {number} of its host and sees {visible} GPUs. Start as many ranks on a host "
            "as it has GPUs."
        )
    return torch.device("cuda", number)
