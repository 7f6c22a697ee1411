"""Sparse gradients stay sparse. Gradients may have different strides on each rank, or elements that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import MismatchError
from sparkhvd.settings import Settings
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

ROWS = 50
SMALL = Settings(bucket_bytes=256)


class Tagger(nn.Module):
    """Two sparse tables (the second is used in odd steps only) and dense layers."""

    def __init__(self, *, sparse: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=sparse, dtype=dtype)
        self.tags = nn.Embedding(ROWS, 4, sparse=sparse, dtype=dtype)
        self.out = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, words: Tensor, step: int) -> Tensor:
        x = self.words(words)
        if step % 2:
            x = x + self.tags(words)
        return self.out(x).square().sum() / 24


def words(step: int, size: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS // 2, (size,), generator=generator)  # many twice


def mine(x: Tensor) -> Tensor:
    """Return this rank's part. Parts have different lengths, and the last rank of three has no rows."""
    bounds = {1: [24], 2: [7, 17], 3: [15, 9, 0]}[hvd.size()]
    return x.split(bounds)[hvd.rank()]


# For optimizers without dense gradients, the second optimizer takes the dense layers.
OPTIMIZERS: dict[str, Callable[[list[Any]], list[torch.optim.Optimizer]]] = {
    "sgd": lambda p: [torch.optim.SGD(p, lr=0.1)],
    "momentum": lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    "adagrad": lambda p: [torch.optim.Adagrad(p, lr=0.1)],
    "sparse_adam": lambda p: [
        torch.optim.SparseAdam(p[:2], lr=0.1),
        torch.optim.SGD(p[2:], lr=0.1),
    ],
}


def train(
    make: Callable[[list[Any]], list[torch.optim.Optimizer]],
    *,
    distributed: bool,
    dtype: torch.dtype = torch.float64,
    passes: int = 1,
    **options: Any,
) -> Tensor:
    model = Tagger(dtype=dtype)
    optimizers = make(list(model.parameters()))
    if distributed:
        optimizers = [
            hvd.DistributedOptimizer(each, op=hvd.Sum, backward_passes_per_step=passes, **options)
            for each in optimizers
        ]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(passes):
            x = words(10 * step + part)
            model(mine(x) if distributed else x, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert model.words.weight.grad.is_sparse
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_training_equals_one_process(name: Any, passes: Any) -> None:
    make = OPTIMIZERS[name]
    expected = train(make, distributed=False, passes=passes)
    for size in (2, 3):
        results = on_ranks(
            size, lambda: train(make, distributed=True, passes=passes), settings=SMALL
        )
        for result in results:
            assert torch.equal(result, results[0])
            assert torch.allclose(result, expected, rtol=0, atol=1e-10)


def test_sparse_training_across_hosts_equals_one_process() -> None:
    expected = train(OPTIMIZERS["sgd"], distributed=False)
    results = on_ranks(
        3, lambda: train(OPTIMIZERS["sgd"], distributed=True), settings=SMALL, hosts=[0, 1, 1]
    )
    for result in results:
        assert torch.allclose(result, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_sparse_gradient_values_are_compressed(compression: Any) -> None:
    make = OPTIMIZERS["sgd"]
    expected = train(make, distributed=False, dtype=torch.float32)
    one, other = on_ranks(
        2, lambda: train(make, distributed=True, dtype=torch.float32, compression=compression)
    )
    assert torch.equal(one, other)
    assert torch.allclose(one, expected, rtol=0, atol=0.1)
    assert not torch.allclose(one, expected, rtol=0, atol=1e-5)


def one_step(
    grads: list[Tensor | None], *, steps: int = 1, set_to_none: bool = True, **options: Any
) -> Any:
    """Return `.grad` after a step in which rank r has grads[r], as a manual backward leaves it."""
    p = nn.Parameter(torch.zeros(next(g.shape for g in grads if g is not None)))
    used = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p, used], lr=1.0),
        named_parameters=[("table", p), ("used", used)],
        **options,
    )
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        p.grad = grads[hvd.rank()]
        used.sum().backward()
        optimizer.synchronize()
    return p.grad


