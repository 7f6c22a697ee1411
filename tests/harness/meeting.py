"""Ranks that meet without torch, because the import of torch takes longer than most of these tests."""

from __future__ import annotations

from sparkhvd import rendezvous
from sparkhvd.engine.engine import Engine


def meet() -> Engine:
    """Connect this rank with the others, as `hvd.init()` does."""
    met = rendezvous.current_rendezvous()
    assert met is not None
    return Engine(met.connect(), met.settings)
