"""Arguments of Horovod's other estimators, which are unknown names here, with the hint that the error gives."""

from __future__ import annotations

__all__ = ["ELSEWHERE"]

ELSEWHERE = {
    "num_gpus": "It is of horovod.spark.lightning; give num_proc.",
    "logger": "It is of horovod.spark.lightning; progress= gets the record of each epoch.",
    "log_every_n_steps": "It is of horovod.spark.lightning; progress= gets the record of each epoch.",
    "loader_num_epochs": "It is of horovod.spark.lightning; every epoch reads each row once.",
    "profiler": "It is of horovod.spark.lightning; sparkhvd.Settings(timeline=...) writes a timeline.",
    "trainer_args": "It is of horovod.spark.lightning; each thing that a fit may do has an argument of its own.",
    "debug_data_loader": "It is of horovod.spark.lightning.",
    "train_async_data_loader_queue_size": "It is of horovod.spark.lightning; batches are always read ahead.",
    "val_async_data_loader_queue_size": "It is of horovod.spark.lightning; batches are always read ahead.",
    "custom_objects": "It is of horovod.spark.keras.",
    "checkpoint_callback": "It is of horovod.spark.keras; a checkpoint is always written.",
    "backend_env": "It is of horovod.spark.keras; set variables in Spark's configuration (spark.executorEnv.NAME).",
}
