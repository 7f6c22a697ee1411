"""Add output columns to Arrow batches in a Python worker, for `TorchModel.transform`.

Every worker loads this module, so it does not import pyspark.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import math
import os
import pickle
import socket
import stat
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from sparkhvd import cpus
from sparkhvd.data.arrow import InvalidRowCounts, column_to_numpy, shape_text, usable_rows
from sparkhvd.data.arrow_types import numpy_to_array
from sparkhvd.data.columns import labels
from sparkhvd.data.columns.binding import InputBinding
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.ragged import Ragged, Rows, Values, row_shape, take
from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.runner.protocol import bytes_of
from sparkhvd.runner.slots import threads_per_rank
from sparkhvd.training.modules.architecture import load_shell
from sparkhvd.training.modules.lookups import naming_lookups
from sparkhvd.training.modules.modes import in_mode
from sparkhvd.training.modules.weights import Weights
from sparkhvd.training.precision import autocast, widened
from sparkhvd.training.to_device import Mover
from sparkhvd.training.torch_settings import TorchSettings, as_on_driver

if TYPE_CHECKING:
    from pyspark import Broadcast


# ----------------------------------------------------------------------------------------------------
# Compute the output columns of a transform as tensors.


@dataclass(frozen=True)
class Output:
    """Output column of a transform.

    Attributes:
        name: name of the column.
        kind: "output", "prediction", "probability" or "raw"; "widths" for the elements per row of each output.
        label: index of the model's output from which the column is computed.
        is_vector: True for an ML vector, False for a double.
        size: elements of the vector, or classes of the prediction; 0 if unknown, or if the prediction is a value.
    """

    name: str
    kind: str
    label: int
    is_vector: bool
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Description of how to compute output columns from rows, without the model.

    Attributes:
        columns: feature columns with the names and shapes of the training data.
        sources: indices of the feature columns in the DataFrame.
        names: names of all columns of the DataFrame.
        inputs: columns of each argument of the model.
        links: link from outputs to probabilities of each label.
        outputs: columns to add, in order.
        output_fn: the user's function from an output to probabilities, or None.
        functions: the user's decoders and collate functions.
        thresholds: thresholds of the classes, or None.
        precision: the Param; `forward` computes with the same precision as in validation.
    """

    columns: tuple[Column, ...]
    sources: tuple[int, ...]
    names: tuple[str, ...]
    inputs: InputBinding
    links: tuple[str, ...]
    outputs: tuple[Output, ...]
    output_fn: Callable[[Tensor], Tensor] | None = None
    functions: RowFunctions = field(default_factory=RowFunctions)
    thresholds: Sequence[float] | None = None
    precision: str = "32"


def column_tensor(spec: Computation, column: Output, output: Tensor) -> Tensor:
    """Compute one output column."""
    link = spec.links[column.label]
    if column.kind == "output":
        return labels.flat_rows(output)
    if column.kind == "raw":
        return labels.raw(link, output)
    if column.kind == "probability":
        return _probability(spec, link, output)
    if spec.thresholds is not None:
        return labels.most_likely(_probability(spec, link, output), spec.thresholds)
    if spec.output_fn is not None:
        return labels.prediction(labels.IDENTITY, _probability(spec, link, output))
    return labels.prediction(link, output)


def _probability(spec: Computation, link: str, output: Tensor) -> Tensor:
    if spec.output_fn is not None:
        rows = labels.flat_rows(spec.output_fn(output))
        return labels.both_classes(rows) if link in (labels.SIGMOID, labels.PROBABILITY) else rows
    found = labels.probability(link, output)
    assert found is not None  # the driver has checked the link
    return found


