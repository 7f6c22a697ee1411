"""Transform in Spark's Python workers: Arrow batches in, the same with output columns out.

The driver matches columns and decides on outputs before Spark runs anything. `gpu`, `computation` and `worker` are what the workers load: they
import nothing of pyspark.

Each module imports only those above it:

    gpu          the device of a worker
    computation  output columns as tensors
    worker       the loop over batches
    columns      the DataFrame's columns for those of the training
    binding      the columns of a module that no fit has trained
    outputs      the columns to add
    single       one row on the driver
    stage        the Spark stage
"""
