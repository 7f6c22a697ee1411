"""Transform in Spark's Python workers: Arrow batches in, the same with output columns out.

The driver matches columns and decides on outputs before Spark runs anything. `gpu`, `computation` and `worker` are what the workers load: they
import nothing of pyspark.

Each module imports only those above it:

    binding  the columns of a module that no fit has trained
    worker   the loop over batches
    outputs  the columns to add
    single   one row on the driver
    stage    the Spark stage
"""