# ----------------------------------------------------------------------------------------------------
# Choose the device of a Python worker in `TorchModel.transform`: the GPU of its Spark task, or the CPU.
# The worker belongs to Spark and later runs other tasks, so CUDA_VISIBLE_DEVICES is not changed: the address of a GPU
# is its number in the process. Every process on a GPU uses a few hundred MB of GPU memory, so a host limits the number
# of tasks that compute on a GPU at a time. Other tasks wait for a lock file, which the kernel releases when its owners
# exit.
# If a stage has several models, each model has its own worker in the same task, and a worker feeds the next worker.
# These workers share one lock. With separate locks, tasks whose first workers hold all locks would deadlock.

# Number of tasks of a host that compute on one GPU at a time; more tasks would not be faster and would use more memory.
TASKS_PER_GPU = 4
# Longest wait for a lock. The owners of locks are alive, so the limit only catches tasks that never end. It is longer
# than any partition should take, because waiting for a large partition must not fail.
WAIT_S = 24 * 3600.0
_POLL_S = 0.05


@dataclass(frozen=True)
class TaskGpus:
    """GPUs and cores of a Spark task.

    Attributes:
        addresses: addresses of the GPUs.
        partition: number of the task's partition.
        name: name that all workers of the task share, and no other task of this host has; "" outside a task.
        num_threads: number of the task's cores, at most the cores that this process may use.
    """

    addresses: tuple[str, ...] = ()
    partition: int = 0
    name: str = ""
    num_threads: int = 1


NO_GPUS = TaskGpus()


def task_gpus() -> TaskGpus:
    """Find the GPUs and cores of this worker's Spark task. The result is empty outside a task."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return TaskGpus()
    gpu = task.resources().get("gpu")
    # Each application counts its tasks from 0, so the pid of the parent process (the executor's daemon) is added.
    name = f"{os.getppid()}-{task.taskAttemptId()}"
    num_threads = threads_per_rank(task.cpus(), cpus.allowed())
    return TaskGpus(tuple(gpu.addresses) if gpu else (), task.partitionId(), name, num_threads)


def choose(use_gpu: bool | None, task: TaskGpus) -> torch.device:
    """Choose the device of this task.

    Args:
        use_gpu: the Param; None uses a GPU if Spark assigned one and torch supports GPUs.
        task: GPUs of the task.

    Raises:
        InvalidArgumentError: a GPU is required, but this process does not see a GPU, or not the assigned GPU.
    """
    if use_gpu is False or (use_gpu is None and not task.addresses):
        return torch.device("cpu")
    if use_gpu is None and torch.version.cuda is None:
        warnings.warn(
            f"transform computes on the CPU, although Spark gave the task a GPU: torch {torch.__version__} of the worker is "
            "built without CUDA.",
            stacklevel=2,
        )
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    host = socket.gethostname()
    if not count:
        why = (
            f"Spark gave the task the GPU with address {task.addresses[0]}"
            if task.addresses
            else "use_gpu is True"
        )
        raise InvalidArgumentError(
            f"transform: {why}, but torch {torch.__version__} of the worker on host {host} sees no GPU. Install torch with "
            "CUDA there, or set use_gpu=False on the model."
        )
    if not task.addresses:
        return torch.device("cuda", task.partition % count)
    index = _ordinal(task.addresses[0], count)
    if index is None:
        raise InvalidArgumentError(
            f"transform: Spark gave the task the GPU with address {task.addresses[0]}, but the worker on host {host} sees "
            f"{count} GPUs, numbered from 0. Let the discovery script print such numbers, or UUIDs; or set use_gpu=False on "
            "the model."
        )
    return torch.device("cuda", index)


def _ordinal(address: str, count: int) -> int | None:
    """Find torch's number of the GPU at `address`, a number or a UUID, or return None if torch does not see it."""
    if address.isdigit():
        return int(address) if int(address) < count else None
    for index in range(count):
        uuid = _uuid(index)
        if uuid and uuid in address:
            return index
    return None


