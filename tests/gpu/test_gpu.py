"""`make gpu` itself: on a GPU if there is one, else on the stand-in, and its report of failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import machine
from tests.gpu.machine import STAND_IN
from tests.gpu.parts import SKIPPED, failure, finish, parts, passed
from tests.gpu.ranks import RankPool
from tests.harness.fake_cuda import is_built
from tests.harness.processes import wait_until_gone
from tests.harness.soak import soak

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
needs_stand_in = pytest.mark.skipif(not is_built(), reason="the stand-in is not built")


def make_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.timeout(540)
@pytest.mark.skipif(bool(machine.why_not()), reason=f"needs a GPU: {machine.why_not()}")
def test_all_checks_pass_on_a_gpu(tmp_path: Path) -> None:
    done = make_gpu("--no-benchmarks", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@soak("torch/test_device_*")
@needs_stand_in
@pytest.mark.timeout(540)
def test_all_checks_pass_on_the_stand_in_and_write_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STAND_IN, "1")
    done = make_gpu("--stand-in", "--rounds", "2", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.count(" | ") == 3]
    outcomes = {row[0].removeprefix("| "): row[1] for row in rows[1:]}
    with RankPool() as pool:
        names = [part.name for part in parts(pool)]
    for name in [*names, "figures: step", "figures: overhead", "figures: pack"]:
        assert outcomes[name] == ("skipped" if name.startswith("torch.") else "ok"), name
    for table in ("| step |", "| allreduce of |", "| copy on the device |"):
        assert table in text


@pytest.mark.skipif(not machine.why_not(), reason="there is a GPU")
def test_make_gpu_without_a_gpu_exits_with_status_2() -> None:
    done = make_gpu()
    assert done.returncode == 2
    assert "make gpu: there is no GPU to check: torch " in done.stderr
    assert done.stdout == ""


@soak("a suite that fails and one that hangs: the tests of programs, here")
@needs_stand_in
@pytest.mark.timeout(300)
def test_failed_check_reports_its_error_and_the_next_check_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STAND_IN, "1")
    with RankPool("tests.gpu.broken:serve") as pool:
        with pytest.raises(
            AssertionError, match=r"^rank 1: AssertionError: seven is not eight \(bro"
        ):
            pool.do("fails", 2, 40)
        assert 'raise AssertionError("seven is not eight")' in capfd.readouterr().err
        assert pool.do("works", 2, 40) == ["2.0", "2.0"]
        with pytest.raises(AssertionError, match="^rank 1: ended without a word"):
            pool.do("dies", 2, 40)
        assert pool.do("works", 1, 40) == ["1.0"]
        began = time.monotonic()
        with pytest.raises(AssertionError, match=r"^rank 0 said nothing for 2 s \(stacks above\)"):
            pool.do("hangs", 1, 2)
        assert time.monotonic() - began < 10
        assert "in hangs" in capfd.readouterr().err


# --- Programs. ---


SUITE = """
import sys
failing, hangs = {failing!r}, {hangs!r}
out = [w for f, w in zip(sys.argv, sys.argv[1:]) if f == "--without"]
for name in ("first", "second", "third"):
    if name in out:
        continue
    if name == hangs:
        import time
        sys.stdout.flush()
        time.sleep(3600)
    if name in failing:
        print(f"FAILED  rank 1 of 2, {{name}}\\n        another rank failed")
        print(f"FAILED  rank 0 of 2, {{name}}\\n        3 and not 4")
        sys.exit(1)
    print(f"ok        0.01 s  {{name}}")
print(f"{{3 - len(out)}} tests passed")
"""


def suite(failing: tuple[str, ...] = (), hangs: str = "") -> list[str]:
    return [sys.executable, "-c", SUITE.format(failing=failing, hangs=hangs)]


def test_the_suite_continues_after_failed_checks() -> None:
    assert passed(suite(), 20) == "3 tests passed"
    with pytest.raises(AssertionError, match="^1 tests passed; first: 3 and not 4; third: 3 and"):
        passed(suite(failing=("first", "third")), 20)


def test_a_hanging_suite_is_stopped_and_names_the_last_check() -> None:
    with pytest.raises(AssertionError, match="^stopped; no answer in time after first$"):
        passed(suite(hangs="second"), 3)


def test_child_processes_end_at_the_deadline_of_their_program() -> None:
    script = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    status, output = finish([sys.executable, "-c", script], 3)
    assert status is None
    assert wait_until_gone({int(output.split()[0])}, 10) == set()


def test_failure_texts_match_the_results_table() -> None:
    assert failure(["ok  0.1 s  one"]) == ("", "no answer in time after one")
    assert SKIPPED.endswith(": ")
    assert STAND_IN not in os.environ