def coo(indices: Any, values: Any, shape: tuple[int, ...]) -> Tensor:
    indices = torch.tensor(indices, dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.tensor(values), shape, check_invariants=True)


def test_sparse_result_has_entries_of_all_ranks_in_rank_order() -> None:
    grads = [coo([[3, 1, 3]], [1.0, 2.0, 4.0], (6,)), coo([[5, 3]], [8.0, 16.0], (6,))]
    for grad in on_ranks(2, lambda: one_step(list(grads))):
        assert not grad.is_coalesced()
        assert grad._indices().tolist() == [[3, 1, 3, 5, 3]]
        assert grad._values().tolist() == [0.5, 1.0, 2.0, 4.0, 8.0]
        assert grad.coalesce().values().tolist() == [1.0, 10.5, 4.0]


@pytest.mark.parametrize("sparse_dim", [1, 2, 3])
def test_sparse_gradients_may_have_several_sparse_and_dense_dimensions(sparse_dim: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    dense = [torch.randn(3, 4, 5, generator=generator) for _ in range(3)]
    dense = [(x.abs() > 1) * x for x in dense]
    grads: list[Tensor | None] = [x.to_sparse(sparse_dim) for x in dense]
    for grad in on_ranks(3, lambda: one_step(list(grads))):
        assert grad.sparse_dim() == sparse_dim
        assert torch.allclose(grad.to_dense(), sum(dense) / 3)


def test_sparse_rows_are_added_in_rank_order() -> None:
    # With more rows than any small-array special case of a sort, and values whose sum depends on the order.
    def rows(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        indices = torch.randperm(5000, generator=generator)[:4000].unsqueeze(0)
        values = torch.randn(4000, 3, generator=generator)
        return torch.sparse_coo_tensor(indices, values, (5000, 3), check_invariants=True)

    expected = torch.zeros(5000, 3)
    for rank in range(3):
        expected += rows(rank).to_dense()
    for grad in on_ranks(3, lambda: one_step([rows(r) for r in range(3)], op=hvd.Sum)):
        assert torch.equal(grad.to_dense(), expected)


def test_ranks_with_empty_or_missing_gradients_contribute_zeros() -> None:
    empty = coo([[]], [], (4,))
    full = coo([[2]], [3.0], (4,))
    for grads in ([full, None, empty], [empty, full, None], [None, empty, full]):
        for grad in on_ranks(3, lambda g=grads: one_step(list(g), steps=2)):
            assert grad.to_dense().tolist() == [0.0, 0.0, 1.0, 0.0]
    for grad in on_ranks(2, lambda: one_step([empty, None])):
        assert grad.is_sparse
        assert grad._nnz() == 0


def test_embedding_table_that_no_rank_uses_keeps_no_gradient() -> None:
    def body() -> Any:
        model = Tagger()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum
        )
        seen = []
        for step in (0, 0, 1, 0, 1):  # `tags` is used in odd steps only
            optimizer.zero_grad()
            model(mine(words(step)), step).backward()
            optimizer.step()
            grad = model.tags.weight.grad
            seen.append(None if grad is None else grad.is_sparse)
        return seen

    assert on_ranks(2, body, settings=SMALL) == [[None, None, True, None, True]] * 2


def test_dense_parameter_first_used_later_is_reduced_from_then_on() -> None:
    def body() -> Any:
        used, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([used, late], lr=1.0), synchronize_in_backward=False
        )
        for step in range(5):
            optimizer.zero_grad()
            on_this_rank = step >= 2 and hvd.rank() == step % 2
            (used.sum() + (late.sum() * 4 if on_this_rank else 0)).backward()
            optimizer.step()
        in_flight = []
        optimizer.zero_grad()
        (used.sum() + late.sum()).backward()
        in_flight = [bucket.work is not None for bucket in optimizer._reducers[0].buckets]
        optimizer.step()
        return used.tolist(), late.tolist(), in_flight

    assert on_ranks(2, body) == [([-6.0] * 2, [-7.0] * 3, [True, True])] * 2


