"""`python -m sparkhvd doctor`."""

from __future__ import annotations

import argparse
import sys

from sparkhvd.runner.doctor import examine

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sparkhvd")
    parser.add_argument("command", choices=["doctor"], help="what this machine can do and lacks")
    parser.parse_args()
    sys.exit(examine())
