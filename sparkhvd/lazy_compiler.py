"""A stand-in for `torch._dynamo`, torch's compiler, until something compiles.

torch imports its compiler where nothing compiles: `add_param_group`, which every optimizer calls, `zero_grad` and `load_state_dict` are
decorated by `torch._disable_dynamo`, which imports it at the first call; `step` imports it to call `graph_break()`; a new process group
clears its caches. `torch.utils.checkpoint` reads one of its settings and decorates a function. Without a compiler these calls do nothing.
The import loads 800 modules and takes as long as torch's own, in each process that makes an optimizer. torch has no switch for it.

The stand-in answers these calls, for these callers. Any other use, such as an attribute, a submodule or `torch.compile`, imports
torch's module, which takes the stand-in's place: from then on torch is as it is without this module.

Threads: safe, as imports are. The compiler is never imported while the import system's own lock is held (`_Finder`), because another thread
may hold the lock of a module that the compiler imports, and wait for that lock. Failure: an error of torch's import reaches the code that needs
the compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
        vars(self)["_disabled"] = []

    @property
    def __path__(self) -> Any:  # type: ignore[override]  # an attribute of other modules
        """Load the compiler. The import system reads the path of a package before it looks for a submodule."""
        return _load(self).__path__

    def graph_break(self, *args: Any, **kwargs: Any) -> Any:
        """Ignore the call of a torch optimizer. Any other caller loads the compiler."""
        if _caller().startswith("torch.optim."):
            return None
        return _load(self).graph_break(*args, **kwargs)

    def disable(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap a function for torch's decorator, as a plain call until the compiler is loaded."""
        caller = _caller()
        if caller not in ("torch._compile", "torch.utils.checkpoint"):
            return _load(self).disable(*args, **kwargs)
        fn = args[0]

        def call(*given: Any, **named: Any) -> Any:
            real = sys.modules.get(NAME)
            if real is None or real is self:
                return fn(*given, **named)
            return real.disable(*args, **kwargs)(*given, **named)

        if caller == "torch._compile":
            vars(self)["_disabled"].append(fn)
        return call

    def clear_lru_cache(self) -> None:
        """Do nothing: the stand-in has no cache. See `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        if name == "trace_rules" and _caller() == "torch.distributed.distributed_c10d":
            return self
        if _caller() == "torch.utils.checkpoint":
            # The function reads `config.error_on_nested_fx_trace` and uses it only under the compiler.
            if name == "config":
                return self
            if name == "error_on_nested_fx_trace":
                return True
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
    """Import finder for the submodules that were loaded with the compiler, at the import that has loaded it.

    The import system calls `find_spec` under its own lock, so nothing is imported here: `_Compiler.__path__` has done it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a submodule in `sys.modules`, or return None."""
        module = sys.modules.get(fullname)
        if not fullname.startswith(f"{NAME}.") or module is None or target is not None:
            return None
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
_swap = threading.RLock()


def install() -> None:
    """Install the stand-in unless the compiler is loaded. torch need not be loaded."""
    if NAME not in sys.modules:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        sys.modules[NAME] = _Compiler()


def remove() -> None:
    """Remove the stand-in without loading the compiler."""
    with _swap:
        found = sys.modules.get(NAME)
        if isinstance(found, _Compiler):
            _take_away(found)
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


class _Users:
    """Blocks of `installed()` that run at the same time, in several threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.number = 0
        self.must_remove = False


_users = _Users()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install the stand-in inside the block, and remove it at the end of the last block that runs at the same time."""
    with _users.lock:
        if not _users.number:
            _users.must_remove = NAME not in sys.modules
        _users.number += 1
        install()
    try:
        yield
    finally:
        with _users.lock:
            _users.number -= 1
            if not _users.number and _users.must_remove:
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
    with _swap:  # not held while the compiler is imported
        is_first = sys.modules.get(NAME) is stand_in
        if is_first:
            _take_away(stand_in)
    try:
        return importlib.import_module(NAME)
    except BaseException:
        if is_first:
            sys.modules.setdefault(NAME, stand_in)  # a later use shall raise the error again
        raise
