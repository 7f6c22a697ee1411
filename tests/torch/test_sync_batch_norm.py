from __future__ import annotations

import contextvars
import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError, NotInitializedError
from sparkhvd.torch import context
from tests.harness import ranks
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

CHANNELS = 3
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# Rows of each rank.
SIZES = [(4,), (3, 3), (5, 2), (1, 1), (0, 4), (4, 0, 3), (2, 1, 4, 1), (0, 0, 2, 0)]

# Shape after the channels, by dimensions of the input.
INNER: dict[int, tuple[int, ...]] = {2: (), 3: (5,), 4: (5, 3), 5: (2, 3, 4)}


def plain_layer(dimensions: int, **options: Any) -> nn.Module:
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    return fill(kinds[dimensions](CHANNELS, **options))


def sync_layer(**options: Any) -> hvd.SyncBatchNorm:
    return fill(hvd.SyncBatchNorm(CHANNELS, **options))


def fill(model: Any, seed: int = 1) -> Any:
    """Set parameters without torch's global generator, which ranks that are threads share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5 + 0.2)
    return model


def values(shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 7) -> torch.Tensor:
    """Channels differ in mean and variance, and so do rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    by_channel = torch.arange(1.0, shape[1] + 1, dtype=torch.float64)
    x = x * by_channel.view(-1, *[1] * (len(shape) - 2)) + 2
    x += torch.arange(float(shape[0]), dtype=torch.float64).view(-1, *[1] * (len(shape) - 1)) / 3
    return x.to(dtype)


def share(x: torch.Tensor, sizes: Sequence[int], rank: int | None = None) -> torch.Tensor:
    """Return a rank's rows."""
    rank = hvd.rank() if rank is None else rank
    return x.split(list(sizes))[rank].clone()


