"""Horovod's `horovod.torch.elastic`: names that say that the number of ranks does not change."""

from __future__ import annotations

from typing import Any, NoReturn

from sparkhvd.horovod.common.elastic import ObjectState, State, not_here

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class TorchState(State):
    """State of a module and its optimizer; making one is an error."""


class ElasticSampler(State):
    """Sampler of rows that are left of an epoch; making one is an error."""


def run(func: Any) -> NoReturn:
    """Refuse.

    Raises:
        NotImplementedError: always.
    """
    del func
    raise not_here("elastic.run")