def _uuid(index: int) -> str:
    """Read the UUID of a GPU by torch's number, or return "" if this torch does not provide it."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


@contextlib.contextmanager
def held(
    device: torch.device,
    task: str = "",
    *,
    limit: int = TASKS_PER_GPU,
    wait_s: float = WAIT_S,
    folder: Path | None = None,
) -> Iterator[None]:
    """Hold one of a host's `limit` slots to compute on a GPU inside the block. The CPU has no limit.

    Args:
        device: device of this process.
        task: name of the task, see `TaskGpus`; "" always takes a slot of its own.
        limit: number of tasks that may compute at once.
        wait_s: longest wait in seconds.
        folder: folder of the lock files.

    Raises:
        TimeoutError: no slot was released in `wait_s` seconds.
        InvalidArgumentError: the folder belongs to another user.
    """
    if device.type == "cpu":
        yield
        return
    folder = folder or Path(tempfile.gettempdir(), f"sparkhvd-gpus-{os.getuid()}")
    _make_private(folder)
    deadline = time.monotonic() + wait_s
    # Files are named by UUID, because containers may share a temporary folder and each calls its own GPU number 0.
    gpu = _uuid(device.index) or str(device.index)
    paths = [folder / f"{gpu}-{number}.lock" for number in range(limit)]
    while (lock := _lock(paths, task)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"transform: {limit} other tasks of this host have computed on {device} for {wait_s:g} s. Give "
                "tasks a larger share by spark.task.resource.gpu.amount, or set use_gpu=False on the model."
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)


def _make_private(folder: Path) -> None:
    """Make a folder for this user alone, or raise an error if another user owns it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise InvalidArgumentError(
            f"transform: {folder} is not a folder, or belongs to user {found.st_uid} and not to this user. Its owner could block all "
            "transforms on the GPU. Delete it, or set TMPDIR for the executors."
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)


def _lock(paths: Sequence[Path], task: str) -> int | None:
    """Lock the file of the task's other workers, else a free file.

    Returns None if no file is free.
    """
    for choose in (_join, _begin) if task else (_begin,):
        for path in paths:
            # O_NOFOLLOW, because all users share the temporary folder and another user may have made a link.
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if choose(lock, task.encode()):
                    return lock
            except BlockingIOError:
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
    return None


def _join(lock: int, task: bytes) -> bool:
    """Lock a file already locked by another worker of this task."""
    import fcntl  # Windows has no fcntl, but a Connect client on Windows imports this file

    if _owner(lock) != task:
        return False
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return _owner(lock) == task  # another task may have taken the file before the lock


def _begin(lock: int, task: bytes) -> bool:
    """Lock a free file for this task."""
    import fcntl  # Windows has no fcntl

    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(lock, 0)
    if not task:
        return True
    os.pwrite(lock, task, 0)
    # Linux releases the exclusive lock before it grants the shared lock, so another task may become the owner in
    # between.
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return _owner(lock) == task


def _owner(lock: int) -> bytes:
    return os.pread(lock, 256, 0)


# Maximum of rows per call of the model: large enough to hide Python's cost, small enough for the CPU's caches.
MAX_ROWS = 4096
# Number of models that a worker keeps. Workers run for a long time, and a pipeline has few stages with a model.
KEPT_MODELS = 3
# Maximum of entries in the padded rows of one call.
MAX_ENTRIES = 8192
# Maximum of bytes of the inputs of one call.
MAX_BYTES = 64 << 20
_REMEDY = "Fill or drop them first, or set handle_invalid to 'skip' or {column: value}."


@dataclass(frozen=True, kw_only=True)
class PredictSpec(Computation):
    """Specification of a transform, for its workers.

    Attributes:
        shell: module without its weights, see `architecture.dump_shell`.
        weights: weights of the module.
        use_gpu: the Param.
        torch_settings: torch settings of the driver.
    """

    shell: bytes = field(repr=False)
    weights: Weights
    use_gpu: bool | None = None
    torch_settings: TorchSettings = field(default_factory=dict)


