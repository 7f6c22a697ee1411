"""`python -m sparkhvd doctor`."""

from __future__ import annotations

import argparse
import sys

from sparkhvd.runner.doctor import examine

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sparkhvd")
    parser.add_argument("command", choices=["doctor"], help="what this machine can do and lacks")
    parser.add_argument("--store", metavar="PATH_OR_URL", help="an estimator's store, to try")
    store = parser.parse_args().store
    if store is None:
        sys.exit(examine())
    from sparkhvd.data.store import Store

    sys.exit(examine(lambda: Store.create(store)))