def run_layer(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, gradients and state after one batch."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    gradients = {f"grad_{name}": p.grad for name, p in layer.named_parameters()}
    state = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {"y": y.detach(), "grad": x.grad, **gradients, **state}  # type: ignore[dict-item]


def assert_equals_one_process(
    parts: Sequence[dict[str, torch.Tensor]], whole: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Compare with one process: the joined outputs of the ranks, the sum of their parameter gradients, and each rank's statistics."""
    for key, expected in whole.items():
        if key in ("y", "grad"):
            found = [torch.cat([part[key] for part in parts])]
        elif key.startswith("grad_"):
            found = [torch.stack([part[key] for part in parts]).sum(0)]
        else:
            found = [part[key] for part in parts]
        for each in found:
            assert each.dtype is expected.dtype, key
            scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
            assert torch.allclose(each, expected, rtol=0, atol=tolerance * scale), (
                key,
                each,
                expected,
            )


def compare(
    sizes: Sequence[int],
    *,
    dimensions: int = 4,
    dtype: torch.dtype = torch.float64,
    parameters: torch.dtype | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    tolerance: float | None = None,
    steps: int = 1,
    **options: Any,
) -> list[dict[str, torch.Tensor]]:
    shape = (sum(sizes), CHANNELS, *INNER[dimensions])
    options["dtype"] = parameters or dtype
    batches = [
        (values(shape, dtype, seed), values(shape, dtype, seed + 50)) for seed in range(steps)
    ]

    def body() -> Any:
        layer = sync_layer(**options)
        for x, dy in batches:
            layer.zero_grad()
            result = run_layer(layer, change(share(x, sizes)), share(dy, sizes))
        return result

    parts = on_ranks(len(sizes), body)
    layer = plain_layer(dimensions, **options)
    for x, dy in batches:
        layer.zero_grad()
        whole = run_layer(layer, x, dy)
    assert_equals_one_process(parts, whole, tolerance or CLOSE[dtype])
    for part in parts:
        for name in ("running_mean", "running_var"):
            assert name not in part or torch.equal(part[name], parts[0][name])
    return parts


@pytest.mark.parametrize("dimensions", INNER)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sync_batch_norm_equals_batch_norm_of_the_whole_batch(sizes: Any, dimensions: Any) -> None:
    compare(sizes, dimensions=dimensions)


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_equal_batches_have_the_statistics_of_one_batch(size: Any) -> None:
    x = values((7, 200), torch.float32)

    def body() -> Any:
        layer = hvd.SyncBatchNorm(200, momentum=1.0)
        layer(x)
        return layer.running_mean, layer.running_var

    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    count = torch.tensor(7.0 * size)
    for found in on_ranks(size, body):
        assert torch.equal(found[0], mean)
        assert torch.equal(found[1], variance * (count / (count - 1)))


@pytest.mark.parametrize("sizes", [(3, 3), (5, 0, 2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"momentum": None, "steps": 3},
        {"momentum": 0.7, "steps": 3},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"eps": 0.5},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"dtype": torch.bfloat16, "parameters": torch.float32},
        {"dtype": torch.float16, "parameters": torch.float32},
    ],
    ids=str,
)
def test_sync_batch_norm_options_behave_as_in_batch_norm(options: Any, sizes: Any) -> None:
    compare(sizes, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_layer_computes_statistics_in_float32(dtype: Any) -> None:
    def body() -> Any:
        layer = sync_layer(dtype=dtype)
        return run_layer(layer, share(x, (3, 4)).to(dtype), share(dy, (3, 4)).to(dtype))

    # 1000 values around 100 and more: sums that float16 and bfloat16 cannot hold.
    x, dy = (values((7, CHANNELS, 20, 10), dtype, seed).float() + 100 for seed in (1, 2))
    x, dy = x.to(dtype), dy.to(dtype)
    parts = on_ranks(2, body)
    exact = run_layer(plain_layer(4, dtype=torch.float64), x.double(), dy.double())
    for part in parts:
        assert part["y"].dtype is part["grad"].dtype is part["grad_weight"].dtype is dtype
        assert part["running_mean"].dtype is dtype
        assert torch.allclose(
            part["running_var"].double(), exact["running_var"], rtol=0.01, atol=0.01
        )
    joined = torch.cat([part["y"] for part in parts]).double()
    # The input itself is rounded, so only its statistics can differ: the rest is one rounding of the
    # output, and one of alpha * x + beta, which torch's kernel has too.
    assert torch.allclose(joined, exact["y"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dimensions", [4, 5])
def test_channels_last_input_keeps_its_format_and_results(dimensions: Any) -> None:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[dimensions]
    parts = compare(
        (3, 2), dimensions=dimensions, change=lambda x: x.contiguous(memory_format=last)
    )
    for part in parts:
        assert part["y"].is_contiguous(memory_format=last)
        assert part["grad"].is_contiguous(memory_format=last)


def test_sync_batch_norm_accepts_any_strides() -> None:
    compare((3, 2), change=lambda x: x.transpose(2, 3).contiguous().transpose(2, 3))
    compare((3, 2), dimensions=3, change=lambda x: x.repeat(1, 1, 2)[..., :5])

    def body() -> Any:
        x = share(values((4, CHANNELS, 4, 4)), (2, 2)).requires_grad_()
        y = sync_layer(dtype=torch.float64)(x.contiguous(memory_format=torch.channels_last))
        y.sum().backward()  # an expanded scalar
        return x.grad

    for gradient in on_ranks(2, body):
        assert gradient.abs().max() < 1e-12  # the sum of normalized values does not depend on x


def test_variance_is_accurate_for_values_far_from_zero() -> None:
    def body() -> Any:
        layer = sync_layer(affine=False, momentum=1.0)
        layer(share(x, (300, 200)))
        return layer.running_var

    x = (values((500, CHANNELS)) + 1e4).float()
    expected = x.double().var(0)
    for found in on_ranks(2, body):
        assert torch.allclose(found.double(), expected, rtol=1e-3)  # sums of squares: wrong by 10


def test_single_rank_equals_the_torch_layer_bit_by_bit() -> None:
    shape = (4, CHANNELS, 5, 3)
    x, dy = values(shape, torch.float32), values(shape, torch.float32, 8)
    whole = run_layer(plain_layer(4), x, dy)
    (part,) = on_ranks(1, lambda: run_layer(sync_layer(), x, dy))
    for key, expected in whole.items():
        assert torch.equal(part[key], expected)


def test_single_value_per_channel_raises_on_every_rank() -> None:
    def body() -> Any:
        layer = sync_layer()
        rows = 1 if hvd.rank() == 1 else 0
        with pytest.raises(InvalidArgumentError) as caught:
            layer(torch.ones(rows, CHANNELS))
        layer(torch.ones(1, CHANNELS))  # the next batch works
        return str(caught.value)

    texts = on_ranks(3, body)
    assert texts[1] == (
        "SyncBatchNorm: Expected more than 1 value per channel when training, got input size (1, 3) on this rank "
        "and 1 value per channel on all 3 ranks together. Give more rows, or call eval()."
    )
    assert "(0, 3) on this rank" in texts[0]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        on_alone(lambda: sync_layer()(torch.ones(1, CHANNELS)))


def on_alone(fn: Callable[[], Any]) -> Any:
    """Run on one rank, and raise its exception here."""
    (outcome,) = ranks.rank_outcomes(1, lambda _: fn(), using=context.use_engine)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def test_an_empty_batch_on_every_rank_changes_nothing() -> None:
    def body() -> Any:
        layer = sync_layer()
        return run_layer(layer, torch.ones(0, CHANNELS, 2, 2), torch.ones(0, CHANNELS, 2, 2))

    whole = run_layer(plain_layer(4), torch.ones(0, CHANNELS, 2, 2), torch.ones(0, CHANNELS, 2, 2))
    for part in on_ranks(2, body):
        for key, expected in whole.items():
            assert torch.equal(part[key], expected), key


def test_wrong_sync_batch_norm_inputs_raise_a_clear_error() -> None:
    def body() -> Any:
        layer = sync_layer()
        with pytest.raises(InvalidArgumentError, match="expected at least 2D input .got 1D input"):
            layer(torch.ones(3))
        with pytest.raises(InvalidArgumentError, match=r"\(2, 4\) has 4 channels. Give 3."):
            layer(torch.ones(2, 4))
        with pytest.raises(MismatchError, match="ranks disagree"):
            hvd.SyncBatchNorm(2 + hvd.rank())(torch.ones(2, 2 + hvd.rank()))
        x = torch.randn(2, CHANNELS, requires_grad=True)
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    on_ranks(2, body)
    with pytest.raises(InvalidArgumentError, match=r"process_set=\[0\]\): expected a ProcessSet"):
        hvd.SyncBatchNorm(3, process_set=[0])  # type: ignore[arg-type]


def test_training_without_init_raises_but_evaluation_works() -> None:
    layer = sync_layer()
    with pytest.raises(NotInitializedError, match="use hvd.init"):
        layer(torch.ones(2, CHANNELS))
    assert layer.eval()(torch.ones(2, CHANNELS)).shape == (2, CHANNELS)


@pytest.mark.parametrize("track", [True, False])
def test_evaluation_equals_torch_and_does_not_communicate(track: Any) -> None:
    x = values((4, CHANNELS, 5, 3))

    def body() -> Any:
        layer = sync_layer(track_running_stats=track, dtype=torch.float64)
        if hvd.rank() == 0:  # only this rank, which would wait for the other
            return layer.eval()(x)
        return None

    expected = plain_layer(4, track_running_stats=track, dtype=torch.float64).eval()(x)
    assert torch.equal(on_ranks(2, body)[0], expected)


def test_frozen_inputs_and_parameters_need_no_backward_exchange() -> None:
    shape = (4, CHANNELS)

    def body() -> Any:
        layer = sync_layer(dtype=torch.float64)
        x, dy = share(values(shape), (2, 2)), share(values(shape, seed=3), (2, 2))
        layer(x).backward(dy)
        assert operations("allreduce") == 1
        weights = layer.weight.grad, layer.bias.grad
        layer.requires_grad_(False).zero_grad()
        layer(x.requires_grad_()).backward(dy)
        assert operations("allreduce") == 3
        assert layer.weight.grad is None
        with torch.no_grad():
            layer(x)
        return *weights, x.grad

    parts = on_ranks(2, body)
    whole = run_layer(plain_layer(2, dtype=torch.float64), values(shape), values(shape, seed=3))
    assert torch.allclose(parts[0][0] + parts[1][0], whole["grad_weight"], atol=1e-12)
    assert torch.allclose(parts[0][1] + parts[1][1], whole["grad_bias"], atol=1e-12)
    assert torch.allclose(torch.cat([p[2] for p in parts]), whole["grad"], atol=1e-12)


def operations(kind: str) -> int:
    """Count the operations of a kind that this rank's engine has finished."""
    entries = hvd.metrics(show=False).counters["collectives"]
    return sum(entry["operations"] for entry in entries if entry["collective"] == kind)


def test_statistics_stay_in_float32_under_autocast() -> None:
    def body() -> Any:
        model = nn.Sequential(nn.Conv2d(2, CHANNELS, 1), sync_layer())
        fill(model)
        x = share(values((6, 2, 4, 4), torch.float32), (4, 2)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        assert y.dtype is torch.bfloat16
        assert model[1].running_mean.dtype is torch.float32
        return model[1].running_mean, model[1].running_var, x.grad

    model = fill(nn.Sequential(nn.Conv2d(2, CHANNELS, 1), plain_layer(4)))
    x = values((6, 2, 4, 4), torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    parts = on_ranks(2, body)
    for mean, variance, _ in parts:
        assert torch.allclose(mean, model[1].running_mean, atol=1e-6)
        assert torch.allclose(variance, model[1].running_var, atol=1e-6)
    assert x.grad is not None
    assert torch.allclose(torch.cat([p[2] for p in parts]), x.grad, atol=0.05)


# --- Several layers ---

BATCH = (4, CHANNELS, 2)


def step(layer: nn.Module, sizes: Sequence[int] = (2, 2)) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x, dy = values(BATCH), values(BATCH, seed=9)
    return run_layer(layer, share(x, sizes), share(dy, sizes))


def cnn(*, is_sync: bool) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.BatchNorm2d(6, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 5),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, 1),
    ).double()
    return fill(hvd.SyncBatchNorm.convert_sync_batchnorm(model) if is_sync else model)  # type: ignore[no-any-return]


def train(*, is_sync: bool, sizes: Sequence[int], steps: int = 20) -> list[torch.Tensor]:
    """Parameters and statistics after some steps."""
    model = cnn(is_sync=is_sync)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if is_sync:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    factor = (len(sizes) if is_sync else 1) / sum(sizes)  # gradients are averaged over ranks
    for step in range(steps):
        x = values((sum(sizes), 1, 8, 8), seed=step)
        y = x.sum((1, 2, 3)).sin().unsqueeze(1)
        if is_sync:
            x, y = share(x, sizes), share(y, sizes)
        optimizer.zero_grad()
        ((model(x) - y).square().sum() * factor).backward()
        optimizer.step()
    return [each.detach().clone() for each in model.state_dict().values()]


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2, 1), (3, 0, 5, 2)], ids=str)
def test_cnn_training_equals_one_process(sizes: Any) -> None:
    expected = train(is_sync=False, sizes=sizes)
    assert (expected[0] - fill(cnn(is_sync=False))[0].weight).abs().max() > 0.01  # it did train
    results = on_ranks(len(sizes), lambda: train(is_sync=True, sizes=sizes))
    for result in results:
        for found, wanted, first in zip(result, expected, results[0], strict=True):
            assert torch.allclose(found.double(), wanted.double(), rtol=0, atol=1e-10)
            assert torch.equal(found, first)


