"""Import alias `horovod` for the modules of `sparkhvd.horovod`, per process and on request.

`import horovod.torch` then returns the module `sparkhvd.horovod.torch` itself, so a class has one identity under both
names. An import finder does it: nothing is written, and no distribution is called horovod. Python programs that this
process starts inherit the name through a variable and a PYTHONPATH with the folder `import_path`, whose `horovod`
installs the finder.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from types import ModuleType
from typing import Any, NoReturn

from sparkhvd.errors import InvalidArgumentError

# A process with the value 1 imports this package as `horovod`.
VARIABLE = "SPARKHVD_AS_HOROVOD"
_NAME = "horovod"
_IMPORT_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "import_path")
# Prefix of a Horovod module, and of the module of sparkhvd in its place; the first existing module is used.
_HOMES = (
    ("horovod", "sparkhvd.horovod"),
    ("horovod.torch", "sparkhvd.torch"),
    ("horovod.common.process_sets", "sparkhvd.torch.process_sets"),
    ("horovod.spark.runner", "sparkhvd.horovod.spark"),
    ("horovod.torch.elastic.state", "sparkhvd.torch.elastic.state"),
)
_PYTORCH_ONLY = (
    "TensorFlow's and MXNet's frontends are not in sparkhvd. Train with PyTorch and horovod.torch"
)
_OLD_KERAS = "It belongs to a Keras version that sparkhvd does not support. Train with Keras 3 on its torch backend and horovod.spark.keras"
_ABSENT = {
    "horovod.tensorflow": f"{_PYTORCH_ONLY}, or with Keras 3 on its torch backend (KERAS_BACKEND=torch) and horovod.keras",
    "horovod.mxnet": _PYTORCH_ONLY,
    "horovod.spark.tensorflow": f"{_PYTORCH_ONLY}; horovod.spark.torch has an estimator",
    "horovod.spark.keras.bare": _OLD_KERAS,
    "horovod.spark.keras.tensorflow": _OLD_KERAS,
    "horovod.ray": "Ray is not a launcher of sparkhvd. Start ranks with sparkhvdrun, mpirun or Spark",
}
_BATCHES = "batches come from the fit, or from data_module= of the Lightning estimator, a LightningDataModule of your own"
_DATA_PATH = "it belongs to Horovod's data path. Use sparkhvd.data.prepare(df, store), whose loaders any rank can read"
_ELASTIC = "it belongs to Horovod's launcher. Start ranks with sparkhvdrun --host-discovery-script, and train with horovod.torch.elastic"
_GRADIENTS = "call allreduce() and its like, which have gradients and take average="
_HELPER = "it belongs to Horovod's internals. Write your own version; extension_available(), nccl_built() and others report what is available"
_LAUNCHER = "it belongs to Horovod's launcher. Call horovod.run or horovod.spark.run, or start ranks with sparkhvdrun, mpirun or torchrun"
# Modules of Horovod's launcher, by package.
_OF_LAUNCHER = {
    "horovod.runner": "common driver gloo_run http js_run launch mpi_run run_task task task_fn util",
    "horovod.runner.common": "service util",
    "horovod.runner.common.service": "driver_service task_service",
    "horovod.runner.common.util": "codec config_parser env host_hash hosts network safe_shell_exec secret settings timeout tiny_shell_exec",
    "horovod.runner.driver": "driver_service",
    "horovod.runner.http": "http_client http_server",
    "horovod.runner.task": "task_service",
    "horovod.runner.util": "cache lsf network remote streams threads",
    "horovod.spark": "driver gloo_run mpi_run",
    "horovod.spark.driver": "driver_service host_discovery job_id mpirun_rsh rendezvous rsh",
    "horovod.spark.task": "gloo_exec_fn mpirun_exec_fn task_info task_service",
}
_LOADERS = "sparkhvd.data has loaders for any loop"
_OWN_LOOP = "it belongs to Horovod's training loop. Give the estimator what a fit needs"
_SAVING = "call save() and load() of the estimator or the model"
# Modules whose missing names are stubs, with the replacement.
STUBS = {
    "horovod.common.elastic": "train a loop of your own with horovod.torch.elastic",
    "horovod.common.exceptions": "nothing has two parts whose versions differ. Leave it out",
    "horovod.common.basics": "call the functions of horovod.torch",
    "horovod.common.util": _HELPER,
    "horovod.data": _LOADERS,
    "horovod.data.data_loader_base": _LOADERS,
    "horovod.keras.elastic": "train a loop of your own with horovod.torch.elastic",
    "horovod.runner.elastic": _ELASTIC,
    "horovod.runner.elastic.discovery": _ELASTIC,
    "horovod.runner.elastic.driver": _ELASTIC,
    "horovod.runner.elastic.settings": _ELASTIC,
    "horovod.runner.elastic.worker": _ELASTIC,
    "horovod.spark.common.cache": _DATA_PATH,
    "horovod.spark.common.codec": _SAVING,
    "horovod.spark.common.datamodule": _BATCHES,
    "horovod.spark.common.serialization": _SAVING,
    "horovod.spark.common.util": _DATA_PATH,
    "horovod.spark.data_loaders": _LOADERS,
    "horovod.spark.data_loaders.pytorch_data_loaders": _LOADERS,
    "horovod.spark.keras.datamodule": _BATCHES,
    "horovod.spark.keras.optimizer": _SAVING,
    "horovod.spark.keras.remote": _OWN_LOOP,
    "horovod.spark.keras.util": _OWN_LOOP,
    "horovod.spark.lightning.datamodule": _BATCHES,
    "horovod.spark.lightning.legacy": _OWN_LOOP,
    "horovod.spark.lightning.remote": _OWN_LOOP,
    "horovod.spark.lightning.util": _OWN_LOOP,
    "horovod.spark.task": _LAUNCHER,
    "horovod.spark.torch.datamodule": _BATCHES,
    "horovod.spark.torch.remote": _OWN_LOOP,
    "horovod.spark.torch.util": _OWN_LOOP,
    "horovod.torch.mpi_ops": _GRADIENTS,
    **{
        f"{package}.{name}": _LAUNCHER
        for package, names in _OF_LAUNCHER.items()
        for name in names.split()
    },
}
# Options of python that take a value.
_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


class Stub:
    """Stub of an unsupported symbol: calling it raises, subclassing is allowed."""

    refusal = ""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Refuse the call.

        Raises:
            NotImplementedError: always, with the replacement.
        """
        raise NotImplementedError(cls.refusal)


