"""Write the table of Horovod's public names into docs/coming_from_horovod.md.

    .venv/bin/python -m tools.horovod_names

Names are those of Horovod 0.28.1's documentation; whether a name is there is found by importing it as `horovod.<module>` here. A note says how it
differs, or why it is not there. A test compares the page with what this writes.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import sparkhvd

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming_from_horovod.md"
BEGIN, END = (
    "<!-- names: written by `python -m tools.horovod_names` -->\n",
    "<!-- end of names -->\n",
)

_ELASTIC = "making or calling it is a `NotImplementedError`: the number of ranks does not change in this version"
_OWN_PATH = "a `NotImplementedError`: use `sparkhvd.data.prepare`"

NAMES: dict[str, str] = {
    "horovod": "run __version__",
    "horovod.torch": "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size mpi_threads_supported mpi_enabled mpi_built "
    "gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built start_timeline stop_timeline Average Sum Adasum Min Max Product "
    "ProcessSet global_process_set add_process_set remove_process_set allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce "
    "grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather "
    "grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async "
    "grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize broadcast_parameters broadcast_optimizer_state broadcast_object "
    "allgather_object Compression DistributedOptimizer SyncBatchNorm HorovodInternalError elastic",
    "horovod.torch.mpi_ops": "is_homogeneous allreduce allgather broadcast alltoall reducescatter synchronize poll join barrier",
    "horovod.torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.compression": "Compression",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "run TorchState ElasticSampler",
    "horovod.common.elastic": "State ObjectState run_fn",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
    "horovod.common.util": "extension_available check_extension gpu_available gloo_built mpi_built nccl_built ddl_built ccl_built cuda_built rocm_built",
    "horovod.runner": "run run_commandline",
    "horovod.spark": "run run_elastic",
    "horovod.spark.elastic": "run_elastic",
    "horovod.spark.torch": "TorchEstimator TorchModel",
    "horovod.spark.lightning": "TorchEstimator TorchModel",
    "horovod.spark.keras": "KerasEstimator KerasModel",
    "horovod.spark.common.backend": "Backend SparkBackend",
    "horovod.spark.common.store": "Store FilesystemStore LocalStore HDFSStore DBFSLocalStore AbstractFilesystemStore",
    "horovod.spark.common.params": "EstimatorParams ModelParams",
    "horovod.spark.common.util": "prepare_data",
    "horovod.spark.common.datamodule": "DataModule",
    "horovod.spark.data_loaders.pytorch_data_loaders": "PytorchDataLoader PytorchAsyncDataLoader",
    "horovod.data": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.keras": "DistributedOptimizer callbacks load_model broadcast_global_variables",
    "horovod.ray": "RayExecutor",
    "horovod.tensorflow": "DistributedGradientTape",
    "horovod.mxnet": "DistributedTrainer",
}  # fmt: skip

# What to know of a name, or of all names of a module.
NOTES: dict[str, str] = {
    "horovod.run": "arguments for a number of ranks that changes, and `output_filename`, are errors",
    "horovod.runner.run": "as `horovod.run`",
    "horovod.torch.elastic": _ELASTIC,
    "horovod.common.elastic": _ELASTIC,
    "horovod.spark.run_elastic": _ELASTIC,
    "horovod.spark.elastic": _ELASTIC,
    "horovod.torch.HorovodInternalError": "of `PeerLostError` and its like; a mismatch between ranks is a `MismatchError`",
    "horovod.torch.synchronize": "a handle is a `Handle`; a second call gives the result again",
    "horovod.torch.reducescatter": "also Min, Max, Product",
    "horovod.torch.broadcast_optimizer_state": "steps nothing; every class of `torch.optim`",
    "horovod.common.exceptions.HostsUpdatedInterrupt": "nothing raises it in this version",
    "horovod.common.exceptions.HorovodVersionMismatchError": "nothing raises it: there is one part",
    "horovod.spark.torch": "predictions are not rounded; `train_minibatch_fn` is an error that names `train_step`; exact rows and resume are ours",
    "horovod.spark.lightning": "as sparkhvd.lightning's, with Horovod's hooks, Params and values; a run that stopped goes on exactly",
    "horovod.spark.keras": "for Keras 3 on its torch backend",
    "horovod.keras": "for Keras 3 on its torch backend",
    "horovod.spark.common.backend.SparkBackend": "sends the variables in `env`, not all of the driver's",
    "horovod.spark.common.store": "data that `fit` packs are in the store's folder `data`; opens every file system by its URL",
    "horovod.spark.common.params": "names that have no effect; the others are in sparkhvd's table of Params",
    "horovod.spark.common.util.prepare_data": _OWN_PATH,
    "horovod.spark.common.datamodule": "batches come from the fit, or from a `data_module` with the same arguments",
    "horovod.spark.data_loaders.pytorch_data_loaders": "use the loaders of `sparkhvd.data`",
    "horovod.data": "use the loaders of `sparkhvd.data`",
    "horovod.ray": "Ray is not a launcher of sparkhvd: use sparkhvdrun, mpirun or Spark",
    "horovod.tensorflow": "use PyTorch, or Keras 3 on its torch backend",
    "horovod.mxnet": "use PyTorch",
}


def _is_there(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError as error:
        # What a frontend needs may not be installed here.
        return (error.name or "").partition(".")[0] not in ("", "horovod", "sparkhvd")


def rows() -> list[tuple[str, str, str, str]]:
    """Return module, names, state and note of each line."""
    found = []
    for module, text in NAMES.items():
        lines: dict[tuple[str, str], list[str]] = {}
        for name in text.split():
            note = NOTES.get(f"{module}.{name}", NOTES.get(module, ""))
            state = "not" if not _is_there(module, name) else "differs" if note else "there"
            if note in (_ELASTIC, _OWN_PATH):
                state = "not"
            lines.setdefault((state, note), []).append(f"`{name}`")
        found += [(module, " ".join(names), state, note) for (state, note), names in lines.items()]
    return found


def table() -> str:
    """Return the table."""
    lines = ["| module | names | | |", "|---|---|---|---|"]
    lines += [
        f"| `{module}` | {names} | {state} | {note} |" for module, names, state, note in rows()
    ]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    sparkhvd.install_as_horovod()
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
