"""Version of the package. All ranks of a job must agree on it."""

__version__ = "0.1.0"
