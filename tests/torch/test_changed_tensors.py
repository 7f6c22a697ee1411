"""Parameters and gradients whose memory, shape or object changes during a reduction."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.engine.library import Status
from sparkhvd.errors import InternalError, InvalidArgumentError
from sparkhvd.torch.context import context
from tests.harness.soak import left_to_soak
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks


class Watched:
    """Memory that shows whether torch still holds it. It is never freed, so nothing is written after a free."""

    def __init__(self, count: int) -> None:
        self.memory = np.zeros(count, np.float32)
        view = self.memory[:]
        self._view = weakref.ref(view)
        self.tensor: torch.Tensor | None = torch.from_numpy(view)

    @property
    def is_held(self) -> bool:
        if self._view() is not None:
            gc.collect()  # of several threads at once takes long: only where it could change something
        return self._view() is not None


@pytest.mark.parametrize("sharded", [False, True])
def test_old_memory_of_a_gradient_is_kept_during_its_reduction(sharded: bool) -> None:
    rank_0_has_looked = threading.Event()

    def body() -> Any:
        p = nn.Parameter(torch.zeros(10))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), sharded=sharded, synchronize_in_backward=False
        )
        p.sum().backward()
        optimizer.step()  # the first cycle submits in step()
        optimizer.zero_grad()
        watched = Watched(10)
        p.grad, watched.tensor = watched.tensor, None
        try:
            if hvd.rank() == 1:
                assert rank_0_has_looked.wait(30)
            p.sum().backward()
            p.grad.data = p.grad.data.clone()
            was_held = hvd.rank() == 1 or watched.is_held
        finally:
            rank_0_has_looked.set()
        optimizer.zero_grad()
        return was_held, watched.is_held

    assert on_ranks(2, body) == [(True, False)] * 2


@pytest.mark.parametrize(
    "start",
    [
        lambda tensor: hvd.allreduce_async_(tensor),
        lambda tensor: hvd.grouped_allreduce_async_([tensor]),
        lambda tensor: hvd.broadcast_async_(tensor, 0),
        lambda tensor: hvd.allreduce_async(tensor),
        lambda tensor: hvd.allgather_async(tensor),
        lambda tensor: hvd.alltoall_async(tensor),
        lambda tensor: hvd.reducescatter_async(tensor),
        lambda tensor: hvd.broadcast_async(tensor, 0),
    ],
)
def test_old_memory_of_a_tensor_is_kept_during_its_operation(
    start: Callable[[torch.Tensor], hvd.Handle],
) -> None:
    rank_0_has_looked = threading.Event()

    def body() -> Any:
        watched = Watched(10)
        tensor, watched.tensor = watched.tensor, None
        assert tensor is not None
        try:
            if hvd.rank() == 1:
                assert rank_0_has_looked.wait(30)
            handle = start(tensor)
            tensor.data = torch.zeros(10)
            was_held = hvd.rank() == 1 or watched.is_held
        finally:
            rank_0_has_looked.set()
        hvd.synchronize(handle)
        return was_held, watched.is_held

    assert on_ranks(2, body) == [(True, False)] * 2


def _shape_error(optimizer: str, whose: str) -> str:
    when = "divided it" if "sharded" in optimizer else "was built"
    return (
        f"{optimizer}: 'w' had shape (100,) when the optimizer {when}, but {whose} (10,) now. Build "
        "DistributedOptimizer after the model has its final shapes."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, _shape_error("DistributedOptimizer", "its gradient has")),
        (
            {"compression": hvd.Compression.fp16},
            _shape_error("DistributedOptimizer", "its gradient has"),
        ),
        ({"gradient_as_bucket_view": True}, _shape_error("DistributedOptimizer", "it has")),
        ({"sharded": True}, _shape_error("DistributedOptimizer(sharded=True)", "has")),
    ],
)
@pytest.mark.parametrize("same_memory", [False, True])
def test_a_parameter_whose_shape_changes_raises(
    options: dict[str, Any], message: str, same_memory: bool
) -> None:
    """The memory after its gradient must not be written."""

    def body() -> Any:
        p = nn.Parameter(torch.zeros(100))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("w", p)], **options)
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        parameter, memory = np.full((2, 100), 7.0, np.float32)
        p.data = p.data[:10] if same_memory else torch.from_numpy(parameter[:10])
        p.grad = torch.from_numpy(memory[:10])
        p.grad.fill_(1.0 + hvd.rank())
        with pytest.raises(InvalidArgumentError) as caught:
            optimizer.step()
        return str(caught.value), bool((memory[10:] == 7.0).all() and (parameter == 7.0).all())

    assert on_ranks(2, body) == [(message, True)] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_backward_raises_if_a_parameter_shape_changed(sharded: bool) -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(10))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("w", p)], sharded=sharded
        )
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        p.data = torch.zeros(20)
        with pytest.raises(InvalidArgumentError, match=r"'w' had shape \(10,\).*has \(20,\) now"):
            p.sum().backward()

    on_ranks(2, body)


@pytest.mark.parametrize("rows", [4, 20])
def test_sparse_layer_with_a_changed_number_of_rows_raises(rows: int) -> None:
    def body() -> Any:
        table = nn.Embedding(10, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters()
        )
        table(torch.tensor([0])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        table.weight.data = torch.zeros(rows, 2)
        with pytest.raises(InvalidArgumentError) as caught:
            table(torch.tensor([rows - 1])).sum().backward()
        return str(caught.value)

    message = (
        "DistributedOptimizer: 'weight' had shape (10, 2) when the optimizer was built, but its gradient has "
        f"({rows}, 2) now. Build DistributedOptimizer after the model has its final shapes."
    )
    assert on_ranks(2, body) == [message] * 2


def test_powersgd_matrix_with_a_changed_shape_raises() -> None:
    def body() -> Any:
        p = nn.Parameter(torch.zeros(40, 60))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("w", p)], hvd.Compression.powersgd(rank=1)
        )
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        p.data = torch.zeros(60, 40)
        with pytest.raises(InvalidArgumentError, match=r"'w' had shape \(40, 60\)"):
            p.sum().backward()

    on_ranks(2, body)


KINDS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"sharded": True},
    {"compression": hvd.Compression.fp16},
    {"sharded": True, "compression": hvd.Compression.bf16},
]
CHANGED = (
    "DistributedOptimizer: the gradient of 'w' was changed, replaced or dropped while it was being reduced "
    "(p.grad.mul_(...), p.grad = ..., p.grad.data = ...), so the result is lost. Call optimizer.synchronize() before you "
    "change gradients; step() then does not reduce again. Register hooks that change them before the optimizer is built."
)


def wrapped(options: dict[str, Any]) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.zeros(3))
    return p, hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("w", p)], **options)


def backward(p: nn.Parameter, optimizer: Any) -> None:
    """Compute gradients with the average 1.5."""
    optimizer.zero_grad()
    (p * (1.0 + hvd.rank())).sum().backward()


def assign(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad = p.grad.clamp(max=10.0)


def assign_data(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.data = p.grad.data * 1.0


def drop(p: nn.Parameter) -> None:
    p.grad = None


def change(p: nn.Parameter) -> None:
    torch.nn.utils.clip_grad_norm_([p], 0.1)


@pytest.mark.parametrize("options", KINDS)
def test_gradients_replaced_by_hooks_are_reduced(options: dict[str, Any]) -> None:
    """This includes hooks that run after the optimizer's own."""

    def halve(p: nn.Parameter) -> None:
        assert p.grad is not None
        p.grad = p.grad * 0.5

    def body() -> Any:
        p, optimizer = wrapped(options)
        for reducer in optimizer._reducers:
            reducer._overlaps = False  # as where the ranks use all cores of one host
        p.register_post_accumulate_grad_hook(halve)  # type: ignore[arg-type]  # of a Parameter
        for _ in range(4):
            backward(p, optimizer)
            optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[-3.0] * 3] * 2


