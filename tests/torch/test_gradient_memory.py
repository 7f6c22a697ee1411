"""`DistributedOptimizer(gradient_as_bucket_view=True)`: gradients in registered memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, MismatchError
from tests.torch.on_ranks import on_ranks
from tests.torch.test_optimizer import (
    OPTIMIZERS,
    SMALL,
    batch,
    loss_of,
    mine,
    mlp,
    train,
    weights,
)

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_with_bucket_views_gives_the_same_bits(name: str, size: int) -> None:
    def body() -> Any:
        plain = train(OPTIMIZERS[name], distributed=True)
        views = train(OPTIMIZERS[name], distributed=True, gradient_as_bucket_view=True)
        assert torch.equal(plain, views)

    on_ranks(size, body, settings=SMALL)


def test_bucket_view_gradients_keep_their_memory_and_are_reduced_in_place() -> None:
    def body() -> Any:
        model = mlp()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=True
        )
        places = []
        for step in range(4):
            optimizer.zero_grad()
            assert all(not p.grad.any() for p in model.parameters())
            loss_of(model, mine(batch(step))).backward()
            optimizer.step()
            places.append([p.grad.data_ptr() for p in model.parameters()])
            assert all(p.grad.data_ptr() % 64 == 0 for p in model.parameters())
        # The first cycle ends with a new order of buckets.
        assert places[1] == places[2] == places[3]
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert len(storages) == 1
        return [p.grad for p in model.parameters()]

    for gradients in on_ranks(3, body, settings=SMALL):
        gc.collect()
        assert all(torch.isfinite(grad.add_(1)).all() for grad in gradients)  # after shutdown


def test_dropped_or_replaced_gradients_return_to_the_bucket() -> None:
    def body() -> Any:
        results = []
        for views in (False, True):
            model = mlp()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=views
            )
            for step in range(4):
                model.zero_grad()  # drops them: backward makes new ones
                loss_of(model, mine(batch(step))).backward()
                optimizer.synchronize()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            results.append((weights(model), norm))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])

    on_ranks(2, body, settings=SMALL)


def test_accumulated_passes_add_up_in_the_bucket() -> None:
    def body() -> Any:
        results = []
        for views in (False, True):
            model = mlp()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                backward_passes_per_step=3,
                gradient_as_bucket_view=views,
            )
            for step in range(6):
                loss_of(model, mine(batch(step))).backward()
                if step % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(weights(model))
        assert torch.equal(*results)

    on_ranks(2, body, settings=SMALL)


def test_bucket_views_support_any_layout_dtype_and_unused_parameters() -> None:
    def body() -> Any:
        conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        double = nn.Parameter(torch.ones(5, dtype=torch.float64))
        unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        for p in conv.parameters():
            nn.init.constant_(p, 0.25)
        parameters = [*conv.parameters(), double, unused]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum, gradient_as_bucket_view=True
        )
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.full((1, 4, 5, 5), hvd.rank() + 1.0)
            (conv(x).sum() + double.sum()).backward()
            optimizer.step()
        assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
        assert unused.grad.tolist() == [0.0] * 3
        assert conv.weight.grad.unique().tolist() == [9.0 * 3]  # 9 places, 1 + 2
        return conv.bias.grad.unique().tolist(), double.tolist()

    assert on_ranks(2, body) == [([18.0], [-3.0] * 5)] * 2


def test_bucket_views_of_different_parameters_raise_on_every_rank() -> None:
    def body() -> Any:
        model = nn.Linear(3, 2 + hvd.rank())
        with pytest.raises(MismatchError, match="ranks disagree on parameter 0"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), gradient_as_bucket_view=True
            )

    on_ranks(2, body)


@pytest.mark.parametrize("options", [{"compression": hvd.Compression.fp16}, {"op": hvd.Adasum}])
def test_options_incompatible_with_bucket_views_raise(options: Any) -> None:
    def body() -> Any:
        with pytest.raises(InvalidArgumentError, match="gradient_as_bucket_view=True reduces"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(mlp().parameters(), lr=1.0), gradient_as_bucket_view=True, **options
            )

    on_ranks(1, body)


def test_bucket_views_require_sparse_as_dense_for_sparse_gradients() -> None:
    def body() -> Any:
        found = []
        for dense in (True, False):
            layer = nn.Embedding(4, 2, sparse=True)
            nn.init.zeros_(layer.weight)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layer.parameters(), lr=1.0),
                sparse_as_dense=dense,
                gradient_as_bucket_view=True,
            )
            layer.zero_grad()
            if not dense:
                with pytest.raises(InvalidArgumentError, match="is sparse"):
                    layer(torch.tensor([hvd.rank()])).sum().backward()
                continue
            layer(torch.tensor([hvd.rank()])).sum().backward()
            optimizer.step()
            found = layer.weight[:, 0].tolist()
        return found

    assert on_ranks(2, body) == [[-0.5, -0.5, 0.0, 0.0]] * 2


def test_registered_memory_refuses_dtypes_without_collectives() -> None:
    def body() -> None:
        with pytest.raises(InvalidArgumentError, match="registered_empty"):
            hvd.registered_empty(4, torch.float8_e4m3fn)

    on_ranks(1, body)
