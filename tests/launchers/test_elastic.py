"""Elastic training by `sparkhvdrun`: real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkhvd.runner.command import main
from sparkhvd.runner.elastic import options
from tests.harness import sshd
from tests.harness.elastic_run import ElasticRun, elastic_run
from tests.harness.processes import find, wait_until_gone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
A, B = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[ElasticRun]:
    with elastic_run(tmp_path, "-np", "3", "--min-np", "1") as job:
        yield job


def hosts_script(folder: Path, text: str = "cat hosts") -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_killed_ranks_are_replaced_and_the_others_stay(three: ElasticRun) -> None:
    """Rank 0 is killed first, then two other ranks at once."""
    members = three.ranks(3)
    lives = 3
    for victims in (0,), (1, 2):
        for victim in victims:
            os.kill(members.pop(victim), signal.SIGKILL)
        lives += 3
        found = three.ranks(3, lives)
        assert {found[number] for number in members} == set(members.values())
        members = {number: pid for number, pid in found.items() if number not in (0, *victims)}
    assert three.end() == 0
    done = {int(match[1]) for match in three.wait_for(r"^\[(\d+)\] done at", 3)}
    assert done == {3, 4, 5}
    assert not any("ResourceWarning" in line for line in three.lines)
    first, *others = three.changes()
    assert re.match(r"3 ranks in \d+\.\d\d s: 3 on localhost$", first)
    changes = " ".join(others)
    for number in range(3):
        assert f"process {number} on localhost was ended by SIGKILL" in changes
        assert re.search(rf"process {number + 3} on localhost joined as rank \d", changes)


def test_excluded_stopped_rank_raises_when_it_resumes(tmp_path: Path) -> None:
    flags = ("-np", "3", "--min-np", "1", "-x", "SPARKHVD_ELASTIC_PATIENCE_S=1")
    with elastic_run(tmp_path, *flags) as job:
        first = job.ranks(3)
        os.kill(first[1], signal.SIGSTOP)
        os.kill(first[2], signal.SIGKILL)
        job.wait_for(r"3 -> 1 rank in 1\.\d\d s: .*process 1 on localhost the others waited 1 s")
        os.kill(first[1], signal.SIGCONT)
        (left,) = job.wait_for(r"^\[1\] sparkhvd.errors.LeftOutError: (.*)")
        assert "the others waited 1 s for it and continued without it" in left[1]
        job.wait_for(r"^\[\d\] rank \d of 3", 6)
        assert job.end() == 0


def test_a_discovery_script_adds_and_removes_slots(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    flags = ("-np", "1", "--max-np", "3", "--host-discovery-script", hosts_script(tmp_path))
    with elastic_run(tmp_path, *flags) as job:
        first = job.ranks(1)
        hosts.write_text("localhost:8\n")
        assert job.ranks(3)[0] == first[0]
        hosts.write_text("localhost:1\n")
        job.wait_for(r"3 -> 1 rank in .*: process 1 on localhost left: its slot is gone; process 2")
        job.wait_for(r"rank 0 of 1", 2)
        hosts.write_text("nonsense here\n")
        job.wait_for(
            r"printed 'nonsense here'; each of its lines must be .* Keeping the last known hosts\.$"
        )
        assert job.end() == 0


def test_slow_processes_join_later_and_a_hanging_process_delays_nothing(
    tmp_path: Path,
) -> None:
    """The launcher starts wrappers, which start the ranks without inherited descriptors."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, subprocess, sys, time\n"
        "time.sleep((0, 0, 1, 3, 1000)[int(os.environ['LOCAL_RANK'])])\n"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
    )
    flags = ("--min-np", "2", "--max-np", "5", "--host-discovery-script", hosts_script(tmp_path))
    flags += (sys.executable, str(wrapper))
    with elastic_run(tmp_path, *flags) as job:
        first = job.ranks(2)
        hosts.write_text("localhost:5\n")
        found = job.ranks(4)
        assert {found[number] for number in first} == set(first.values())
        began = time.monotonic()
        assert job.end() == 0
        assert time.monotonic() - began < 10
        job.wait_for(
            r"finished, and ends the processes that had not joined: process 4 on localhost"
        )