def test_sparse_gradient_is_submitted_during_backward() -> None:
    def body() -> Any:
        model = Tagger()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), synchronize_in_backward=False
        )
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(mine(words(1)), 1)
            # Made after the tables' output, so backward reaches it before the tables.
            hook = model.out[0].weight.register_post_accumulate_grad_hook(lambda _: None)
            loss.backward()
            hook.remove()
            seen.append([bucket.work is not None for bucket in optimizer._reducers[0].buckets])
            optimizer.step()
        # The first time, the ranks agree on the gradients in step().
        return all(all(each) and len(each) >= 3 for each in seen[1:])

    assert on_ranks(2, body, settings=SMALL) == [True, True]


def test_zero_grad_without_set_to_none_equals_one_process() -> None:
    def run(distributed: bool) -> Tensor:
        model = Tagger()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            model(mine(words(step)) if distributed else words(step), step).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    expected = run(False)
    for result in on_ranks(2, lambda: run(True), settings=SMALL):
        assert torch.allclose(result, expected, rtol=0, atol=1e-10)


def test_process_set_reduces_sparse_gradients_among_its_ranks() -> None:
    grads = [None, coo([[1]], [2.0], (3,)), coo([[1, 2]], [4.0, 6.0], (3,))]

    def body() -> Any:
        pair = hvd.add_process_set([1, 2])
        grad = one_step(list(grads), process_set=pair)
        return None if grad is None else grad.to_dense().tolist()

    assert on_ranks(3, body) == [None, [0.0, 3.0, 3.0], [0.0, 3.0, 3.0]]


def test_predivide_factor_does_not_change_a_sparse_average() -> None:
    grads = [coo([[1]], [2.0], (3,)), coo([[1]], [4.0], (3,))]
    for grad in on_ranks(2, lambda: one_step(list(grads), gradient_predivide_factor=8.0)):
        assert grad.to_dense().tolist() == [0.0, 3.0, 0.0]


SPARSE, DENSE = coo([[1]], [2.0], (3,)), torch.ones(3)


@pytest.mark.parametrize(
    ("grads", "found"),
    [
        ([SPARSE, DENSE, None], "rank 0 sparse in 1 dimension, rank 1 dense, rank 2 none"),
        ([DENSE, None, SPARSE], "rank 0 dense, rank 1 none, rank 2 sparse in 1 dimension"),
        (
            [torch.eye(3).to_sparse(1), torch.eye(3).to_sparse(2), None],
            "rank 0 sparse in 1 dimension, rank 1 sparse in 2 dimensions, rank 2 none",
        ),
    ],
)
def test_sparse_and_dense_gradients_on_different_ranks_raise(grads: Any, found: Any) -> None:
    def body() -> Any:
        with pytest.raises(MismatchError) as caught:
            one_step(list(grads))
        return str(caught.value)

    for message in on_ranks(3, body):
        assert message == (
            "DistributedOptimizer.0: ranks disagree on the layout of the gradient of 'table': "
            f"{found}. Build the layer with the same sparse= on every rank, or give sparse_as_dense=True."
        )


def test_a_later_dense_gradient_raises_on_every_rank_and_the_engine_continues() -> None:
    def body() -> Any:
        p, used = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p, used], lr=1.0), named_parameters=[("table", p), ("used", used)]
        )
        messages = []
        for step in range(3):
            optimizer.zero_grad()
            p.grad = DENSE.clone() if step == 1 and hvd.rank() == 1 else SPARSE.clone()
            if step == 1:
                with pytest.raises(MismatchError) as caught:
                    used.sum().backward()
                messages.append(str(caught.value))
            else:
                used.sum().backward()
                optimizer.step()
        return messages, p.tolist()

    for messages, values in on_ranks(2, body):
        assert "the gradient of 'table': rank 0 sparse in 1 dimension, rank 1 dense." in messages[0]
        assert values == [0.0, -4.0, 0.0]


