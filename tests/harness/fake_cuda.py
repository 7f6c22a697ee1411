"""GPU tensors without a GPU: torch operations as work on the streams of the stand-in for libcuda.

`FakeTensor` says it is on `cuda:<ordinal>`. Every operation of torch on it is enqueued on this thread's current stream
as a host function, and its memory is the stand-in's. So a missing event dependency gives wrong data, as on a GPU. Calls
that need values on the host (`item`, `cpu`) wait for the stream. `FakeDevice` is the `Device` of `sparkhvd/torch/cuda.py`.

Shapes that depend on values are computed after a wait for the stream. Sparse tensors support only the operations of
gradients: they are made from tensors of the device (inside of `Factories`), taken apart, and added to dense ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sparkhvd.engine.engine import Engine
from sparkhvd.engine.work import Buffer
from sparkhvd.torch.context import Context
from sparkhvd.torch.context import use_engine as use_plain_engine
from sparkhvd.torch.cuda import RankGpu
from tests.harness.paths import ROOT

BUILD = ROOT / "build" / "native"
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NUM_GPUS = 8
# Seconds that enqueued functions may run after a test has ended.
DRAIN_S = 30.0


def library(name: str) -> Path:
    """Find a library of the stand-in in the build."""
    return next(iter(sorted(BUILD.rglob(name))), BUILD / name)


class FakeCudaError(RuntimeError):
    """A call of the stand-in failed, or an operation of torch on one of its streams."""


class Driver:
    """libfake_cuda through ctypes. Calls release the GIL, which host functions need."""

    def __init__(self) -> None:
        self.path = library("libfake_cuda.so")
        self.nccl = library("libfake_nccl.so")
        self._library = ctypes.CDLL(str(self.path))
        self._must("cuInit", 0)

    def _must(self, function: str, *arguments: Any) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            raise FakeCudaError(f"{function} gave {result}.")

    def use(self, ordinal: int) -> int:
        """Make a device's primary context this thread's."""
        made = ctypes.c_void_p()
        self._must("cuDevicePrimaryCtxRetain", ctypes.byref(made), ordinal)
        self._must("cuCtxSetCurrent", made)
        return int(made.value or 0)

    def set_current(self, made: int) -> None:
        self._must("cuCtxSetCurrent", ctypes.c_void_p(made))

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self._must("cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)  # non-blocking
        return int(made.value or 0)

    def launch(self, stream: int, function: Any, number: int) -> None:
        self._must("cuLaunchHostFunc", ctypes.c_void_p(stream), function, ctypes.c_void_p(number))

    def synchronize(self, stream: int) -> None:
        self._must("cuStreamSynchronize", ctypes.c_void_p(stream))

    def await_stream(self, waiting: int, other: int) -> None:
        event = ctypes.c_void_p()
        self._must("cuEventCreate", ctypes.byref(event), 2)  # no timing
        self._must("cuEventRecord", event, ctypes.c_void_p(other))
        self._must("cuStreamWaitEvent", ctypes.c_void_p(waiting), event, 0)
        self._must("cuEventDestroy_v2", event)

    def allocate(self, num_bytes: int) -> int:
        made = ctypes.c_uint64()
        self._must("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(num_bytes))
        return made.value

    def misuse(self) -> str:
        """Return the first misuse that a GPU would have punished at random."""
        found = self._library.fake_cuda_misuse
        found.restype = ctypes.c_char_p
        return str(found().decode())

    def control(self, function: str, *arguments: Any) -> int:
        """Call one of the stand-in's own functions, such as `fake_cuda_skip_wait`."""
        given = [a.encode() if isinstance(a, str) else a for a in arguments]
        return int(getattr(self._library, function)(*given))


class _Memory:
    """Device memory, which is reused and never freed: to free waits for every stream, as in CUDA."""

    def __init__(self, device: FakeDevice, num_bytes: int) -> None:
        self._unused = device.unused[1 << max(8, num_bytes.bit_length())]
        try:
            self.address = self._unused.pop()
        except IndexError:
            self.address = device.driver.allocate(1 << max(8, num_bytes.bit_length()))

    def __del__(self) -> None:
        self._unused.append(self.address)


