"""Files that locate a coordinator inside a task, in a folder of this host."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkhvd import Store
from sparkhvd.errors import StoreError
from sparkhvd.runner.elastic.coordinator import AttemptResult, CoordinatorFiles
from sparkhvd.runner.elastic.launcher import JobResult
from sparkhvd.runner.elastic.options import CoordinatorTerms, RankRange
from sparkhvd.runner.options import RankChange
from sparkhvd.runner.outcomes import Outcome, OutcomeKind
from sparkhvd.runner.supervisor import RankEnded
from sparkhvd.wire import rebuild

pytestmark = pytest.mark.processes

KEY = "ab" * 32
RESULT = AttemptResult(
    JobResult(
        has_finished=True,
        has_begun=True,
        problem="",
        failed=(RankEnded(1, -9, "was ended", is_final=True),),
        received=0,
        members=(2, 0),
    ),
    {0: Outcome(0, OutcomeKind.OK, exit="ok", log_tail=("a",)), 1: Outcome(1, OutcomeKind.CRASH)},
    {0: b"one\n\x00", 2: b""},
    "refused",
    ((3, "a line", 1, False),),
    (RankChange(2, 3, 2, 0.5, "process 1 was lost", 1e9),),
)


@dataclass(frozen=True)
class Folder:
    """Files of a coordinator, their folder, and another folder of the same job."""

    root: Path
    store: Store

    def files(self, *, attempt: int = 0, job_id: str = "job", key: str = KEY) -> CoordinatorFiles:
        return CoordinatorFiles(self.store, "runs/r", attempt, job_id, key)

    def path(self, name: str) -> Path:
        return self.root / "runs/r/attempts/0/elastic-job" / name


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, Store.create(tmp_path))


def test_tasks_find_the_coordinator_and_the_client_gets_its_result(folder: Folder) -> None:
    coordinator, others = folder.files(), folder.files()
    assert others.address() is None
    assert others.await_address(0.0) is None
    later = threading.Timer(0.3, coordinator.publish, [("::1", 7)])
    later.start()
    assert others.await_address(10.0) == ("::1", 7)
    later.join()
    assert not coordinator.is_interrupted()
    others.interrupt()
    assert coordinator.is_interrupted()
    assert not others.is_over()
    coordinator.report(RESULT)
    assert others.is_over()
    assert others.result() == RESULT


def test_each_attempt_and_job_has_its_own_files(folder: Folder) -> None:
    folder.files().publish(("a", 1))
    assert folder.files(attempt=1).address() is None
    assert folder.files(job_id="other").address() is None


@pytest.mark.parametrize("how", ["key", "content", "place", "short"])
def test_file_not_written_by_the_job_raises(folder: Folder, how: str) -> None:
    files = folder.files(key="cd" * 32 if how == "key" else KEY)
    files.report(RESULT)
    path = folder.path("result")
    if how == "content":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif how == "place":
        files.publish(("a", 1))
        shutil.copy(folder.path("coordinator"), path)
    elif how == "short":
        path.write_bytes(b"")
    with pytest.raises(StoreError, match="result in .* was not written by this job: its proof"):
        folder.files().result()


def test_limits_are_equal_after_json_round_trip() -> None:
    limits = RankRange(num_proc=2, least=1, most=4, reset_limit=3).options(2, 5.0)
    terms = CoordinatorTerms(limits, 2)
    assert rebuild(CoordinatorTerms, terms.to_dict()) == terms
