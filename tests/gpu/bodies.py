"""Functions of ranks on one GPU, all on device 0. `ranks.py` calls them with the `Machine`."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparkhvd.distributed  # noqa: F401 - registers the backend
import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.cuda import divide_
from tests.gpu.machine import Cuda, Machine, StandIn, is_on_gpu, profiled
from tests.harness import device_bodies as each
from tests.harness import device_training as alike

# --- Collectives. ---

OF_A_TYPE = (
    each.allreduces,
    each.broadcasts,
    each.gathers,
    each.alltoalls,
    each.reducescatters,
)
OTHERS = (
    each.grouped,
    each.compressed,
    each.strided,
    each.asynchronous,
    each.gathers_go_on_alone,
    each.gradients,
    each.parameters,
    each.batch_norm,
)


def collectives(gpu: Machine) -> str:
    """Compare every collective on every type, with sizes of zero and odd ones, against the CPU's plane."""
    runs = 0
    # Other tests cover all types on the stand-in without processes. Here, the checks themselves are tested.
    dtypes = (torch.float16, torch.uint32, torch.bool) if gpu.is_stand_in else each.DTYPES
    for dtype in dtypes:
        for body in OF_A_TYPE:
            with named(f"{body.__name__}, {dtype}"):
                body(gpu, dtype)
            runs += 1
        if dtype != torch.bool:
            with named(f"factors, {dtype}"):
                each.factors(gpu, dtype)
            runs += 1
    for other in (
        *OTHERS,
        registered,
        adasum,
        quotients,
        *([some_ranks, join] if hvd.size() > 1 else []),
    ):
        with named(other.__name__):
            other(gpu)
        runs += 1
    return f"{runs} kinds, {len(dtypes)} types"


def registered(gpu: Machine) -> None:
    """Use memory that is registered with NCCL, and keep a part of it after its name is deleted."""
    x = hvd.registered_empty((3, 5), torch.float64, device="cuda")
    assert x.is_cuda
    assert x.tolist() == [[0.0] * 5] * 3
    values = each.mine((3, 5), torch.float64)
    x.copy_(gpu.tensor(values))
    part = x[1]
    assert hvd.allreduce_(x) is x
    del x
    each.equal(part, hvd.allreduce(values)[1])


def adasum(gpu: Machine) -> None:
    """Through the CPU's plane, and in place."""
    for dtype in each.FLOATS:
        values = each.mine((3, 5), dtype)
        there = gpu.tensor(values)
        expected = hvd.allreduce(values, op=hvd.Adasum)
        each.equal(hvd.allreduce(there, op=hvd.Adasum), expected, is_sum=False)
        hvd.allreduce_(there, op=hvd.Adasum)
        each.equal(there, expected, is_sum=False)


def quotients(gpu: Machine) -> None:
    """Average over numbers of ranks that one GPU cannot have: divided on the GPU as on the CPU."""
    for dtype in each.FLOATS:
        for divisor in (3, 7, 1.25, 100):
            there = gpu.tensor(values := each.random((1001,), dtype, 1))
            divide_([there], divisor)
            each.equal(there, (values.double() / divisor).to(dtype), is_sum=False)


def join(gpu: Machine) -> None:
    """Check that a rank without more data counts as zeros."""
    size = hvd.size()
    if hvd.rank() == size - 1:
        hvd.join()
        return
    for number in range(3):
        values = torch.ones(1000)
        found = hvd.allreduce(gpu.tensor(values), op=hvd.Sum, name=f"joined {number}")
        each.equal(found, values * (size - 1))
    hvd.join()


def some_ranks(gpu: Machine) -> None:
    """Check a process set beside all ranks, with its own communicator."""
    process_set = hvd.add_process_set([hvd.size() - 1])
    values = each.mine((9,), torch.float32)
    handle = hvd.allreduce_async(gpu.tensor(values), op=hvd.Sum)
    if process_set.included():
        alone = hvd.allreduce(gpu.tensor(values), process_set=process_set, op=hvd.Sum)
        each.equal(alone, values)
    each.equal(hvd.synchronize(handle), hvd.allreduce(values, op=hvd.Sum))
    hvd.remove_process_set(process_set)


