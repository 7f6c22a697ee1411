"""Horovod's `horovod.spark.common`.

Each module imports only those above it:

    util       where a program runs
    backend    where the ranks of a fit run
    store      where a fit keeps its files
    parquet    data of a fit as plain Parquet in the store
    constants  words and numbers of Horovod's data path
    params     names of Params
    model      models
    estimator  estimators
"""