class ModelCache:
    """Cache of the most recently used models of this process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._models: OrderedDict[tuple[str, str, str], nn.Module] = OrderedDict()

    def get(self, spec: PredictSpec, device: torch.device) -> nn.Module:
        """Load a spec's model on the device in eval mode, from the cache if possible."""
        key = (spec.weights.sha256, hashlib.sha256(spec.shell).hexdigest(), str(device))
        if key not in self._models:
            model = in_mode(load_shell(spec.shell, spec.weights.load()), is_training=False)
            model.to(device)
            self._models[key] = model
            while len(self._models) > self._size:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return self._models[key]


_cache = ModelCache(KEPT_MODELS)


def load_spec(carried: bytes | Broadcast[bytes]) -> PredictSpec:
    """Unpickle the driver's spec, sent with Spark's function."""
    spec: PredictSpec = pickle.loads(bytes_of(carried))  # noqa: S301 - the driver's closure
    return spec


@functools.cache
def _freeze_imports() -> None:
    """Exclude imported modules from garbage collection, to save 0.1 s per task with torch."""
    gc.freeze()


def predict(
    spec: PredictSpec, batches: Iterator[pa.RecordBatch], task: TaskGpus = NO_GPUS
) -> Iterator[pa.RecordBatch]:
    """Add the output columns to every batch, and leave other columns unchanged.

    Columns are named c0, c1, ...
    """
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:  # without rows the model is not loaded
        return
    _freeze_imports()
    device = choose(spec.use_gpu, task)
    torch.set_num_threads(task.num_threads)
    with held(device, task.name):
        yield from _predicted(spec, device, itertools.chain([first], filled))


def _predicted(
    spec: PredictSpec, device: torch.device, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    with as_on_driver(spec.torch_settings):
        model = _cache.get(spec, device)
    move = Mover(device)
    for batch in batches:
        batch, _ = usable_batch(spec, batch)
        if not batch.num_rows:
            continue
        columns = features(spec, batch)
        with as_on_driver(spec.torch_settings):
            values, missing = compute(spec, model, columns, move)
        mask = missing if spec.functions.skips else None
        added = [to_arrow(each, mask) for each in values]
        arrays = [*batch.columns, *added]
        yield pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(arrays))])


