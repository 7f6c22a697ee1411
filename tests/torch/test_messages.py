"""`hvd.send` and `hvd.recv` beside collectives."""

from __future__ import annotations

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import CollectiveTimeoutError, InvalidArgumentError, MismatchError
from tests.torch.on_ranks import on_ranks
from tests.torch.test_collectives import FLOATS, INTS, values

pytestmark = pytest.mark.ranks

SHAPES = [(), (0,), (5,), (3, 4), (100_003,)]


@pytest.mark.parametrize("hosts", [None, [0, 1, 0]], ids=["one host", "two hosts"])
def test_tensors_of_every_dtype_and_shape_arrive(hosts: list[int] | None) -> None:
    def body() -> None:
        right, left = (hvd.rank() + 1) % 3, (hvd.rank() + 2) % 3
        cases = [(dtype, shape) for dtype in [*FLOATS, *INTS, torch.bool] for shape in SHAPES]
        sent = [values(hvd.rank(), shape, dtype) for dtype, shape in cases]
        received = [torch.empty_like(tensor) for tensor in sent]
        total = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        handles = [hvd.send_async(tensor, right, tag=tag) for tag, tensor in enumerate(sent)]
        # From the last to the first.
        for tag in reversed(range(len(cases))):
            assert hvd.recv(received[tag], left, tag=tag) == left
        for handle in handles:
            hvd.synchronize(handle)
        assert hvd.synchronize(total).tolist() == [3, 3, 3]
        for tensor, (dtype, shape) in zip(received, cases, strict=True):
            assert torch.equal(tensor, values(left, shape, dtype)), (dtype, shape)

    on_ranks(3, body, hosts=hosts)


def test_receiving_from_any_rank_returns_the_sender() -> None:
    def body() -> None:
        handle = hvd.send_async(torch.full((4,), hvd.rank()), 0, tag=3)
        if hvd.rank() == 0:
            tensor = torch.empty(4, dtype=torch.int64)
            senders = []
            for _ in range(3):
                senders.append(hvd.recv(tensor, tag=3))
                assert tensor.tolist() == [senders[-1]] * 4
            assert sorted(senders) == [0, 1, 2]
        hvd.synchronize(handle)

    on_ranks(3, body)


def test_wrong_send_and_recv_calls_raise_a_clear_error() -> None:
    def body() -> None:
        other = 1 - hvd.rank()
        tensor = torch.zeros(50_000)
        with pytest.raises(InvalidArgumentError, match="rank 7 is not in the process set"):
            hvd.send(tensor, 7)
        with pytest.raises(InvalidArgumentError, match="give one tag, from 0"):
            hvd.send(tensor, other, tag=-1)
        with pytest.raises(
            InvalidArgumentError, match="'one' and the tag 0; both must be integers"
        ):
            hvd.send(tensor, "one")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="contiguous"):
            hvd.recv(torch.zeros(4, 4).t(), other)
        with pytest.raises(CollectiveTimeoutError, match="sent nothing with tag 5 within 0.1 s"):
            hvd.recv(tensor, other, tag=5, timeout_s=0.1)
        text = "rank 0 sent 50000 elements of float32 with tag 0, rank 1 receives 50000 elements of float64"
        work = hvd.send_async(tensor, 1) if other else hvd.recv_async(tensor.double(), 0)
        with pytest.raises(MismatchError, match=text):
            hvd.synchronize(work)
        hvd.barrier()

    on_ranks(2, body)
