"""Checks on one GPU. Needs torch and nothing else: where cloudpickle is missing, pickle takes its name.

The checks send plain values; only the estimator's need the real one, and are skipped then.
"""

import pickle
import sys

try:
    import cloudpickle  # noqa: F401 - whether it is there
except ModuleNotFoundError:
    sys.modules["cloudpickle"] = pickle
