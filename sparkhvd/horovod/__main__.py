"""Run a program that imports `horovod`: `python -m sparkhvd.horovod script.py`, `-m module` or `-c code`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from sparkhvd.horovod import install_as_horovod

_USAGE = "usage: python -m sparkhvd.horovod script.py ... | -m module ... | -c code ..."


def main(words: Sequence[str]) -> None:
    """Run a program as `python` would, with `horovod` installed."""
    if not words or (words[0] in ("-m", "-c") and len(words) == 1) or words[0] in ("-h", "--help"):
        raise SystemExit(_USAGE)
    install_as_horovod()
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c`
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