@contextlib.contextmanager
def named(what: str) -> Any:
    """Check that errors name the operation."""
    try:
        yield
    except Exception as error:
        error.args = (f"{what}: {error}",)
        raise


def large(gpu: Machine) -> str:
    """Compare some megabytes, which NCCL divides into pieces."""
    count = (1 << 12 if gpu.is_stand_in else 1 << 22) + 3
    rows = count + 100 * hvd.rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        values = each.mine((count,), dtype)
        there = gpu.tensor(values)
        each.equal(hvd.allreduce(there, op=hvd.Sum), hvd.allreduce(values, op=hvd.Sum))
        each.equal(hvd.broadcast(there, 0), hvd.broadcast(values, 0), is_sum=False)
        values = each.mine((rows,), dtype)
        each.equal(hvd.allgather(gpu.tensor(values)), hvd.allgather(values), is_sum=False)
    return f"{count} elements"


def streams(gpu: Machine) -> str:
    """Run operations on several streams in turn, after long kernels: a missing dependency shows stale data."""
    side = gpu.new_stream()
    rounds = 40
    for number in range(rounds):
        stream = side if number % 2 else gpu.main_stream
        with gpu.using(stream):
            tensor = gpu.tensor(torch.zeros(1 << 12 if gpu.is_stand_in else 1 << 18))
            gpu.busy()
            tensor.fill_(float(hvd.rank() + number))
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"stream {number}")
        # Every second pair is waited for on the other stream than the one that submitted.
        with gpu.using(side if number % 4 < 2 else gpu.main_stream):
            hvd.synchronize(handle)
            found = float(tensor.sum())
        size = hvd.size()
        expected = (number * size + size * (size - 1) / 2) * tensor.numel()
        assert found == expected, f"operation {number} gave {found} and not {expected}"
    return f"{rounds} operations on two streams"


# --- Training. ---


class Cpu:
    """The CPU as a machine: the other plane, with the same ranks."""

    def tensor(self, values: Tensor) -> Tensor:
        return values

    def module(self, module: nn.Module) -> nn.Module:
        return module


def uses_extra(step: int, rank: int) -> bool:
    return (step + rank) % 3 == 0


def training(gpu: Machine) -> str:
    """Compare DistributedOptimizer's weights with those of one process on the CPU that has the whole batch."""
    size = hvd.size()

    def of_row(step: int, row: int) -> bool:
        return uses_extra(step, row // (alike.ROWS // size))

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-2)

    extra = alike.alone(extra_for=of_row)
    cases: dict[str, tuple[Callable[[], Tensor], Tensor, float]] = {
        "SGD": (lambda: alike.together(gpu), alike.alone(), 1e-10),
        "Adam": (lambda: alike.together(gpu, make=adam), alike.alone(make=adam), 1e-10),
        "gradients kept": (lambda: alike.together(gpu, set_to_none=False), alike.alone(), 1e-10),
        "accumulation": (lambda: alike.together(gpu, passes=2), alike.alone(passes=2), 1e-10),
        "clipping": (
            lambda: alike.together(gpu, change=alike.clip),
            alike.alone(change=alike.clip),
            1e-10,
        ),
        "unused parameters": (lambda: alike.together(gpu, uses_extra=uses_extra), extra, 1e-10),
        "predivided": (
            lambda: alike.together(gpu, gradient_predivide_factor=3.0),
            alike.alone(),
            1e-10,
        ),
        "fp16 on the wire": (
            lambda: alike.together(gpu, compression=hvd.Compression.fp16, uses_extra=uses_extra),
            extra,
            1e-2,
        ),
        "gradients as views": (
            lambda: alike.together(gpu, gradient_as_bucket_view=True),
            alike.alone(),
            1e-10,
        ),
        "sharded": (lambda: alike.together(gpu, sharded=True), alike.alone(), 1e-10),
        "sharded Adam, unused parameters": (
            lambda: alike.together(gpu, make=adam, sharded=True, uses_extra=uses_extra),
            alike.alone(make=adam, extra_for=of_row),
            1e-10,
        ),
        "PowerSGD": (
            lambda: alike.together(gpu, compression=hvd.Compression.powersgd(rank=1)),
            alike.together(Cpu(), compression=hvd.Compression.powersgd(rank=1)),
            1e-8,
        ),
        "streams in turns": (lambda: alike.two_streams(gpu), alike.alone(steps=4), 1e-10),
    }
    worst = 0.0
    for name, (train, expected, bound) in cases.items():
        with named(name):
            found = float((train() - expected).abs().max())
        assert found <= bound, f"{name}: weights differ by {found:.1e}, more than {bound}"
        if bound < 1e-9:
            worst = max(worst, found)
    return f"{len(cases)} ways, weights differ by at most {worst:.1e}"


