"""Unmodified users of torch.distributed, compared with the same training in one process or with Gloo."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DistributedSampler

import sparkhvd.distributed
from sparkhvd.torch.context import context

STEPS, BATCH, WIDTH = 5, 8, 6


class Net(nn.Module):
    """A used layer, an unused layer, and a layer that every other step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None, affine=False, track_running_stats=False)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Choosing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.unused(x) if x[0, 0] > 3 else x)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        made.append((x, x.sum(1, keepdim=True)))
    return made


def share(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train(
    model: nn.Module,
    part: Callable[[Tensor], Tensor],
    make: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.1),
) -> Any:
    optimizer = make(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(part(x)), part(y)).backward()
        optimizer.step()
    return optimizer


def close(model: Any, wanted: nn.Module, tolerance: float = 1e-12) -> bool:
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(found, wanted.parameters(), strict=True)
    )


def reference(kind: type[Net] = Net) -> nn.Module:
    model = kind().double()
    train(model, lambda x: x)
    return model


class Reentrant(Net):
    """Its backward pass contains another one, in which the last gradient and the end of DDP occur."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = recompute(self.first, x.requires_grad_(), use_reentrant=True)
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]


class Inside(torch.autograd.Function):
    """Calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], object]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.act()
        return gradient, None


def in_backward(act: Callable[[], object]) -> None:
    Inside.apply(torch.ones(1, requires_grad=True), act).backward()


def backward_passes() -> list[str]:
    """Work that a pass launches starts at the end of the pass, or when its result is requested, also after an error. The pass raises its error."""
    size, rank = dist.get_world_size(), dist.get_rank()
    overlaps(False)
    tensors = [torch.ones(3) for _ in range(5)]
    works: list[Any] = []

    def start() -> None:
        works.append(dist.all_reduce(tensors[len(works)], async_op=True))

    def ask() -> None:
        start()
        while not works[-1].is_completed():
            pass

    def fail() -> None:
        start()
        works[-1].get_future()
        raise KeyError

    in_backward(start)
    in_backward(ask)
    try:
        in_backward(fail)
    except KeyError:
        start()  # outside
        in_backward(start)
    # Only this call waits for the last pass's work, because the failed pass had no wait at its end.
    for work in works:
        work.wait()
    wrong = [f"work {n}" for n, tensor in enumerate(tensors) if tensor[0] != size]
    uneven = torch.ones(2 + rank)
    try:
        in_backward(lambda: dist.all_reduce(uneven, async_op=True).get_future())  # type: ignore[union-attr]
    except sparkhvd.MismatchError:
        return wrong
    return [*wrong, "no error of a pass's work"]


def overlaps(value: bool) -> None:
    group: Any = dist.group.WORLD
    group.launcher.overlaps = value


def ddp_options() -> list[str]:
    wrong = []
    for value in (True, False):
        overlaps(value)
        wrong += [f"{each}, overlaps: {value}" for each in ddp_options_now()]
    return wrong


def ddp_options_now() -> list[str]:
    wanted = reference()
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "small buckets": {"bucket_cap_mb": 0.0001},
        "views": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "reentrant": {"bucket_cap_mb": 0.0001},
    }
    kinds = {"unused": Choosing, "reentrant": Reentrant}
    wrong = []
    for name, chosen in options.items():
        kind = kinds.get(name, Net)
        model = DistributedDataParallel(kind().double(), **chosen)
        train(model, share)
        expected = reference(Choosing) if name == "unused" else wanted
        if not close(model.module, expected):
            wrong.append(f"DDP {name}")
    return wrong


