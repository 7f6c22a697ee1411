"""Packages with Horovod's own layout, for programs that import `horovod`.

    import sparkhvd
    sparkhvd.install_as_horovod()
    import horovod.torch as hvd  # from here on, here and in every process started by sparkhvd

Without a change of code: `python -m sparkhvd.horovod train.py`, or SPARKHVD_AS_HOROVOD=1 under `sparkhvdrun`. See
docs/coming_from_horovod.md.

Each module imports only those above it:

    common    checks of built features, exceptions
    keras     the same for Keras 3, with callbacks
    runner    a function on processes, and the command line
    spark     a function on Spark, the estimator, stores, backends
    torch     Horovod's API
    __main__  `python -m sparkhvd.horovod script.py`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkhvd.as_horovod import install as install_as_horovod

if TYPE_CHECKING:
    from sparkhvd.horovod.runner import run as run

# Version of the Horovod API, checked by programs.
__version__ = "0.28.1"

__all__ = ["__version__", "install_as_horovod", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":  # imported on first use, because that takes long
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparkhvd.horovod.runner import run

    return run