def perceptron(width: int = 64, layers: int = 4) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return alike.fill(nn.Sequential(*parts)).float()


def stepper(
    gpu: Machine, width: int, layers: int, rows: int = 64, **options: Any
) -> tuple[Callable[[], None], nn.Module]:
    """Return a training step that reads no values, and its model."""
    model = gpu.module(perceptron(width, layers))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        **options,
    )
    x = gpu.tensor(torch.randn(rows, width))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model


def unsynchronized(gpu: Machine) -> str:
    """Check that the host never waits for the GPU in a step."""
    assert gpu.watch(gpu.synchronize).waits, "a wait of the host was not noticed"
    return f"no wait of the host in three steps, {_watched_steps(gpu)}"


def unsynchronized_otherwise(gpu: Machine) -> str:
    """Check the same with the options of an optimizer."""
    ways: dict[str, dict[str, Any]] = {
        "views": {"gradient_as_bucket_view": True},
        "fp16": {"compression": hvd.Compression.fp16},
        "sharded": {"sharded": True},
        "PowerSGD": {"compression": hvd.Compression.powersgd(rank=2)},
    }
    failed = []
    for name, options in ways.items():
        try:
            _watched_steps(gpu, **options)
        except Exception as error:
            failed.append(f"{name}: {error}")
    assert not failed, "; ".join(failed)
    return ", ".join(ways)


def _watched_steps(gpu: Machine, **options: Any) -> str:
    step, _ = stepper(gpu, 64, 4, **options)
    for _ in range(6):
        step()
    gpu.synchronize()

    def steps() -> None:
        for _ in range(3):
            step()

    seen = gpu.watch(steps)
    assert seen.evidence, "nothing was seen at all"
    assert not seen.waits, f"the host waited: {sorted(set(seen.waits))}"
    return seen.evidence


def overlap(gpu: Machine) -> str:
    """Check that gradients are reduced during backward."""
    return _overlap_on_stand_in(gpu) if isinstance(gpu, StandIn) else _overlap_in_profile(gpu)


def _overlap_on_stand_in(gpu: StandIn) -> str:
    """Hold backward before its last gradient until the first reduction has been launched."""
    step, model = stepper(gpu, 16, 4)
    step()
    before = gpu.count("ncclAllReduce")
    launched: list[int] = []

    def hold(gradient: Tensor) -> None:
        for _ in range(1000):
            launched.append(gpu.count("ncclAllReduce") - before)
            if launched[-1]:
                return
            time.sleep(0.005)

    first = next(model.parameters())
    handle = first.register_hook(hold)
    step()
    handle.remove()
    assert launched[-1], "nothing was reduced before backward was through"
    return "a reduction was launched before the last gradient was there"


def _overlap_in_profile(gpu: Machine) -> str:
    """Return the kernels of backward that ran between the begin of NCCL's first kernel and the end of its last."""
    step, _ = stepper(gpu, 2048, 8, rows=4096)  # milliseconds of backward
    for _ in range(5):
        step()
    events = [event for event in profiled(step) if is_on_gpu(event)]
    ours = [event.time_range for event in events if "nccl" in event.name.lower()]
    if not ours:
        raise AssertionError(f"no kernel of NCCL among {sorted({e.name for e in events})[:8]}")
    begin, end = min(one.start for one in ours), max(one.end for one in ours)
    products = [
        event.time_range
        for event in events
        if any(word in event.name.lower() for word in ("gemm", "cutlass", "xmma", "nvjet"))
    ]
    meanwhile = [one for one in products if begin < one.start < end]
    assert meanwhile, f"none of {len(products)} matrix products ran beside {len(ours)} of NCCL"
    return f"{len(meanwhile)} of {len(products)} matrix products ran beside NCCL's kernels"


