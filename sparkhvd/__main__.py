"""`python -m sparkhvd doctor`."""

from __future__ import annotations

import argparse
import sys

from sparkhvd.runner.doctor import COMMANDS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sparkhvd")
    parser.add_argument(
        "command", choices=sorted(COMMANDS), help="doctor: what this machine can do and lacks"
    )
    sys.exit(COMMANDS[parser.parse_args().command]())
