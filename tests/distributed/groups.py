"""Groups of some ranks, names, backends, errors: what torch requires of a backend besides collectives."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import distributed_c10d

import sparkhvd
import sparkhvd.distributed
import sparkhvd.torch as hvd
from tests.distributed import collectives


def findings() -> dict[str, list[str]]:
    """Return the errors by subject."""
    return {
        "answers": [name for name, ok in answers().items() if not ok],
        "subgroups": subgroups(),
        "monitored barrier": monitored_barriers(),
        "torch 2.14": calls_of_torch_2_14(),
        "mismatch": mismatches(),
        "functional": functional_collectives(),
        "Gloo inside": gloo_inside(),
        "messages of many groups": many_groups(),
        "short forms": short_forms(),
        "coalesced messages": coalesced_messages(),
        "profiler": profiled(),
        "autograd": untold(),
        "roots": wrong_roots(),
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
        "devices": torch.device("cpu") in group._device_types,
        "configuration": dist.get_backend_config() == "cpu:sparkhvd,cuda:sparkhvd",
        "hvd shares the engine": hvd.size() == size and hvd.rank() == dist.get_rank(),
        "is_available": dist.is_backend_available("sparkhvd"),
        "monitored_barrier": sparkhvd.distributed.monitored_barrier() is None,
        "monitored_barrier elsewhere": sparkhvd.distributed.monitored_barrier(
            dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[arg-type]
        )
        is None,
    }


def monitored_barriers() -> list[str]:
    """A missing rank is named, the other ranks learn it, and the group stays usable."""
    group: Any = dist.group.WORLD
    size, rank = dist.get_world_size(), dist.get_rank()
    last, wrong = size - 1, []
    # The last of the named ranks. On a busy machine others may be late too.
    wanted = f"{last} failed to pass" if rank == 0 else "successfully reached monitoredBarrier"
    for wait_all_ranks in (True, False) if size > 1 else ():
        if rank != last:
            try:
                sparkhvd.distributed.monitored_barrier(None, timedelta(seconds=0.2), wait_all_ranks)
            except dist.DistBackendError as error:
                text = wanted if wait_all_ranks else wanted.removeprefix(f"{last} ")
                wrong += [] if text in str(error) else [str(error)]
            else:
                wrong.append("no error")
        dist.barrier()
    for _ in range(3):
        group.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
    group.monitored_barrier()
    return wrong


def calls_of_torch_2_14() -> list[str]:
    """Calls that torch makes to a group since 2.14, through the calling functions, if this torch has them."""
    group: Any = dist.group.WORLD
    size, rank, cpu = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    # Rows that lie apart are written, too.
    whole = torch.zeros(2, 3 * size).t() if rank == size - 1 else torch.zeros(0)
    own = torch.full((3, 2), float(rank))
    group.gather_single(whole, own, root=size - 1).wait()
    wanted = torch.arange(float(size)).repeat_interleave(3)[:, None].expand(-1, 2)
    found = {
        "timeout of a wait": timeout_of_a_wait(),
        "gather_single": rank < size - 1 or torch.equal(whole, wanted),
        "tensors by keyword": torch.equal(by_keyword(group, rank), torch.full((2,), size - 1.0)),
        "options": group.options._timeout == timedelta(seconds=group.launcher.timeout_s),
        "get_error": str(group.get_error()).endswith("SUCCESS"),
    }
    split = group.split_group([0, size - 1], group_name="split", device_types=[cpu], new_word=1)
    if rank in (0, size - 1):
        found["split_group"] = split.size() == min(size, 2)
        split.shutdown()
    if hasattr(dist, "get_backend_impl"):
        dist.monitored_barrier()
        parts = torch.zeros(3 * size, 2)
        dist.gather_single(own, parts if rank == 0 else None)
        found["dist.gather_single"] = rank > 0 or torch.equal(parts, wanted)
        found["get_backend_impl"] = dist.get_backend_impl(None, cpu) is group
        found["get_backend_impl without a device"] = dist.get_backend_impl() is group
        found["reconfigure"] = not distributed_c10d._supports_reconfigure()
        found["window"] = not distributed_c10d._supports_window()
        dist.set_timeout(timedelta(seconds=group.launcher.timeout_s))
    if torch.__version__ >= "2.15":  # before it takes groups of accelerators alone
        made: Any = dist.split_group(None, [[each] for each in range(size)])
        found["dist.split_group"] = made.size() == 1
        dist.destroy_process_group(made)
    return [name for name, ok in found.items() if not ok]


def timeout_of_a_wait() -> bool:
    """Return True if the error has torch's word, and the message arrives later."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, text = torch.zeros(1), " timeout "
    work: Any = None
    if rank == 0:
        work = dist.irecv(tensor, size - 1, tag=7)
        try:
            work.wait(timedelta(seconds=0.05))
        except RuntimeError as error:
            text = str(error)
        else:
            text = "no error"
    dist.barrier()
    if rank == size - 1:
        sent: Any = dist.isend(torch.ones(1), 0, tag=7)
        sent.wait()
    if rank == 0:
        work.wait()
    return " timeout " in text and (rank > 0 or tensor.item() == 1)


