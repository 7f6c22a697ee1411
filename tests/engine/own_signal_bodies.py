"""Functions like `observe_bodies`, in a program that uses signal 44 itself before its engine starts."""

from __future__ import annotations

import signal

from tests.engine.observe_bodies import one_rank_is_late

__all__ = ["one_rank_is_late"]

signal.signal(44, lambda *_: print("mine", flush=True))