def on_threads(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Run both at once. The second starts when the first has started on every rank."""
    outcomes: list[Any] = [None, None]

    def run(index: int, fn: Callable[[], Any]) -> None:
        outcomes[index] = fn()

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, index, fn), daemon=True)
        for index, fn in enumerate((first, second))
    ]
    threads[0].start()
    hvd.barrier()
    threads[1].start()
    for thread in threads:
        thread.join()
    return outcomes[0], outcomes[1]


def compare_on_threads(make: Callable[[], tuple[nn.Module, nn.Module]]) -> None:
    """Check that two concurrent layers, used in the other order on every second rank, equal two layers of one process."""
    shape, sizes = (6, CHANNELS, 4), (3, 3)
    inputs = [(values(shape, seed=seed), values(shape, seed=seed + 50)) for seed in (1, 2)]

    def body() -> Any:
        layers = make()
        runs = [
            lambda i=i: run_layer(layers[i], *(share(each, sizes) for each in inputs[i]))
            for i in range(2)
        ]
        if hvd.rank() == 0:
            return on_threads(runs[0], runs[1])
        return on_threads(runs[1], runs[0])[::-1]

    parts = on_ranks(2, body)
    for i in range(2):
        whole = run_layer(plain_layer(3, dtype=torch.float64), *inputs[i])
        assert_equals_one_process([part[i] for part in parts], whole, 1e-12)


def test_layers_may_run_concurrently_in_different_orders() -> None:
    compare_on_threads(lambda: (sync_layer(dtype=torch.float64), sync_layer(dtype=torch.float64)))


def test_copied_layer_may_run_concurrently_with_its_original() -> None:
    def make() -> tuple[nn.Module, nn.Module]:
        layer = sync_layer(dtype=torch.float64)
        return layer, copy.deepcopy(layer)

    compare_on_threads(make)


def test_joined_ranks_contribute_no_rows() -> None:
    def body() -> Any:
        layer = sync_layer(dtype=torch.float64)
        results = [step(layer)]
        if hvd.rank() == 0:
            results.append(step(layer))
        hvd.join()
        results.append(step(layer))
        return results

    parts = on_ranks(2, body)
    layer = plain_layer(3, dtype=torch.float64)
    x, dy = values(BATCH), values(BATCH, seed=9)
    run_layer(layer, x, dy)
    layer.zero_grad()
    alone = run_layer(layer, x[:2], dy[:2])
    assert_equals_one_process([parts[0][1]], alone, 1e-12)
    assert torch.equal(parts[0][2]["y"], parts[0][0]["y"])


def test_layer_may_be_used_several_times_per_step() -> None:
    shape, sizes = (5, CHANNELS, 4), (2, 3)
    x, dy = values(shape), values(shape, seed=9)

    class Twice(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x).sin() + x)

    def body() -> Any:
        model = Twice(sync_layer(dtype=torch.float64))
        return run_layer(model, share(x, sizes), share(dy, sizes))

    whole = run_layer(Twice(plain_layer(3, dtype=torch.float64)), x, dy)
    assert_equals_one_process(on_ranks(2, body), whole, 1e-12)


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in the backward pass."""

    def __init__(self, layers: Sequence[nn.Module], **options: Any) -> None:
        super().__init__()
        self.block = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, **self.options)


