"""PyTorch's own tests of a backend, in forks of this process.

    python -m tests.soak.distributed.torchs_tests BACKEND FILE [TEST...]     writes the outcome of each test as JSON

The tests are in PyTorch's wheel and written for backends with known names: a Gloo test is skipped for another name, and the
bodies of some ask for it. So they run under the name "gloo", and make groups of BACKEND.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

BACKEND = sys.argv[1] if __name__ == "__main__" else "gloo"
# PyTorch's tests read these when they are imported.
FOLDER = os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torchs-tests-"))
os.environ.setdefault("INIT_METHOD", f"file://{FOLDER}/default_group")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ["BACKEND"] = "gloo"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import distributed_test as torchs  # noqa: E402

if BACKEND == "sparkhvd":
    import sparkhvd.distributed  # noqa: F401 - registers the backend, before torch 2.14

# Tests of the name itself.
OF_THE_NAME = {"test_get_backend"}


class OwnTests(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):  # type: ignore[name-defined, misc]
    """Each test forks its ranks, which saves them the import of torch."""

    def setUp(self) -> None:
        super().setUp()
        if self._testMethodName in OF_THE_NAME:
            torchs.BACKEND = BACKEND
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
        torchs.BACKEND = "gloo"


class Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def addSuccess(self, test: Any) -> None:  # noqa: N802 - unittest's
        self.found[test._testMethodName] = "passed"

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802 - unittest's
        self.found[test._testMethodName] = f"skipped: {reason}"

    def addError(self, test: Any, error: Any) -> None:  # noqa: N802 - unittest's
        self.found[test._testMethodName] = f"failed: {str(error[1])[-1000:]}"

    addFailure = addError  # noqa: N815 - unittest's


def make_groups_of(backend: str) -> None:
    """Let `init_process_group("gloo")` make a group of another backend."""
    make = dist.init_process_group

    def init_process_group(*args: Any, **named: Any) -> None:
        if named.get("backend") == "gloo":
            named["backend"] = backend
        make(*args, **named)

    dist.init_process_group = init_process_group


def main() -> None:
    _, backend, file, *names = sys.argv
    torch.set_num_threads(1)
    make_groups_of(backend)
    found = unittest.TestLoader().getTestCaseNames(OwnTests)
    suite = unittest.TestSuite(OwnTests(name) for name in found if not names or name in names)
    outcomes = Outcomes()
    suite.run(outcomes)
    Path(file).write_text(json.dumps(outcomes.found))


if __name__ == "__main__":
    main()