def rows_at_once(columns: Sequence[Column]) -> int:
    """Compute the number of rows per call of the model. Large decoded rows reduce it."""
    widths = [
        math.prod(c.row_shape) * c.row_dtype.itemsize
        for c in columns
        if c.row_shape is not None and c.kind != "sparse"
    ]
    return max(1, min(MAX_ROWS, MAX_BYTES // max(1, sum(widths))))


def compute(
    spec: Computation, model: nn.Module, columns: dict[str, Values], move: Mover
) -> tuple[list[np.ndarray[Any, Any]], npt.NDArray[np.bool_]]:
    """Compute the output columns of rows in parts and return them with the mask of `usable`."""
    at_once, num_rows = rows_at_once(spec.columns), len(next(iter(columns.values())))
    # no_grad as in validation, because `forward` may use gradients inside. It ends with the block, because other Spark
    # tasks use this process later.
    with torch.no_grad():
        parts = [
            usable(spec, model, {n: v[start : start + at_once] for n, v in columns.items()}, move)
            for start in range(0, num_rows, at_once)
        ]
    values = [_joined(each) for each in zip(*(found for found, _ in parts), strict=True)]
    return values, np.concatenate([mask for _, mask in parts])


def usable(
    spec: Computation, model: nn.Module, columns: dict[str, Values], move: Mover
) -> tuple[list[np.ndarray[Any, Any]], npt.NDArray[np.bool_]]:
    """Compute the output columns, and a mask of rows skipped by a decoder. Their outputs are 0."""
    num_rows = len(next(iter(columns.values())))
    decoded = spec.functions.decode_usable(spec.columns, columns)
    missing = np.zeros(num_rows, np.bool_)
    if decoded.kept is None:
        return _computed(spec, model, decoded.columns, num_rows, move), missing
    missing[:] = True
    missing[decoded.kept] = False
    if not len(decoded.kept):
        return [_zeros(num_rows, output.size, output) for output in spec.outputs], missing
    found = _computed(spec, model, decoded.columns, len(decoded.kept), move)
    spread = []
    for output, values in zip(spec.outputs, found, strict=True):
        out = _zeros(num_rows, values.shape[-1], output)
        out[decoded.kept] = values
        spread.append(out)
    return spread, missing


def _zeros(num_rows: int, width: int, output: Output) -> np.ndarray[Any, Any]:
    return np.zeros((num_rows, width) if output.is_vector else num_rows)


def _joined(values: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Join the values of parts. A part with only skipped rows gets the width of the other parts."""
    width = max(each.shape[-1] for each in values) if values[0].ndim > 1 else 0
    return np.concatenate(
        [
            np.zeros((len(each), width)) if width and each.shape[-1] != width else each
            for each in values
        ]
    )


def _computed(
    spec: Computation, model: nn.Module, decoded: dict[str, Any], num_rows: int, move: Mover
) -> list[np.ndarray[Any, Any]]:
    """Compute the output columns of decoded rows as float64: (rows,) for doubles, (rows, width) for vectors.

    Rows of variable length are first grouped by length, because padding costs as much time as data.
    """
    lengths = [v.lengths for v in decoded.values() if isinstance(v, Ragged)]
    if not lengths:
        return _outputs(spec, model, decoded, num_rows, move)
    groups = groups_by_length(np.sum(lengths, axis=0))
    parts = [
        _outputs(spec, model, {n: _taken(v, rows) for n, v in decoded.items()}, len(rows), move)
        for rows in groups
    ]
    back = np.argsort(np.concatenate(groups))
    return [np.concatenate(values)[back] for values in zip(*parts, strict=True)]


def groups_by_length(lengths: Rows) -> list[Rows]:
    """Divide rows into groups of similar length, longest first, of one row or at most `MAX_ENTRIES` padded entries."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    while start < len(order):
        rows = max(1, MAX_ENTRIES // max(1, int(lengths[order[start]])))
        groups.append(order[start : start + rows])
        start += rows
    return groups


def _taken(values: Any, rows: Rows) -> Any:
    return [values[row] for row in rows] if isinstance(values, list) else take(values, rows)


def _outputs(
    spec: Computation, model: nn.Module, decoded: dict[str, Any], num_rows: int, move: Mover
) -> list[np.ndarray[Any, Any]]:
    """Compute the output columns of decoded rows in one call of the model."""
    arguments, keywords = move(spec.inputs.apply(spec.functions.collate_batch(decoded)))
    with autocast(spec.precision, move.device), naming_lookups(model, decoded):
        result = model(*arguments, **keywords)
    outputs = widened(labels.outputs_of(result))
    for output in outputs:
        if output.ndim == 0 or len(output) != num_rows:
            raise InvalidArgumentError(
                f"The model returned shape {tuple(output.shape)} for {num_rows} rows. An output must have one "
                "entry per row."
            )
    if spec.outputs[0].kind == "widths":
        return [np.tile(np.array(labels.widths_of(outputs), np.float64), (num_rows, 1))]
    return [column_values(spec, column, outputs[column.label]) for column in spec.outputs]


def column_values(spec: Computation, column: Output, output: Tensor) -> np.ndarray[Any, Any]:
    """Compute the values of one output column in float64."""
    if output.is_complex():
        raise InvalidArgumentError(
            f"The model returned a complex output for column {column.name!r}, which Spark's columns cannot hold. Return real and imaginary "
            "parts, for example with torch.view_as_real, or omit the output with '' in outputCols."
        )
    values = column_tensor(spec, column, output).double().cpu().numpy()
    return values.reshape(len(values), -1) if column.is_vector else values.reshape(-1)


def usable_batch(
    spec: Computation, batch: pa.RecordBatch
) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_] | None]:
    """Drop the rows that `handle_invalid` skips and return the other rows and their mask (None for all rows)."""
    pairs = zip(spec.columns, spec.sources, strict=True)
    usable = [usable_rows(batch.column(source), c) for c, source in pairs if c.invalid[0] == "skip"]
    masks = [mask for mask in usable if mask is not None]
    if not masks:
        return batch, None
    kept = np.logical_and.reduce(masks)
    return batch.filter(pa.array(kept)), kept


def features(spec: Computation, batch: pa.RecordBatch) -> dict[str, Values]:
    """Convert the feature columns of a batch with at least one row and return them by name.

    Raises:
        InvalidArgumentError: a value cannot be used; the message counts the rows.
    """
    return {
        c.name: feature(batch.column(source), c, spec.names[source])
        for c, source in zip(spec.columns, spec.sources, strict=True)
    }


def feature(array: pa.Array, column: Column, source: str) -> Values:
    """Convert a feature column to (rows, *shape), or to rows of any length.

    Raises:
        InvalidArgumentError: a value cannot be used; the message counts the rows.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    values, found = column_to_numpy(array, column)
    # The shape is None if only a user's function reads the rows.
    if values is None or (len(values) and column.shape not in (None, row_shape(values))):
        raise InvalidArgumentError(f"transform: column {source!r} {_problem(found, column)}")
    return values


def _problem(found: InvalidRowCounts, column: Column) -> str:
    if found.nulls:
        return f"is null, or has a null element, in {found.nulls} rows of a batch. {_REMEDY}"
    if found.nans:
        is_kept = (
            f" If NaN is meant, set handle_invalid={{{column.name!r}: 'keep'}}."
            if column.holds_nan
            else ""
        )
        return f"is NaN in {found.nans} rows of a batch. {_REMEDY}{is_kept}"
    if found.infinities:
        return (
            f"is infinite in {found.infinities} rows of a batch, for example {found.examples['infinities']}. Cap or drop "
            "them first, or set handle_invalid."
        )
    if found.overflows or found.inexact:
        name = "overflows" if found.overflows else "inexact"
        exactly = "" if found.overflows else " exactly"
        return (
            f"has {found.counts()[name]} rows in a batch with a number that {column.number_type} cannot hold{exactly}, for "
            f"example {found.examples[name]}. Scale it as in training, cast integers to double if they may be rounded, or "
            "set handle_invalid."
        )
    if found.fractions:
        return f"has {found.fractions} rows in a batch that are not whole numbers."
    shapes = listed(shape_text(s) for s in sorted(found.shapes)) or "0"
    expected = shape_text(column.shape or (1,))
    return f"has {shapes} elements per row in a batch, but the model takes {expected}."


def to_arrow(
    values: npt.NDArray[np.float64], missing: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Convert numbers to a column of doubles, or rows of numbers to a column of Spark's dense vectors.

    Args:
        values: (rows,) or (rows, width).
        missing: mask of rows that become null, or None.
    """
    if values.ndim == 1:
        return numpy_to_array(values) if missing is None else pa.array(values, mask=missing)
    num_rows, width = values.shape
    offsets = numpy_to_array(np.arange(num_rows + 1, dtype=np.int32) * np.int32(width))
    lists = pa.ListArray.from_arrays(offsets, numpy_to_array(values.reshape(-1)))
    return pa.StructArray.from_arrays(
        [
            numpy_to_array(np.ones(num_rows, dtype=np.int8)),  # 1 = dense: no size, no indices
            pa.nulls(num_rows, pa.int32()),
            pa.nulls(num_rows, pa.list_(pa.int32())),
            lists,
        ],
        names=["type", "size", "indices", "values"],
        mask=None if missing is None else pa.array(missing),
    )