def by_keyword(group: Any, rank: int) -> Tensor:
    tensor = torch.full((2,), float(rank))
    group.allreduce(tensors=[tensor], op=dist.ReduceOp.MAX).wait()
    return tensor


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
        "split": sparkhvd.distributed.split_group(split_ranks=[chosen]),
    }
    if rank in chosen:
        made["members alone"] = dist.new_group(chosen, use_local_synchronization=True)
        made["split of a group"] = sparkhvd.distributed.split_group(made["new_group"], [[0, 1]])
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


def gloo_inside() -> list[str]:
    """A Gloo group in a job of ours is torch's own: collectives, messages, DDP, compiled names, timeouts."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group: Any = dist.new_group(backend="gloo")
    cpu = torch.device("cpu")
    backend = group._get_backend(cpu)
    wrong = [] if isinstance(backend, dist.ProcessGroupGloo) else [f"backend {backend}"]
    if size > 1:  # the last rank has not used the group yet
        if rank == 0:
            dist.send(torch.ones(2), 1, group)
        elif rank == 1:
            dist.recv(torch.empty(2), 0, group)
    if dist.get_backend(group) != "gloo" or group.name() != "gloo":
        wrong.append("name")
    ranks = collectives.Ranks(group)
    wrong += [name for name, ok in collectives.objects(ranks) if not ok]
    rows = functional.all_gather_tensor(torch.full((1,), float(rank)), 0, group)
    if functional.wait_tensor(rows).tolist() != list(range(size)):
        wrong.append("functional")
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(1, 1, bias=False), process_group=group
    )
    model(torch.full((1, 1), float(rank))).sum().backward()
    gradient = model.module.weight.grad
    if gradient is None or abs(gradient.item() - (size - 1) / 2) > 1e-6:
        wrong.append(f"DDP {gradient}")
    group.set_timeout(timedelta(seconds=77))
    if backend.options._timeout != timedelta(seconds=77):
        wrong.append("set_timeout")
    dist.monitored_barrier(group)
    dist.destroy_process_group(group)
    os.environ["GLOO_SOCKET_IFNAME"] = "sparkhvd-none"
    elsewhere: Any = dist.new_group(backend="gloo")
    try:
        elsewhere._get_backend(cpu)
        wrong.append("GLOO_SOCKET_IFNAME")
    except RuntimeError as error:
        if "sparkhvd-none" not in str(error):
            wrong.append(f"GLOO_SOCKET_IFNAME: {error}")
    del os.environ["GLOO_SOCKET_IFNAME"]
    dist.destroy_process_group(elsewhere)
    return wrong


def short_forms() -> list[str]:
    """Calls of the group itself with torch's short forms: tensors without lists, no options, positional arguments."""
    group: Any = dist.group.WORLD
    size, rank = dist.get_world_size(), dist.get_rank()
    own, soon = torch.full((2,), float(rank)), timedelta(seconds=60)
    rows = [torch.full((2,), float(each)) for each in range(size)]
    total, last = torch.stack(rows).sum(0), rows[-1]
    found: dict[str, tuple[Tensor | list[Tensor], Tensor | list[Tensor]]] = {}

    def run(name: str, wanted: Tensor | list[Tensor], call: Any, output: Any) -> None:
        call(output).wait()
        found[name] = (output, wanted)

    run("allreduce", total, group.allreduce, own.clone())
    run("allreduce of", last, lambda t: group.allreduce(t, dist.ReduceOp.MAX, soon), own.clone())
    run("allreduce op=", last, lambda t: group.allreduce([t], op=dist.ReduceOp.MAX), own.clone())
    run("broadcast", last, lambda t: group.broadcast(t, size - 1), own.clone())
    run(
        "broadcast root=",
        last,
        lambda t: group.broadcast(t, root=size - 1, timeout=soon),
        own.clone(),
    )
    run("broadcast of root 0", rows[0], lambda t: group.broadcast([t]), own.clone())
    run("reduce", total if rank == 0 else own, lambda t: group.reduce(t, 0), own.clone())
    places = [torch.empty(2) for _ in range(size)]
    run("allgather", rows, lambda out: group.allgather(out, own), places)
    run(
        "gather",
        rows if rank == 0 else [],
        lambda out: group.gather(out, own, 0),
        [torch.empty(2) for _ in range(size)] if rank == 0 else [],
    )
    run(
        "scatter", own, lambda out: group.scatter(out, rows if rank == 0 else [], 0), torch.empty(2)
    )
    run(
        "reduce_scatter",
        own * size,
        lambda out: group.reduce_scatter(out, rows, dist.ReduceOp.SUM),
        torch.empty(2),
    )
    each = torch.arange(float(size))
    run(
        "all_to_all_single",
        torch.full((size,), float(rank)),
        lambda out: group.all_to_all_single(out, each, [], []),
        torch.empty(size),
    )
    run(
        "alltoall_base",
        torch.full((size,), float(rank)),
        lambda out: group.alltoall_base(out, each, [1] * size, [1] * size, timeout=soon),
        torch.empty(size),
    )
    run(
        "_allgather_base",
        torch.cat(rows),
        lambda out: group._allgather_base(out, own),
        torch.empty(2 * size),
    )
    group.barrier().wait()
    group.barrier(timeout=soon).wait()
    sent = group.send([own], dstRank=(rank + 1) % size, tag=3)
    run("recv", rows[rank - 1], lambda t: group.recv([t], (rank - 1) % size, tag=3), torch.empty(2))
    sent.wait()
    wrong = [name for name, (got, wanted) in found.items() if not equal(got, wanted)]
    for call in (lambda: group.broadcast(own, oops=1), lambda: group.allgather(places)):
        try:
            call()
        except TypeError as error:
            wrong += [] if str(error).startswith(("broadcast: ", "all_gather: ")) else [str(error)]
        else:
            wrong.append("no TypeError")
    return wrong


