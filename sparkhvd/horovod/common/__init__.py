"""Horovod's `horovod.common`.

exceptions  errors that programs catch
util        what was built, by Horovod's names
"""