def capture(gpu: Machine) -> str:
    """Check that a collective in a capture of a CUDA graph is refused, and that the engine continues."""
    tensor = gpu.tensor(torch.ones(10))
    hvd.allreduce_(tensor, op=hvd.Sum)
    text = ""
    with gpu.capturing():
        other = tensor * 2
        try:
            hvd.allreduce_(other, op=hvd.Sum)
        except InvalidArgumentError as error:
            text = str(error)
    assert "being captured into a CUDA graph" in text, text or "it was not refused"
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert float(tensor[0]) == hvd.size() ** 2
    return "refused, and the next one works"


def mixed_precision(gpu: Machine) -> str:
    """Autocast to bfloat16, and to float16 with a scaler: the loss decreases, and all ranks have the same weights."""
    falls = []
    for dtype in (torch.bfloat16, torch.float16):
        model = gpu.module(perceptron(32, 3))
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
        )
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        x = gpu.tensor(torch.randn(32, 32))
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                loss = (model(x).float() - 0.5).square().mean()
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0], f"{dtype}: the loss went {losses[0]} to {losses[-1]}"
        weights = hvd.allgather(alike.weights(model).reshape(1, -1))
        assert bool((weights == weights[0]).all()), f"{dtype}: weights differ between ranks"
        falls.append(f"{losses[0]:.3f} to {losses[-1]:.3f}")
    return f"loss from {', '.join(falls)}"


def compiled(gpu: Machine) -> str:
    """Train with torch.compile around the model."""
    if not isinstance(gpu, Cuda):
        return "skipped: the stand-in's tensors cannot be compiled"
    found = alike.together(gpu, prepare=torch.compile, dtype=torch.float32)  # type: ignore[arg-type]  # a module again
    worst = float((found - alike.alone(dtype=torch.float32)).abs().max())
    assert worst < 1e-4, f"weights differ by {worst:.1e}"
    return f"weights differ by at most {worst:.1e}"


def backend(gpu: Machine) -> str:
    """Use our torch.distributed backend, which passes GPU tensors to an inner group of torch's NCCL."""
    if not isinstance(gpu, Cuda):
        return "skipped: torch's NCCL needs a GPU"
    rank, size = hvd.rank(), hvd.size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = hvd.broadcast_object(None if store is None else store.port, 0)
    dist.init_process_group(
        "sparkhvd", store=store or dist.TCPStore("127.0.0.1", port), rank=rank, world_size=size
    )
    try:
        values = each.mine((1000,), torch.float32)
        here, there = values.clone(), gpu.tensor(values)
        for tensor in (here, there):
            dist.all_reduce(tensor)
        each.equal(there, here)
        parts = [torch.empty_like(there) for _ in range(size)]
        dist.all_gather(parts, gpu.tensor(values))
        expected = [torch.empty_like(values) for _ in range(size)]
        dist.all_gather(expected, values)
        for found, wanted in zip(parts, expected, strict=True):
            each.equal(found, wanted, is_sum=False)
        net = gpu.module(alike.fill(nn.Linear(5, 3)).float())
        parallel = nn.parallel.DistributedDataParallel(net, device_ids=[0])
        x = gpu.tensor(each.mine((4, 5), torch.float32))
        parallel(x).square().sum().backward()
        gradient = net.weight.grad
        assert gradient is not None
        alone = copy.deepcopy(net)
        alone.zero_grad()
        alone(x).square().sum().backward()
        assert alone.weight.grad is not None
        each.equal(gradient, hvd.allreduce(alone.weight.grad.cpu()))
    finally:
        dist.destroy_process_group()
    return "all_reduce, all_gather, DDP"


BODIES: dict[str, Callable[[Machine], str]] = {
    body.__name__: body
    for body in (
        collectives,
        large,
        streams,
        training,
        unsynchronized,
        unsynchronized_otherwise,
        overlap,
        capture,
        mixed_precision,
        compiled,
        backend,
    )
}
