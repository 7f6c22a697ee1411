"""Copies of modules with the users' hooks and attributes on their parameters."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from sparkhvd.training.modules import torchscript

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


class _CopyValues(TorchFunctionMode):
    """Lets a copy of a graph's tensor, such as an output that `forward` stored, copy only its value.

    Without this mode torch raises an error.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor: Any
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        if is_lazy(tensor):  # torch can copy lazy parameters, but not lazy buffers
            make: Any = type(tensor)
            made = make(tensor.requires_grad, tensor.data.device, tensor.data.dtype)
        elif not tensor.is_leaf:
            made = tensor.detach().clone()
        else:
            return func(tensor, memo)  # type: ignore[no-untyped-call]
        memo[id(tensor)] = made
        return made


def deepcopy(value: T, memo: dict[int, Any] | None = None) -> T:
    """Copy a value and its modules, also modules that `copy.deepcopy` rejects."""
    memo = {} if memo is None else memo
    if isinstance(value, nn.Module):
        torchscript.copy_parts(value, memo)
    with _CopyValues():
        made = copy.deepcopy(value, memo)
    if isinstance(value, nn.Module) and isinstance(made, nn.Module):
        own = {id(part) for part in value.modules()}
        for part in made.modules():
            if (
                id(part) not in own
            ):  # torch's copy of a module with parametrizations would call the original module
                vars(part).pop("_compiled_call_impl", None)
    return made


def copied(module: M) -> M:
    """Copy a module."""
    return _attach(module, deepcopy(module))


def copy_with(module: nn.Module, state: Mapping[str, object]) -> nn.Module:
    """Copy a module, and use the tensors of a state dict in place of the module's tensors."""
    memo: dict[int, object] = {}
    for name, old in module.state_dict(keep_vars=True).items():
        new = state.get(name)
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            continue
        # Replace plain tensors of the same shape here; `load_state_dict` handles the others. Tied tensors stay tied.
        if type(old) in (Tensor, nn.Parameter) and (old.shape, old.dtype) == (new.shape, new.dtype):
            is_parameter = isinstance(old, nn.Parameter)
            replacement = nn.Parameter(new, old.requires_grad) if is_parameter else new
            memo.setdefault(id(old), replacement)
    made = deepcopy(module, memo)
    made.load_state_dict(state)
    return _attach(module, made)


def light_copy(module: nn.Module) -> nn.Module:
    """Copy a module for reading. The copy's parameters are new objects with the same memory."""
    embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    # Copy the weights of embeddings with max_norm, because their forward writes into the weights.
    written = {id(m.weight) for m in embeddings if m.max_norm is not None}
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach(), p.requires_grad)
        for p in module.parameters()
        # `Tensor`, because TorchScript modules have plain tensors as parameters
        if type(p) in (Tensor, nn.Parameter) and id(p) not in written
    }
    return _attach(module, deepcopy(module, memo))


def _attach(module: nn.Module, made: M) -> M:
    """Copy hooks and attributes to the tensors of a copy, with references to these tensors."""
    pairs = list(zip(_tensors(module), _tensors(made), strict=False))
    if not any(vars(old) or hooks_of(old) for old, _ in pairs):
        return made
    parts: list[tuple[object, object]] = [*zip(module.modules(), made.modules(), strict=False)]
    memo: dict[int, Any] = {id(old): new for old, new in [*pairs, *parts]}
    for old, new in pairs:
        vars(new).update({name: _deepcopy(value, memo) for name, value in vars(old).items()})
        if (hooks := hooks_of(old)) is not None:
            add_hooks(
                new, TensorHooks(*(tuple(_deepcopy(h, memo) for h in each) for each in hooks))
            )
    return made


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value, including closures of functions, or return the value itself if this fails."""
    try:
        if isinstance(value, types.FunctionType):
            return copy_function(value, memo)
        return deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - a lock, a session
        return value


def copy_function(
    function: types.FunctionType, memo: dict[int, Any], names: Mapping[str, object] | None = None
) -> types.FunctionType:
    """Copy a function with its closure and defaults.

    Args:
        function: the function.
        memo: replacements of objects, as for `copy.deepcopy`.
        names: globals of the copy. None means the function's own globals; then a function without a closure is returned
            unchanged.

    Raises:
        Exception: a part cannot be copied.
    """
    if id(function) in memo:
        made: types.FunctionType = memo[id(function)]
        return made
    if names is None and not function.__closure__:
        return function
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    made = types.FunctionType(
        function.__code__,
        function.__globals__ if names is None else dict(names),
        function.__name__,
        deepcopy(function.__defaults__, memo),
        cells,
    )
    made.__kwdefaults__ = deepcopy(function.__kwdefaults__, memo)
    made.__dict__.update(function.__dict__)
    memo[id(function)] = made  # the function may refer to itself
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        content = old.cell_contents
        is_function = isinstance(content, types.FunctionType)
        cell.cell_contents = (
            copy_function(content, memo) if is_function else deepcopy(content, memo)
        )
    return made


# ----------------------------------------------------------------------------------------------------
# Hooks and attributes that users attach to parameters and buffers. torch omits them from copies, from pickles, or from
# both.

Hook = Callable[[Tensor], Any]


class TensorHooks(NamedTuple):
    """Hooks of a tensor, in their order.

    Attributes:
        backward: hooks from `register_hook`.
        accumulated: hooks from `register_post_accumulate_grad_hook`.
    """

    backward: tuple[Hook, ...]
    accumulated: tuple[Hook, ...]


class WithHooks(NamedTuple):
    """A value to pickle, with the hooks of tensors by their names in the pickle."""

    value: Any
    hooks: Mapping[str, TensorHooks]


def hooks_of(tensor: Tensor) -> TensorHooks | None:
    found = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    if not any(found):
        return None
    backward, accumulated = (tuple((hooks or {}).values()) for hooks in found)
    return TensorHooks(backward, accumulated)


def hooks_by_name(module: nn.Module) -> dict[str, TensorHooks]:
    """Collect the hooks of a module's parameters by name. Parameters without hooks are skipped."""
    found = ((name, hooks_of(p)) for name, p in module.named_parameters())
    return {name: hooks for name, hooks in found if hooks is not None}


def add_hooks(tensor: Tensor, hooks: TensorHooks) -> None:
    """Register hooks on a trainable or frozen leaf tensor."""
    requires_grad = tensor.requires_grad
    tensor.requires_grad_(True)  # torch requires it for hooks
    for hook in hooks.backward:
        tensor.register_hook(hook)
    for hook in hooks.accumulated:
        tensor.register_post_accumulate_grad_hook(hook)
    tensor.requires_grad_(requires_grad)


def reduce_with_hooks(tensor: Tensor, hooks: TensorHooks, protocol: int) -> tuple[Any, ...] | None:
    """Reduce a tensor for pickle with its hooks as state, because the hooks may refer to the tensor.

    Returns None if the tensor's class has another state.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*backward hooks")
        function, arguments, *rest = tensor.__reduce_ex__(protocol)
    return None if any(rest) else (function, arguments, hooks, None, None, add_hooks)
