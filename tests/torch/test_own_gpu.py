"""`hvd.init()` makes the rank's GPU torch's current device. A stand-in for `torch.cuda` records the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd import topology
from sparkhvd.topology import RankContext

pytestmark = pytest.mark.ranks


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Make torch see this many GPUs, and return the list of devices that were made current."""

    def make(count: int, current: int | None = None) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return make


@pytest.fixture
def launched() -> Iterator[Callable[[int | None], None]]:
    """Act as if a launcher had given this process a GPU."""
    yield lambda gpu: topology.install_rank_context(RankContext(1, 2, 1, 0, 1, gpu))
    hvd.shutdown()
    topology.install_rank_context(None)


@pytest.mark.parametrize(
    ("gpu", "count", "current", "expected"),
    [
        (1, 2, None, [1]),
        (1, 2, 0, [1]),  # CUDA runs, and no device was chosen
        (2, 4, 1, []),  # the script has
        (0, 2, None, []),  # it is the current one anyway, and CUDA need not start
        (None, 2, None, []),  # use_gpu=False, or none was assigned
        (1, 0, None, []),  # a torch without CUDA: the script may compute elsewhere
        (1, 1, None, []),  # the script has hidden the others
    ],
)
def test_init_makes_the_gpu_of_the_rank_current(
    cuda: Callable[..., list[int]],
    launched: Callable[[int | None], None],
    gpu: int | None,
    count: int,
    current: int | None,
    expected: list[int],
) -> None:
    chosen = cuda(count, current)
    launched(gpu)
    hvd.init()
    assert chosen == expected
    hvd.init()  # does nothing while initialised
    assert chosen == expected


def test_a_process_without_a_launcher_makes_no_cuda_call(
    cuda: Callable[..., list[int]],
) -> None:
    chosen = cuda(4)
    hvd.init()
    hvd.shutdown()
    assert chosen == []
