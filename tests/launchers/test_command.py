"""`sparkhvdrun` with real scripts: their ranks, output, ends, and leftovers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparkhvd.horovod import runner
from sparkhvd.interfaces import interfaces
from sparkhvd.runner.command import main
from tests.harness.by_value import by_value
from tests.harness.paths import ROOT
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.processes

by_value(__name__)

# Only the engine, without torch.
SCRIPT = """
import os, subprocess, sys, time
from sparkhvd import launchers, rank_context
from sparkhvd.engine.engine import Engine
os.environ["SPARKHVD_STALL_SHUTDOWN_TIME_SECONDS"] = "20"
rendezvous = launchers.find()
children = subprocess.run([sys.executable, "-c", "from sparkhvd import launchers; launchers.find()"],
                          capture_output=True, text=True) if "children" in sys.argv else None
engine = Engine(rendezvous.connect(), rendezvous.settings)
engine.barrier().wait()
place = rank_context.context()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_CROSS_SIZE", "GIVEN", "MASTER_ADDR")
print(engine.rank, engine.size, place.local_rank, *(os.environ.get(name) for name in names))
print("warning of", engine.rank, file=sys.stderr)
if children:
    print("child:", children.stderr.splitlines()[-1])
if "fail" in sys.argv:
    if engine.rank == 1:
        print("reason", flush=True)
        engine.shutdown()
        time.sleep(0.5)
        sys.exit(7)
    engine.barrier().wait()
if "stubborn" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "sleep" in sys.argv:
    helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("asleep", os.getpid(), helper.pid, flush=True)
    time.sleep(1000)
engine.shutdown()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def sparkhvdrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sparkhvd.runner.command", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        sparkhvdrun(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )


def test_ranks_connect_and_their_output_is_forwarded(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "output"
    flags = ("-np", "2", "-x", "GIVEN=a b", "--output-filename", str(folder), "-prefix-timestamp")
    # sparkhvdrun starts wrappers, which start the ranks without inherited descriptors.
    wrapper = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    command = [
        sys.executable,
        "-c",
        wrapper,
        sys.executable,
        "-W",
        "error",
        str(script),
        "children",
    ]
    ended = run(*flags, "--gloo", *command)
    assert ended.returncode == 0, ended.stderr
    said = sorted(line.split(" ", 1)[1] for line in ended.stdout.splitlines())
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+", line) for line in ended.stdout.splitlines())
    for rank in range(2):
        place = f"{rank} 2 {rank} {rank} 2 {rank} {rank} 2 1 a b 127.0.0.1"
        assert f"[{rank}] {place}" in said
        child = next(line for line in said if line.startswith(f"[{rank}] child:"))
        assert "InvalidArgumentError: init(): this process was started by a rank" in child
        assert re.search(f"process [0-9]+ called init.. first and is now rank {rank}", child)
        assert (folder / f"rank.{rank}" / "stdout").read_text().splitlines()[0] == place
        assert (folder / f"rank.{rank}" / "stderr").read_text() == f"warning of {rank}\n"
    assert "sparkhvdrun: --gloo is accepted and has no effect in sparkhvd.\n" in ended.stderr


def test_ascii_stream_shows_every_line(tmp_path: Path) -> None:
    script = tmp_path / "speaks.py"
    script.write_text("print('\u00fc')\nprint('second')")
    command = sparkhvdrun("-np", "1", "env", "PYTHONIOENCODING=utf-8", sys.executable, str(script))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout == "[0] \\xfc\n[0] second\n"


def test_an_address_of_this_host_needs_no_ssh() -> None:
    here = next((each for each in interfaces() if each.is_up and each.name != "lo"), None)
    if here is None:
        pytest.skip("this machine has no interface but its loopback's")
    hosts = f"[{here.address}]:2" if ":" in here.address else f"{here.address}:2"
    ended = run("-np", "2", "-H", hosts, "--network-interfaces", here.name, "echo", "done")
    assert ended.returncode == 0
    assert ended.stdout.count("done") == 2
    assert ended.stderr.startswith("sparkhvdrun: --network-interfaces has no effect on ranks of")


def test_two_names_of_this_host_are_one_host_without_ssh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARKHVD_SSH", "false")
    names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    said = f"echo {' '.join(f'$HOROVOD_{name}' for name in names)}"
    ended = run("-np", "4", "-H", "localhost:2,127.0.0.1:2", "sh", "-c", said)
    assert sorted(ended.stdout.splitlines()) == [
        f"[{rank}] {rank} {rank} 4 0 1" for rank in range(4)
    ]

    def place() -> tuple[str, ...]:
        return tuple(os.environ[f"HOROVOD_{name}"] for name in names)

    found = runner.run(place, num_proc=2, hosts="localhost:1,127.0.0.1:1")
    assert found == [("0", "0", "2", "0", "1"), ("1", "1", "2", "0", "1")]


def test_exit_status_and_last_lines_are_of_the_first_failed_rank(
    script: Path,
) -> None:
    ended = run("-np", "3", sys.executable, str(script), "fail")
    assert ended.returncode == 7
    before, last = ended.stderr.split("sparkhvdrun: rank 1 exited with 7 first. Its last lines:\n")
    assert "[0] sparkhvd.errors.CollectiveError" in before
    assert "[1] reason" in last.splitlines()


@pytest.mark.parametrize("end", ["import no_such_module", "raise SystemExit(0)"])
def test_rank_that_ends_before_rendezvous_ends_the_others(tmp_path: Path, end: str) -> None:
    """The ranks that wait for it get an error even if it ended without a failure, because its port is closed."""
    script = tmp_path / "train.py"
    early = f"import os\nif os.environ['RANK'] == '1':\n    {end}\n"
    script.write_text(early + SCRIPT)
    began = time.monotonic()
    ended = run("-np", "2", sys.executable, str(script))
    assert time.monotonic() - began < 10
    assert ended.returncode == 1
    wanted = "ModuleNotFoundError: No module" if "import" in end else "rank 1 at .* is gone"
    assert re.search(wanted, ended.stderr.split(" first. Its last lines:")[1])


def pids_of(launcher: subprocess.Popen[str], count: int) -> list[int]:
    """Read the process ids of the ranks and of their children from the output."""
    assert launcher.stdout is not None
    pids: list[int] = []
    for line in launcher.stdout:
        if match := re.search(r"asleep ([\d ]+)", line):
            pids += map(int, match[1].split())
            count -= 1
        if count == 0:
            return pids
    raise AssertionError("the ranks did not start")


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("number", "mode", "status"),
    [
        (signal.SIGTERM, "sleep", 128 + signal.SIGTERM),
        (signal.SIGINT, "sleep", 128 + signal.SIGINT),
        (signal.SIGKILL, "sleep", -signal.SIGKILL),
        (signal.SIGTERM, "sleep stubborn", 128 + signal.SIGTERM),
    ],
)
def test_no_process_survives_the_end_of_the_launcher(
    script: Path, number: int, mode: str, status: int
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = sparkhvdrun("-np", "2", sys.executable, str(script), *mode.split())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        pids = pids_of(launcher, 2)
        began = time.monotonic()
        launcher.send_signal(number)
        launcher.communicate(timeout=20)
        assert launcher.returncode == status
        wait_until(lambda: not any(map(is_running, pids)), "every process has ended")
        assert time.monotonic() - began < 5


def test_a_killed_rank_ends_the_others(script: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = sparkhvdrun("-np", "2", sys.executable, str(script), "sleep", "stubborn")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        pids = pids_of(launcher, 2)
        began = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=20)
        assert launcher.returncode == 128 + signal.SIGKILL
        assert re.search(r"rank \d was ended by SIGKILL first", errors)
        wait_until(lambda: not any(map(is_running, pids)), "every process has ended")
        assert time.monotonic() - began < 5


def test_doctor_command_shows_installed_parts_and_remedies() -> None:
    environment = {**os.environ, "JAVA_HOME": "/nowhere", "SPARKHVD_PORT_RANGE": "40000-40100"}
    command = [sys.executable, "-m", "sparkhvd", "doctor"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) <= 25
    found = {line[5:].partition("  ")[0].strip(): line for line in lines if line[:4].strip()}
    assert "kernels for scalar" in found["compiled engine"]
    assert found["torch"].startswith("ok")
    assert found["Java"].startswith("-")
    assert "/nowhere/bin/java does not run" in found["Java"]
    assert "install Java 17 or newer" in ended.stdout
    assert "a port is free (40000-40100)" in found["ports"]
    assert set(found) >= {"GPUs", "NCCL", "pyspark", "MPI", "CPUs", "shared memory", "open files"}
    assert re.search(r" GiB are free; fsspec \d", found["store"])
    missing = run("--check-build")
    assert missing.returncode == 0
    assert missing.stdout.splitlines()[0] == lines[0]


@pytest.mark.parametrize(
    ("store", "found"),
    [("{}/new", r"ok   store +Store\('file://.*/new'\) can be"), ("no", r"-    store +cannot be")],
)
def test_doctor_command_checks_a_store(tmp_path: Path, store: str, found: str) -> None:
    command = [sys.executable, "-m", "sparkhvd", "doctor", "--store", store.format(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert re.search(found, ended.stdout), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "0", "python", "x.py"], "-np is 0; it must be at least 1"),
        (["-np", "9" * 20, "python", "x.py"], "it must be at least 1 and at most 99999"),
        (["-np", "2"], "there is no command"),
        (["-np", "2", "python", "no.py"], "the script 'no.py' does not exist"),
        (["-np", "2", "no-program"], "the program 'no-program' does not exist"),
        (["-np", "2", "-H", "a:1,b:1,a:2", "true"], "appears twice, a"),
        (["-np", "2", "--hosts=-oProxyCommand=x:2", "true"], "it must be host:slots,host:slots"),
        (["-np", "2", "-x", "NOT_SET_HERE", "true"], "this variable is not set here"),
        (["-np", "3", "-H", "localhost:2", "true"], "at least one slot per rank"),
        (["-np", "2", "--hostfile", "/nowhere", "true"], "'/nowhere' cannot be read"),
        (["-np", "2", "--fusion-threshold-mb", "much", "true"], "is 'much'; it must be a number"),
        (["-np", "2", "--fusion-threshold-mb", "inf", "true"], "is 'inf'; it must be a number"),
        (["-np", "2", "--start-timeout", "nan", "true"], "--start-timeout is nan; it must be"),
        (["-np", "2", "--output-filename", "/dev/null", "true"], "'/dev/null' cannot be written"),
        (["-np", "2", "--network-interfaces", "none0", "true"], "interfaces='none0': host "),
        (["-np", "2", "--hostfile", sys.executable, "true"], "cannot be read"),
        (["-np", "1", "--log-hide-timestamp", "no-program"], "--log-hide-timestamp is accepted"),
    ],
)
def test_bad_arguments_are_reported_before_any_process_starts(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_ranks_run_if_the_launcher_has_no_standard_streams(tmp_path: Path) -> None:
    """As under a daemon, the launcher has no standard streams, but keeps the job's output and returns its status."""
    program = tmp_path / "many.py"
    program.write_text("for number in range(30000):\n    print(number)\nraise SystemExit(4)\n")
    folder = tmp_path / "output"
    command = f"{sys.executable} -m sparkhvd.runner.command -np 1 --output-filename {folder} {sys.executable} {program} <&- >&- 2>&-"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, check=False, timeout=60)
    assert ended.returncode == 4
    assert len((folder / "rank.0" / "stdout").read_text().splitlines()) == 30000
