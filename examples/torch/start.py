"""Start a script as several ranks on this host: `python start.py 2 train.py --epochs 3`."""

import os
import runpy
import sys

from sparkhvd.runner import run_local


def run_script(script: str, *arguments: str) -> None:
    """Run on every rank: the script, as `python script arguments` would."""
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_local(run_script, sys.argv[2:], num_proc=int(sys.argv[1]))
