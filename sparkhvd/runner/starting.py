"""Everything that the start of a trainer needs: pipes, environment, and the choice between a fork and a fresh process."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparkhvd.runner import allocator, nurseries
from sparkhvd.runner.frames import Prologue
from sparkhvd.runner.processes import Ends

__all__ = ["Start", "may_fork", "prepare", "prepare_nursery"]

_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
# Folders of Python's own modules.
_OF_PYTHON = frozenset([*_STDLIB, *(f"{folder}/lib-dynload" for folder in _STDLIB)])


@dataclass(frozen=True)
class Start:
    """Everything that the start of a trainer needs.

    Attributes:
        prologue: its first frame.
        program: its second one.
        environ: environment of the process.
        ends: descriptors that the process takes over.
        result: this side's end of the pipe of results.
        log: this side's end of the pipe of output.
        is_late: whether a nursery may fork the process, after the listener's owner has closed it.
    """

    prologue: Prologue
    program: bytes
    environ: dict[str, str]
    ends: Ends
    result: int
    log: int
    is_late: bool = False

    def kept(self) -> Start:
        """Return a start with a listener of its own."""
        listener = [fd if fd < 0 else os.dup(fd) for fd in self.ends.listener]
        tcp, unix = listener
        ends = replace(self.ends, listener=(tcp, unix))
        return replace(
            self, prologue=replace(self.prologue, listener=(tcp, unix)), ends=ends, is_late=True
        )

    def variables(self) -> dict[str, str]:
        """Return the environment with which the process imports."""
        return {**self.environ, **self.prologue.variables()}

    def close_listener(self) -> None:
        """Close the listener of a start that was kept."""
        for fd in self.ends.listener:
            if fd >= 0:
                os.close(fd)

    def abandon(self) -> None:
        """Close everything of a start that was kept, and that is not wanted any more."""
        self.ends.close()
        self.close_listener()
        os.close(self.result)
        os.close(self.log)


def prepare(prologue: Prologue, program: bytes) -> tuple[int, Start]:
    """Make the pipes and the environment of a process; return the pipe to it, and the start."""
    spec_read, spec = os.pipe()
    result, result_write = os.pipe()
    log, log_write = os.pipe()
    ends = Ends(spec_read, result_write, log_write, prologue.listener)
    return spec, Start(prologue, program, _environment(prologue), ends, result, log)


def prepare_nursery(prologue: Prologue) -> None:
    """Let this process's nursery import what a trainer with this prologue needs; returns at once."""
    nurseries.prepare(prologue.preload, {**_environment(prologue), **prologue.variables()})


def may_fork(prologue: Prologue) -> bool:
    """Return True if a nursery may fork the process: not where CUDA's driver is asked, or may have been."""
    return prologue.nursery and not prologue.gpu_views and nurseries.is_possible()


def _environment(prologue: Prologue) -> dict[str, str]:
    """Return the environment in which the process starts."""
    inherited = os.environ  # noqa: TID251 - the trainer inherits the environment of its parent
    environ = {**inherited, **_loader_variables(prologue.env)}
    if prologue.keep_freed_memory:
        environ.update(allocator.start_variables(environ))
    # The package must be found before the trainer has set its own path; "" is the working directory.
    path = [entry or prologue.cwd for entry in prologue.sys_path]
    # A notebook has that first, and Python's modules in place already: a `secrets.py` there is not Python's.
    path.sort(key=lambda entry: entry not in _OF_PYTHON)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path)) or environ.get("PYTHONPATH", "")
    return environ


def _loader_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only work if they are set before the process starts."""
    prefixes = ("LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES")
    return {name: value for name, value in env.items() if name.startswith(prefixes)}
