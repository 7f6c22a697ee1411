"""Transform DataFrames in Spark's Python workers: read Arrow batches and add output columns.

The driver matches columns and decides the output columns before Spark runs a job. Workers load only the module
`worker`, which does not import pyspark.

Each module imports only those above it:

    binding  match a DataFrame's columns with the model's
    worker   loop over batches in a Python worker
    outputs  columns to add
    local    predictions without Spark
    stage    Spark stage that runs the workers
"""
