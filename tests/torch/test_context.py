from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError, NotInitializedError
from sparkhvd.settings import Settings
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    "call",
    [
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allgather(torch.ones(1)),
        lambda: hvd.broadcast(torch.ones(1), 0),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_parameters({}, 0),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])),
    ],
)
def test_every_call_before_init_raises_notinitializederror(call: Any) -> None:
    with pytest.raises(NotInitializedError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == "sparkhvd has not been initialized; use hvd.init()."


def test_init_and_shutdown_are_idempotent_and_repeatable() -> None:
    assert not hvd.is_initialized()
    hvd.shutdown()
    for _ in range(3):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size()) == (0, 1)
        assert (hvd.local_rank(), hvd.local_size()) == (0, 1)
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        assert hvd.is_homogeneous()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()


def test_all_threads_share_the_process_context(alone: Any) -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(hvd.size()))
    thread.start()
    thread.join()
    assert seen == [1]


def test_collectives_work_with_one_rank(alone: Any) -> None:
    x = torch.arange(5, dtype=torch.float64)
    assert torch.equal(hvd.allreduce(x), x)
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2, postscale_factor=3), x * 6)
    assert torch.equal(hvd.allgather(x), x)
    assert torch.equal(hvd.broadcast(x, 0), x)
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object("x") == ["x"]
    hvd.barrier()


def test_ranks_and_host_groups_match_the_engine() -> None:
    def body() -> Any:
        return (hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())

    assert on_ranks(3, body, hosts=[0, 0, 1]) == [
        (0, 0, 2, 0, 2),
        (1, 1, 2, 0, 1),
        (2, 0, 1, 1, 2),
    ]


def test_built_and_enabled_predicates_match_the_installation() -> None:
    has_cuda = torch.version.cuda is not None
    assert hvd.cuda_built() is has_cuda
    assert (hvd.nccl_built() > 20000) is has_cuda
    for predicate in (
        hvd.mpi_built,
        hvd.mpi_enabled,
        hvd.mpi_threads_supported,
        hvd.gloo_built,
        hvd.gloo_enabled,
        hvd.rocm_built,
        hvd.ddl_built,
        hvd.ccl_built,
    ):
        assert predicate() is False


def test_reduction_constants_equal_those_of_horovod() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))


def test_every_public_name_of_the_torch_api_exists() -> None:
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_an_unregistered_process_set_raises_a_clear_error(alone: Any) -> None:
    assert hvd.global_process_set.ranks == [0]
    assert hvd.global_process_set.size() == 1
    assert hvd.global_process_set.rank() == 0
    assert hvd.global_process_set.included()
    with pytest.raises(InvalidArgumentError, match="the process set is not registered"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))


def test_settings_reach_the_engine() -> None:
    settings = Settings(bucket_bytes=123)

    def body() -> Any:
        from sparkhvd.torch.context import context

        return context().engine.settings.bucket_bytes

    assert on_ranks(2, body, settings=settings) == [123, 123]