@functools.cache
def stub(name: str, instead: str) -> type[Any]:
    """Create the stub class for an unsupported name of Horovod.

    Args:
        name: full name, with its module.
        instead: what to use instead, for the message.
    """
    module, _, last = name.rpartition(".")
    refusal = f"{name} is not in sparkhvd: {instead}."
    return type(last, (Stub,), {"__module__": module, "refusal": refusal})


def _stub_in(module: str, name: str) -> object:
    """Find a name in a module of `STUBS`: a stub module, or the stub of a class or function.

    Names with an underscore raise AttributeError.
    """
    if f"{module}.{name}" in STUBS:
        return importlib.import_module(f"{module}.{name}")
    if name.startswith("_"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return stub(f"{module}.{name}", STUBS[module])


def _module_in(package: str, earlier: Callable[[str], object] | None, name: str) -> object:
    """Import a stub submodule of a package, or else call the package's own `__getattr__`."""
    if f"{package}.{name}" in STUBS:
        return importlib.import_module(f"{package}.{name}")
    if earlier is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return earlier(name)


class _Loader(importlib.abc.Loader):
    """Loader of an existing module under its alias, or of a module with stubs only."""

    def __init__(self, home: str | None) -> None:
        self._home = home
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Import or create the module, and add stubs for its missing names."""
        if self._home is None:
            module, self._spec = ModuleType(spec.name), spec
        else:
            module = importlib.import_module(self._home)
            self._spec = module.__spec__
        if spec.name in STUBS:
            module.__dict__["__getattr__"] = functools.partial(_stub_in, spec.name)
        elif any(name.rpartition(".")[0] == spec.name for name in STUBS):
            earlier = module.__dict__.get("__getattr__")
            module.__dict__["__getattr__"] = functools.partial(_module_in, spec.name, earlier)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own specification: the import system has just replaced it."""
        module.__spec__ = self._spec


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `horovod` and its submodules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a Horovod module, or return None for all others.

        Raises:
            ModuleNotFoundError: sparkhvd has no such module; the message has the replacement.
        """
        if name.partition(".")[0] != _NAME:
            return None
        for absent, text in _ABSENT.items():
            if name == absent or name.startswith(f"{absent}."):
                raise ModuleNotFoundError(f"No module named {name!r}: {text}.", name=name)
        for prefix, home in _HOMES:
            own = home + name.removeprefix(prefix)
            if (name == prefix or name.startswith(f"{prefix}.")) and _is_there(own):
                return importlib.machinery.ModuleSpec(name, _Loader(own), is_package=True)
        return (
            importlib.machinery.ModuleSpec(name, _Loader(None), is_package=True)
            if name in STUBS
            else None
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


def is_installed() -> bool:
    """Whether `horovod` means `sparkhvd.horovod` in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Make `import horovod` mean `sparkhvd.horovod` here and in processes started by sparkhvd.

    Call it before anything imports `horovod`; an installed Horovod is hidden. Further calls do nothing.

    Raises:
        InvalidArgumentError: another `horovod` has been imported.
    """
    present = sys.modules.get(_NAME)
    if present is not None and not is_installed():
        raise InvalidArgumentError(
            f"install_as_horovod(): {getattr(present, '__file__', None) or present} has been imported as horovod. Call it "
            "before the first import of horovod."
        )
    environ = os.environ  # noqa: TID251 - for processes that this process starts
    environ[VARIABLE] = "1"
    environ.update(path_variables(environ))
    if not is_installed():
        sys.meta_path.insert(0, _Finder())
        _install_in_spawned()


class _ProcessName(str):
    """Name of a multiprocessing process.

    Unpickling it installs `horovod`, before the program is imported.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        """Call `install()` in the process that unpickles the name."""
        return _named, (str(self),)


def _named(name: str) -> str:
    install()
    return name


def _install_in_spawned() -> None:
    """Install `horovod` in processes of multiprocessing: spawned, or forked by its fork server."""
    made = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = made(name)
        return {**data, "name": _ProcessName(data["name"])}

    spawn.get_preparation_data = get_preparation_data


def install_if_asked() -> None:
    """Call `install()` if the parent process has requested it."""
    if _is_asked():
        install()


def _is_asked() -> bool:
    return os.environ.get(VARIABLE) == "1"  # noqa: TID251 - not a setting: it changes what a process imports


def path_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Build PYTHONPATH for imports of `horovod`, or {} if not requested or already set."""
    if environ.get(VARIABLE) != "1":
        return {}
    others = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if _IMPORT_PATH in others:
        return {}
    return {"PYTHONPATH": os.pathsep.join([_IMPORT_PATH, *others])}


def variables() -> dict[str, str]:
    """Build the variables for the alias in other processes, or {} if this process has no alias."""
    return {VARIABLE: "1"} if is_installed() else {}


def command(words: Sequence[str]) -> list[str]:
    """Make a command of Python run with the name `horovod`, if requested. Other commands are unchanged."""
    if (
        not _is_asked()
        or not words
        or not re.fullmatch(r"python[\d.]*", os.path.basename(words[0]))
    ):
        return list(words)
    first = 1
    while first < len(words) and words[first].startswith("-") and words[first] not in ("-m", "-c"):
        first += 2 if words[first] in _WITH_VALUE else 1
    if first >= len(words):  # python reads its standard input, or prints its version
        return list(words)
    return [*words[:first], "-m", "sparkhvd.horovod", *words[first:]]
