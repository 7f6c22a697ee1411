"""Horovod's API of Keras, for Keras 3 on its torch backend: `import sparkhvd.keras as hvd`.

Horovod's own runs on TensorFlow; its programs need Keras 3 and KERAS_BACKEND=torch. If Keras is not yet imported and no backend
chosen, importing this package selects torch. Usage and limits: docs/keras.md.

Threads, failure, shutdown: as in `sparkhvd.torch`, whose engine this uses.

Each module imports only those above it:

    backend    import and check of the package `keras`
    network    a Keras model as a torch module
    model      `KerasModel`
    optimizer  `DistributedOptimizer`
    variables  collectives on values and variables
    callbacks  Horovod's callbacks
    training   a rank of a fit
    estimator  `KerasEstimator`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparkhvd.keras import callbacks
from sparkhvd.keras.optimizer import DistributedOptimizer, load_model
from sparkhvd.keras.variables import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from sparkhvd.spark import needs_pyspark
from sparkhvd.torch import (
    Adasum,
    Average,
    Compression,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

if TYPE_CHECKING:
    from sparkhvd.keras.estimator import KerasEstimator as KerasEstimator
    from sparkhvd.keras.model import KerasModel as KerasModel

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

# Ranks of a script need no pyspark.
_OF_SPARK = {"KerasEstimator": "estimator", "KerasModel": "model"}


def __getattr__(name: str) -> Any:
    if name in _OF_SPARK:
        with needs_pyspark(f"sparkhvd.keras.{name}"):
            return getattr(importlib.import_module(f"sparkhvd.keras.{_OF_SPARK[name]}"), name)
    raise AttributeError(f"module 'sparkhvd.keras' has no attribute {name!r}")
