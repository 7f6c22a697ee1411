"""Horovod's `horovod.spark.common`.

Each module imports only those above it:

    backend    where the ranks of a fit run
    constants  words and numbers of Horovod's data path
    params     names of Params
    parquet    data of a fit as plain Parquet in the store
    util       where a program runs
    store      where a fit keeps its files
    model      models
    estimator  estimators
"""