class _NoCollection:
    """No thread collects garbage automatically while a stream has work.

    Garbage may include device memory, which must not be freed on a stream's own thread. Only threads that may
    free enter and leave: a collection can begin as soon as a thread has called any function of Python.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection may begin while `leave` has it
        self._reasons = 0
        self._was_enabled = False

    def enter(self) -> None:
        """Hold garbage collection off for one more function on a stream."""
        with self._lock:
            self._reasons += 1
            if self._reasons == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()

    def leave(self) -> None:
        """Note that a function on a stream has run."""
        with self._lock:
            self._reasons -= 1
            if self._reasons == 0 and self._was_enabled:
                gc.enable()


_NO_COLLECTION = _NoCollection()


class FakeDevice:
    """GPU of the stand-in, as sparkhvd's torch layer and `FakeTensor` need it."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.unused: defaultdict[int, list[int]] = defaultdict(list)
        self.is_capturing = False
        self.host_waits = 0  # how often the host waited for a stream
        self._context = driver.use(ordinal)
        self.default_stream = driver.stream()
        self._local = threading.local()
        self._functions: dict[int, Callable[[], None]] = {}
        self._spent: deque[int] = deque()  # of `_functions`, have run
        self._lost: list[Callable[[], None]] = []  # may run yet
        self._numbers = iter(range(1, 1 << 62))
        self._entry = HOST_FUNCTION(self._run)
        self.errors: list[BaseException] = []

    # --- As `sparkhvd.torch.cuda.Device`. ---

    def stream(self) -> int:
        """Return this thread's current stream."""
        if self.is_capturing:
            from sparkhvd.torch.cuda import refuse_capture

            refuse_capture()
        return self.current

    def raw_stream(self) -> int:
        """Return the same."""
        return self.current

    def here(self) -> Callable[[], Any]:
        """Return a context of the current stream, for any thread."""
        stream = self.current
        return lambda: self.using(stream)

    def await_stream(self, stream: int) -> None:
        """Make the current stream wait for another, by an event."""
        self.driver.set_current(self._context)
        self.driver.await_stream(self.current, stream)

    def keep_for(self, tensor: Tensor) -> None:
        """Do nothing: memory lives as long as functions that are enqueued on it."""

    def over_buffer(self, buffer: Buffer) -> Tensor:
        """Return the engine's memory as a tensor."""
        memory: Any = (ctypes.c_char * buffer.num_bytes).from_address(buffer.address)
        memory.buffer = buffer
        return FakeTensor(torch.frombuffer(memory, dtype=torch.uint8), self)

    # --- As torch.cuda. ---

    def forget(self) -> None:
        """Release finished functions and the objects that they kept alive, such as the engine's memory.

        Raises:
            FakeCudaError: a function has not run within `DRAIN_S`. It is released anyway.
        """
        deadline = time.monotonic() + DRAIN_S
        self._let_go()
        while self._functions and time.monotonic() < deadline:  # on any of its streams
            time.sleep(0.001)
            self._let_go()
        self.errors.clear()
        lost = list(self._functions)
        for number in lost:
            self._lost.append(self._functions.pop(number))
            _NO_COLLECTION.leave()
        if lost:
            raise FakeCudaError(
                f"{len(lost)} operations on GPU {self.ordinal} have not run in {DRAIN_S} s."
            )

    @property
    def main_stream(self) -> int:
        """The one that is current unless another is."""
        return self.default_stream

    def new_stream(self) -> int:
        """Make a stream, as `torch.cuda.Stream()` does."""
        self.driver.set_current(self._context)
        return self.driver.stream()

    @property
    def current(self) -> int:
        """This thread's current stream."""
        return int(getattr(self._local, "stream", self.default_stream))

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Use a stream in the block, as `torch.cuda.stream` does."""
        before = self.current
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def enqueue(self, function: Callable[[], None]) -> None:
        """Run a function on the current stream when its turn comes."""
        self._let_go()
        number = next(self._numbers)
        self._functions[number] = function
        _NO_COLLECTION.enter()
        try:
            self.driver.set_current(self._context)
            self.driver.launch(self.current, self._entry, number)
        except BaseException:
            del self._functions[number]
            _NO_COLLECTION.leave()
            raise

    def _let_go(self) -> None:
        """Memory may be freed with a finished function. On a stream's own thread this is forbidden, like all of CUDA."""
        while True:
            try:
                number = self._spent.popleft()
            except IndexError:  # even if another thread was faster
                return
            if self._functions.pop(number, None) is not None:  # otherwise it was forgotten
                _NO_COLLECTION.leave()

    def _run(self, number: int) -> None:
        try:
            with torch.no_grad():
                self._functions[number]()
        except BaseException as error:  # noqa: BLE001 - raised by the next `synchronize`
            self.errors.append(error)
        # The enqueuing thread releases it, because this thread must not have the last reference.
        self._spent.append(number)

    def synchronize(self) -> None:
        """Wait on the host for the current stream."""
        self.host_waits += 1
        self.driver.set_current(self._context)
        self.driver.synchronize(self.current)
        self._let_go()
        if self.errors:
            error = self.errors.pop(0)
            raise FakeCudaError(f"An operation on a stream failed: {error!r}") from error

    def empty(self, like: Tensor) -> Tensor:
        """Make a tensor of the stand-in's memory with the shape, strides and type of another one, without filling it."""
        self.driver.set_current(self._context)
        places = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        memory = _Memory(self, places * like.dtype.itemsize)
        held: Any = (ctypes.c_char * (places * like.dtype.itemsize)).from_address(memory.address)
        held.memory = memory
        flat = torch.frombuffer(held, dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def tensor(self, values: Tensor) -> FakeTensor:
        """Copy values to the GPU, as `values.cuda()` does."""
        raw = self.empty(values)
        copy = values.detach().clone()
        made = FakeTensor(raw, self)
        self.enqueue(lambda: raw.copy_(copy))
        return made

    def module(self, module: nn.Module) -> nn.Module:
        """Move a module to the GPU, as `module.cuda()` does."""
        moved: dict[Tensor, Tensor] = {}
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    if parameter not in moved:
                        made = nn.Parameter(self.tensor(parameter), parameter.requires_grad)
                        moved[parameter] = made
                    each._parameters[name] = moved[parameter]
            for name, buffer in each._buffers.items():
                if buffer is not None:
                    each._buffers[name] = self.tensor(buffer)
        return module


def torch_device(gpu: FakeDevice) -> str:
    """Return the device on which torch's own code sees tensors of the stand-in: "meta", which computes nothing."""
    del gpu
    return "meta"


class FakeTensor(torch.Tensor):
    """A tensor of a `FakeDevice`."""

    raw: Tensor
    gpu: FakeDevice

    @staticmethod
    def __new__(cls: Any, raw: Tensor, gpu: FakeDevice) -> FakeTensor:
        is_sparse = raw.layout is not torch.strided
        made: FakeTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # torch's
            cls,
            raw.size(),
            strides=None if is_sparse else raw.stride(),
            storage_offset=None if is_sparse else raw.storage_offset(),
            dtype=raw.dtype,
            device=torch_device(gpu),
        )
        made.raw, made.gpu = raw, gpu
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's way

    layout = property(lambda self: self.raw.layout)  # type: ignore[assignment]  # torch's own code sees a dense one
    is_sparse = property(lambda self: self.raw.is_sparse)  # type: ignore[assignment]  # as above
    is_cuda = property(lambda self: True)  # type: ignore[assignment]  # as a real one
    device = property(lambda self: torch.device("cuda", self.gpu.ordinal))  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """The tensor's data, with its own count of changes. `x.data = y` gives it y's memory."""
        return FakeTensor(self.raw, self.gpu)

    @data.setter
    def data(self, value: FakeTensor) -> None:
        assert value.shape == self.shape
        assert value.stride() == self.stride()
        self.raw = value.raw

    def sparse_dim(self) -> int:
        """Return the sparse dimensions of a sparse tensor."""
        return self.raw.sparse_dim()

    def _indices(self) -> Tensor:
        return FakeTensor(self.raw._indices(), self.gpu)

    def _values(self) -> Tensor:
        return FakeTensor(self.raw._values(), self.gpu)

    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a sparse tensor as a dense one."""
        raw, made = self.raw, self.gpu.empty(torch.empty(self.shape, dtype=self.raw.dtype))
        self.gpu.enqueue(lambda: made.copy_(raw.to_dense()))
        return FakeTensor(made, self.gpu)

    def to_sparse(self, *args: Any, **kwargs: Any) -> Tensor:
        """Wait, because the number of elements depends on values."""
        self.gpu.synchronize()
        return FakeTensor(self.raw.to_sparse(*args, **kwargs), self.gpu)

    def get_device(self) -> int:
        """Return the device's number."""
        return self.gpu.ordinal

    def data_ptr(self) -> int:
        """Return the address in the stand-in's memory."""
        return self.raw.data_ptr()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return itself for its own device, because torch itself would look for CUDA."""
        args = tuple(a for a in args if not _is_cuda(a))
        kwargs = {key: value for key, value in kwargs.items() if not _is_cuda(value)}
        return super().to(*args, **kwargs) if args or kwargs else self

    def tolist(self) -> Any:
        """Wait for the values."""
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory's storage."""
        return self.raw.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FakeTensor({tuple(self.shape)}, {self.dtype}, cuda:{self.gpu.ordinal})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A FakeTensor cannot be copied or pickled.")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fakes = [each for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)]
        gpu = fakes[0].gpu
        if "sparse_coo_tensor" in func._schema.name:
            return FakeTensor(func(*tree_map(_same, args), **tree_map(_same, kwargs)), gpu)
        returns = func._schema.returns
        aliases = [each.alias_info for each in returns]
        is_writing = any(
            a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
        )
        goes_home = func is torch.ops.aten._to_copy.default and _is_cpu(kwargs.get("device"))
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor):
            gpu.synchronize()
            return args[0].copy_(args[1].raw)
        func, args = _as_on_cuda(func, args)
        raw_args, raw_kwargs = tree_map(_raw, args), tree_map(_raw, kwargs)
        if goes_home or func is torch.ops.aten._local_scalar_dense.default:
            gpu.synchronize()
            return func(*raw_args, **raw_kwargs)
        if any(a is not None and not a.is_write for a in aliases):
            return tree_map(lambda x: _wrap(x, gpu), func(*raw_args, **raw_kwargs))
        if is_writing and (not returns or any(a is not None for a in aliases)):
            gpu.enqueue(lambda: func(*raw_args, **raw_kwargs))
            return _written(func, args, kwargs)
        try:
            shapes = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        except (RuntimeError, NotImplementedError):  # the shape depends on values
            gpu.synchronize()
            return tree_map(lambda x: _moved(x, gpu), func(*raw_args, **raw_kwargs))
        made = tree_map(lambda x: gpu.empty(x) if isinstance(x, Tensor) else x, shapes)

        def compute() -> None:
            found = func(*raw_args, **raw_kwargs)
            for target, value in zip(tree_leaves(made), tree_leaves(found), strict=True):
                # The CPU's kernels omit values that batch normalization saves only for other kernels.
                if isinstance(value, Tensor) and value.numel() == target.numel():
                    target.copy_(value)

        gpu.enqueue(compute)
        return tree_map(lambda x: _wrap(x, gpu), made)


