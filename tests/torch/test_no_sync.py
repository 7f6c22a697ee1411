"""`no_sync()`, `detach()`, and wrappers for an optimizer class, as Lightning uses them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.context import context
from tests.torch.exact import MLP, Batch, compare, mine, values
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

F64 = torch.float64


def batch(step: int, distributed: bool) -> Batch:
    whole = MLP.batch(step, F64)
    return mine(whole) if distributed else whole


def distribute(optimizer: torch.optim.Optimizer, distributed: bool, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, **options) if distributed else optimizer


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"sharded": True}])
@pytest.mark.parametrize("last_is_held", [False, True])
def test_gradients_of_no_sync_passes_are_reduced_with_the_next_pass(
    options: dict[str, Any], last_is_held: bool
) -> None:
    def run(distributed: bool) -> Tensor:
        model = MLP.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = distribute(optimizer, distributed, **options)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                loss = MLP.loss(model, batch(3 * step + part, distributed))
                if distributed and (part < 2 or last_is_held):
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
        return values(model)

    compare(run, size=3)


def operations() -> int:
    return sum(each["operations"] for each in context().engine.counters()["collectives"])


def test_no_sync_passes_send_nothing() -> None:
    def body() -> list[bool]:
        model = MLP.build()
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        found = []
        for step in range(4):
            # Except the first one, which waits for the comparison of the parameters, which began with the optimizer.
            is_held = step % 2 == 1
            before = operations()
            if is_held:
                with optimizer.no_sync():
                    MLP.loss(model, batch(step, True)).backward()
                    own = next(model.parameters()).grad
                found.append(operations() == before)
                assert own is not None
            else:
                MLP.loss(model, batch(step, True)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert on_ranks(2, body) == [[True, True]] * 2


def test_detached_optimizer_reduces_no_gradients() -> None:
    def body() -> list[float]:
        model = MLP.build()
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        MLP.loss(model, batch(0, True)).backward()
        optimizer.step()
        optimizer.detach()
        optimizer.zero_grad()
        if hvd.rank() == 0:  # no other rank takes part
            MLP.loss(model, batch(1, True)).backward()
        assert len(optimizer.state_dict()["param_groups"]) == 1
        with pytest.raises(InvalidArgumentError, match="detached"):
            optimizer.step()
        return [float(p.grad is not None) for p in model.parameters()]

    found = on_ranks(2, body)
    assert set(found[0]) == {1.0}
    assert set(found[1]) == {0.0}


def test_schedulers_of_plain_and_distributed_optimizers_do_not_warn() -> None:
    def body() -> None:
        model = MLP.build()
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        before = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        optimizer: Any = hvd.DistributedOptimizer(plain)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)
        moved = torch.optim.lr_scheduler.StepLR(plain, 1, 1.0)
        moved.optimizer = optimizer
        MLP.loss(model, batch(0, True)).backward()
        optimizer.step()
        for scheduler in (before, after, moved):
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.025

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, body)


def test_wrapper_with_the_optimizer_class_shares_its_param_groups() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self._optimizer = optimizer
            self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

        def __getattr__(self, name: str) -> Any:
            return getattr(self._optimizer, name)

    def body() -> bool:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(MLP.build().parameters(), lr=0.05))
        wrapped: Any = Wrapper(optimizer)
        return wrapped.param_groups is optimizer.param_groups

    assert on_ranks(2, body) == [True, True]
