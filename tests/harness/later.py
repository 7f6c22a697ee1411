"""Modules that a few tests compare with, imported when the first of these runs: each worker collects every test."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Module that is imported when an attribute is asked for.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for fixtures everywhere
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
