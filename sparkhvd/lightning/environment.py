"""Ranks and hosts of the job, as Lightning asks for them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.engine import stacks
from sparkhvd.topology import Topology
from sparkhvd.torch.context import context

__all__ = ["environment_of", "join"]

# This rank's, as of the last `join()`: Lightning asks for it also when the job has ended.
_known: list[Topology] = []


def join() -> Topology:
    """Join the job, unless this process is in it, and return this rank's place."""
    hvd.init()
    engine = context().engine
    stacks.prepare(engine.settings.stack_signal)  # the end of a trainer has taken the handler away
    _known[:] = [engine.topology]
    return _known[0]


def _place() -> Topology:
    return _known[0] if _known else join()


class _Environment:
    """Ranks and hosts of the job that a launcher of sparkhvd, or one that it knows, has started; the first question joins it."""

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"  # nobody connects by it: the ranks have met

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False  # a strategy brings it along

    def world_size(self) -> int:
        return _place().size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has said how many ranks there are."""

    def global_rank(self) -> int:
        return _place().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, likewise."""

    def local_rank(self) -> int:
        return _place().local_rank

    def node_rank(self) -> int:
        place = _place()
        return place.hosts[place.rank]


@functools.cache
def environment_of(package: Any) -> type[Any]:
    """Return the class of environments for a package of Lightning."""
    base = importlib.import_module(f"{package.__name__}.plugins.environments").ClusterEnvironment
    return type("SparkhvdEnvironment", (_Environment, base), {"__module__": __name__})
