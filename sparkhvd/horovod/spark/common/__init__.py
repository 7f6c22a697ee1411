"""Horovod's `horovod.spark.common`.

Each module imports only those above it:

    backend    where the ranks of a fit run
    store      where a fit keeps its files
    params     names of Params
    model      models
    estimator  estimators
"""