def own(_: object, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# torch compares the annotations themselves, which are texts in this file.
own.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def ddp_hooks() -> list[str]:
    wanted, wrong = reference(), []
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    hooks: dict[str, tuple[Any, Any, float]] = {
        "allreduce_hook": (None, default_hooks.allreduce_hook, 1e-12),
        "fp16": (None, default_hooks.fp16_compress_hook, 1e-2),
        "own": (None, own, 1e-12),
        "ddp_hook": (None, sparkhvd.distributed.ddp_hook, 1e-12),
        "ddp_hook, views": (None, sparkhvd.distributed.ddp_hook, 1e-12),
        "powerSGD": (state, powerSGD_hook.powerSGD_hook, 1.0),
    }
    for name, (argument, hook, tolerance) in hooks.items():
        views = name == "ddp_hook, views"
        model = DistributedDataParallel(
            Net().double(), bucket_cap_mb=0.0001, gradient_as_bucket_view=views
        )
        model.register_comm_hook(argument, hook)
        before = registered()
        train(model, share)
        if not close(model.module, wanted, tolerance):
            wrong.append(f"hook {name}")
        if (registered() > before) != views:
            wrong.append(f"hook {name}: {registered() - before} operations in registered memory")
    return wrong


def sparse_gradients() -> list[str]:
    """Sparse gradients beside dense gradients give the same result with our hooks and without a hook."""
    hooks: dict[str, tuple[Any, Any]] = {
        "none": (None, None),
        "ddp_hook": (None, sparkhvd.distributed.ddp_hook),
        "powersgd_hook": (
            sparkhvd.distributed.PowerSGDState(),
            sparkhvd.distributed.powersgd_hook,
        ),
    }
    found: dict[str, list[Tensor]] = {}
    for name, (argument, hook) in hooks.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 2))
        model = DistributedDataParallel(net)
        if hook is not None:
            model.register_comm_hook(argument, hook)
        for _ in range(3):
            net.zero_grad()
            model(torch.tensor([[dist.get_rank(), 3], [1, 2]])).sum().backward()
        found[name] = [p.grad.to_dense() for p in net.parameters() if p.grad is not None]
    return [
        f"sparse, {name}"
        for name, grads in found.items()
        if len(grads) != 3 or not all(map(torch.allclose, grads, found["none"]))
    ]


def registered() -> int:
    """Count the allreduces of this rank in registered memory."""
    found = context().engine.counters()["collectives"]
    return sum(e["operations"] for e in found if e["algorithm"] == "registered_allreduce")


def several_models() -> list[str]:
    """Models whose buckets are reduced in one backward pass do not share memory. A model gets other buckets after its first pass."""
    group: Any = dist.new_group()
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "plain": DistributedDataParallel,
        "ddp_hook": lambda net: DistributedDataParallel(
            net, process_group=group, bucket_cap_mb=0.001, gradient_as_bucket_view=True
        ),
    }
    found = {}
    for name, make in makers.items():
        models = [make(Net().double()) for _ in range(2)]
        for model in models if name == "ddp_hook" else ():
            model.register_comm_hook(group, sparkhvd.distributed.ddp_hook)
        for x, y in batches()[:3]:
            losses = [nn.functional.mse_loss(each(share(x)), share(y)) for each in models]
            (losses[0] + 3 * losses[1]).backward()
        found[name] = [p.grad for each in models for p in each.parameters()]
    same = [torch.allclose(a, b) for a, b in zip(*found.values(), strict=True)]  # type: ignore[arg-type]
    return [] if all(same) else ["ddp_hook of two models"]


def powersgd() -> list[str]:
    """Low-rank gradients are sent completely, other gradients as far as with torch's hook, and the rest is not lost."""
    torch_state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=4
    )
    hooks: dict[str, Any] = {
        "plain": None,
        "torch": (torch_state, powerSGD_hook.powerSGD_hook),
        "ours": (
            sparkhvd.distributed.PowerSGDState(rank=4, warm_up_steps=2),
            sparkhvd.distributed.powersgd_hook,
        ),
    }
    wrong, losses = [], {}
    for rows in (2, 32):  # of rank 2 over all ranks, and of full rank
        weights = {}
        for name, hook in hooks.items():
            torch.manual_seed(1)
            model = DistributedDataParallel(nn.Linear(40, 40).double(), bucket_cap_mb=0.001)
            if hook is not None:
                state = hook[0]
                if name == "ours":
                    state = sparkhvd.distributed.PowerSGDState(rank=4, warm_up_steps=2)
                model.register_comm_hook(state, hook[1])
            losses[name] = fit(model, rows)
            weights[name] = model.module.weight.detach()
        near = {name: (weights[name] - weights["plain"]).norm().item() for name in weights}
        if rows == 2 and near["ours"] > 1e-9:
            wrong.append(f"powersgd_hook of low rank: {near}")
        if rows == 32 and not 1e-6 < near["ours"] < 2 * near["torch"]:
            wrong.append(f"powersgd_hook of full rank: {near}")
        if losses["ours"] > 1.1 * max(losses["plain"], losses["torch"]) + 1e-12:
            wrong.append(f"powersgd_hook's loss of {rows}: {losses}")
    return wrong


def fit(model: nn.Module, rows: int) -> float:
    x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(share(x)), share(x).flip(1))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), x.flip(1)).item()


