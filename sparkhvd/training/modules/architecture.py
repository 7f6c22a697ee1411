"""Modules without their weights, in two forms.

- A *description* is JSON: classes of `torch.nn` by name, their plain attributes, shapes of parameters. Rebuilding
  it runs only constructors of `torch.nn.Module`, so files from any source can be read. Only modules made of
  `torch.nn` classes have a description.
- A *shell* is a pickle that refers to tensors by name. Any module has a shell, and reading it runs code:
  only for bytes of the driver's closure, or for files that the user trusts.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import io
import json
import pickle
import sys
import weakref
from collections import ChainMap
from collections.abc import Mapping
from contextvars import ContextVar
from types import CodeType
from typing import Any, TypeAlias, TypedDict

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from sparkhvd.training.modules import torchscript
from sparkhvd.training.modules.copies import (
    WithHooks,
    add_hooks,
    hooks_by_name,
    hooks_of,
    reduce_with_hooks,
)
from sparkhvd.training.references import is_by_value
from sparkhvd.training.types import Json

# Attributes of every module: set by the constructor of nn.Module, or handled by name in `describe`.
_COMMON = frozenset(nn.Module().__dict__)
_EMPTY_HOOKS = tuple(
    name for name in _COMMON if name.endswith("_hooks") or name.startswith("_forward_hooks")
)
# Lists in which RNNs keep their weights a second time; `rebuild` creates them again.
_RNN_LISTS = frozenset({"_flat_weights", "_flat_weight_refs"})
_FUNCTIONS = "torch.nn.functional"


class TensorText(TypedDict, total=False):
    """Description of a parameter or buffer, or the path of its tied tensor."""

    shape: list[int]
    dtype: str
    requires_grad: bool
    attributes: dict[str, Json]
    same_as: str


# Description of a module, or the path of a shared module.
Description = TypedDict(
    "Description",
    {
        "class": str,
        "training": bool,
        "attributes": "dict[str, Json]",
        "parameters": "dict[str, TensorText | None]",
        "buffers": "dict[str, TensorText | None]",
        "children": "dict[str, Description | None]",
        "same_as": str,
    },
    total=False,
)
# Rebuilt modules and tensors by their path.
_Rebuilt: TypeAlias = "dict[str, nn.Module | Tensor]"


class _NotPlain(Exception):
    """Raised if a description cannot represent a module."""


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Collect the detached tensors of the state dict by name."""
    return {n: t.detach() for n, t in module.state_dict().items() if isinstance(t, Tensor)}


def foreign_class(module: nn.Module) -> str | None:
    """Find the name of the module's first class outside `torch.nn`, or return None."""
    for part in module.modules():
        if not _is_allowed(type(part)):
            return f"{type(part).__module__}.{type(part).__qualname__}"
    return None


def _is_allowed(kind: type) -> bool:
    return (
        kind.__module__.startswith("torch.nn.modules.")
        and issubclass(kind, nn.Module)
        and getattr(torch.nn, kind.__name__, None) is kind
    ) or kind is nn.modules.linear.NonDynamicallyQuantizableLinear


def module_texts(module: nn.Module) -> dict[str, str]:
    """Describe each module by its class, plain options and children, such as "Linear(in_features=2, ...)".

    Equal modules have equal texts in every process, so the texts can compare two fits. The options of `torch.nn`
    classes are their attributes. Other classes may have any attributes, so only attributes that are constructor
    arguments and numbers count as options.
    """
    return {name: _text(part) for name, part in module.named_modules()}


def _text(module: nn.Module) -> str:
    kind = type(module)
    values = {n: v for n, v in vars(module).items() if n not in _COMMON and not n.startswith("_")}
    if not _is_allowed(kind):
        try:
            arguments = inspect.signature(kind.__init__).parameters
        except (TypeError, ValueError):
            arguments = inspect.signature(lambda: None).parameters
        numbers = (bool, int, float)
        values = {n: v for n, v in values.items() if n in arguments and isinstance(v, numbers)}
    options = []
    for name, value in sorted(values.items()):
        with contextlib.suppress(_NotPlain):
            options.append(f"{name}={json.dumps(_encode(value))}")
    children = list(module._modules.keys())
    shown = f"[{', '.join(children)}]" if children else ""
    return f"{kind.__qualname__}({', '.join(options)}){shown}"


# --- descriptions ---------------------------------------------------------------------------------------------


