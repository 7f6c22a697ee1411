"""sparkhvd: train PyTorch models on Spark DataFrames, with Horovod's API on compiled collectives.

Every public name below is imported at its first use, so `import sparkhvd` loads neither torch nor
pyspark. The `__init__` of each package describes its purpose, threads, trust, failures and shutdown.

Each module imports only those above it:

    _moved         former module names, which saved models, checkpoints and pickles may contain
    _version       version of the package
    arrow_buffers  Arrow arrays of plain values
    cpus           CPUs that a process may use
    errors         every exception
    python_daemon  daemon of Spark's Python workers that has imported torch
    as_horovod     the name `horovod` for this package's modules
    lazy_compiler  torch's compiler, imported when something compiles
    interfaces     addresses of this host
    rank_messages  messages of a rank to the driver
    wire           frames and messages between processes of a job, and the reader of JSON
    settings       every setting of engine and launch
    terminal       text of ranks and files for a terminal
    topology       local and cross ranks from hosts
    engine         compiled collectives: the only ctypes
    spark          a session, classic or Connect, behind one interface
    observe        report, loggers, timeline, autotune
    rendezvous     authenticated connections between ranks
    elastic        membership of elastic jobs
    launchers      a script's rendezvous, by its launcher
    runner         a function on every rank
    torch          Horovod's API on the engine
    data           a DataFrame's rows as batches of a rank
    distributed    the engine as a backend of torch.distributed
    training       the training loop of a rank
    estimator      `TorchEstimator`, `TorchClassifier`, `TorchRegressor` and their models
    run_commands   `sparkhvd runs`, `report`, `compare` and `reproduce`
    __main__       `sparkhvd doctor`, `runs`, `report`, `compare`, `reproduce`
    keras          Horovod's API of Keras, and its estimator
    lightning      Lightning's strategy
    horovod        packages with Horovod's layout
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparkhvd import _moved
from sparkhvd._version import __version__

_moved.install()

if TYPE_CHECKING:
    from sparkhvd.errors import CollectiveError as CollectiveError
    from sparkhvd.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from sparkhvd.errors import ElasticError as ElasticError
    from sparkhvd.errors import EngineUnavailableError as EngineUnavailableError
    from sparkhvd.errors import HorovodInternalError as HorovodInternalError
    from sparkhvd.errors import InternalError as InternalError
    from sparkhvd.errors import InvalidArgumentError as InvalidArgumentError
    from sparkhvd.errors import LeftOutError as LeftOutError
    from sparkhvd.errors import MismatchError as MismatchError
    from sparkhvd.errors import NotInitializedError as NotInitializedError
    from sparkhvd.errors import PeerLostError as PeerLostError
    from sparkhvd.errors import PreflightError as PreflightError
    from sparkhvd.errors import RankError as RankError
    from sparkhvd.errors import ResultMemoryError as ResultMemoryError
    from sparkhvd.errors import SparkhvdError as SparkhvdError
    from sparkhvd.errors import SparkUnavailableError as SparkUnavailableError
    from sparkhvd.errors import StoreError as StoreError
    from sparkhvd.errors import UntrustedError as UntrustedError
    from sparkhvd.estimator import Callback as Callback
    from sparkhvd.estimator import LocalModel as LocalModel
    from sparkhvd.estimator import Store as Store
    from sparkhvd.estimator import TorchClassificationModel as TorchClassificationModel
    from sparkhvd.estimator import TorchClassifier as TorchClassifier
    from sparkhvd.estimator import TorchEstimator as TorchEstimator
    from sparkhvd.estimator import TorchModel as TorchModel
    from sparkhvd.estimator import TorchRegressionModel as TorchRegressionModel
    from sparkhvd.estimator import TorchRegressor as TorchRegressor
    from sparkhvd.estimator import load_local as load_local
    from sparkhvd.estimator import pad as pad
    from sparkhvd.estimator import read_packed as read_packed
    from sparkhvd.estimator import trust as trust
    from sparkhvd.horovod import install_as_horovod as install_as_horovod
    from sparkhvd.observe.live_plot import LivePlot as LivePlot
    from sparkhvd.observe.loggers.base import Logger as Logger
    from sparkhvd.observe.loggers.mlflow import MLflowLogger as MLflowLogger
    from sparkhvd.observe.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from sparkhvd.rank_messages import log_metrics as log_metrics
    from sparkhvd.rank_messages import log_to_driver as log_to_driver
    from sparkhvd.runner import run as run
    from sparkhvd.runner import run_hosts as run_hosts
    from sparkhvd.runner import run_local as run_local
    from sparkhvd.runner.horovod_runner import HorovodRunner as HorovodRunner
    from sparkhvd.settings import Settings as Settings
    from sparkhvd.torch import metrics as metrics

_ERRORS = (
    "CollectiveError",
    "CollectiveTimeoutError",
    "ElasticError",
    "EngineUnavailableError",
    "HorovodInternalError",
    "InternalError",
    "InvalidArgumentError",
    "LeftOutError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "PreflightError",
    "RankError",
    "ResultMemoryError",
    "SparkUnavailableError",
    "SparkhvdError",
    "StoreError",
    "UntrustedError",
)

# Module of each public name.
_HOMES = {
    **dict.fromkeys(_ERRORS, "sparkhvd.errors"),
    "Settings": "sparkhvd.settings",
    "metrics": "sparkhvd.torch",
    "log_metrics": "sparkhvd.rank_messages",
    "log_to_driver": "sparkhvd.rank_messages",
    "LivePlot": "sparkhvd.observe.live_plot",
    "Logger": "sparkhvd.observe.loggers.base",
    "MLflowLogger": "sparkhvd.observe.loggers.mlflow",
    "TensorBoardLogger": "sparkhvd.observe.loggers.tensorboard",
    "Callback": "sparkhvd.estimator",
    "LocalModel": "sparkhvd.estimator",
    "Store": "sparkhvd.estimator",
    "TorchClassificationModel": "sparkhvd.estimator",
    "TorchClassifier": "sparkhvd.estimator",
    "TorchEstimator": "sparkhvd.estimator",
    "TorchModel": "sparkhvd.estimator",
    "load_local": "sparkhvd.estimator",
    "pad": "sparkhvd.estimator",
    "TorchRegressionModel": "sparkhvd.estimator",
    "TorchRegressor": "sparkhvd.estimator",
    "read_packed": "sparkhvd.estimator",
    "HorovodRunner": "sparkhvd.runner.horovod_runner",
    "install_as_horovod": "sparkhvd.horovod",
    "run": "sparkhvd.runner",
    "run_hosts": "sparkhvd.runner",
    "run_local": "sparkhvd.runner",
    "trust": "sparkhvd.estimator",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 - the names are data, so that each is listed once


def __getattr__(name: str) -> Any:
    if name == "runner":  # a package with a slow import
        return importlib.import_module("sparkhvd.runner")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sparkhvd' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
