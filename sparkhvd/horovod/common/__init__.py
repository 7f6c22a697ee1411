"""Horovod's `horovod.common`.

Each module imports only those above it:

    elastic     names of a training whose ranks change
    exceptions  errors that programs catch
    util        what was built, by Horovod's names
"""