def accumulation_and_join() -> list[str]:
    wrong = []
    model = DistributedDataParallel(Net().double())
    parts = share(batches()[0][0]).split(2)
    with model.no_sync():
        for part in parts[:-1]:
            model(part).sum().backward()
    model(parts[-1]).sum().backward()
    alone = Net().double()
    alone(batches()[0][0]).sum().backward()
    size = dist.get_world_size()
    if not torch.allclose(model.module.first.weight.grad * size, alone.first.weight.grad):
        wrong.append("no_sync")
    hooked = DistributedDataParallel(Net().double(), gradient_as_bucket_view=True)
    hooked.register_comm_hook(None, sparkhvd.distributed.ddp_hook)
    rank = dist.get_rank()
    unused = DistributedDataParallel(Net().double(), find_unused_parameters=True)
    for each in (model, hooked, unused):
        steps = 0
        with Join([each]):  # rank 0 has one batch, rank 1 as many as it takes to move buckets
            for x, _ in batches()[: 3 * rank + 1]:
                each(x).sum().backward()
                steps += 1
        if steps != 3 * rank + 1:
            wrong.append("join")
    return wrong


def zero_optimizer() -> list[str]:
    wanted = Net().double()
    train(wanted, lambda x: x, lambda p: torch.optim.Adam(p, lr=0.01))
    model = DistributedDataParallel(Net().double())
    optimizer = train(model, share, lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.01))
    optimizer.consolidate_state_dict(to=0)
    held = dist.get_rank() != 0 or len(optimizer.state_dict()["state"]) == 4
    return [] if close(model.module, wanted) and held else ["ZeroRedundancyOptimizer"]


def sharded() -> list[str]:
    """FSDP2, its checkpoint, DTensor."""
    wrong = []
    wanted = Net().double()
    train(wanted, lambda x: x, lambda p: torch.optim.Adam(p, lr=0.01))
    model = Net().double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, share, lambda p: torch.optim.Adam(p, lr=0.01))
    if not close(model, wanted):
        wrong.append("fully_shard")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    loaded = copy.deepcopy(wanted)
    fresh = {f: torch.zeros_like(t) for f, t in loaded.state_dict().items()}
    checkpoint.load({"model": fresh}, checkpoint_id=folder[0])
    loaded.load_state_dict(fresh)
    if not close(loaded, wanted):
        wrong.append("distributed checkpoint")
    whole = torch.arange(12.0).view(4, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    ones = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    product = (rows @ ones).redistribute(placements=[Shard(1)]).full_tensor()
    if not torch.equal(product, whole @ torch.ones(3, 2)):
        wrong.append("DTensor")
    return wrong


def hybrid() -> list[str]:
    """FSDP2 on a two-dimensional mesh with a group per dimension, and a checkpoint whose save makes a group."""
    wrong = []
    wanted = Net().double()
    train(wanted, lambda x: x, lambda p: torch.optim.Adam(p, lr=0.01))
    size = dist.get_world_size()
    for shape in ((size, 1), (1, size)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = Net().double()
        fully_shard(model, mesh=mesh)
        train(model, share, lambda p: torch.optim.Adam(p, lr=0.01))
        if not close(model, wanted):
            wrong.append(f"fully_shard on {shape}")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    with_gloo = dist.new_group(backend="gloo")
    state = {"model": model.state_dict()}
    checkpoint.async_save(state, checkpoint_id=folder[0], process_group=with_gloo).result()
    fresh = {name: torch.zeros_like(t) for name, t in wanted.state_dict().items()}
    checkpoint.load({"model": fresh}, checkpoint_id=folder[0])
    wanted.load_state_dict(fresh)
    if not close(model, wanted):
        wrong.append("async_save")
    own, _ = dist.new_subgroups(1)
    if dist.get_world_size(own) != 1:
        wrong.append("new_subgroups")
    return wrong


def samplers() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = list(DistributedSampler(range(10), shuffle=False))
    return [] if mine == [n % 10 for n in range(rank, size * len(mine), size)] else ["sampler"]


def metrics() -> list[str]:
    import torchmetrics

    accuracy = torchmetrics.classification.BinaryAccuracy()
    accuracy.update(torch.full((4,), float(dist.get_rank() == 0)), torch.ones(4))
    found = accuracy.compute().item()
    return [] if abs(found - 1 / dist.get_world_size()) < 1e-6 else ["torchmetrics"]


def findings(with_metrics: bool) -> dict[str, list[str]]:
    """Return the errors by subject. The import of torchmetrics takes as long as everything else."""
    checks = [
        backward_passes,
        ddp_options,
        ddp_hooks,
        sparse_gradients,
        several_models,
        powersgd,
        accumulation_and_join,
        zero_optimizer,
        sharded,
        hybrid,
        samplers,
        *([metrics] if with_metrics else []),
    ]
    return {check.__name__: check() for check in checks}
