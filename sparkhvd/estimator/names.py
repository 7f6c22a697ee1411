"""Spark ML's and Horovod's names for what has another name here, and what of Horovod's has no effect here.

Nothing but tables: `params.py` makes keyword arguments, Params and accessors of them. The same names stand in
docs/params.md.
"""

from __future__ import annotations

__all__ = ["ACCESSORS", "ALIASES", "ELSEWHERE", "NO_EFFECT"]

# Spark ML's name -> the Param. Good as a keyword argument, as an attribute (for a ParamGridBuilder) and in accessors.
ALIASES = {
    "featuresCol": "feature_cols",
    "labelCol": "label_cols",
    "weightCol": "sample_weight_col",
    "validationIndicatorCol": "validation",
    "maxIter": "epochs",
    "seed": "random_seed",
    "stepSize": "learning_rate",
    "numTrainWorkers": "num_proc",
    "backward_passes_per_step": "accumulate",  # Horovod's names
    "train_reader_num_workers": "num_workers",
}

# Horovod's accessors whose names do not follow from the Param's: getX and setX for each.
ACCESSORS = {
    "ShufflingBufferSize": "shuffle_buffer_size",
    "TrainReaderNumWorker": "num_workers",
    "ValReaderNumWorker": "val_reader_num_workers",
    "InMemoryCacheAll": "inmemory_cache_all",
    "FeatureColumns": "feature_cols",
    "LabelColumns": "label_cols",
    "LabelColoumns": "label_cols",
}

# Horovod's Params that are taken and have no effect -> what to do instead. Setting one warns with this text.
NO_EFFECT = {
    "backend": "give num_proc, and variables as spark.executorEnv.NAME in Spark's configuration",
    "partitions_per_process": "rows are shared out evenly whatever the partitions are; repartition the DataFrame to "
    "write with more tasks",
    "reader_pool_type": "data are read by threads",
    "mp_start_method": "ranks are always processes of their own",
    "tensorflow_dataset_prefetch_buffer_size": "batches are always read ahead",
    "shuffle_buffer_size": "give shuffle_bytes",
    "continuous_cols": "give feature_cols, and inputs={...} to pass columns by name",
    "categorical_cols": "give feature_cols, and inputs={...} to pass columns by name",
    "data_module": "batches come from the materialized data; read them yourself in a function for sparkhvd.runner.run",
    "compress_sparse_cols": "how a sparse vector is stored follows from the column",
    "transformation_edit_fields": "shapes follow from the data",
    "transformation_removed_fields": "only the columns that the model needs are read",
}

# Horovod's arguments that are unknown here, and what the error says.
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
