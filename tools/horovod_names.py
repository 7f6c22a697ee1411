"""Write the table of Horovod's public names into docs/horovod_names.md.

    .venv/bin/python -m tools.horovod_names

The names are those of Horovod 0.28.1's documentation. Each is imported here as `horovod.<module>` to see whether it
exists. A note says how it differs, or why it is missing. A test compares the page with the output.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import sparkhvd
from sparkhvd import as_horovod

PAGE = Path(__file__).resolve().parents[1] / "docs" / "horovod_names.md"
BEGIN, END = (
    "<!-- names: written by `python -m tools.horovod_names` -->\n",
    "<!-- end of names -->\n",
)

# For the numbers of ranks.
_ELASTIC = "by default as many ranks as there are slots"

NAMES: dict[str, str] = {
    "horovod": "run __version__",
    "horovod.torch": "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size mpi_threads_supported mpi_enabled mpi_built "
    "gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built start_timeline stop_timeline Average Sum Adasum Min Max Product "
    "ProcessSet global_process_set add_process_set remove_process_set allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce "
    "grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather "
    "grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async "
    "grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize broadcast_parameters broadcast_optimizer_state broadcast_object "
    "allgather_object Compression DistributedOptimizer SyncBatchNorm HorovodInternalError elastic check_extension gpu_available num_rank_is_power_2",
    "horovod.torch.mpi_ops": "is_homogeneous allreduce allgather broadcast alltoall reducescatter synchronize poll join barrier "
    "HorovodAllreduce handle_average_backwards_compatibility check_extension gpu_available num_rank_is_power_2",
    "horovod.torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.compression": "Compression NoneCompressor FP16Compressor",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "run State ObjectState TorchState ElasticSampler",
    "horovod.torch.elastic.state": "TorchState",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.common.elastic": "State ObjectState run_fn notification_manager",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError get_version_mismatch_message",
    "horovod.common.util": "extension_available check_extension gpu_available gloo_built mpi_built nccl_built ddl_built ccl_built cuda_built rocm_built "
    "num_rank_is_power_2 get_average_backwards_compatibility_fun",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "horovod.runner": "run run_commandline",
    "horovod.runner.launch": "run_commandline parse_args run_controller is_gloo_used",
    "horovod.runner.gloo_run": "gloo_run launch_gloo",
    "horovod.runner.mpi_run": "mpi_run mpi_available is_open_mpi is_mpich is_intel_mpi",
    "horovod.runner.js_run": "js_run is_jsrun_installed",
    "horovod.runner.run_task": "main",
    "horovod.runner.task_fn": "main",
    "horovod.runner.common.service.driver_service": "BasicDriverService BasicDriverClient",
    "horovod.runner.common.service.task_service": "BasicTaskService BasicTaskClient",
    "horovod.runner.common.util": "all",
    "horovod.runner.common.util.host_hash": "host_hash",
    "horovod.runner.common.util.hosts": "HostInfo SlotInfo parse_hosts get_host_assignments",
    "horovod.runner.common.util.safe_shell_exec": "execute",
    "horovod.runner.common.util.secret": "make_secret_key",
    "horovod.runner.common.util.settings": "BaseSettings Settings",
    "horovod.runner.common.util.timeout": "Timeout",
    "horovod.runner.driver.driver_service": "HorovodRunDriverService HorovodRunDriverClient",
    "horovod.runner.elastic.discovery": "HostDiscovery HostManager",
    "horovod.runner.elastic.driver": "ElasticDriver",
    "horovod.runner.elastic.settings": "ElasticSettings",
    "horovod.runner.elastic.worker": "WorkerNotificationManager",
    "horovod.runner.http.http_client": "read_data_from_kvstore put_data_into_kvstore",
    "horovod.runner.http.http_server": "RendezvousServer KVStoreServer",
    "horovod.runner.task.task_service": "HorovodRunTaskService HorovodRunTaskClient",
    "horovod.runner.util": "all",
    "horovod.spark": "run run_elastic",
    "horovod.spark.runner": "run run_elastic",
    "horovod.spark.conf": "SPARK_CONF_ALWAYS_RESTART_FAILED_TASK SPARK_CONF_BLACKLIST_DISABLED SPARK_CONF_BLACKLIST_ENABLED",
    "horovod.spark.task": "get_available_devices",
    "horovod.spark.task.task_service": "SparkTaskService SparkTaskClient",
    "horovod.spark.driver": "all",
    "horovod.spark.driver.driver_service": "SparkDriverService SparkDriverClient",
    "horovod.spark.driver.job_id": "next_job_id",
    "horovod.spark.driver.rsh": "rsh",
    "horovod.spark.driver.mpirun_rsh": "main",
    "horovod.spark.gloo_run": "gloo_run gloo_run_elastic",
    "horovod.spark.mpi_run": "mpi_run",
    "horovod.spark.elastic": "run_elastic",
    "horovod.spark.torch": "TorchEstimator TorchModel",
    "horovod.spark.torch.estimator": "TorchEstimator TorchModel EstimatorParams",
    "horovod.spark.torch.datamodule": "PetastormDataModule NVTabularDataModule",
    "horovod.spark.torch.util": "all",
    "horovod.spark.torch.remote": "RemoteTrainer",
    "horovod.spark.lightning": "TorchEstimator TorchModel",
    "horovod.spark.lightning.estimator": "TorchEstimator TorchModel EstimatorParams MIN_PL_VERSION",
    "horovod.spark.lightning.datamodule": "PetastormDataModule",
    "horovod.spark.lightning.legacy": "all",
    "horovod.spark.lightning.remote": "RemoteTrainer",
    "horovod.spark.lightning.util": "all",
    "horovod.spark.keras": "KerasEstimator KerasModel",
    "horovod.spark.keras.estimator": "KerasEstimator KerasModel EstimatorParams",
    "horovod.spark.keras.datamodule": "PetastormDataModule NVTabularDataModule",
    "horovod.spark.keras.bare": "all",
    "horovod.spark.keras.optimizer": "all",
    "horovod.spark.keras.remote": "RemoteTrainer",
    "horovod.spark.keras.tensorflow": "all",
    "horovod.spark.keras.util": "all",
    "horovod.spark.common.backend": "Backend SparkBackend",
    "horovod.spark.common.cache": "TrainingDataCache",
    "horovod.spark.common.store": "Store FilesystemStore LocalStore HDFSStore DBFSLocalStore AbstractFilesystemStore "
    "is_databricks host_hash",
    "horovod.spark.common.store.Store": "create is_parquet_dataset get_parquet_dataset get_train_data_path get_val_data_path get_test_data_path "
    "get_data_metadata_path saving_runs get_runs_path get_run_path get_checkpoint_path get_checkpoints get_logs_path get_checkpoint_filename "
    "get_logs_subdir exists read write_text read_serialized_keras_model get_local_output_dir_fn sync_fn to_remote fs get_localized_path "
    "get_full_path get_full_path_fn copy",
    "horovod.spark.common.store.DBFSLocalStore": "normalize_path matches_dbfs",
    "horovod.spark.common.params": "EstimatorParams ModelParams",
    "horovod.spark.common.estimator": "HorovodEstimator HorovodModel",
    "horovod.spark.common.constants": "ARRAY BYTES_PER_GIB CUSTOM_SPARSE NOCHANGE PETASTORM_HDFS_DRIVER TOTAL_BUFFER_MEMORY_CAP_GIB "
    "METRIC_PRINT_FREQUENCY MIXED_SPARSE_DENSE_VECTOR",
    "horovod.spark.common.codec": "all",
    "horovod.spark.common.serialization": "HorovodParamsReader HorovodParamsWriter",
    "horovod.spark.common.util": "is_databricks host_hash prepare_data check_shape_compatibility",
    "horovod.spark.common.datamodule": "DataModule",
    "horovod.spark.data_loaders.pytorch_data_loaders": "PytorchDataLoader PytorchAsyncDataLoader PytorchInfiniteDataLoader "
    "PytorchInfiniteAsyncDataLoader PytorchInmemDataLoader PytorchInmemAsyncDataLoader PetastormBatchedDataLoader",
    "horovod.data": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.data.data_loader_base": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.keras": "DistributedOptimizer callbacks load_model broadcast_global_variables",
    "horovod.keras.elastic": "all",
    "horovod.ray": "RayExecutor",
    "horovod.tensorflow": "DistributedGradientTape",
    "horovod.mxnet": "DistributedTrainer",
}  # fmt: skip

# Notes on a name, or on all names of a module.
NOTES: dict[str, str] = {
    "horovod.run": "`output_filename` is an error",
    "horovod.runner.run": "as `horovod.run`",
    "horovod.torch.elastic.ElasticSampler": "also `batches(size)`, which repeats no row; `processed_num` counts as there, and a commit adds what other ranks have done more or less; `state_dict()` has the rows themselves, too",
    "horovod.torch.elastic.sampler.ElasticSampler": "the same",
    "horovod.spark.run_elastic": _ELASTIC,
    "horovod.spark.runner.run_elastic": _ELASTIC,
    "horovod.spark.elastic": _ELASTIC,
    "horovod.spark.conf": "pairs as there, by Spark's names since 3.1; nothing here needs them, because a rank that dies fails no task",
    "horovod.spark.task.get_available_devices": "the number by which CUDA knows the rank's GPU in its process, not Spark's address",
    "horovod.spark.lightning.estimator.MIN_PL_VERSION": "Horovod's, 1.3.8; sparkhvd needs 2.4",
    "horovod.torch.HorovodInternalError": "of `PeerLostError` and its like; a mismatch between ranks is a `MismatchError`",
    "horovod.torch.synchronize": "a handle is a `Handle`; a second call gives the result again",
    "horovod.torch.reducescatter": "also Min, Max, Product",
    "horovod.torch.broadcast_optimizer_state": "steps nothing; every class of `torch.optim`",
    "horovod.common.exceptions.HorovodVersionMismatchError": "nothing raises it: there is one part",
    "horovod.spark.torch": "predictions are not rounded; `train_minibatch_fn` is an error that names `train_step`; exact rows and resume are ours",
    "horovod.spark.lightning": "as sparkhvd.lightning's, with Horovod's hooks, Params and values; a stopped run resumes exactly",
    "horovod.spark.keras": "for Keras 3 on its torch backend",
    "horovod.spark.keras.estimator": "for Keras 3 on its torch backend",
    "horovod.keras": "for Keras 3 on its torch backend",
    "horovod.spark.common.backend.SparkBackend": "sends the variables in `env`, not all of the driver's",
    "horovod.spark.common.store.Store.get_checkpoints": "files end in `.pt`",
    "horovod.spark.common.store.Store.get_checkpoint_path": "the folder `checkpoints` of the run",
    "horovod.spark.common.store.Store.get_checkpoint_filename": "`latest.json`, which points to the newest",
    "horovod.spark.common.store.Store.get_localized_path": "as `fs` takes it",
    "horovod.spark.common.store": "data that `fit` packs are in the store's folder `data`; opens every file system by its URL",
    "horovod.spark.common.store.is_databricks": "",
    "horovod.spark.common.constants.METRIC_PRINT_FREQUENCY": "progress is shown per epoch, not per step: print metrics of steps in a callback's on_step_end()",
    "horovod.spark.common.constants.MIXED_SPARSE_DENSE_VECTOR": "sparse and dense vectors of a column are one type: leave it out",
    "horovod.spark.common.params": "names that have no effect; the others are in sparkhvd's table of Params",
    "horovod.ray": "Ray is not a launcher of sparkhvd: use sparkhvdrun, mpirun or Spark",
    "horovod.spark.keras.bare": "of a Keras that sparkhvd does not have: use Keras 3 on its torch backend",
    "horovod.spark.keras.tensorflow": "of a Keras that sparkhvd does not have: use Keras 3 on its torch backend",
    "horovod.tensorflow": "use PyTorch, or Keras 3 on its torch backend",
    "horovod.mxnet": "use PyTorch",
}


def _found(module: str, name: str) -> Any:
    """Look up a name of a module or class, or None if it is missing.

    Returns True if a requirement of a frontend is not installed here.
    """
    home, _, last = module.rpartition(".")
    is_class = last[:1].isupper()
    try:
        value = importlib.import_module(home if is_class else module)
        return getattr(getattr(value, last) if is_class else value, name, None)
    except ImportError as error:
        needs = (error.name or "").partition(".")[0]
        return needs not in ("", "horovod", "sparkhvd") or None


def rows() -> list[tuple[str, str, str, str]]:
    """List the lines of the table: module, names, state and note."""
    found = []
    for module, text in NAMES.items():
        lines: dict[tuple[str, str], list[str]] = {}
        for name in text.split():
            note = NOTES.get(f"{module}.{name}", NOTES.get(module, ""))
            value = _found(module, name)
            state = "not" if value is None else "differs" if note else "there"
            if isinstance(value, type) and issubclass(value, as_horovod.Stub):
                state = "stub"
                note = value.refusal.partition(" is not in sparkhvd: ")[2].removesuffix(".")
            shown = name if name == "all" else f"`{name}`"
            lines.setdefault((state, note), []).append(shown)
        found += [(module, " ".join(names), state, note) for (state, note), names in lines.items()]
    return found


def table() -> str:
    """Format the lines as a Markdown table."""
    lines = ["| module | names | | |", "|---|---|---|---|"]
    lines += [
        f"| `{module}` | {names} | {state} | {note} |" for module, names, state, note in rows()
    ]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Replace the table in the text of the page."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    sparkhvd.install_as_horovod()
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