@pytest.mark.parametrize("sizes", [(2, 3), (0, 4, 1)], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_give_the_same_gradients(reentrant: Any, sizes: Any) -> None:
    shape = (sum(sizes), CHANNELS, 4)
    x, dy = values(shape), values(shape, seed=9)
    double = {"dtype": torch.float64}

    def body() -> Any:
        layers = sync_layer(**double), sync_layer(**double)
        model = Checkpointed(layers, use_reentrant=reentrant)
        return run_layer(model, share(x, sizes), share(dy, sizes))

    layers = plain_layer(3, **double), plain_layer(3, **double)
    whole = run_layer(Checkpointed(layers, use_reentrant=reentrant), x, dy)
    assert_equals_one_process(on_ranks(len(sizes), body), whole, 1e-12)


# --- Copies, and devices of layers ---


def whole_steps(count: int) -> dict[str, torch.Tensor]:
    layer = plain_layer(3, dtype=torch.float64)
    for _ in range(count):
        layer.zero_grad()
        whole = run_layer(layer, values(BATCH), values(BATCH, seed=9))
    return whole


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copied_layers_are_independent(copied: Any) -> None:
    def body() -> Any:
        layer = sync_layer(dtype=torch.float64)
        step(layer)
        made = copied(layer)
        made.load_state_dict(copy.deepcopy(layer.state_dict()))
        assert made.process_set is hvd.global_process_set
        if copied is copy.copy:  # shares its parameters
            return step(made), step(made)
        return step(made), step(layer)

    parts = on_ranks(2, body)
    assert_equals_one_process([part[0] for part in parts], whole_steps(2), 1e-12)
    assert_equals_one_process(
        [part[1] for part in parts], whole_steps(3 if copied is copy.copy else 2), 1e-12
    )


def test_layer_copies_on_one_rank_do_not_affect_other_ranks() -> None:
    def body() -> Any:
        layer = sync_layer(dtype=torch.float64)
        if hvd.rank() == 0:
            kept = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
            for each in kept:
                each.eval()(torch.ones(2, CHANNELS, 2, dtype=torch.float64))
        first = step(layer)
        other, another = copy.deepcopy(layer), sync_layer(dtype=torch.float64)
        return first, step(another), step(other), step(layer)

    parts = on_ranks(2, body)
    for index, count in enumerate((1, 1, 2, 2)):
        assert_equals_one_process([part[index] for part in parts], whole_steps(count), 1e-12)


def test_layers_created_before_init_work_in_later_jobs() -> None:
    layers = [sync_layer(dtype=torch.float64) for _ in range(3)]
    copies = copy.deepcopy(layers)
    assert copies[0] is not layers[0]

    def body() -> Any:
        mine = layers[hvd.rank()]
        return step(mine, sizes), step(copies[hvd.rank()], sizes)

    # Another job with one more rank, as after shutdown() and init(); the new rank got its layers from another.
    for count, sizes in ((1, (2, 2)), (2, (1, 2, 1))):
        if len(sizes) == 3:
            layers[2], copies[2] = pickle.loads(pickle.dumps((layers[1], copies[1])))
        parts = on_ranks(len(sizes), body)
        for index in range(2):
            assert_equals_one_process([p[index] for p in parts], whole_steps(count), 1e-12)


def test_models_of_one_job_keep_separate_statistics() -> None:
    def body() -> Any:
        generator, critic = (nn.ModuleList([sync_layer(dtype=torch.float64)]) for _ in range(2))
        results = []
        for _ in range(2):
            results += [step(critic[0]), step(generator[0])]
        return results

    parts = on_ranks(2, body)
    for index, count in enumerate((1, 1, 2, 2)):
        assert_equals_one_process([part[index] for part in parts], whole_steps(count), 1e-12)


# --- Process sets ---


def test_process_set_normalizes_together_and_other_ranks_alone() -> None:
    def body() -> Any:
        early = hvd.ProcessSet([0, 2])
        before = fill(hvd.SyncBatchNorm(CHANNELS, process_set=early, dtype=torch.float64))
        even = hvd.add_process_set(early)
        after = sync_layer(process_set=even, dtype=torch.float64)
        copies = copy.deepcopy(after), pickle.loads(pickle.dumps(after))
        assert copies[0].process_set.ranks == copies[1].process_set.ranks == [0, 2]
        return [step(each, (1, 1, 2)) for each in (before, after, *copies)]

    parts = on_ranks(3, body)
    x, dy = values(BATCH), values(BATCH, seed=9)
    picked = torch.tensor([0, 2, 3])
    together = run_layer(plain_layer(3, dtype=torch.float64), x[picked], dy[picked])
    alone = run_layer(plain_layer(3, dtype=torch.float64), x[1:2], dy[1:2])
    for index in range(4):
        assert_equals_one_process([parts[0][index], parts[2][index]], together, 1e-12)
        assert_equals_one_process([parts[1][index]], alone, 1e-12)


def test_an_unregistered_process_set_raises_a_clear_error() -> None:
    def body() -> Any:
        layer = sync_layer(process_set=hvd.ProcessSet([0, 1]))
        with pytest.raises(InvalidArgumentError, match="the process set is not registered"):
            layer(torch.ones(2, CHANNELS))

    on_ranks(3, body)


# --- Conversion and state ---


def test_conversion_keeps_parameters_buffers_and_module_positions() -> None:
    shared = nn.BatchNorm1d(4, eps=0.1, momentum=None)
    frozen = nn.BatchNorm2d(2, affine=False).eval()
    shared.qconfig = "kept"
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(shared, nn.InstanceNorm1d(4), nn.LayerNorm(4)),
            "b": nn.ModuleList([shared, frozen, nn.BatchNorm3d(3, track_running_stats=False)]),
            "c": nn.SyncBatchNorm(2),
        }
    )
    keys = list(model.state_dict())
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert list(model.state_dict()) == keys
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert model["a"][0] is model["b"][0]
    new = [model["a"][0], model["b"][1], model["b"][2], model["c"]]
    assert all(type(each) is hvd.SyncBatchNorm for each in new)
    assert type(model["a"][1]) is nn.InstanceNorm1d
    assert (new[0].eps, new[0].momentum, new[0].qconfig) == (0.1, None, "kept")
    assert (new[0].training, new[1].training) == (True, False)
    assert not new[1].affine
    assert new[1].weight is None
    assert not new[2].track_running_stats
    assert new[2].running_mean is None
    assert all(not p.is_meta for p in model.state_dict().values())


