"""The two packages of Lightning: `lightning.pytorch` and `pytorch_lightning`, with classes of their own each; and their Fabrics."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from sparkhvd.errors import InvalidArgumentError

__all__ = ["FABRICS", "NAMES", "find", "is_module", "package_of"]

NAMES = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")  # each comes with the package above it


def find(names: tuple[str, ...] = NAMES) -> list[Any]:
    """Return the packages of these names that are imported, or else the first that is installed.

    Raises:
        ImportError: no package is installed.
    """
    if imported := [sys.modules[name] for name in names if name in sys.modules]:
        return imported
    for name in names:
        try:
            return [importlib.import_module(name)]
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError(
        f"sparkhvd.lightning: neither of {' and '.join(names)} is installed. Run `pip install 'sparkhvd[lightning]'`.",
        name="lightning",
    )


def is_module(module: Any) -> bool:
    """Return True for a LightningModule of either package."""
    packages = filter(None, map(sys.modules.get, NAMES))  # the module's class has imported its own
    return any(isinstance(module, package.LightningModule) for package in packages)


def package_of(module: Any) -> Any:
    """Return the package whose LightningModule a module is.

    Raises:
        InvalidArgumentError: it is none.
    """
    for name in NAMES:
        package = sys.modules.get(name)  # the module's class has imported it
        if package is not None and isinstance(module, package.LightningModule):
            return package
    raise InvalidArgumentError(
        f"sparkhvd.lightning.TorchEstimator: model is a {type(module).__name__}; it must be a LightningModule of {' or '.join(NAMES)}. "
        "Use sparkhvd.TorchEstimator for other modules."
    )
