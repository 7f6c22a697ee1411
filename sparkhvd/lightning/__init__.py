"""Lightning on sparkhvd: `import sparkhvd.lightning`, then `Trainer(strategy="sparkhvd")` or `Fabric(strategy="sparkhvd")`.

The import registers `SparkhvdStrategy` as "sparkhvd" and as "horovod", and `FabricStrategy` as "sparkhvd" for Fabric, with each
of the packages `lightning`, `pytorch_lightning` and `lightning_fabric` already imported, or else with the installed one. Usage
and limits: docs/lightning.md.

Resources: the strategy joins the job (`hvd.init()`) when the `Trainer` or the `Fabric` is made, and makes the default group of
torch.distributed when a run begins. Both last until the process ends, so that one function may run several trainers.

Failure: after an exception in a run this rank leaves the job, so the other ranks get a `PeerLostError` that names the
    rank
instead of waiting.

Each module imports only those above it:

    strategy   `SparkhvdStrategy`
    fabric     `FabricStrategy`
    loop       the training function of a fit
    estimator  `TorchEstimator`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparkhvd.lightning import fabric
from sparkhvd.lightning.strategy import FABRICS, find, register
from sparkhvd.spark import needs_pyspark

if TYPE_CHECKING:
    from sparkhvd.lightning.estimator import TorchEstimator as TorchEstimator

__all__ = ["FabricStrategy", "SparkhvdStrategy", "TorchEstimator"]

# There is a strategy class for each package; this is the class for the first package.
SparkhvdStrategy: Any = [register(package) for package in find()][0]
FabricStrategy: Any = [fabric.register(package) for package in find(FABRICS)][0]


def __getattr__(name: str) -> Any:
    if name == "TorchEstimator":  # imported late, because ranks of a script need no pyspark
        with needs_pyspark("sparkhvd.lightning.TorchEstimator"):
            return importlib.import_module("sparkhvd.lightning.estimator").TorchEstimator
    raise AttributeError(f"module 'sparkhvd.lightning' has no attribute {name!r}")
