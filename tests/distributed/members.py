"""Processes of a group that reconfigures. Each runs the calls that the test sends."""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparkhvd
from tests.harness.descriptors import descriptors
from tests.harness.rank_process import Talk

WIDTH = 5


class Member:
    """State of one process, and the calls."""

    def __init__(self) -> None:
        self.store: Any = None
        self.groups: dict[str, Any] = {"": None}  # by name; None = torch's default group
        self.aborts: list[str] = []
        self.model: Any = None
        self.optimizer: Any = None

    def init(self, store: str, rank: int, size: int, backend: str, timeout_s: float) -> None:
        if store.startswith("/"):
            self.store = dist.FileStore(store, -1)
        else:
            host, _, rest = store.partition(":")
            port, _, prefix = rest.partition("/")
            server = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
            self.store = dist.PrefixStore(prefix, server)
        options: Any = {"enable_reconfigure": True}
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=size,
            store=self.store,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )

    def init_without(self, store: str, rank: int, size: int) -> str:
        dist.init_process_group("sparkhvd", rank=rank, world_size=size, store=dist.FileStore(store))
        assert not _torch._supports_reconfigure()
        try:
            _torch._get_reconfigure_handle()
        except ValueError as error:
            return str(error)
        return ""

    def handle(self, group: str = "") -> str:
        assert _torch._supports_reconfigure(self.groups[group])
        return str(_torch._get_reconfigure_handle(self.groups[group]))

    def reconfigure(
        self,
        uuid: int,
        handles: list[str],
        timeout_s: float | None = None,
        is_set: bool = False,
        group: str = "",
    ) -> list[int]:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        given = set(handles) if is_set else handles
        work = _torch._reconfigure(uuid, given, self.groups[group], timeout)
        assert work.wait()
        return self.numbers(group)

    def numbers(self, group: str = "") -> list[int]:
        given = self.groups[group]
        return [dist.get_rank(given), dist.get_world_size(given)]

    def sequence_number(self) -> int:
        return int(_torch._get_default_group()._get_sequence_number_for_group())

    def sum(self, value: float, group: str = "", numel: int = 1000) -> float:
        tensor = torch.full((numel,), value, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.groups[group])
        assert tensor.unique().numel() == 1
        return float(tensor[0])

    def pending(self) -> None:
        """Leave an operation unfinished, which the other ranks never start."""
        self.work = dist.all_reduce(torch.ones(3), async_op=True)

    def end_of_pending(self) -> str:
        try:
            self.work.wait()
        except RuntimeError as error:
            return str(error)
        return ""

    def around(self) -> float:
        """Send this rank's number to the next rank, and return the received number. Then check other collectives."""
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.zeros(4)
        reading = dist.irecv(received, (rank - 1) % size)
        dist.send(torch.full((4,), rank + 1.0), (rank + 1) % size)
        assert reading is not None
        reading.wait()
        rows = [torch.empty(2) for _ in range(size)]
        dist.all_gather(rows, torch.full((2,), float(rank)))
        assert [row[0].item() for row in rows] == [*range(size)]
        root = torch.full((3,), float(rank))
        dist.broadcast(root, src=size - 1)
        assert root[0].item() == size - 1
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        return float(received[0])

    def subgroup(self, name: str, ranks: list[int]) -> None:
        self.groups[name] = dist.new_group(ranks)

    def abort(self) -> str:
        group: Any = _torch._get_default_group()
        group.register_abort_hook(1, lambda: self.aborts.append("called"))
        group.register_abort_hook(2, lambda: self.aborts.append("removed"))
        group.unregister_abort_hook(2)
        group.abort()
        assert self.aborts == ["called"]
        return self.error()

    def error(self) -> str:
        group: Any = _torch._get_default_group()
        return str(group.get_error()).rpartition(".")[2]

    def used(self) -> dict[str, int]:
        """Count the resources of this process."""
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "descriptors": len(descriptors()),
            "threads": threading.active_count(),
            "tasks": len(os.listdir("/proc/self/task")),
            "resident": resident,
        }

    def reconfigure_often(self, first: int, times: int, handles: list[str]) -> float:
        """Reconfigure with the same ranks, in another order each time."""
        for number in range(times):
            shift = number % len(handles)
            self.reconfigure(first + number, [*handles[shift:], *handles[:shift]])
            total = self.sum(dist.get_rank() + 1.0, numel=10)
        return total

    def wrap(self, hook: str = "") -> None:
        """Make a model of DDP, the same on every rank."""
        import sparkhvd.distributed

        torch.manual_seed(3)
        net = nn.Sequential(
            nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 1)
        )
        self.model = nn.parallel.DistributedDataParallel(
            net.double(), gradient_as_bucket_view=hook == "ddp_hook"
        )
        if hook == "ddp_hook":
            self.model.register_comm_hook(None, sparkhvd.distributed.ddp_hook)
        if hook == "powersgd_hook":
            state = sparkhvd.distributed.PowerSGDState(rank=12)
            self.model.register_comm_hook(state, sparkhvd.distributed.powersgd_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def shard(self) -> None:
        """Make an HSDP model on two replicas of two shards each. The mesh dimensions are the groups."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        fully_shard(net, mesh=mesh)
        self.model = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.groups |= {each: mesh.get_group(each) for each in ("replicas", "shards")}

    def step(self, seed: int, share: int, shares: int) -> list[float]:
        """Train on one share of the rows of a seed, and return all parameters."""
        x, y = rows(seed)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x.chunk(shares)[share]), y.chunk(shares)[share])
        loss.backward()
        self.optimizer.step()
        return self.parameters()

    def steps_until_a_loss(self, overlaps: bool) -> str:
        """Train until another rank is lost, in any part of a step."""
        group: Any = _torch._get_default_group()
        group.launcher.overlaps = overlaps
        self.optimizer.param_groups[0]["lr"] = 1e-4  # random rows would lead a larger one astray
        try:
            for seed in range(100_000):
                self.step(seed, 0, 1)
        except sparkhvd.PeerLostError as error:  # with its class, though C++ has raised it
            return str(error)
        return ""

    def wrap_with_hooks(self) -> None:
        """Make models of DDP whose hooks wait in callbacks."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        def waits(_: object, bucket: Any) -> Any:
            work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.wait()[0])

        del waits.__annotations__  # torch compares them with its own types, and here they are texts
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2)
        self.hooked = []
        for hook in ((None, waits), (state, powerSGD_hook.powerSGD_hook)):
            net = nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, 1)).double()
            self.hooked.append(nn.parallel.DistributedDataParallel(net))
            self.hooked[-1].register_comm_hook(*hook)
        for model in self.hooked * 3:
            model(rows(1)[0]).sum().backward()

    def errors_in_backward(self) -> list[str]:
        """Return the class of the error of each program on a group that has lost a rank."""
        works: list[Any] = []

        def keep(grad: Tensor) -> None:
            works.append(dist.all_reduce(grad.clone(), async_op=True))

        def coalesce(grad: Tensor) -> None:
            with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
                dist.all_reduce(grad.clone())
            works.append(manager)

        def another(grad: Tensor) -> None:
            works.append(dist.all_reduce(grad.clone(), async_op=True))
            works.append(works[-1].get_future())
            raise KeyError

        losses = [model(rows(1)[0]).sum() for model in self.hooked]
        found = [_error(loss.backward) for loss in losses]
        for hook in (keep, coalesce, another):
            x = torch.ones(2, requires_grad=True)
            x.register_hook(hook)
            works.clear()
            ended = _error(x.sum().backward)
            if hook is keep:
                future = works[0].get_future()
                found.append(_error(torch.futures.collect_all([future]).wait))
                continue
            if hook is another:
                assert ended == "KeyError"
                with contextlib.suppress(sparkhvd.PeerLostError):
                    works[0].wait()
            found.append(_error(works[-1].wait))
        return found

    def parameters(self) -> list[float]:
        found = []
        for parameter in self.model.parameters():
            whole = getattr(parameter, "full_tensor", lambda p=parameter: p)()
            found += whole.detach().flatten()[:7].tolist()
        return found

    def destroy(self) -> None:
        dist.destroy_process_group()


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - its class is compared
        return type(error).__name__
    return "none"


def rows(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


_torch: Any = dist.distributed_c10d


def member(rendezvous: Any, talk: Talk) -> None:
    """Answer each call with its result, or with the classes and the text of its error."""
    import sparkhvd.distributed  # noqa: F401 - registers the backend

    rendezvous.close()
    one = Member()
    while call := talk.hear():
        name, args, keywords = call
        try:
            talk.say({"result": getattr(one, name)(*args, **keywords)})
        except Exception as error:  # noqa: BLE001 - the test compares it
            kinds = [kind.__name__ for kind in type(error).__mro__]
            talk.say({"kinds": kinds, "text": str(error)})
