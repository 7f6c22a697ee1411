"""Transform in Spark's Python workers: reads Arrow batches and adds output columns.

The driver matches columns and decides on outputs before Spark runs anything. Workers load only `worker`, which
does not import pyspark.

Each module imports only those above it:

    binding  the columns of a module without a fit
    worker   the loop over batches
    outputs  the columns to add
    local    predictions without Spark
    stage    the Spark stage
"""
