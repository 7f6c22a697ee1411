"""`sparkhvdrun` and `run_hosts` over ssh: a real sshd listens on two loopback addresses, which are the hosts."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparkhvd
from sparkhvd.errors import InvalidArgumentError, PreflightError, RankError
from sparkhvd.runner.command import main
from tests.harness import sshd
from tests.harness.by_value import by_value
from tests.harness.meeting import meet
from tests.harness.netns import two_hosts
from tests.harness.netns import why_not as why_no_namespaces
from tests.harness.paths import ROOT
from tests.harness.processes import is_alive, wait_until_gone
from tests.harness.soak import SOAK, left_to_soak, soak
from tests.harness.waiting import wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sshd.why_not() is not None, reason=f"sshd: {sshd.why_not()}"),
]
by_value(__name__)

A, B = "127.0.0.2", "127.0.0.3"
AGENT = "sparkhvd.runner.hosts.agent"
# Only the engine, without torch.
SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from sparkhvd import launchers, rank_context
from sparkhvd.engine.engine import Engine
rendezvous = launchers.find()
engine = Engine(rendezvous.connect(), rendezvous.settings)
engine.barrier().wait()
def seen(secret, file):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if secret in (entry / file).read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\\0", b" ").decode())
        except OSError:
            pass
    return found
names = ("RANK", "LOCAL_RANK", "HOROVOD_SIZE", "GIVEN", "NOT_GIVEN", "SPARKHVD_STREAMS")
print("rank", engine.rank, engine.size, *(os.environ.get(name) for name in names), os.getcwd())
if "secrets" in sys.argv and engine.rank == 0:
    key = rendezvous.job.key.hex().encode()
    print("key in", seen(key, "cmdline") + seen(key, "environ"))
    value = os.environ["SECRET"].encode()
    print("value in", seen(value, "cmdline"), sum("hosts.agent" in each and "ssh" not in each for each in seen(value, "environ")))
engine.barrier().wait()
if "sleep" in sys.argv:
    helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("asleep", os.getpid(), helper.pid, flush=True)
    time.sleep(1000)
engine.shutdown()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Server]:
    with sshd.serving(tmp_path_factory.mktemp("sshd"), (A, B)) as started:
        yield started


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def environment(server: sshd.Server, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "SPARKHVD_SSH": server.ssh, **more}


def sparkhvdrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sparkhvd.runner.command", *arguments]


def run(
    server: sshd.Server, folder: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        sparkhvdrun(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env=environment(server, **more),
    )


def test_ranks_over_ssh_connect_and_their_output_is_forwarded(
    server: sshd.Server, script: Path, tmp_path: Path
) -> None:
    """Only the allowed variables reach the ranks, and no command line contains the key or a value."""
    flags = ("-np", "2", "-H", f"{A}:1,{B}:4", "-x", "GIVEN=a b", "-x", "SECRET")
    output = ("--output-filename", str(tmp_path / "output"))
    more = {"NOT_GIVEN": "x", "SECRET": "hidden" * 4, "SPARKHVD_STREAMS": "2"}
    # The agents start wrappers, which start the ranks without inherited descriptors.
    wrapper = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    command = (sys.executable, "-c", wrapper, sys.executable, script.name, "secrets")
    ended = run(server, tmp_path, *flags, *output, *command, **more)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for rank in range(2):  # one machine: ranks of both addresses share its memory
        place = f"rank {rank} 2 {rank} {rank} 2 a b None 2 {tmp_path}"
        assert f"[{rank}] {place}" in lines
        assert (tmp_path / "output" / f"rank.{rank}" / "stdout").read_text().startswith(place)
    assert "[0] key in []" in lines
    assert "[0] value in [] 0" in lines


def test_ranks_may_end_before_all_have_started(server: sshd.Server, tmp_path: Path) -> None:
    ended = run(server, tmp_path, "-np", "8", "-H", f"{A}:7,{B}:1", "echo", "done")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] done" for rank in range(8)]


@pytest.mark.parametrize(
    "ended",
    [
        "launcher, SIGKILL",
        "rank",
        "ssh",
        *left_to_soak(
            "the other three, here", "launcher, SIGTERM", "launcher, SIGINT", "agent", "sshd"
        ),
    ],
)
def test_no_process_survives_on_any_host(
    server: sshd.Server, script: Path, tmp_path: Path, ended: str
) -> None:
    (tmp_path / "hosts").write_text(f"# two hosts\n{A} slots=1\n{B}:1\n")
    flags = ("-np", "2", "--hostfile", "hosts", sys.executable, str(script), "sleep")
    with subprocess.Popen(
        sparkhvdrun(*flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(server),
    ) as launcher:
        ranks, helpers = started_by(launcher, 2)
        ours = agents_of(server) | commands_with(str(server.port), re.escape(server.ssh))
        left = {*ranks, *helpers, *ours} - {launcher.pid}
        if ended.startswith("launcher"):
            number = getattr(signal, ended.split()[1])
            launcher.send_signal(number)
            status = -9 if number == 9 else 128 + number
        else:
            victim = {
                "rank": lambda: ranks[1],
                "ssh": lambda: min(commands_with(f"{re.escape(server.ssh)}.*{B}")),
                "agent": lambda: parent_of(ranks[1]),
                "sshd": lambda: parent_of(parent_of(ranks[1])),
            }[ended]()
            os.kill(victim, signal.SIGKILL)
            status = 137 if ended == "rank" else 255
        began = time.monotonic()
        _, errors = launcher.communicate(timeout=20)
        assert launcher.returncode == status, errors
        if ended == "rank":
            _, last = errors.split(
                "sparkhvdrun: rank 1 was ended by SIGKILL first. Its last lines:\n"
            )
            assert f"[1] asleep {ranks[1]}" in last
        if status == 255:
            assert f"the connection to {B} (ranks 1) was lost" in errors
        assert wait_until_gone(left, 5) == set()
        assert time.monotonic() - began < 5
    assert agents_of(server) == set()


@soak("each kill on its own, here")
def test_random_kills_leave_no_process_on_any_host(
    server: sshd.Server, script: Path, tmp_path: Path
) -> None:
    """Each launch loses a random process at a random moment."""
    seed = int.from_bytes(os.urandom(4), "big")
    generator = random.Random(seed)

    def of_launch() -> set[int]:
        return agents_of(server) | commands_with(str(script), re.escape(server.ssh))

    for number in range(50):
        flags = ("-np", "3", "-H", f"{A}:2,{B}:1", sys.executable, str(script), "sleep")
        with subprocess.Popen(
            sparkhvdrun(*flags),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
            env=environment(server),
        ) as launcher:
            time.sleep(generator.uniform(0.2, 3))
            ours = sorted(of_launch() - {server.process.pid})
            victim = generator.choice([launcher.pid, *ours])
            command = Path(f"/proc/{victim}/cmdline")
            name = command.read_bytes()[:200] if command.exists() else b"gone"
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            if victim not in ours or not wait_for_end(launcher, 10):
                launcher.kill()
            launcher.wait()
            what = f"seed {seed}, kill {number} of {name!r}"
            wait_until(lambda: not of_launch(), what, within_s=5)


def wait_for_end(process: subprocess.Popen[bytes], within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def started_by(launcher: subprocess.Popen[str], count: int) -> tuple[list[int], list[int]]:
    """Read the process ids of the ranks, by rank, and of their children."""
    assert launcher.stdout is not None
    found: dict[int, tuple[int, int]] = {}
    for line in launcher.stdout:
        if match := re.search(r"\[(\d)\] asleep (\d+) (\d+)", line):
            found[int(match[1])] = (int(match[2]), int(match[3]))
        if len(found) == count:
            return [found[rank][0] for rank in range(count)], [h for _, h in found.values()]
    assert launcher.stderr is not None
    raise AssertionError(f"the ranks did not start: {launcher.stderr.read()}")


def commands_with(*patterns: str) -> set[int]:
    """Return the processes whose command line matches one of some patterns."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if any(re.search(each, command) for each in patterns) and is_alive(int(entry.name)):
            found.add(int(entry.name))
    return found - {os.getpid()}


