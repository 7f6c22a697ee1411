"""Groups of some ranks, names, backends, errors: what torch asks of a backend beside collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import sparkhvd
import sparkhvd.distributed
import sparkhvd.torch as hvd
from tests.processes.distributed import collectives


def findings() -> dict[str, list[str]]:
    """Return by subject what is wrong."""
    return {
        "answers": [name for name, ok in answers().items() if not ok],
        "subgroups": subgroups(),
        "mismatch": mismatches(),
        "functional": functional_collectives(),
    }


def answers() -> dict[str, bool]:
    group: Any = dist.group.WORLD
    size = dist.get_world_size()
    hvd.init()  # the engine is there: does nothing
    return {
        "backend": dist.get_backend() == "sparkhvd",
        "name": group.name() == "sparkhvd",
        "group_name": group.group_name == "0",
        "_get_backend": group._get_backend(torch.device("cpu")) is group,
        "devices": group._device_types == [torch.device("cpu")],
        "hvd shares the engine": hvd.size() == size and hvd.rank() == dist.get_rank(),
        "is_available": dist.is_backend_available("sparkhvd"),
        "monitored_barrier": sparkhvd.distributed.monitored_barrier() is None,
    }


def subgroups() -> list[str]:
    """Every kind of group runs every collective: a process set, all ranks again, in another order, of members alone."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size < 3:
        return []
    chosen = [0, size - 1]
    made = {
        "new_group": dist.new_group(chosen),
        "all": dist.new_group(),
        "again": dist.new_group(chosen),
        "reversed": dist.new_group(chosen[::-1], sort_ranks=False),
        "split": sparkhvd.distributed.split_group([chosen]),
    }
    if rank in chosen:
        made["members alone"] = dist.new_group(chosen, use_local_synchronization=True)
    wrong = []
    for name, group in made.items():
        is_member = name == "all" or rank in chosen
        if not is_member:
            if group not in (dist.GroupMember.NON_GROUP_MEMBER, None):
                wrong.append(f"{name}: rank {rank} is in it")
            continue
        checks = collectives.CHECKS if name in ("new_group", "reversed") else collectives.CHECKS[4:]
        ranks = collectives.Ranks(group)
        wrong += [f"{name}: {text}" for check in checks for text, ok in check(ranks) if not ok]
        if name not in ("all", "new_group"):
            dist.destroy_process_group(group)
    return wrong


def mismatches() -> list[str]:
    """Ranks that disagree are told both sides, and the group goes on."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return []
    wrong = []

    def expect(label: str, parts: list[str], call: Any) -> None:
        try:
            call()
        except sparkhvd.MismatchError as error:
            if not all(part in str(error) for part in parts):
                wrong.append(f"{label}: {error}")
        else:
            wrong.append(f"{label}: no error")

    one = torch.ones(3 if rank else 4)
    expect("shape", ["(3,)", "(4,)"], lambda: dist.all_reduce(one))
    kind = torch.ones(3, dtype=torch.float64 if rank else torch.float32)
    expect("dtype", ["float64", "float32"], lambda: dist.all_reduce(kind))
    call: Any = dist.all_reduce if rank else (lambda tensor: dist.broadcast(tensor, 0))
    expect("collective", ["allreduce", "broadcast"], lambda: call(torch.ones(3)))
    work = dist.all_reduce(one, async_op=True)
    expect("async", ["(3,)", "(4,)"], lambda: work.wait(timedelta(seconds=60)))
    expect("future", ["(3,)"], work.get_future().wait)
    after = torch.ones(1)
    dist.all_reduce(after)
    return wrong if after.item() == size else [*wrong, "the group does not go on"]


def body(x: torch.Tensor) -> torch.Tensor:
    group: Any = dist.group.WORLD
    total = functional.all_reduce(x, "sum", group)
    rows = functional.all_gather_tensor(total * 2, 0, group)
    part = functional.reduce_scatter_tensor(rows, "avg", 0, group)
    moved = functional.all_to_all_single(rows, None, None, group)
    return functional.wait_tensor(part) + functional.wait_tensor(moved)[:2]


def functional_collectives() -> list[str]:
    wanted = torch.full((2,), 4.0 * dist.get_world_size())
    return [] if torch.equal(body(torch.ones(2)), wanted) else ["functional collectives"]


def compiled() -> dict[str, list[str]]:
    """Check a compiled function, which finds the group by its name."""
    wanted = torch.full((2,), 4.0 * dist.get_world_size())
    found = torch.compile(body, backend="aot_eager", fullgraph=True)(torch.ones(2))
    return {"compiled": [] if torch.equal(found, wanted) else [str(found)]}
