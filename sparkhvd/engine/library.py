"""The C header in ctypes: enumerations, structures and functions of the compiled library.

A test compares all of it with `native/include/sparkhvd.h`. Only this package uses the functions.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkhvd.errors import EngineUnavailableError

ABI_VERSION = 12
WIRE_VERSION = 14


class Status(IntEnum):
    """Results of native calls and finished operations."""

    OK = 0
    PENDING = 1
    INVALID_ARGUMENT = 2
    MISMATCH = 3
    TIMEOUT = 4
    PEER_LOST = 5
    SHUT_DOWN = 6
    UNSUPPORTED = 7
    INTERNAL = 8
    NO_MEMORY = 9


class DType(IntEnum):
    """Element types."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT32 = 10
    FLOAT64 = 11
    BOOL = 12


class ReduceOp(IntEnum):
    """Reductions; Horovod's have its numbers. Those of bits are for integers and bool, on the CPU."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BIT_AND = 6
    BIT_OR = 7
    BIT_XOR = 8


class Collective(IntEnum):
    """Kinds of operation: the tensors, results and numbers of each.

    ALLREDUCE: combines tensors elementwise; every rank gets the same values.
    ALLGATHER: joins the ranks' tensors along the first dimension, in rank order, as `Work.output()`. First dimensions
        may differ between ranks, the others may not. On a device the result goes to the tensors' outputs, which
        have room for all ranks' rows.
    BROADCAST: copies the input of `root_rank` (counted among all ranks) to every rank's output.
    BARRIER: waits for every rank of the process set.
    ALLTOALL: sends rows to every rank and joins the received ones in rank order, as `Work.output()`; on a device in
        the tensor's output. Numbers: the rows for each rank of the process set, none for equal parts. All
        dimensions but the first are equal on all ranks.
    REDUCESCATTER: an allreduce of which every rank gets its rows only, in the tensors' outputs, which may be where
        they are in the input. Of d rows rank r of n gets d // n, and one more if r < d % n; ranks in the order of
        the process set.
    ALLGATHER_INTO: the inverse of a reducescatter, in place: every rank has its rows of each tensor and gets the
        others'. Shapes are equal on all ranks, inputs are outputs.
    REDUCE: an allreduce whose result only `root_rank` gets, in its tensors' outputs.
    GATHER: an allgather of one tensor whose result only `root_rank` gets.
    SCATTER: divides the tensor of `root_rank` by rows, as `Work.output()`. Numbers: the root's, the rows for each rank
        of the process set, none for equal parts; the other ranks bring a tensor of 0 rows. CPU only, like the two above.
    SEND, RECEIVE: a message from one rank of the process set to another, `root_rank`; of a receive also -1, any rank. No
        collectives: nobody else takes part, and names need only be unique on their rank. Numbers: the tag; of a receive
        also 1 behind it, if shorter messages fit, too; the tensor is undefined behind their bytes. `Work.output().rows` of a receive:
        sender, tag, bytes. CPU only.
    JOIN, ADD_PROCESS_SET, REMOVE_PROCESS_SET, REGISTER, CONFIGURE: see `Engine.join`, `add_process_set`,
        `remove_process_set`, `allocate` and `configure`.

    Numbers of an allreduce, allgather or reducescatter: none, or a digest that must be equal on all ranks, of the
    operations that belong together.
    """

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    BARRIER = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    JOIN = 6
    ADD_PROCESS_SET = 7
    REMOVE_PROCESS_SET = 8
    REGISTER = 9
    CONFIGURE = 10
    ALLGATHER_INTO = 11
    REDUCE = 12
    GATHER = 13
    SCATTER = 14
    SEND = 15
    RECEIVE = 16


class Knob(IntEnum):
    """Places of the numbers of a CONFIGURE."""

    CHUNK_BYTES = 0
    STREAMS = 1
    DIRECT_RANKS = 2


class Loss(IntEnum):
    """How a rank was lost."""

    DEAD = 1
    SILENT = 2
    LEFT = 3


class Isa(IntEnum):
    """Instruction sets of the reduce kernels; `Settings.isa` has their names."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3
    NEON = 4


