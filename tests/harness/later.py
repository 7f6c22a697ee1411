"""Modules that few tests need, imported at their first use, because each pytest worker collects every test."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Module that is imported at the first access to an attribute.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for fixtures everywhere
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