def describe(module: nn.Module) -> Description | None:
    """Describe the module as JSON without weights, or return None if it has classes outside `torch.nn`."""
    try:
        return _describe(module, {}, "")
    except _NotPlain:
        return None


def _describe(module: nn.Module, seen: dict[int, str], path: str) -> Description:
    if id(module) in seen:
        return {"same_as": seen[id(module)]}
    seen[id(module)] = path
    if not _is_allowed(type(module)):
        raise _NotPlain
    values = vars(module)
    if any(values.get(name) for name in _EMPTY_HOOKS) or values["_non_persistent_buffers_set"]:
        raise _NotPlain
    skipped = _COMMON | (_RNN_LISTS if isinstance(module, nn.RNNBase) else frozenset())
    return {
        "class": type(module).__name__,
        "training": module.training,
        "attributes": {n: _encode(v) for n, v in values.items() if n not in skipped},
        "parameters": {n: _tensor(p, seen, f"{path}.{n}") for n, p in module._parameters.items()},
        "buffers": {n: _tensor(b, seen, f"{path}.{n}") for n, b in module._buffers.items()},
        "children": {
            n: None if m is None else _describe(m, seen, f"{path}.{n}")
            for n, m in module._modules.items()
        },
    }


def _tensor(tensor: Tensor | None, seen: dict[int, str], path: str) -> TensorText | None:
    if tensor is None:
        return None
    if id(tensor) in seen:
        return {"same_as": seen[id(tensor)]}
    seen[id(tensor)] = path
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or hooks_of(tensor) is not None:
        raise _NotPlain
    text: TensorText = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }
    if vars(tensor):
        text["attributes"] = {name: _encode(value) for name, value in vars(tensor).items()}
    return text


def _encode(value: object) -> Json:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    name = getattr(value, "__name__", "")
    if name and not name.startswith("_") and getattr(torch.nn.functional, name, None) is value:
        return {"function": name}
    raise _NotPlain


