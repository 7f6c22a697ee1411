"""Functions and classes of a test module that are sent to ranks by value, like those of a user's `__main__` or notebook.

By reference, each rank imports the test module, and with it pytest and pyspark: about a second of CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest


def by_value(module_name: str) -> Any:
    """Make a fixture of the module with this name that pickles the module's functions and classes by value."""

    @pytest.fixture(scope="module", autouse=True)
    def travels_by_value() -> Iterator[None]:
        from pyspark import cloudpickle as of_spark  # the launcher's; other tests need no Spark

        module = sys.modules[module_name]
        for pickler in (cloudpickle, of_spark):
            pickler.register_pickle_by_value(module)
        yield
        for pickler in (cloudpickle, of_spark):
            pickler.unregister_pickle_by_value(module)

    return travels_by_value
