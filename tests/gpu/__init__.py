"""Checks on one GPU. They need only torch: without cloudpickle, pickle replaces it.

The checks send plain values. Only the estimator's checks need the real cloudpickle, and are skipped without it.
"""

import pickle
import sys

try:
    import cloudpickle  # noqa: F401 - whether it is there
except ModuleNotFoundError:
    sys.modules["cloudpickle"] = pickle