def _decode(value: Json) -> object:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple" and isinstance(content, list):
        return tuple(_decode(v) for v in content)
    if kind == "dtype" and isinstance(content, str):
        return _dtype(content)
    if kind != "function" or not isinstance(content, str) or content.startswith("_"):
        raise ValueError(f"unknown entry {kind!r}")
    function: object = getattr(torch.nn.functional, content)
    # Allow only functions, because the namespace also holds modules and typing helpers.
    if getattr(function, "__module__", "") not in (_FUNCTIONS, "torch._C._nn", "torch", None):
        raise ValueError(f"{content!r} is not a function of {_FUNCTIONS}")
    return function


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def rebuild(description: Description, weights: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the module of a description with these weights, without running code from the description."""
    module = _rebuild(description, {}, "")
    module.load_state_dict(dict(weights))
    return module


def _rebuild(description: Description, seen: _Rebuilt, path: str) -> nn.Module:
    if "same_as" in description:
        shared = seen[description["same_as"]]
        assert isinstance(shared, nn.Module)
        return shared
    name = description["class"]
    kind = getattr(torch.nn, name, None) or getattr(nn.modules.linear, name, None)
    if not (isinstance(kind, type) and _is_allowed(kind)):
        raise ValueError(f"{name!r} is not a module of torch.nn")
    module: nn.Module = object.__new__(kind)
    nn.Module.__init__(module)
    seen[path] = module
    for key, value in description["attributes"].items():
        if key in _COMMON or hasattr(nn.Module, key) or callable(getattr(kind, key, None)):
            raise ValueError(f"{key!r} is not an attribute of {name}")
        module.__dict__[key] = _decode(value)
    for key, text in description["parameters"].items():
        module._parameters[key] = _parameter(text, seen, f"{path}.{key}")
    for key, text in description["buffers"].items():
        module._buffers[key] = _buffer(text, seen, f"{path}.{key}")
    for key, child in description["children"].items():
        part = None if child is None else _rebuild(child, seen, f"{path}.{key}")
        module._modules[key] = part
    module.training = bool(description["training"])
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return module


def _parameter(text: TensorText | None, seen: _Rebuilt, path: str) -> nn.Parameter | None:
    if text is None:
        return None
    if "same_as" in text:
        shared = seen[text["same_as"]]
        assert isinstance(shared, nn.Parameter)
        return shared
    empty = torch.empty(text["shape"], dtype=_dtype(text["dtype"]))
    seen[path] = parameter = nn.Parameter(empty, requires_grad=bool(text["requires_grad"]))
    _attach(parameter, text)
    return parameter


def _buffer(text: TensorText | None, seen: _Rebuilt, path: str) -> Tensor | None:
    if text is None:
        return None
    if "same_as" in text:
        shared = seen[text["same_as"]]
        assert isinstance(shared, Tensor)
        return shared
    seen[path] = buffer = torch.empty(text["shape"], dtype=_dtype(text["dtype"]))
    _attach(buffer, text)
    return buffer


def _attach(tensor: Tensor, text: TensorText) -> None:
    for key, value in text.get("attributes", {}).items():
        if hasattr(type(tensor), key):
            raise ValueError(f"{key!r} is not an attribute that a user can set")
        vars(tensor)[key] = _decode(value)


# --- shells ---------------------------------------------------------------------------------------------------


def _reduce_cached_property(value: functools.cached_property[Any]) -> tuple[object, ...]:
    """Reduce a cached property for pickle, because its lock (Python < 3.12) cannot be pickled."""
    return _cached_property, (value.func, value.attrname)


def _cached_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduce_cached_function(value: Any) -> str | tuple[object, ...]:
    """Reduce a function of `functools.lru_cache` by value.

    Pickle would use its name, which ranks may not have.
    """
    if not is_by_value(value):
        return str(value.__qualname__)
    return _cached_function, (value.__wrapped__, value.cache_parameters())


def _cached_function(function: Any, parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _ShellPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table = ChainMap(
        {
            functools.cached_property: _reduce_cached_property,
            functools._lru_cache_wrapper: _reduce_cached_function,
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(self, file: io.BytesIO, module: nn.Module, *, with_hooks: bool) -> None:
        super().__init__(file)
        self._with_hooks = with_hooks
        kept = tensors_of(module)
        # Keeps the tensors' ids valid.
        self._named = [*module.named_parameters(), *module.named_buffers()]
        self._names = {id(t): n for n, t in self._named if n in kept}
        # Tensors whose attributes are written, because attributes may form cycles.
        self._written: set[str] = set()

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        name = self._names.get(id(value))
        if name is None or not isinstance(value, Tensor):
            return None
        pid = (name, isinstance(value, nn.Parameter), value.requires_grad)
        if name in self._written or not vars(value):
            return pid
        self._written.add(name)
        # Include attributes that the user has set, for example for the groups of an optimizer.
        return (*pid, dict(vars(value)))

    def reducer_override(self, value: object) -> Any:
        if self._with_hooks and isinstance(value, Tensor) and (hooks := hooks_of(value)):
            reduced = reduce_with_hooks(value, hooks, pickle.HIGHEST_PROTOCOL)
            if reduced is None:
                raise pickle.PicklingError(
                    f"a tensor of class {type(value).__qualname__} has hooks, but hooks on this class cannot be pickled"
                )
            return reduced
        if isinstance(value, torch.jit.ScriptModule):
            return torchscript.reduce(value)
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            return _reduce_parametrized(value)
        if isinstance(value, Optimizer) and type(value).__getstate__ is Optimizer.__getstate__:
            return _reduce_optimizer(value)
        if (name := _context_global(value)) is not None:
            return name
        return super().reducer_override(value)


def _context_global(value: object) -> str | None:
    """Find the global name of a transformers object with a ContextVar, or return None.

    Such an object can be pickled only by name.
    """
    module = type(value).__module__
    if not module.startswith("transformers.") or module not in sys.modules:
        return None
    if not any(isinstance(each, ContextVar) for each in getattr(value, "__dict__", {}).values()):
        return None
    places = vars(sys.modules[module])
    return next((name for name, each in places.items() if each is value), None)


def _reduce_parametrized(module: nn.Module) -> tuple[Any, ...]:
    """Reduce a module with parametrizations for pickle.

    torch does not do it, because the class of the module is created at run time.
    """
    kind: Any = parametrize.type_before_parametrizations(module)
    if isinstance(module, nn.RNNBase):
        # Avoid the module's own `__getstate__`, which computes the weights and so may change buffers.
        state = {**nn.Module.__getstate__(module), "_flat_weights": [], "_flat_weight_refs": []}
    else:
        state = kind.__getstate__(module)
    return _new, (kind,), state, None, None, _set_parametrized


def _reduce_optimizer(optimizer: Optimizer) -> tuple[Any, ...]:
    """Reduce an optimizer for pickle with its attributes and step hooks. torch omits them."""
    omitted = ("step", "_zero_grad_profile_name")  # wrappers of a scheduler and of torch
    state = {name: value for name, value in vars(optimizer).items() if name not in omitted}
    return copyreg.__newobj__, (type(optimizer),), state  # type: ignore[attr-defined]


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _set_parametrized(module: nn.Module, state: Any) -> None:
    if isinstance(module, nn.RNNBase):
        vars(module).update(state)
        # The dead references make `forward` collect the weights again.
        found: list[Any] = [module._parameters.get(name) for name in module._flat_weights_names]
        module._flat_weights = found
        gone: Any = nn.Module()
        module._flat_weight_refs = [weakref.ref(gone if w is None else w) for w in found]
    else:
        module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module._modules["parametrizations"]:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


def _reduce_code(code: CodeType) -> tuple[object, ...]:
    """Reduce code with its file name. cloudpickle since 3.1 replaces it with "<dynamic-code>"."""
    make, values = cloudpickle.Pickler.dispatch_table[CodeType](code)
    named = (
        code.co_filename if isinstance(value, str) and value == "<dynamic-code>" else value
        for value in values
    )
    return make, tuple(named)


class _NamingPickler(_ShellPickler):
    """Pickler with the file names of code, for tracebacks.

    Its bytes therefore depend on the machine and notebook.
    """

    dispatch_table = ChainMap({CodeType: _reduce_code}, _ShellPickler.dispatch_table)


class _ShellUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, weights: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self._weights = weights
        self._made: dict[str, Tensor] = {}
        self._new: set[str] = set()  # parameters that were created here, and so need attributes

    def persistent_load(self, pid: tuple[Any, ...]) -> Tensor:
        name, is_parameter, requires_grad, *attributes = pid
        if name not in self._made:
            tensor = self._weights[name]
            if is_parameter and not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad)
                self._new.add(name)
            self._made[name] = tensor
        for entries in attributes:
            vars(self._made[name]).update(entries)
        return self._made[name]

    def load(self) -> Any:
        loaded = super().load()
        if not isinstance(loaded, WithHooks):
            return loaded
        for name in self._new & loaded.hooks.keys():
            add_hooks(self._made[name], loaded.hooks[name])
        return loaded.value


def dump_shell(
    module: nn.Module, value: object = None, *, names_files: bool = False, with_hooks: bool = True
) -> bytes:
    """Pickle a module, or a `value` that refers to it, with names in place of the module's tensors.

    Args:
        module: the module.
        value: the value, or None.
        names_files: keep file names of code, for tracebacks.
        with_hooks: include hooks of parameters, which predictions do not need.
    """
    buffer = io.BytesIO()
    pickler = _NamingPickler if names_files else _ShellPickler
    value = module if value is None else value
    if with_hooks and (hooks := hooks_by_name(module)):
        value = WithHooks(value, hooks)
    pickler(buffer, module, with_hooks=with_hooks).dump(value)
    return buffer.getvalue()


def load_shell(data: bytes, weights: Mapping[str, Tensor]) -> Any:
    """Load the bytes of `dump_shell` with these weights.

    The bytes must be trusted, because loading runs code.
    """
    loaded = _ShellUnpickler(io.BytesIO(data), weights).load()
    module = loaded if isinstance(loaded, nn.Module) else getattr(loaded, "model", None)
    if isinstance(module, nn.Module):
        _register_outputs(module)
    return loaded


def _register_outputs(module: nn.Module) -> None:
    """Let models of transformers collect hidden states in this process.

    Their `__init__` registers their classes for this, but unpickling does not call `__init__`. Without the registration
    `output_hidden_states` gives no states, and Segformer fails.
    """
    for place in ("transformers.utils.output_capturing", "transformers.utils.generic"):
        registry = getattr(sys.modules.get(place), "_CAN_RECORD_REGISTRY", None)
        if not isinstance(registry, dict):
            continue
        for part in module.modules():
            if hasattr(part, "_can_record_outputs"):
                # Use dict's own method, so that the key is the class's name in every version of transformers.
                dict.setdefault(registry, str(part.__class__), part._can_record_outputs)  # noqa: SLF001
