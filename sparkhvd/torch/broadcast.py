"""Broadcasts of model parameters, optimizer state and Python objects.

Only `broadcast_object`, `allgather_object` and `pass_object` unpickle in this package, and only pickles of authenticated ranks of
the same job. Optimizer state travels as tensors and JSON.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.torch.arguments import to_list
from sparkhvd.torch.collectives.allgathers import gathered, start_allgather
from sparkhvd.torch.collectives.alltoalls import start_alltoall
from sparkhvd.torch.collectives.broadcasts import start_broadcast
from sparkhvd.torch.collectives.tensors import Operation
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id
from sparkhvd.wire import read_json

# --- Parameters. ---


def broadcast_parameters(
    params: Mapping[str, object] | Iterable[tuple[str, Tensor]] | Iterable[Tensor], root_rank: int
) -> None:
    """Copy the parameters of rank `root_rank` to every rank, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or a list of (name, tensor) or of tensors, which
            are matched by position. The same names, shapes and dtypes on every rank; complex dtypes, too.
            None values are skipped.
        root_rank: the rank with the values.

    Raises:
        InvalidArgumentError: `params` holds something else.
        MismatchError: ranks disagree on the shape or dtype of a parameter.
        CollectiveTimeoutError: a rank did not submit, or lacks a parameter; the message names it.
    """
    # Both are iterable (rows, children), but the user certainly meant something else.
    if isinstance(params, (Tensor, torch.nn.Module)):
        raise InvalidArgumentError(
            f"broadcast_parameters: expected a dict or a list, got {type(params).__name__}. Give model.state_dict(), "
            "model.named_parameters() or a list of tensors."
        )
    pairs: Iterable[object] = params.items() if isinstance(params, Mapping) else params
    named: dict[str, Tensor] = {}
    for index, pair in enumerate(to_list("broadcast_parameters", pairs)):
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        name, tensor = cast("tuple[object, object]", pair) if is_pair else (f"noname.{index}", pair)
        if tensor is None:
            continue
        if not (isinstance(name, str) and name and isinstance(tensor, Tensor)):
            raise InvalidArgumentError(
                f"broadcast_parameters: expected tensors or (name, tensor) pairs, found {type(tensor).__name__}"
                f"{f' for {name!r}' if is_pair else ''}. Give model.state_dict() or model.named_parameters(); "
                "send other objects with broadcast_object()."
            )
        if name in named:
            raise InvalidArgumentError(
                f"broadcast_parameters: two tensors have the name {name!r}. Give every tensor a unique name."
            )
        named[name] = tensor
    ctx = context()
    _broadcast_tensors(ctx, ctx.name("broadcast_parameters", None), named, root_rank)


def _broadcast_tensors(
    ctx: Context, prefix: str, named: Mapping[str, Tensor], root_rank: int
) -> None:
    """Broadcast all tensors in place, concurrently, and wait."""
    started: list[tuple[Operation, Tensor, Tensor]] = []
    for name in sorted(named):
        target = named[name].detach()
        tensor = target.resolve_conj().resolve_neg().contiguous()
        # The engine sends a complex number as two real numbers.
        sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        work = start_broadcast(ctx, f"{prefix}.{name}", sent, sent, root_rank)
        started.append((work, target, tensor))
    for work, target, tensor in started:
        work.wait()
        if tensor.data_ptr() != target.data_ptr():
            target.copy_(tensor)
        elif not target.is_inference():
            torch.autograd.graph.increment_version(target)


# --- Objects. ---

# Size of the first message of an object: its length and, if it fits, its bytes.
_LENGTH = struct.Struct("<q")
_HEAD_BYTES = 1024
_SMALL_BYTES = _HEAD_BYTES - _LENGTH.size


def _to_bytes(payload: bytes) -> Tensor:
    # A tensor shares the buffer's memory, which must be writable.
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else _no_bytes()


def _no_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _from_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _broadcast_bytes(
    ctx: Context, name: str, payload: bytes | None, root_rank: int, process_set: int = 0
) -> bytes:
    """Send rank `root_rank`'s `payload` to every rank. Other ranks pass None.

    A first message of fixed size holds the length and a small payload. Only larger payloads need a second message.
    """
    head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
    if payload is not None:
        small = payload if len(payload) <= _SMALL_BYTES else b""
        head = _to_bytes((_LENGTH.pack(len(payload)) + small).ljust(_HEAD_BYTES, b"\0"))
    start_broadcast(ctx, f"{name}.head", head, head, root_rank, process_set).wait()
    received = _from_bytes(head)
    (length,) = _LENGTH.unpack_from(received)
    if length <= _SMALL_BYTES:
        return received[_LENGTH.size : _LENGTH.size + length]
    content = _to_bytes(payload) if payload is not None else torch.empty(length, dtype=torch.uint8)
    start_broadcast(ctx, f"{name}.bytes", content, content, root_rank, process_set).wait()
    return payload if payload is not None else _from_bytes(content)


def _allgather_bytes(ctx: Context, name: str, payload: bytes, process_set: int = 0) -> list[bytes]:
    """Gather every rank's `payload`, by rank."""
    content = _to_bytes(payload)
    work = start_allgather(ctx, name, content, process_set)
    work.wait()
    joined, rows = gathered(work, content.dtype, content.shape)
    return [_from_bytes(part) for part in joined.split(list(rows))]


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rank `root_rank`'s object to every rank.

    Args:
        obj: any object that cloudpickle supports; used on `root_rank` only, which gets back the object itself.
        root_rank: the global rank with the object.
        name: as for `allreduce`.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError, MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("broadcast_object", name, number)
    is_root = ctx.engine.topology.rank == root_rank
    pickled = cloudpickle.dumps(obj) if is_root else None
    payload = _broadcast_bytes(ctx, name, pickled, root_rank, number)
    return obj if is_root else pickle.loads(payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather every rank's object, by rank. The objects may have any size and type.

    Args:
        obj: any object that cloudpickle supports.
        name: as for `allreduce`.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("allgather_object", name, number)
    parts = _allgather_bytes(ctx, name, cloudpickle.dumps(obj), number)
    return [pickle.loads(part) for part in parts]


def pass_object(obj: Any, name: str) -> Any:
    """Send an object to the next rank and return the previous rank's object. Every rank must call this."""
    ctx = context()
    place = ctx.engine.topology
    payload = cloudpickle.dumps(obj)
    splits = [0] * place.size
    splits[(place.rank + 1) % place.size] = len(payload)
    received, _ = start_alltoall(_to_bytes(payload), splits, name, global_process_set).wait()
    return pickle.loads(_from_bytes(received))


# --- Optimizer state. ---


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: object = None
) -> None:
    """Copy the optimizer state and options (learning rate, ...) of rank `root_rank` to every rank.

    The optimizer is not stepped and parameters do not change. All state of this rank is replaced, also by an empty
    state. As with Horovod, parameters of an optimizer without state then have gradients of zeros. Works for every class
    of `torch.optim`, and for other optimizers whose state holds tensors, numbers, strings, None, and lists, tuples and
    dicts of them.

    Args:
        optimizer: plain or distributed, with equally many parameter groups and parameters on every rank.
        root_rank: the rank with the state.
        model: not needed; accepted as in Horovod.

    Raises:
        InvalidArgumentError: the state holds something else.
        MismatchError: ranks disagree on the number of groups or parameters; raised on every rank.
    """
    del model
    ctx = context()
    had_state = bool(optimizer.state)
    prefix = ctx.name("broadcast_optimizer_state", None)
    _check_structure(ctx, prefix, optimizer)
    is_root = ctx.engine.topology.rank == root_rank
    tensors: list[Tensor] = []
    payload, error = None, None
    if is_root:
        try:
            described: object = _describe(_content(optimizer), tensors, type(optimizer).__name__)
        except InvalidArgumentError as refused:
            described, error = None, refused
        payload = json.dumps(described).encode()
    structure = read_json(
        _broadcast_bytes(ctx, f"{prefix}.structure", payload, root_rank), most_bytes=None
    )
    if structure is None:
        raise error or InvalidArgumentError(
            f"broadcast_optimizer_state: rank {root_rank} cannot send its optimizer's state; see that rank's error."
        )
    content = None if is_root else _build(structure, tensors, _on_gpu(optimizer))
    numbered = {str(number): tensor for number, tensor in enumerate(tensors)}
    _broadcast_tensors(ctx, f"{prefix}.tensor", numbered, root_rank)
    if content is not None:
        _install(optimizer, content)
    if not had_state and not getattr(optimizer, "_shards", None):
        for group in optimizer.__dict__[
            "param_groups"
        ]:  # a distributed optimizer's property would wait
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


