"""The GPU of the checks: a torch.cuda device or the stand-in's, with the same names.

Rank processes read the choice from the environment (`STAND_IN`), like NCCL's variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.engine.engine import Engine
from sparkhvd.settings import Settings
from sparkhvd.torch.context import _process, context, use_engine
from sparkhvd.torch.cuda import RankGpu, find_nccl, nccl_version
from sparkhvd.torch.optimizer.distributed import Distributed

# Set where the checks run on the stand-in.
STAND_IN = "SPARKHVD_TEST_STAND_IN"
# The folder for NCCL's warnings.
LOGS = "SPARKHVD_TEST_GPU_LOGS"
# The words of CUDA and torch for a host that waits for the device.
WAITS = ("Synchronize", "_local_scalar_dense", "Memcpy DtoH (Device -> Pageable)")


class Seen(NamedTuple):
    """Observations of some steps.

    Attributes:
        waits: where the host waited for the GPU.
        evidence: proof that the steps were observed.
    """

    waits: list[str]
    evidence: str


class Machine(Protocol):
    """A GPU: `tests.harness.device_bodies.Gpu` with more methods."""

    is_stand_in: bool
    main_stream: Any

    def tensor(self, values: Tensor) -> Tensor:
        """Copy values to the GPU."""

    def module(self, module: nn.Module) -> nn.Module:
        """Move a module to the GPU."""

    def use_engine(self, engine: Engine) -> AbstractContextManager[Any]:
        """Use an engine as `sparkhvd.torch.context.use_engine` does."""

    def synchronize(self) -> None:
        """Wait on the host for all of this GPU's current stream."""

    def new_stream(self) -> Any:
        """Make a stream for which no other stream waits."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make it the current one."""

    def await_stream(self, stream: Any) -> None:
        """Make the current stream wait for another one."""

    def init(self) -> None:
        """Initialise one rank on this GPU, as `hvd.init()` does."""

    def handle(self) -> int:
        """Return the driver's handle of the current stream."""

    def nccl(self) -> str:
        """Return the NCCL library that the engine takes."""

    def mark(self) -> Any:
        """Record an event in the current stream."""

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events, by the GPU's clock. The host waits."""

    def busy(self) -> None:
        """Keep the current stream busy for a millisecond or so."""

    def capturing(self) -> AbstractContextManager[Any]:
        """Treat the block as captured into a graph."""

    def watch(self, steps: Callable[[], None]) -> Seen:
        """Return the places where the host waits for the GPU in these steps."""


class Cuda:
    """A device of torch.cuda."""

    is_stand_in = False

    def __init__(self, ordinal: int = 0) -> None:
        self.place = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.place)
        self.main_stream = torch.cuda.default_stream(self.place)

    def tensor(self, values: Tensor) -> Tensor:
        return values.to(self.place)

    def module(self, module: nn.Module) -> nn.Module:
        return module.to(self.place)

    @contextlib.contextmanager
    def use_engine(self, engine: Engine) -> Iterator[Any]:
        # For the whole process, like `hvd.init()`, because backward of GPU tensors runs on autograd's own thread.
        with use_engine(engine) as made:
            _process.context = made
            try:
                yield made
            finally:
                _process.context = None

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.place)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.place)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def await_stream(self, stream: Any) -> None:
        torch.cuda.current_stream(self.place).wait_stream(stream)

    def init(self) -> None:
        hvd.init()

    def handle(self) -> int:
        return int(torch.cuda.current_stream(self.place).cuda_stream)

    def nccl(self) -> str:
        return nccl_library()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def busy(self) -> None:
        torch.cuda._sleep(2_000_000)  # clock ticks

    def capturing(self) -> AbstractContextManager[Any]:
        return torch.cuda.graph(torch.cuda.CUDAGraph())

    def watch(self, steps: Callable[[], None]) -> Seen:
        # torch raises if its own operations make the host wait. The profile has CUDA's calls, including the engine's.
        def guarded() -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                steps()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        events = profiled(guarded)
        waits = [each.name for each in events if any(word in each.name for word in WAITS)]
        launches = sum("Launch" in each.name for each in events)
        return Seen(waits, f"{launches} launches in the profile" if launches else "")


def profiled(steps: Callable[[], None]) -> list[Any]:
    """Return the profiler's events of the steps, of the host and of the GPU."""
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function("the steps"):
            steps()
        torch.cuda.synchronize()  # so that their kernels are in the profile
    events: list[Any] = list(seen.events() or ())
    # The GPU's side has a range of this name, too.
    whole = next(
        each.time_range for each in events if each.name == "the steps" and not is_on_gpu(each)
    )
    return [
        each
        for each in events
        if whole.start <= each.time_range.start
        and (is_on_gpu(each) or each.time_range.end <= whole.end)
        and each.name != "the steps"
    ]


def is_on_gpu(event: Any) -> bool:
    """Return True if an event happened on the device, and not in a call of the host."""
    return bool(event.device_type == torch.autograd.DeviceType.CUDA)


