"""A stand-in for `torch._dynamo`, torch's compiler, until something compiles.

torch imports its compiler where nothing compiles: `add_param_group`, which every optimizer calls, `zero_grad` and `load_state_dict` are
decorated by `torch._disable_dynamo`, which imports it at the first call; `step` imports it to call `graph_break()`; a new process group
clears its caches. Without a compiler these calls do nothing. The import loads 800 modules and takes as long as torch's own, in each
process that makes an optimizer. torch has no switch for it.

The stand-in answers these three calls, for these callers. Any other use, such as an attribute, a submodule or `torch.compile`, imports
torch's module, which takes the stand-in's place: from then on torch is as it is without this module.

Threads: safe, as imports are. Failure: an error of torch's import reaches the code that needs the compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
# A module that is loaded if and only if the compiler is.
REAL = "torch._dynamo.utils"
# Attribute in which torch keeps the wrapper of a function that must not be compiled.
_KEPT = "__dynamo_disable"


class _Compiler(ModuleType):
    """Module in the place of `torch._dynamo` until something compiles."""

    def __init__(self) -> None:
        super().__init__(NAME, "Stands for torch's compiler until something compiles.")
        self.__spec__ = ModuleSpec(NAME, None, is_package=True)
        self.__path__: list[str] = []  # its submodules are found by `_Finder`
        vars(self).update(_disabled=[], _lock=threading.RLock())

    def graph_break(self, *args: Any, **kwargs: Any) -> Any:
        """Ignore the call of a torch optimizer. Any other caller loads the compiler."""
        if _caller().startswith("torch.optim."):
            return None
        return _load(self).graph_break(*args, **kwargs)

    def disable(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap a function for torch's decorator, as a plain call until the compiler is loaded."""
        if _caller() != "torch._compile":
            return _load(self).disable(*args, **kwargs)
        fn = args[0]

        def call(*given: Any, **named: Any) -> Any:
            real = sys.modules.get(NAME)
            if real is None or real is self:
                return fn(*given, **named)
            return real.disable(*args, **kwargs)(*given, **named)

        vars(self)["_disabled"].append(fn)
        return call

    def clear_lru_cache(self) -> None:
        """Do nothing: the stand-in has no cache. See `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        if name == "trace_rules" and _caller() == "torch.distributed.distributed_c10d":
            return self
        if name.startswith("__"):  # asked for by imports, `inspect`, `copy`, `doctest`
            raise AttributeError(name)
        return getattr(_load(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(_load(self), name, value)

    def __dir__(self) -> list[str]:
        return dir(_load(self))


class _Finder(MetaPathFinder, Loader):
    """Import finder: importing a submodule of the stand-in loads torch's compiler."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a submodule, or return None without the stand-in."""
        stand_in = sys.modules.get(NAME)
        if not fullname.startswith(f"{NAME}.") or not isinstance(stand_in, _Compiler):
            return None
        real = _load(stand_in)
        module = sys.modules.get(fullname)
        if module is None:
            return PathFinder.find_spec(fullname, real.__path__, target)
        # The compiler's import has loaded this submodule, and it must not run twice. The import system replaces a
        # module's spec, so `exec_module` restores it.
        spec = ModuleSpec(fullname, self)
        spec.loader_state = module.__spec__
        vars(module)["__spec__"] = spec  # a config module of torch refuses `setattr`
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Reuse the module in `sys.modules`."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec."""
        assert module.__spec__ is not None
        vars(module)["__spec__"] = module.__spec__.loader_state


_finder = _Finder()


def install() -> None:
    """Install the stand-in unless the compiler is loaded. torch need not be loaded."""
    if NAME not in sys.modules:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        sys.modules[NAME] = _Compiler()


def remove() -> None:
    """Remove the stand-in without loading the compiler."""
    found = sys.modules.get(NAME)
    if isinstance(found, _Compiler):
        _take_away(found)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install the stand-in inside the block."""
    had = NAME in sys.modules
    install()
    try:
        yield
    finally:
        if not had:
            remove()


def is_loaded() -> bool:
    """Whether this process has torch's compiler."""
    return REAL in sys.modules


def _caller() -> str:
    """Find the name of the module calling the stand-in's function."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _take_away(stand_in: _Compiler) -> None:
    del sys.modules[NAME]
    torch = sys.modules.get("torch")
    if vars(torch or object).get("_dynamo") is stand_in:
        del torch._dynamo  # type: ignore[union-attr]
    disabled: list[Callable[..., Any]] = vars(stand_in)["_disabled"]
    for fn in disabled:
        vars(fn).pop(_KEPT, None)
    disabled.clear()


def _load(stand_in: _Compiler) -> ModuleType:
    """Load torch's compiler in place of the stand-in."""
    with vars(stand_in)["_lock"]:
        if sys.modules.get(NAME) is stand_in:
            _take_away(stand_in)
            try:
                return importlib.import_module(NAME)
            except BaseException:
                sys.modules.setdefault(NAME, stand_in)  # a later use shall raise the error again
                raise
    return importlib.import_module(NAME)
