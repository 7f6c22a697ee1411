"""Horovod's `horovod.common`.

Each module imports only those above it:

    elastic     names of elastic training
    exceptions  errors that programs catch
    util        built features, by Horovod's names
"""
