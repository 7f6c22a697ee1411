"""Horovod's `horovod.runner.launch`: the command line."""

from sparkhvd.runner.command import main as run_commandline

__all__ = ["run_commandline"]
