"""Commands `sparkhvd doctor`, `runs`, `report`, `compare` and `reproduce`.

`python -m sparkhvd` runs them, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparkhvd.errors import SparkhvdError
from sparkhvd.runner.doctor import examine
from sparkhvd.terminal import visible


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparkhvd")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="report what this machine supports and lacks")
    doctor.add_argument("--store", metavar="PATH_OR_URL", help="an estimator's store, to try")
    runs = commands.add_parser("runs", help="list the runs of a store")
    runs.add_argument("store", metavar="STORE", help="path or URL of the store")
    report = commands.add_parser("report", help="print where the report of a run is")
    report.add_argument("run", metavar="RUN", help="folder of the run: <store>/runs/<run_id>")
    report.add_argument("-o", "--output", metavar="FILE", help="write the page again, to this file")
    report.add_argument("--open", action="store_true", help="open it in a browser")
    compare = commands.add_parser("compare", help="what distinguishes two runs")
    compare.add_argument("runs", metavar="RUN", nargs=2, help="folders of the runs")
    again = commands.add_parser("reproduce", help="fit again what a run on a table has fitted")
    again.add_argument("run", metavar="RUN", help="folder of the run: <store>/runs/<run_id>")
    again.add_argument("--key-file", metavar="FILE", help="file with the run's key; - is stdin")
    again.add_argument("--trust", action="store_true", help="run the run's program without its key")
    again.add_argument("--master", help="master of the Spark session; default: local")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: of the command line; None means this process's.
    """
    given = _parser().parse_args(arguments)
    if given.command == "doctor" and given.store is None:
        return examine()
    from sparkhvd import run_commands
    from sparkhvd.data.store import Store

    if given.command == "doctor":
        return examine(lambda: Store.create(given.store))
    try:
        if given.command == "runs":
            run_commands.list_runs(given.store)
        elif given.command == "reproduce":
            found = (given.run, given.key_file, given.master)
            return 0 if run_commands.reproduce_run(*found, trusted=given.trust) else 2
        elif given.command == "report":
            run_commands.show_report(given.run, given.output, is_opened=given.open)
        else:
            run_commands.compare_runs(*given.runs)
    except (SparkhvdError, OSError) as e:
        # A message may quote what is in a file of the store.
        sys.stderr.write("".join(f"{visible(line)}\n" for line in f"sparkhvd: {e}".split("\n")))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
