"""The version of the package; ranks of one job must agree on it."""

__version__ = "0.1.0"