def equal(found: Tensor | list[Tensor], wanted: Tensor | list[Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(got, right) for got, right in pairs)


def coalesced_messages() -> list[str]:
    """Messages inside of torch's coalescing manager have arrived after its wait."""
    size, rank = dist.get_world_size(), dist.get_rank()
    got = torch.full((3,), -1.0)
    cpu = torch.device("cpu")
    with distributed_c10d._coalescing_manager(device=cpu, async_ops=True) as manager:
        dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
        dist.irecv(got, (rank - 1) % size)
    manager.wait()
    return [] if got.tolist() == [float((rank - 1) % size)] * 3 else [str(got)]


def profiled() -> list[str]:
    """torch's profiler shows collectives by torch's names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(2))
        work: Any = dist.broadcast(torch.ones(2), 0, async_op=True)
        work.wait()
        dist.all_gather_into_tensor(torch.empty(2 * dist.get_world_size()), torch.ones(2))
    wanted = {f"sparkhvd:{name}" for name in ("all_reduce", "broadcast", "all_gather_into_tensor")}
    missing = wanted - {event.key for event in profile.key_averages()}
    return sorted(missing)


def many_groups() -> list[str]:
    """Groups of the same ranks in one process set: no group gets another group's message."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size != 2:
        return []
    groups = [dist.new_group() for _ in range(9)]
    if rank == 0:
        works: list[Any] = [
            dist.isend(torch.tensor([float(number)]), 1, groups[number], tag=3)
            for number in reversed(range(len(groups)))
        ]
        for work in works:
            work.wait()
        return []
    got = [torch.empty(1) for _ in groups]
    for tensor, group in zip(got, groups, strict=True):
        dist.recv(tensor, 0, group, tag=3)
    return [f"group {n} got {t.item()}" for n, t in enumerate(got) if t.item() != n]


def mismatches() -> list[str]:
    """The errors of ranks that disagree show both sides, and the group continues."""
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
    turned = torch.ones(2, 3) if rank else torch.ones(3, 2)
    expect("turned", ["(2, 3)", "(3, 2)"], lambda: dist.all_reduce(turned))
    expect("turned", ["(2, 3)", "(3, 2)"], lambda: dist.broadcast(turned, 0))
    pairs = torch.ones(3, dtype=torch.complex64) if rank else torch.ones(6)
    expect("complex", ["(3, 2)", "(6,)"], lambda: dist.all_reduce(pairs))
    bits = dist.ReduceOp.BAND if rank else dist.ReduceOp.BXOR
    count = torch.ones(3, dtype=torch.int32)
    expect("bits", ["BitAnd", "BitXor"], lambda: dist.all_reduce(count, bits))
    kind = torch.ones(3, dtype=torch.float64 if rank else torch.float32)
    expect("dtype", ["float64", "float32"], lambda: dist.all_reduce(kind))
    call: Any = dist.all_reduce if rank else (lambda tensor: dist.broadcast(tensor, 0))
    expect("collective", ["allreduce", "broadcast"], lambda: call(torch.ones(3)))
    long = torch.sparse_coo_tensor([[0 if rank else 90000]], [1.0], (5,) if rank else (100000,))
    expect("sparse", ["(5,)", "(100000,)"], lambda: dist.all_reduce(long))
    double = torch.eye(2, dtype=torch.float64 if rank else torch.float32).to_sparse()
    expect("sparse dtype", ["float64", "float32"], lambda: dist.all_reduce(double))
    dense = torch.eye(2).to_sparse() if rank else torch.eye(2)
    expect("sparse and dense", ["allreduce", "allgather"], lambda: dist.all_reduce(dense))
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=5)
    elif rank == 1:
        expect(
            "message", ["3 elem", "4 elem", "tag 5,"], lambda: dist.recv(torch.ones(4), 0, tag=5)
        )
    short = torch.zeros(2 if rank == 0 else 3)
    if rank == 0:
        dist.scatter(short, [torch.ones(2)] * size)
    else:
        expect("scatter", ["[2]", "[3]"], lambda: dist.scatter(short, src=0))
    work = dist.all_reduce(one, async_op=True)
    expect("async", ["(3,)", "(4,)"], lambda: work.wait(timedelta(seconds=60)))
    expect("future", ["(3,)"], work.get_future().wait)
    after = torch.ones(1)
    dist.all_reduce(after)
    return wrong if after.item() == size else [*wrong, "the group does not continue"]


