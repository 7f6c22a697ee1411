"""Transform in Spark's Python workers: Arrow batches in, the same with output columns out. Imports nothing of pyspark.

Each module imports only those above it:

    gpu     the device of a worker
    worker  the loop over batches
"""
