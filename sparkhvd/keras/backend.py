"""Import of the package `keras`. It must be Keras 3 on its torch backend."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from sparkhvd.errors import InvalidArgumentError

_OLDEST = (3, 5)
_HOW = "Set the variable KERAS_BACKEND=torch before anything imports keras, or import sparkhvd.keras before it"


def _find() -> Any:
    """Import Keras, on torch if it is not yet imported and no backend is chosen.

    Raises:
        ImportError: Keras is missing or too old, or its backend's package is missing.
        InvalidArgumentError: it has another backend.
    """
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")  # noqa: TID251 - Keras' own, read at its import
    try:
        found = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name == "keras":
            raise ImportError(
                "sparkhvd.keras: keras is not installed. Run `pip install 'sparkhvd[keras]'`.",
                name="keras",
            ) from None
        raise ImportError(
            f"sparkhvd.keras: keras cannot be imported, because {error.name} is missing. sparkhvd needs Keras 3 on its torch backend. {_HOW}.",
            name="keras",
        ) from error
    version = str(getattr(found, "__version__", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(
            f"sparkhvd.keras: keras is {version}, but it must be {'.'.join(map(str, _OLDEST))} or newer. Run "
            "`pip install 'sparkhvd[keras]'`.",
            name="keras",
        )
    if (backend := found.backend.backend()) != "torch":
        raise InvalidArgumentError(
            f"sparkhvd.keras: the backend of keras is {backend}, but only the torch backend is supported. {_HOW}."
        )
    return found


keras: Any = _find()
