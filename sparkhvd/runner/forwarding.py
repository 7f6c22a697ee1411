"""Variables of a launcher that ranks on other hosts get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.topology import HOROVOD_NAMES

__all__ = ["forwarded", "given_variables"]

# Settings, and what numerical libraries and Python read; where programs and libraries are, as hosts of a cluster have them alike.
_PREFIXES = ("HOROVOD_", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "SPARKHVD_", "TORCH_")
_NAMES = {
    "CONDA_PREFIX",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "TZ",
    "VIRTUAL_ENV",
}
# Of this process alone.
_OWN = {
    *("SPARKHVD_LAUNCHED_BY", "SPARKHVD_PLACE", "SPARKHVD_RANK_PROCESS", "SPARKHVD_SSH"),
    *HOROVOD_NAMES,
}


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to ranks on other hosts without being named."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OWN and (name in _NAMES or name.startswith(_PREFIXES))
    }


def given_variables(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `-x NAME=VALUE` and `-x NAME`, which takes this process's.

    Raises:
        InvalidArgumentError: one without a value is not set here.
    """
    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not name or (not sign and name not in environ):
            raise InvalidArgumentError(
                f"-x {word}: this variable is not set here. Give it a value, as in -x {name or 'NAME'}=VALUE."
            )
        found[name] = value if sign else environ[name]
    return found