def wrong_roots() -> list[str]:
    """A rank outside the group is refused in the call."""
    wrong = []
    for root in (dist.get_world_size(), -1):
        for name in ("broadcast", "reduce"):
            try:
                getattr(dist, name)(torch.ones(1), root)
            except ValueError as error:
                wrong += [] if f"root rank {root}" in str(error) else [f"{name}: {error}"]
            else:
                wrong.append(f"{name} of root {root}: no error")
    return wrong


def untold() -> list[str]:
    """As with torch's own backends, a tensor that backward needs may be written."""
    x = torch.ones(2, requires_grad=True)
    y = torch.relu(x * 2)
    dist.broadcast(y.detach(), 0)
    dist.reduce(y.detach(), 0)
    dist.all_reduce(y.detach(), dist.ReduceOp.MAX)
    y.sum().backward()
    assert x.grad is not None
    return [] if x.grad.tolist() == [2.0, 2.0] else [str(x.grad)]


def later_generations() -> list[str]:
    """Unfinished operations of a destroyed default group do not reach the next group, and a late rank gets no old error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return []
    wrong, kept = [], []

    def meet(label: str) -> None:
        if rank == 0:
            kept.append(dist.all_reduce(torch.full((1,), 1000.0), async_op=True))
            kept.append(dist.isend(torch.full((1,), 111.0), 1))
            kept.append(dist.irecv(torch.empty(1), 1, tag=1))
        dist.destroy_process_group()
        dist.init_process_group("sparkhvd", timeout=timedelta(seconds=30))
        total = torch.full((1,), rank + 5.0)
        dist.all_reduce(total)
        if total.item() != sum(range(5, 5 + size)):
            wrong.append(f"{label}: {total.item()}")
        got = torch.zeros(1)
        if rank == 0:
            dist.send(torch.full((1,), 222.0), 1)
            dist.recv(got, 1, tag=1)
        elif rank == 1:
            dist.recv(got, 0)
            dist.send(got, 0, tag=1)
        if rank < 2 and got.item() != 222:
            wrong.append(f"{label}: message {got.item()}")

    meet("left behind")
    dist.barrier(dist.new_group([0, 1]))
    short = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        try:
            dist.barrier(short)
        except sparkhvd.CollectiveTimeoutError as error:
            if "raise the timeout of the group" not in str(error):
                wrong.append(str(error))
        else:
            wrong.append("no timeout")
    meet("timed out")
    dist.destroy_process_group()
    return wrong + other_order()


def other_order() -> list[str]:
    """torch's ranks may have another order than the launcher's ranks. They get their own engine."""
    size, turned = hvd.size(), hvd.size() - 1 - hvd.rank()
    file = f"{tempfile.gettempdir()}/sparkhvd-{os.getppid()}-{os.environ['MASTER_PORT']}"
    dist.init_process_group("sparkhvd", init_method=f"file://{file}", rank=turned, world_size=size)
    rows = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(rows, torch.tensor([float(hvd.rank())]))
    found = [int(row.item()) for row in rows]
    dist.destroy_process_group()
    if turned == 0:
        os.unlink(file)
    dist.init_process_group("sparkhvd")
    return [] if found == list(reversed(range(size))) else [f"in another order: {found}"]


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
    """Check a compiled function, which finds the group by its name, and a compiled model of DDP's, whose C++ calls the group."""
    wanted = torch.full((2,), 4.0 * dist.get_world_size())
    found = torch.compile(body, backend="aot_eager", fullgraph=True)(torch.ones(2))
    net = torch.nn.Linear(2, 1, bias=False)
    model = torch.compile(torch.nn.parallel.DistributedDataParallel(net), backend="aot_eager")
    for _ in range(3):  # DDP rebuilds its buckets in the second step
        net.zero_grad()
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    mean = torch.full((1, 2), (dist.get_world_size() - 1) / 2)
    assert net.weight.grad is not None
    return {
        "compiled": [] if torch.equal(found, wanted) else [str(found)],
        "compiled DDP": [] if torch.allclose(net.weight.grad, mean) else [str(net.weight.grad)],
    }