DEVICE_CPU = -1


class EngineOptions(ctypes.Structure):
    """`sparkhvd_engine_options`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("hosts", ctypes.POINTER(ctypes.c_int32)),
        ("sockets", ctypes.POINTER(ctypes.c_int32)),
        ("isa", ctypes.c_int32),
        ("spin_us", ctypes.c_int32),
        ("stall_warning_s", ctypes.c_double),
        ("stall_shutdown_s", ctypes.c_double),
        ("host_loss_s", ctypes.c_double),
        ("connect_timeout_s", ctypes.c_double),
        ("slot_bytes", ctypes.c_uint64),
        ("slots", ctypes.c_uint32),
        ("use_shared_memory", ctypes.c_uint32),
        ("streams", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("stream_sockets", ctypes.POINTER(ctypes.c_int32)),
        ("stack_signal", ctypes.c_int32),
        ("stack_pipe", ctypes.c_int32),
    ]


class DeviceOptions(ctypes.Structure):
    """`sparkhvd_device_options`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("cuda_library", ctypes.c_char_p),
        ("nccl_library", ctypes.c_char_p),
        ("nccl_candidates", ctypes.POINTER(ctypes.c_char_p)),
        ("num_nccl_candidates", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Tensor(ctypes.Structure):
    """`sparkhvd_tensor`."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("num_dims", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("output_bytes", ctypes.c_uint64),
    ]


class Request(ctypes.Structure):
    """`sparkhvd_request`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("collective", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("process_set", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("reduce_op", ctypes.c_int32),
        ("root_rank", ctypes.c_int32),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("device", ctypes.c_int32),
        ("num_tensors", ctypes.c_uint32),
        ("tensors", ctypes.POINTER(Tensor)),
        ("stream", ctypes.c_uint64),
        ("splits", ctypes.POINTER(ctypes.c_int64)),
        ("num_splits", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("timeout_s", ctypes.c_double),
        ("adopted", ctypes.c_void_p),
    ]


class Output(ctypes.Structure):
    """`sparkhvd_output`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
    ]


class LossEntry(ctypes.Structure):
    """`sparkhvd_loss`."""

    _fields_ = [("rank", ctypes.c_int32), ("kind", ctypes.c_int32)]


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "sparkhvd_engine_options": EngineOptions,
    "sparkhvd_device_options": DeviceOptions,
    "sparkhvd_tensor": Tensor,
    "sparkhvd_request": Request,
    "sparkhvd_output": Output,
    "sparkhvd_loss": LossEntry,
}

_HANDLE = ctypes.c_void_p
_OUT_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_ERROR = (ctypes.c_char_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Signature:
    """A function of the header; one that may block releases the GIL."""

    returns: Any
    arguments: tuple[Any, ...]
    may_block: bool = False


FUNCTIONS: dict[str, Signature] = {
    "sparkhvd_abi_version": Signature(ctypes.c_uint32, ()),
    "sparkhvd_wire_version": Signature(ctypes.c_uint32, ()),
    "sparkhvd_isa_available": Signature(ctypes.c_int32, (ctypes.c_int32,)),
    # Waits for nothing; releases the GIL because it reads megabytes.
    "sparkhvd_crc32_blocks": Signature(
        None,
        (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_uint32),
        ),
        may_block=True,
    ),
    "sparkhvd_engine_create": Signature(
        ctypes.c_int32,
        (ctypes.POINTER(EngineOptions), _OUT_HANDLE, *_ERROR),
        may_block=True,
    ),
    "sparkhvd_engine_shutdown": Signature(ctypes.c_int32, (_HANDLE, *_ERROR), may_block=True),
    "sparkhvd_finish": Signature(None, (), may_block=True),
    "sparkhvd_engine_abort": Signature(None, (_HANDLE, ctypes.c_char_p)),
    "sparkhvd_engine_status": Signature(ctypes.c_int32, (_HANDLE, *_ERROR)),
    "sparkhvd_engine_after_fork": Signature(None, (_HANDLE,)),
    # Joins a thread that needs no GIL; releases it all the same, because a join is a wait.
    "sparkhvd_engine_destroy": Signature(None, (_HANDLE,), may_block=True),
    "sparkhvd_engine_counters": Signature(
        ctypes.c_size_t, (_HANDLE, ctypes.c_char_p, ctypes.c_size_t)
    ),
    "sparkhvd_engine_lost": Signature(
        ctypes.c_uint32, (_HANDLE, ctypes.POINTER(LossEntry), ctypes.c_uint32)
    ),
    # Both wait for the disk.
    "sparkhvd_timeline_start": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.c_char_p, ctypes.c_int32, *_ERROR), may_block=True
    ),
    "sparkhvd_timeline_stop": Signature(ctypes.c_int32, (_HANDLE, *_ERROR), may_block=True),
    # Loads libraries and starts the device.
    "sparkhvd_device_open": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.POINTER(DeviceOptions), *_ERROR), may_block=True
    ),
    "sparkhvd_submit": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.POINTER(Request), _OUT_HANDLE, *_ERROR)
    ),
    "sparkhvd_run": Signature(
        ctypes.c_int32,
        (_HANDLE, ctypes.POINTER(Request), ctypes.c_uint32, _OUT_HANDLE, *_ERROR),
        may_block=True,
    ),
    "sparkhvd_poll": Signature(ctypes.c_int32, (_HANDLE, *_ERROR)),
    "sparkhvd_wait": Signature(ctypes.c_int32, (_HANDLE, ctypes.c_uint32, *_ERROR), may_block=True),
    "sparkhvd_wait_stream": Signature(
        ctypes.c_int32, (_HANDLE, ctypes.c_uint64, ctypes.c_uint32, *_ERROR), may_block=True
    ),
    "sparkhvd_work_output": Signature(ctypes.c_int32, (_HANDLE, ctypes.POINTER(Output), *_ERROR)),
    "sparkhvd_work_buffer": Signature(ctypes.c_int32, (_HANDLE, _OUT_HANDLE, *_ERROR)),
    "sparkhvd_buffer_data": Signature(ctypes.c_void_p, (_HANDLE,)),
    "sparkhvd_buffer_bytes": Signature(ctypes.c_uint64, (_HANDLE,)),
    "sparkhvd_buffer_is_shared": Signature(ctypes.c_int32, (_HANDLE,)),
    "sparkhvd_buffer_device": Signature(ctypes.c_int32, (_HANDLE,)),
    "sparkhvd_buffer_release": Signature(None, (_HANDLE,)),
    "sparkhvd_work_is_left_to_device": Signature(ctypes.c_int32, (_HANDLE,)),
    "sparkhvd_work_release": Signature(None, (_HANDLE,)),
}


class Library:
    """The loaded functions, by their names without the prefix."""

    def __init__(self, path: Path) -> None:
        try:
            keeps_gil, releases_gil = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        except OSError as error:
            found = str(error) if path.exists() else "the file is missing"
            raise EngineUnavailableError(
                f"Engine(): cannot load {path}: {found}. In a checkout run `make env`. Elsewhere install the "
                "wheel for Linux on x86-64 or aarch64, or compile the library on this machine: "
                "`pip install --force-reinstall --no-deps --no-binary sparkhvd sparkhvd`. (The wheel "
                "py3-none-any is for clients and has no library.)"
            ) from error
        version = getattr(keeps_gil, "sparkhvd_abi_version", None)
        found_version = None if version is None else int(version())
        if found_version != ABI_VERSION:
            raise EngineUnavailableError(
                f"Engine(): {path} has ABI version {found_version}, this Python package needs "
                f"{ABI_VERSION}. In a checkout run `make env` to build the library again; otherwise "
                "reinstall sparkhvd."
            )
        for name, signature in FUNCTIONS.items():
            function = getattr(releases_gil if signature.may_block else keeps_gil, name)
            function.restype = signature.returns
            function.argtypes = signature.arguments
            setattr(self, name.removeprefix("sparkhvd_"), function)
        # Before what shuts engines down was registered, so after it at the end of the process.
        atexit.register(self.finish)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...