def test_converted_layer_uses_the_given_process_set() -> None:
    class Mine(hvd.SyncBatchNorm):
        pass

    ranks_of = hvd.ProcessSet([0, 1])
    made: Any = Mine.convert_sync_batchnorm(nn.BatchNorm2d(3), ranks_of)
    assert type(made) is Mine
    assert made.process_set is ranks_of
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(made).process_set is hvd.global_process_set
    with pytest.raises(InvalidArgumentError, match="LazyBatchNorm2d does not know its channels"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))


def test_conversion_keeps_a_layer_without_bias() -> None:
    layer = nn.BatchNorm1d(3)
    layer.register_parameter("bias", None)
    fill(layer.double())

    def body() -> Any:
        return step(hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer)))

    whole = run_layer(copy.deepcopy(layer), values(BATCH), values(BATCH, seed=9))
    assert_equals_one_process(on_ranks(2, body), whole, 1e-12)


def test_state_dict_is_interchangeable_with_batch_norm() -> None:
    plain, sync = nn.BatchNorm2d(CHANNELS), hvd.SyncBatchNorm(CHANNELS)
    fill(plain)(values((4, CHANNELS, 2, 2), torch.float32))
    sync.load_state_dict(plain.state_dict())
    back = nn.BatchNorm2d(CHANNELS)
    back.load_state_dict(sync.state_dict())
    x = values((4, CHANNELS, 2, 2), torch.float32, seed=3)
    assert torch.equal(back.eval()(x), plain.eval()(x))
    assert torch.equal(sync.eval()(x), plain.eval()(x))
    assert sync.num_batches_tracked == 1
    assert repr(sync) == repr(plain).replace("BatchNorm2d", "SyncBatchNorm")


def test_layer_parameters_have_the_requested_device_and_dtype() -> None:
    layer = hvd.SyncBatchNorm(3, device="meta", dtype=torch.float64)
    assert layer.weight.is_meta
    assert layer.running_var.dtype is torch.float64