# By a number: torch's kernels of CUDA multiply by its reciprocal.
_DIVISIONS = {
    torch.ops.aten.div.Tensor: torch.ops.aten.mul.Tensor,
    torch.ops.aten.div_.Tensor: torch.ops.aten.mul_.Tensor,
    torch.ops.aten._foreach_div_.Scalar: torch.ops.aten._foreach_mul_.Scalar,
}


def _as_on_cuda(func: Any, args: Any) -> tuple[Any, Any]:
    """Return the operation on the CPU that computes the same as CUDA's kernel, and refuse what that kernel refuses."""
    if func is torch.ops.aten._foreach_copy_.default:
        _check_copies(args[0], args[1])
    elif func is torch.ops.aten.native_batch_norm_backward.default:
        assert None not in args[5:7], "save_mean should always be defined"
    elif func in _DIVISIONS and isinstance(args[1], (int, float)):
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        if first.dtype in (torch.float32, torch.float64):  # of halves the quotients are right
            reciprocal = (1.0 / torch.tensor(float(args[1]), dtype=first.dtype)).item()
            return _DIVISIONS[func], (args[0], reciprocal)
    return func, args


def _check_copies(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Check the copies like torch's kernel, which uses the first target's type for all and has no wide unsigned types."""
    unknown = {torch.uint16, torch.uint32, torch.uint64}
    types = {each.dtype for each in targets}
    assert len(types) == 1, f"_foreach_copy_ to {types} would write beyond tensors"
    assert unknown.isdisjoint({*types, sources[0].dtype}), '"foreach_tensor_copy" not implemented'


class Factories(TorchFunctionMode):
    """Inside, torch's own code with `device="cuda"` makes tensors on the stand-in's device."""

    _MAKE = (torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor)

    def __init__(self, gpu: FakeDevice) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._MAKE and _is_cuda(kwargs.get("device")):
            return self._gpu.tensor(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def _is_cpu(place: Any) -> bool:
    return place is not None and torch.device(place).type == "cpu"


def _is_cuda(place: Any) -> bool:
    return isinstance(place, (torch.device, str)) and torch.device(place).type == "cuda"


def _raw(value: Any) -> Any:
    """Return the value with which a host function computes."""
    if isinstance(value, FakeTensor):
        return value.raw
    if isinstance(value, Tensor):
        assert not value.is_meta, "torch made a tensor where it believes this one to be"
        return value.detach().clone()  # the host may change it meanwhile
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        raw = value.raw if isinstance(value, FakeTensor) else value
        return torch.empty_strided(raw.shape, raw.stride(), dtype=raw.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _wrap(value: Any, gpu: FakeDevice) -> Any:
    return FakeTensor(value, gpu) if isinstance(value, Tensor) else value


def _moved(value: Any, gpu: FakeDevice) -> Any:
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return FakeTensor(value, gpu)
    return gpu.tensor(value) if isinstance(value, Tensor) else value


def _same(value: Any) -> Any:
    """Return the memory itself, before a write."""
    if isinstance(value, FakeTensor):
        return value.raw
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation that writes: its own arguments."""
    returns = func._schema.returns
    if not returns:
        return None
    found = []
    for each in returns:
        for place, argument in enumerate(func._schema.arguments):
            ours, its = argument.alias_info, each.alias_info
            if ours is not None and its is not None and ours.before_set == its.before_set:
                found.append(args[place] if place < len(args) else kwargs[argument.name])
                break
    return found[0] if len(returns) == 1 else tuple(found)


# --- Ranks. ---


@functools.cache
def driver() -> Driver:
    """Return the driver of this process; its streams and their threads stay."""
    return Driver()


@functools.cache
def gpu(ordinal: int) -> FakeDevice:
    """Return one of the stand-in's devices."""
    return FakeDevice(driver(), ordinal)


def is_built() -> bool:
    """Return True if the stand-in is built."""
    return library("libfake_nccl.so").exists()


@pytest.fixture
def fake_gpus() -> Iterator[Driver]:
    """The stand-in's driver, without rules. A test that misuses it fails."""
    if not is_built():
        pytest.skip("the stand-in is not built: cmake --build build/native --target fake_cuda")
    found = driver()
    found.control("fake_cuda_reset")
    found.control("fake_cuda_stream_delay_us", 0)
    yield found
    misuse = found.misuse()
    found.control("fake_cuda_reset")
    found.control("fake_cuda_stream_delay_us", 0)
    problems = [misuse] if misuse else []
    for ordinal in range(NUM_GPUS):
        try:
            gpu(ordinal).forget()
        except FakeCudaError as error:
            problems.append(str(error))
    assert not problems, problems


def open_fake(engine: Engine, ordinal: int) -> FakeDevice:
    """Open a device of the stand-in, as `sparkhvd.torch.cuda.open_cuda` does."""
    engine.open_device(ordinal, cuda_library=str(driver().path), nccl_library=str(driver().nccl))
    return gpu(ordinal)


@contextlib.contextmanager
def use_engine(engine: Engine) -> Iterator[Context]:
    """Use an engine as `sparkhvd.torch.context.use_engine` does, with GPUs of the stand-in."""
    with use_plain_engine(engine) as made:
        made.part(RankGpu).opener = open_fake
        yield made