def test_last_process_stays_until_another_has_copied_its_state(tmp_path: Path) -> None:
    """At first no host is available, then another one."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    flags = ("-np", "1", "--max-np", "1", "--host-discovery-script", hosts_script(tmp_path))
    with elastic_run(tmp_path, *flags) as job:
        job.ranks(1)
        hosts.write_text("")
        job.wait_for(
            "printed no host. Keeping the last process with the state until another has copied it"
        )
        hosts.write_text("127.0.0.1:1\n")
        job.wait_for(r"2 -> 1 rank in .*: process 0 on localhost left: its slot is gone")
        job.wait_for(r"^\[1\] rank 0 of 1")
        assert job.end() == 0


def test_the_reset_limit_ends_the_job(tmp_path: Path) -> None:
    with elastic_run(tmp_path, "-np", "3", "--min-np", "1", "--reset-limit", "0") as job:
        os.kill(job.ranks(3)[2], signal.SIGKILL)
        assert job.wait() == 1
        text = "the elastic job cannot continue: the job was reset 0 times, as often as its reset limit allows (--reset-limit"
        assert sum(text in line for line in job.lines if line.startswith("sparkhvdrun:")) == 1


def test_too_few_ranks_end_the_job_after_the_timeout(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    flags = (
        "-np",
        "2",
        "--elastic-timeout",
        "2",
        "--host-discovery-script",
        hosts_script(tmp_path),
    )
    with elastic_run(tmp_path, *flags) as job:
        first = job.ranks(2)
        hosts.write_text("localhost:1\n")
        assert job.wait() == 1
        job.wait_for(
            r"cannot continue: after 2 s .* it has 1 of the 2 ranks that it needs \(--min-np"
        )
        assert wait_until_gone(set(first.values()), 1) == set()


def test_repeatedly_failing_rank_does_not_end_the_others(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "0.3", "100")
    with elastic_run(tmp_path, *flags, script=("fail",)) as job:
        job.wait_for(
            "localhost is left out for 1 s: process 3 there exited with 3, and other processes before"
        )
        assert job.end() == 0
        assert sum(" done at" in line for line in job.lines) == 1


def test_ranks_that_all_fail_end_the_job_with_their_status(tmp_path: Path) -> None:
    began = time.monotonic()
    with elastic_run(tmp_path, "-np", "2", "--min-np", "1", script=("exit",)) as job:
        assert job.wait() == 4
        job.wait_for(r"rank \d exited with 4 first\. Its last lines:")
    assert time.monotonic() - began < 15


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Server]:
    if reason := sshd.why_not():
        pytest.skip(f"sshd: {reason}")
    with sshd.serving(tmp_path_factory.mktemp("sshd"), (A, B)) as started:
        yield started


def test_a_lost_host_is_retried_while_the_other_ranks_continue(
    server: sshd.Server, tmp_path: Path
) -> None:
    hosts = ("-np", "3", "--min-np", "1", "-H", f"{A}:2,{B}:1")
    with elastic_run(tmp_path, *hosts, SPARKHVD_SSH=server.ssh) as job:
        first = job.ranks(3)
        (client,) = find(f"{B} exec")
        os.kill(client, signal.SIGKILL)
        job.wait_for(rf"3 -> 2 ranks in .*: process \d on {B} was lost with its host")
        job.wait_for(rf"2 -> 3 ranks in .*: process 3 on {B} joined as rank 2")
        found = job.ranks(3, 6)
        assert [found[number] for number in (0, 1)] == [first[number] for number in (0, 1)]
        os.kill(first[0], signal.SIGKILL)
        job.wait_for(rf"process 4 on {A} joined as rank 2")
        assert job.end() == 0
        assert wait_until_gone({*first.values(), *found.values()}, 5) == set()


def test_function_runs_while_hosts_join_and_are_lost(server: sshd.Server, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{A}:2\n")
    program = (
        "import sys\n"
        "from sparkhvd.horovod.runner import run\n"
        "from tests.launchers.elastic_script import train\n"
        "print('results', run(train, (sys.argv[1],), min_num_proc=2, max_num_proc=4,"
        f" host_discovery_script={hosts_script(tmp_path)!r}))"
    )
    with elastic_run(tmp_path, "-c", program, SPARKHVD_SSH=server.ssh) as job:
        first = job.ranks(2)
        hosts.write_text(f"{A}:2\n{B}:2\n")
        job.ranks(4)
        (client,) = find(f"{B} exec")
        os.kill(client, signal.SIGKILL)
        job.wait_for(rf"^sparkhvd: 4 -> 2 ranks in .*: process \d on {B} was lost with its host")
        found = job.ranks(4, 8)
        assert {found[number] for number in first} == set(first.values())
        assert job.end() == 0
        (results,) = job.wait_for("^results (.*)")
        assert results[1] == str([(str(rank), "4") for rank in range(4)])
        assert wait_until_gone(set(found.values()), 5) == set()


def test_unreachable_host_does_not_end_the_other_ranks(server: sshd.Server, tmp_path: Path) -> None:
    hosts = ("-np", "2", "--min-np", "1", "-H", f"{A}:1,127.0.0.77:1")
    with elastic_run(tmp_path, *hosts, SPARKHVD_SSH=server.ssh) as job:
        job.wait_for(r"process 1 on 127\.0\.0\.77 was lost with its host: .*before it was a rank")
        job.ranks(1)
        assert job.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_its_elastic_launcher(three: ElasticRun, number: int) -> None:
    ranks = set(three.ranks(3).values())
    three.process.send_signal(number)
    assert three.wait() == (128 + number if number != signal.SIGKILL else -number)
    assert wait_until_gone(ranks, 5) == set()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "2", "--min-np", "3", "true"], "--min-np is 3, -np is 2 and --max-np is"),
        (["-np", "4", "--max-np", "2", "true"], "-np is 4 and --max-np is 2; each must be at most"),
        (["--min-np", "0", "true"], "--min-np is 0; it must be a whole number of at least 1"),
        (
            ["-np", "2", "--max-np", "-1", "true"],
            "--max-np is -1; it must be a whole number of at least 1",
        ),
        (["--max-np", "2", "true"], "an elastic job needs -np or --min-np"),
        (
            ["-np", "2", "--reset-limit", "-1", "true"],
            "--reset-limit is -1. Give a whole number of at least 0",
        ),
        (["-np", "2", "--elastic-timeout", "nan", "true"], "--elastic-timeout is nan; it must be"),
        (["-np", "2", "--blacklist-cooldown-range", "9", "3", "true"], "is 9 3; it must be two"),
        (["-np", "2", "--slots-per-host", "2", "true"], "--slots-per-host is for the hosts of"),
        (["--min-np", "1", "--host-discovery-script", "/nowhere", "true"], "cannot be started"),
        (
            ["--min-np", "1", "-H", "a:1", "--host-discovery-script", "x", "true"],
            "Give one of them",
        ),
        (["--min-np", "1", "no-program"], "the program 'no-program' does not exist"),
        (["--min-np", "1"], "there is no command"),
    ],
)
def test_bad_arguments_are_reported_before_any_process_starts(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo trouble >&2; exit 3", "exited with 3.* Its errors: trouble"),
        ("sleep 100", "has not ended within 0.5 s"),
        ("echo 'Traceback (most recent call last):'", "printed 'Traceback .* must be `host` or"),
        ("echo a:0", "printed 'a:0'; each of its lines"),
        ("echo a:4,b:4", "printed 'a:4,b:4'; each of its lines"),
        ("echo a", "printed 'a' without slots. Print host:slots, or give --slots-per-host"),
        ("echo a:1; echo a:2", "printed 'a' twice"),
    ],
)
def test_a_failing_discovery_script_is_reported_before_any_process_starts(
    tmp_path: Path,
    script: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "LIMIT_S", 0.5)
    arguments = ["--min-np", "1", "--host-discovery-script", hosts_script(tmp_path, script), "true"]
    assert main(arguments) == 2
    assert re.search(text, capsys.readouterr().err)
