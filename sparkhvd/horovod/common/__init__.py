"""Horovod's `horovod.common`.

Each module imports only those above it:

    exceptions  errors that programs catch
    util        what was built, by Horovod's names
    elastic     names of a training whose ranks change
"""