def _check_structure(ctx: Context, prefix: str, optimizer: torch.optim.Optimizer) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    # A sharded optimizer with state cannot be broadcast, because no rank has the whole state.
    is_part = bool(getattr(optimizer, "_shards", None)) and bool(optimizer.state)
    parts = _allgather_bytes(ctx, f"{prefix}.groups", json.dumps([sizes, is_part]).encode())
    by_rank = [read_json(part, most_bytes=None) for part in parts]
    for rank, (sizes, is_part) in enumerate(by_rank):
        if is_part:
            raise InvalidArgumentError(
                "broadcast_optimizer_state: the optimizer is sharded, and no rank has the state of all parameters. "
                "Send a whole state dict with broadcast_object(), and load it with optimizer.load_state_dict() on "
                "every rank."
            )
        if sizes != by_rank[0][0]:
            raise MismatchError(
                "broadcast_optimizer_state: ranks disagree on the parameters per group. Rank 0 has "
                f"{by_rank[0][0]}, rank {rank} has {sizes}. Build the same optimizer on every rank."
            )


def _content(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Collect the state by parameter number, and the options of each group."""
    numbers: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers[parameter] = len(numbers)
    state = [
        [numbers[key] if isinstance(key, Tensor) else key, value]
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor) or key in numbers
    ]
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def _install(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Change the dictionaries in place, because schedulers and distributed optimizers refer to them.
    optimizer.state.clear()
    for key, value in content["state"]:
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value
    for group, options in zip(optimizer.param_groups, content["groups"], strict=True):
        for name in [name for name in group if name != "params" and name not in options]:
            del group[name]
        group.update(options)


def _describe(value: object, tensors: list[Tensor], where: str) -> list[object]:
    """Describe `value` for JSON as a pair [kind, content], and append its tensors to `tensors`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    if isinstance(value, Tensor):
        tensors.append(value)
        layout = torch.empty_like(value, device="meta").stride()
        name = str(value.dtype).removeprefix("torch.")
        place = "cpu" if value.is_cpu else "cuda"
        return ["tensor", [name, list(value.shape), list(layout), value.requires_grad, place]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_describe(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, dict):
        return [
            "dict",
            [
                [_describe(key, tensors, where), _describe(item, tensors, f"{where}[{key!r}]")]
                for key, item in value.items()
            ],
        ]
    raise InvalidArgumentError(
        f"broadcast_optimizer_state: {where} holds a {type(value).__name__}, which cannot be sent. Supported are tensors, "
        "numbers, strings, None, and lists, tuples and dicts of them. Send other objects with broadcast_object()."
    )


def _on_gpu(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Find a parameter on this rank's GPU, if any."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p for p in parameters if p.is_cuda), None)


def _build(described: Any, tensors: list[Tensor], on_gpu: Tensor | None) -> Any:
    """Build the value that `_describe` described, with empty tensors, and append the tensors to `tensors`.

    Tensors that the root has on its GPU are created on the device of `on_gpu`.
    """
    kind, content = described
    if kind == "plain":
        return content
    if kind == "tensor":
        name, shape, layout, requires_grad, place = content
        dtype = getattr(torch, name)
        if place == "cpu":
            tensor = torch.empty_strided(shape, layout, dtype=dtype)
        elif on_gpu is not None:
            tensor = on_gpu.new_empty_strided(shape, layout, dtype=dtype)
        else:
            raise MismatchError(
                "broadcast_optimizer_state: the root has state on a GPU, and this rank has its parameters on the CPU. "
                "Put the model on the same kind of device on every rank."
            )
        tensor.requires_grad_(requires_grad)
        tensors.append(tensor)
        return tensor
    if kind == "dict":
        return {
            _build(key, tensors, on_gpu): _build(item, tensors, on_gpu) for key, item in content
        }
    items = [_build(item, tensors, on_gpu) for item in content]
    return items if kind == "list" else tuple(items)