def agents_of(server: sshd.Server) -> set[int]:
    """Return agents and helpers of ranks that came through this server, because another test may have some too."""
    found = set()
    for pid in commands_with(AGENT, "^sleep 1000"):
        with contextlib.suppress(OSError):
            if f" {server.port}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


OTHER_VERSION = (
    "import json,os,struct,sys;os.write(1,b'welcome to this host\\nsparkhvd-agent %d.%d python\\n' % sys.version_info[:2]);"
    "sys.stdin.readline();m=json.dumps(['hello',{'version':'0.0.1'}]).encode()+b'\\n';"
    "os.write(1,struct.pack('!Q',len(m))+m);sys.stdin.read()"
)


def test_error_lists_hosts_that_cannot_run_ranks(
    server: sshd.Server, script: Path, tmp_path: Path
) -> None:
    """One launch has a host with each kind of failure."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"""#!/bin/bash
case " $* " in
*" old "*) echo "sparkhvd-agent 2.7 /usr/bin/python2"; cat >/dev/null;;
*" other "*) exec {sys.executable} -c "{OTHER_VERSION}";;
*" empty "*) exec env -u PYTHONPATH {sys.executable} -S -c 'import sys; print("sparkhvd-agent %d.%d x" % sys.version_info[:2], flush=True); import no_such_module';;
*) exec {server.ssh} "$@";;
esac
"""
    )
    ssh.chmod(0o700)
    began = time.monotonic()
    hosts = f"{A}:1,old:1,other:1,empty:1,no.such.invalid:1,127.0.0.9:1"
    ended = run(
        server,
        tmp_path,
        *("-np", "6", "-H", hosts, sys.executable, str(script)),
        SPARKHVD_SSH=str(ssh),
    )
    assert time.monotonic() - began < 10
    assert ended.returncode == 2
    said = ended.stderr
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "sparkhvdrun: 5 of 6 hosts cannot run their ranks:" in said
    assert f"/usr/bin/python2 there is Python 2.7, and {sys.executable} here is {here}" in said
    assert f"sparkhvd 0.0.1 is installed there for python, and {sparkhvd.__version__} here" in said
    assert "  empty: " in said
    assert "No module named 'no_such_module'" in said
    assert re.search(r"no.such.invalid: ssh: Could not resolve hostname", said)
    assert re.search(r"127.0.0.9: .*(Connection refused|Host key verification failed)", said)
    assert f"  {A}: " not in said


@pytest.mark.parametrize(
    ("arguments", "more", "text"),
    [
        (["python", "no.py"], {}, "the script 'no.py' does not exist in"),
        (["true"], {"SPARKHVD_PORT_RANGE": "45001"}, "every port of port_range='45001' is taken"),
        (
            ["true"],
            {"SPARKHVD_INTERFACES": "none0"},
            r"interfaces='none0': host .* has no interface of this choice that is up \(no interface matches\)\. Its interfaces are ",
        ),
        (["true"], {"SPARKHVD_SSH": "/no/ssh"}, "'/no/ssh' cannot be started"),
    ],
)
def test_missing_requirements_of_a_host_are_reported(
    server: sshd.Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    more: dict[str, str],
    text: str,
) -> None:
    for name, value in environment(server, **more).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    assert main(["-np", "2", "-H", f"{A}:2", *arguments]) == 2
    assert time.monotonic() - began < 10
    assert re.search(text, capsys.readouterr().err)


def body(fail: bool) -> tuple[int, int, str]:
    engine = meet()
    print("here is", engine.rank)
    engine.barrier().wait()
    if fail:
        raise KeyError("given")
    engine.barrier().wait()
    engine.shutdown()
    return engine.rank, engine.size, os.environ["GIVEN"]


def leaves_one() -> int:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def test_run_hosts_returns_the_results_of_a_function(
    server: sshd.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPARKHVD_SSH", server.ssh)
    lines = io.StringIO()
    hosts = f"{A}:1,{B}:1"
    # The ranks' processes report a wrong variable of Python before they have a job.
    env = {"GIVEN": "x", "PYTHONWARNINGS": "wrong"}
    results = sparkhvd.run_hosts(body, (False,), hosts=hosts, env=env, stdout=lines)
    assert results == [(0, 2, "x"), (1, 2, "x")]
    for rank in range(2):
        said = [line for line in lines.getvalue().splitlines() if line.startswith(f"[{rank}]")]
        assert "Invalid -W option" in said[0]
        assert said[1:] == [f"[{rank}] here is {rank}"]
    with pytest.raises(RankError, match=f"Rank 0 of 1 on host {B} raised KeyError") as raised:
        sparkhvd.run_hosts(body, (True,), hosts=f"{B}:1", verbose=0)
    assert "in body" in raised.value.traceback
    left = sparkhvd.run_hosts(leaves_one, hosts=f"{B}:1", verbose=0)
    assert wait_until_gone(set(left), 5) == set()
    assert agents_of(server) == set()


def test_agent_starts_in_folder_with_files_named_like_stdlib_modules(tmp_path: Path) -> None:
    folder, script = tmp_path / "own", tmp_path / "driver.py"
    folder.mkdir()
    (folder / "json.py").write_text("raise RuntimeError('not the library')")
    script.write_text(
        "import os, sparkhvd\n"
        "if __name__ == '__main__':\n"
        "    print(sparkhvd.run_hosts(os.getcwd, hosts='localhost:1', verbose=0))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == (f"['{folder}']\n", 0), done.stderr


def test_wrong_run_hosts_calls_raise_a_clear_error() -> None:
    with pytest.raises(InvalidArgumentError, match="give one of them"):
        sparkhvd.run_hosts(print)
    with pytest.raises(
        InvalidArgumentError, match="num_proc .-np. is 3; there must be at least one slot per rank"
    ):
        sparkhvd.run_hosts(print, hosts="a:1,b:1", num_proc=3)
    with pytest.raises(PreflightError, match="2 of 2 hosts cannot run"):
        sparkhvd.run_hosts(print, hosts="no-1.invalid:1,no-2.invalid:1")


@pytest.mark.skipif(why_no_namespaces() is not None, reason=f"two hosts: {why_no_namespaces()}")
def test_ranks_connect_over_the_working_network_of_two(script: Path, tmp_path: Path) -> None:
    """The second cable has a carrier on both sides but loses every packet."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    with two_hosts() as (a, b):
        peer = ["peer", "name", "dead0", "netns", b.namespace]
        a.run("ip", "link", "add", "dead0", "type", "veth", *peer)
        for host, number in ((a, 1), (b, 2)):
            host.run("ip", "address", "add", f"10.58.0.{number}/24", "dev", "dead0")
            host.run("ip", "link", "set", "dead0", "up")
            wrong = ["lladdr", "02:00:00:00:00:99", "dev", "dead0", "nud", "permanent"]
            host.run("ip", "neighbour", "replace", f"10.58.0.{3 - number}", *wrong)
        with sshd.serving(folder, [b.address], b.command()) as server:

            def launch(*flags: str) -> subprocess.CompletedProcess[str]:
                hosts = ("-np", "3", "-H", f"localhost:1,{b.address}:2")
                return subprocess.run(
                    a.command(*sparkhvdrun(*hosts, *flags, sys.executable, str(script))),
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                    cwd=tmp_path,
                    env=environment(server),
                )

            by_name = ("--network-interface", a.device, "--network-interface", b.device)
            by_network = ("--network-interfaces", "10.57.0.0/16,dead0")
            for flags in [by_network, *([(), by_name] if SOAK else [])]:
                ended = launch(*flags)
                assert ended.returncode == 0, ended.stderr
                place = f"rank 2 3 2 1 3 None None None {tmp_path}"
                assert f"[2] {place}" in ended.stdout.splitlines()
            began = time.monotonic()
            ended = launch("--network-interfaces", "dead0")
            assert time.monotonic() - began < 10
            assert ended.returncode == 2
            assert "localhost: 10.57.0.2 does not answer at 10.58.0.2:" in ended.stderr
            assert "Choose interfaces that all hosts share" in ended.stderr


@soak("an agent that hears nothing, and whose launcher's host does not answer: runner/test_agent")
@pytest.mark.skipif(why_no_namespaces() is not None, reason=f"two hosts: {why_no_namespaces()}")
def test_disconnected_cable_leaves_no_process(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sshd"
    folder.mkdir()
    with two_hosts() as (a, b), sshd.serving(folder, [b.address], b.command()) as server:
        hosts = ("-np", "2", "-H", f"localhost:1,{b.address}:1")
        command = a.command(*sparkhvdrun(*hosts, sys.executable, str(script), "sleep"))
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment(server),
        ) as launcher:
            ranks, helpers = started_by(launcher, 2)
            agents = {parent_of(rank) for rank in ranks}
            a.set_cable("down")
            began = time.monotonic()
            _, errors = launcher.communicate(timeout=60)
            assert launcher.returncode == 255, errors
            assert wait_until_gone({*ranks, *helpers, *agents}, 40) == set()
            assert 10 < time.monotonic() - began < 40