@pytest.mark.parametrize(
    ("options", "replace"),
    [
        *zip(KINDS, [assign, assign_data, drop, change, assign], strict=True),
        *zip(KINDS, [change, drop, assign_data, assign, drop], strict=True),
        *left_to_soak(
            "each change and each kind, here",
            *zip(KINDS, [assign_data, assign, change, drop, assign_data], strict=True),
            *zip(KINDS, [drop, change, assign, assign_data, change], strict=True),
        ),
    ],
)
def test_changing_a_gradient_during_its_reduction_raises(
    options: dict[str, Any], replace: Callable[[nn.Parameter], None]
) -> None:
    def body() -> Any:
        p, optimizer = wrapped({**options, "synchronize_in_backward": False})
        backward(p, optimizer)
        optimizer.step()
        backward(p, optimizer)
        replace(p)
        with pytest.raises(InvalidArgumentError) as caught:
            optimizer.step()
        backward(p, optimizer)
        optimizer.step()  # the next one works
        return str(caught.value), p.tolist()

    assert on_ranks(2, body) == [(CHANGED, [-3.0] * 3)] * 2


def test_changing_a_powersgd_or_sparse_gradient_during_reduction_raises() -> None:
    def body() -> Any:
        matrix = nn.Parameter(torch.zeros(40, 60))
        table = nn.Parameter(torch.zeros(10, 2))
        for p, compression, loss in (
            (matrix, hvd.Compression.powersgd(rank=1), lambda p: p.sum()),
            (
                table,
                hvd.Compression.none,
                lambda p: nn.functional.embedding(torch.tensor([1]), p, sparse=True).sum(),
            ),
        ):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([p], lr=1.0),
                [("w", p)],
                compression,
                synchronize_in_backward=False,
            )
            for step in range(3):
                optimizer.zero_grad()
                loss(p).backward()
                if step < 2:
                    optimizer.step()
            p.grad = p.grad * 0.5
            with pytest.raises(InvalidArgumentError) as caught:
                optimizer.step()
            assert str(caught.value) == CHANGED

    on_ranks(2, body)


