"""Horovod's `horovod.spark.common`.

Each module imports only those above it:

    backend    backends that run the ranks of a fit
    constants  constants of Horovod's data path
    params     names of Params
    parquet    data of a fit as plain Parquet in the store
    util       the environment of a program
    store      stores with Horovod's methods
    model      models
    estimator  estimators
"""