class StandIn:
    """A device of the stand-in: `tests.harness.fake_cuda.FakeDevice`."""

    is_stand_in = True

    def __init__(self, ordinal: int = 0) -> None:
        from tests.harness import fake_cuda

        self._use_engine = fake_cuda.use_engine
        self.driver = fake_cuda.driver()
        self.device = fake_cuda.gpu(ordinal)
        self.main_stream = self.device.main_stream
        self.tensor = self.device.tensor
        self.module = self.device.module
        self.synchronize = self.device.synchronize
        self.new_stream = self.device.new_stream
        self.using = self.device.using
        self.await_stream = self.device.await_stream

    def use_engine(self, engine: Engine) -> AbstractContextManager[Any]:
        return self._use_engine(engine)

    def init(self) -> None:
        from tests.harness.fake_cuda import open_fake

        hvd.init()
        context().part(RankGpu).opener = open_fake

    def handle(self) -> int:
        return self.device.current

    def nccl(self) -> str:
        return str(self.driver.nccl)

    def mark(self) -> Any:
        reached: list[float] = []
        self.device.enqueue(lambda: reached.append(time.perf_counter()))
        return reached

    def seconds_between(self, begin: Any, end: Any) -> float:
        self.synchronize()
        return float(end[0] - begin[0])

    def busy(self) -> None:
        self.device.enqueue(lambda: time.sleep(0.002))

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.device.is_capturing = True
        try:
            yield
        finally:
            self.device.is_capturing = False

    def watch(self, steps: Callable[[], None]) -> Seen:
        calls = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
        before = [self.count(name) for name in calls]
        launched, waited = self.count("cuLaunchHostFunc"), self.device.host_waits
        steps()
        waits = ["FakeDevice.synchronize"] * (self.device.host_waits - waited)
        for name, number in zip(calls, before, strict=True):
            waits += [name] * (self.count(name) - number)
        launched = self.count("cuLaunchHostFunc") - launched
        return Seen(waits, f"{launched} launches" if launched else "")

    def count(self, function: str) -> int:
        """Calls of a function of CUDA or NCCL so far."""
        return self.driver.control("fake_cuda_count", function)


def machine() -> Machine:
    """Return the GPU of this process."""
    return StandIn() if is_stand_in() else Cuda()


def is_stand_in() -> bool:
    """Return True if the checks run on the stand-in."""
    return os.environ.get(STAND_IN) == "1"


@contextlib.contextmanager
def as_with_partners() -> Iterator[None]:
    """Make a DistributedOptimizer with one rank pack and reduce like one of several, instead of doing nothing.

    So one GPU shows all work of a rank. Only the network is missing.
    """
    before = Distributed._has_partners
    Distributed._has_partners = lambda self: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        Distributed._has_partners = before  # type: ignore[method-assign]


def nccl_library() -> str:
    """NCCL as the engine loads it."""
    return Settings.resolve().nccl_library or find_nccl()


def nccl_environment() -> dict[str, str]:
    """Return NCCL's variables here: several ranks share this GPU, and there is no network."""
    wanted = {
        "MULTI_RANK_GPU_ENABLE": "1",  # from 2.30 on; until then see `share_gpu`
        "SOCKET_IFNAME": "lo",
        "IB_DISABLE": "1",
        "NET_PLUGIN": "none",
        "MNNVL_ENABLE": "0",  # hosts of one NVLink domain would look for the other's GPU there
        "NVLS_ENABLE": "0",
        "NET_GDR_LEVEL": "LOC",
        "RAS_ENABLE": "0",  # both ranks would listen on one port
        "MAX_CTAS": "8",  # both ranks' kernels must fit on the GPU at once
        "DEBUG": "WARN",
    }
    if logs := os.environ.get(LOGS):
        wanted["DEBUG_FILE"] = f"{logs}/nccl.%p"  # a rank's standard output has other readers
    given = {f"NCCL_{name}": value for name, value in wanted.items()}
    return {name: os.environ.get(name, value) for name, value in given.items()}


def share_gpu(rank: int) -> None:
    """Tell NCCL before it is loaded that this rank shares the GPU."""
    # Up to 2.29, ranks on one GPU must appear to be on different hosts.
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    os.environ.update(nccl_environment())


def why_not() -> str:
    """Return the reason why the checks cannot run here, or "" if they can."""
    if is_stand_in():
        from tests.harness.fake_cuda import is_built

        return "" if is_built() else "the stand-in is not built (target fake_cuda)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False)"
    return ""


def description() -> str:
    """Describe hardware and versions in one line."""
    if is_stand_in():
        return "the stand-in for CUDA and NCCL, no GPU"
    gpu = torch.cuda.get_device_properties(0)
    code = nccl_version()
    nccl = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return (
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, driver {driver_version()}, torch {torch.__version__} with "
        f"CUDA {torch.version.cuda} and NCCL {nccl}"
    )


def driver_version() -> str:
    """Return the driver's version if the kernel reports it, and the newest CUDA that it supports."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    cuda = f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        words = file.readline().split()
        number = next((word for word in words if word[:1].isdigit() and "." in word), "")
        return f"{number} ({cuda})"
    return cuda