def test_later_sparse_gradient_of_a_dense_parameter_is_reduced_dense() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        for grad in (DENSE.clone(), SPARSE.clone() if hvd.rank() else DENSE.clone()):
            p.grad = grad
            optimizer.step()
        return p.tolist(), p.grad.tolist()

    assert on_ranks(2, body) == [([-1.5, -2.5, -1.5], [0.5, 1.5, 0.5])] * 2


def test_sparse_gradients_refuse_max_and_powersgd() -> None:
    def body() -> Any:
        messages = []
        for options in ({"op": hvd.Max}, {"compression": hvd.Compression.powersgd()}):
            with pytest.raises(MismatchError) as caught:
                one_step([coo([[1]], [2.0], (3,)), None], **options)
            messages.append(str(caught.value))
        return messages

    for of_max, of_powersgd in on_ranks(2, body):
        assert "the gradient of 'table' is sparse, and op=Max is not possible" in of_max
        assert "Compression.powersgd(rank=4, warm_up_steps=0) is for dense gradients" in of_powersgd


def test_custom_compressor_gets_sparse_gradient_values() -> None:
    class Halves(hvd.compression.Compressor):
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, Any]:
            return tensor * 0.5, None

        @staticmethod
        def decompress(tensor: Tensor, ctx: Any) -> Tensor:
            return tensor * 2

    grads = [coo([[1]], [2.0], (3,)), None]
    for grad in on_ranks(2, lambda: one_step(list(grads), compression=Halves)):
        assert grad.to_dense().tolist() == [0.0, 1.0, 0.0]


# --- Strides. ---


def convolution(channels_last: bool) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2)).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def pictures(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, 5, 5, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("as_views", [False, True])
def test_channels_last_on_one_rank_equals_one_process(size: Any, as_views: Any) -> None:
    def run(distributed: bool) -> Tensor:
        odd = distributed and hvd.rank() == size - 1
        model = convolution(channels_last=odd)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, gradient_as_bucket_view=as_views)
        for step in range(3):
            x = pictures(step)
            if distributed:
                x = x.chunk(size)[hvd.rank()]
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    expected = run(False)
    for result in on_ranks(size, lambda: run(True), settings=SMALL):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_gradients_with_other_strides_are_reduced_right() -> None:
    plain = torch.arange(12.0).view(3, 4)

    def body() -> Any:
        p = nn.Parameter(torch.zeros(3, 4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        for _ in range(2):
            p.grad = plain.t().contiguous().t() if hvd.rank() else plain.clone()
            optimizer.synchronize()
        return p.grad

    for grad in on_ranks(2, body):
        assert torch.equal(grad, plain)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(2.0).expand(3, 4),
        lambda: torch.arange(4.0).expand(3, 4),
        lambda: torch.arange(6.0).as_strided((3, 4), (1, 1)),
    ],
    ids=["one element", "rows", "overlapping"],
)
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16])
def test_overlapping_gradients_are_replaced_by_contiguous_results(
    make: Any, compression: Any
) -> None:
    plain = torch.arange(12.0).view(3, 4)
    expected = (make() + plain + make()) / 3

    def body() -> Any:
        p = nn.Parameter(torch.zeros(3, 4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=compression)
        p.grad = plain.clone() if hvd.rank() == 1 else make()
        optimizer.step()
        assert p.grad.is_contiguous()
        p.grad.add_(0)  # an ordinary tensor
        return p.grad

    results = on_ranks(3, body)
    for grad in results:
        assert torch.equal(grad, results[0])
        assert torch.allclose(grad, expected, rtol=1e-2)