@pytest.mark.parametrize("options", KINDS)
def test_a_gradient_replaced_before_submission_is_reduced(options: dict[str, Any]) -> None:
    def body() -> Any:
        p, optimizer = wrapped(options)
        optimizer.zero_grad()
        p.grad = torch.full((3,), 2.0 * hvd.rank())
        optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[-1.0] * 3] * 2


@pytest.mark.parametrize("options", KINDS)
def test_gradients_may_be_replaced_after_synchronize(options: dict[str, Any]) -> None:
    def body() -> Any:
        p, optimizer = wrapped(options)
        for replace in (assign, assign_data, drop):
            backward(p, optimizer)
            optimizer.synchronize()
            replace(p)
            optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[-3.0] * 3] * 2


def test_a_hook_that_replaces_a_submitted_gradient_raises() -> None:
    """With several hosts, the optimizer's own hook submits the gradient."""

    def body() -> Any:
        p, optimizer = wrapped({})
        p.register_post_accumulate_grad_hook(assign)  # type: ignore[arg-type]  # of a Parameter
        backward(p, optimizer)
        optimizer.step()
        with pytest.raises(InvalidArgumentError) as caught:
            backward(p, optimizer)
        return str(caught.value)

    assert on_ranks(2, body, hosts=[0, 1]) == [CHANGED] * 2


@pytest.mark.parametrize("options", KINDS)
def test_gradient_with_the_torch_negative_bit_keeps_its_sign(options: dict[str, Any]) -> None:
    def body() -> Any:
        p, optimizer = wrapped(options)
        optimizer.zero_grad()
        p.grad = torch._neg_view(torch.tensor([1.0, 2.0, 3.0]) * (1 + 2 * hvd.rank()))
        optimizer.synchronize()
        optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[2.0, 4.0, 6.0]] * 2


class Failing:
    """The library with one function that works and then fails, as without memory."""

    def __init__(self, library: Any, function: str) -> None:
        self._library = library
        self._function = function

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if name != self._function:
            return found

        def fail(*arguments: Any) -> int:
            found(*arguments)
            return int(Status.INTERNAL)

        return fail


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("submit", lambda tensor: hvd.allreduce_async_(tensor, name="x")),
        ("run", lambda tensor: hvd.allreduce_(tensor, name="x")),
        ("wait", lambda tensor: hvd.allreduce_async_(tensor, name="x").wait()),
    ],
)
def test_tensor_memory_is_kept_if_the_library_fails_after_submission(
    function: str, call: Callable[[torch.Tensor], Any]
) -> None:
    """Operations that the library has accepted continue to use the memory."""
    rank_0_has_looked = threading.Event()

    def body() -> Any:
        state = context().engine._state
        watched = Watched(10)
        tensor, watched.tensor = watched.tensor, None
        assert tensor is not None
        hvd.barrier()
        if hvd.rank() == 1:
            assert rank_0_has_looked.wait(30)
            hvd.allreduce_(tensor, name="x")
            return True
        library, state.library = state.library, Failing(state.library, function)  # type: ignore[assignment]  # stands in
        try:
            with pytest.raises(InternalError):
                call(tensor)
            del tensor
            return watched.is_held
        finally:
            state.library = library
            rank_0_has_looked.set()

    assert on_ranks(2, body) == [True] * 2
