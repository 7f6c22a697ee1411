"""Trainers that a zygote forks equal fresh ones, and neither leaves anything behind."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkhvd import lazy_compiler
from sparkhvd.errors import RankError
from sparkhvd.runner import context, run_local
from sparkhvd.runner.processes import InheritedPipes
from sparkhvd.runner.zygote_client import ZygoteClient, of_this_process
from sparkhvd.settings import Settings
from tests.harness.by_value import by_value
from tests.harness.paths import ROOT
from tests.harness.processes import ZYGOTE, children, find, is_alive, wait_until_gone
from tests.harness.soak import SOAK, left_to_soak, soak
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.processes

travels_by_value = by_value(__name__)

FRESH = Settings(nursery="0")
# Belongs to the job, not to the process.
OF_THE_JOB = {*("MASTER_PORT", "SPARKHVD_LAUNCHED_BY", "SPARKHVD_PLACE", "SPARKHVD_RANK_PROCESS")}


@pytest.fixture
def own_zygote() -> Iterator[None]:
    """Let a test begin and end without a zygote."""
    of_this_process.forget()
    yield
    of_this_process.forget()
    assert wait_until_gone(find(ZYGOTE) & children(os.getpid())) == set()


def describe() -> dict[str, Any]:
    """Describe the process of a rank."""
    import numpy as np
    import torch

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # torch 2.4 renames a process that imports it to pt_main_thread.
    status["Name"] = status["Name"].replace("pt_main_thread", "sparkhvd-rank")
    shown = ("Name", "Umask", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "Threads")
    return {
        **{field: status[field].strip() for field in shown},
        "environment": {n: v for n, v in os.environ.items() if n not in OF_THE_JOB},
        "cwd": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv[1:],
        "flags": str(sys.flags),
        "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "streams": [(s.encoding, s.errors, s.line_buffering) for s in (sys.stdout, sys.stderr)],
        "threads": sorted(t.name for t in threading.enumerate()),
        "torch threads": torch.get_num_threads(),
        "main": (sys.modules["__main__"].__name__, threading.current_thread().name),
        "numpy": np.__version__,
    }


def parents_of(pids: list[int]) -> set[int]:
    return {
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids
    }


@pytest.mark.parametrize("threads", ["3", *left_to_soak("three threads, here", "1")])
def test_forked_trainer_equals_a_fresh_process(
    own_zygote: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: str
) -> None:
    monkeypatch.chdir(tmp_path)
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env = {**dict.fromkeys(libraries, threads), "MINE": "a\nb=c"}
    fresh = run_local(describe, num_proc=1, env=env, settings=FRESH, verbose=0)
    forked = [run_local(describe, num_proc=1, env=env, verbose=0) for _ in range(2)]
    for (found,) in forked:
        assert {
            name: (found[name], fresh[0][name]) for name in found if found[name] != fresh[0][name]
        } == {}
    assert fresh[0]["environment"]["MINE"] == "a\nb=c"


def pid_and_parent() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def at_and_parent() -> tuple[float, int]:
    return time.monotonic(), os.getppid()


def launch(num_proc: int = 2, env: Mapping[str, str] | None = None, **options: Any) -> set[int]:
    """Launch ranks, and return their parents."""
    ranks = run_local(pid_and_parent, num_proc=num_proc, env=env, verbose=0, **options)
    assert len({pid for pid, _ in ranks}) == num_proc
    return {parent for _, parent in ranks}


@soak("an unused zygote ends, here")
def test_idle_zygote_ends_with_its_process_or_after_the_set_time(own_zygote: None) -> None:
    (pid,) = launch(1)
    assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2] == b"1e+08"
    of_this_process.forget()
    (pid,) = launch(1, settings=Settings(nursery_idle_s=0.3))
    assert wait_until_gone({pid}) == set()


def test_later_launches_use_the_zygote_of_the_first(own_zygote: None) -> None:
    assert launch(settings=FRESH) == {os.getpid()}
    first = launch()
    assert first == {of_this_process.pid()}
    assert launch(3) == first
    assert launch(env={"MINE": "1"}) == first


def test_different_startup_conditions_use_separate_zygotes(own_zygote: None) -> None:
    found = [launch(1)]
    found.append(launch(1, env={"OMP_NUM_THREADS": "5"}))
    if SOAK:
        found.append(launch(1, env={"LD_LIBRARY_PATH": "/nowhere"}))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        found.append(launch(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if SOAK:
        mask = os.umask(0o027)
        try:
            found.append(launch(1))
        finally:
            os.umask(mask)
    assert len(set.union(*found)) == len(found)
    # The earlier zygotes have ended, and the last one ends with the process.
    assert wait_until_gone(set.union(*found[:-1])) == set()


def what_imports_have_read() -> tuple[str, str, bool]:
    import io
    import tempfile

    import torch._inductor.config as config
    from tqdm import tqdm

    bar = io.StringIO()
    list(tqdm(range(2), file=bar))
    return config.cpp.cxx[1], tempfile.gettempdir(), bool(bar.getvalue())


@soak("different startup conditions, here")
def test_libraries_read_import_time_variables_of_the_launch(
    own_zygote: None, tmp_path: Path
) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    of_this_process._useful.update(("torch", "torch._dynamo.utils"))
    launch(1)
    # TMPDIR comes before TMP.
    env = {"CXX": "theirs", "TMPDIR": str(tmp_path), "TQDM_DISABLE": "1"}
    found = run_local(what_imports_have_read, num_proc=1, env=env, verbose=0)
    assert found == [("theirs", str(tmp_path), False)]


@soak("modules of Python itself, here")
@pytest.mark.usefixtures("torch_in_the_zygote")
def test_files_in_the_working_directory_do_not_shadow_libraries(
    own_zygote: None, tmp_path: Path
) -> None:
    (tmp_path / "sympy.py").write_text("raise RuntimeError('not the library')")
    (tmp_path / "tqdm.py").write_text("raise RuntimeError('not the library')")
    code = (
        "import sparkhvd\n"
        "def rank():\n"
        "    import os, torch._dynamo.utils\n"
        "    return os.getppid()\n"
        "if __name__ == '__main__':\n"
        "    print(len({sparkhvd.run_local(rank, num_proc=1, verbose=0)[0] for _ in range(2)}))\n"
    )
    script = tmp_path.parent / f"{tmp_path.name}.py"
    script.write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    assert "Warning" not in done.stderr  # of the zygote that the script leaves


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
@pytest.mark.parametrize("setting", ["auto", "0"])
def test_files_in_the_working_directory_do_not_shadow_stdlib_modules(
    own_zygote: None, tmp_path: Path, setting: str
) -> None:
    """The folder is last on the path at the start, and first inside the function, as in a notebook."""
    for name in ("random", "secrets", "queue", "logging"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the library')")
    (tmp_path / "theirs.py").write_text("")
    code = (
        "import sparkhvd, sys, random, secrets, queue, logging\n"
        "def rank():\n"
        "    import os, random, secrets, theirs\n"
        "    return os.path.dirname(theirs.__file__), sys.path\n"
        "if __name__ == '__main__':\n"
        "    sys.path.insert(0, '')\n"
        "    for _ in range(2):\n"
        "        print(sparkhvd.run_local(rank, num_proc=1, verbose=0)[0] == (os.getcwd(), sys.path))\n"
    )
    script = tmp_path.parent / f"{tmp_path.name}.py"
    script.write_text(f"import os\n{code}")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "SPARKHVD_NURSERY": setting}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("True\nTrue\n", 0), done.stderr


def draw() -> tuple[float, float, float, str]:
    import uuid

    import numpy as np
    import torch

    return random.random(), np.random.rand(), torch.rand(1).item(), uuid.uuid4().hex  # noqa: S311, NPY002


@pytest.mark.usefixtures("torch_in_the_zygote")
def test_forked_trainers_draw_random_numbers_like_fresh_processes(own_zygote: None) -> None:
    drawn = [rank for _ in range(2) for rank in run_local(draw, num_proc=2, verbose=0)]
    for kind in range(4):
        assert len({numbers[kind] for numbers in drawn}) == 4


def sleep_and_place(seconds: float) -> int:
    time.sleep(seconds)
    here = context()
    assert here is not None
    return here.rank


@soak("a zygote that is killed while ranks run, below")
@pytest.mark.timeout(3600)
def test_launches_succeed_if_the_zygote_is_killed_at_any_time(own_zygote: None) -> None:
    """In every fifth launch the zygote is killed before it forks, while ranks start, or while they run."""
    seed = secrets.randbelow(2**32)
    dice = random.Random(seed)
    launches = 500
    zygotes = set()
    for number in range(launches):
        (pid,) = launch(1)
        zygotes.add(pid)
        killer = threading.Timer(dice.uniform(0, 0.5), os.kill, (pid, signal.SIGKILL))
        if number % 5 == 4:
            killer.start()
        assert run_local(sleep_and_place, (0.1,), num_proc=2, verbose=0) == [0, 1], (seed, number)
        if number % 5 == 4:
            killer.join()
    assert len(zygotes) >= launches // 5
    assert wait_until_gone(zygotes - {of_this_process.pid()}) == set()


def test_ranks_survive_their_zygote_and_the_next_launch_starts_another(own_zygote: None) -> None:
    (before,) = launch()
    killer = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({before}, 9)"]
    )
    assert run_local(sleep_and_place, (2.0,), num_proc=2, verbose=0) == [0, 1]
    assert killer.wait() == 0
    assert launch() != {before}


def stop_parent() -> int:
    os.kill(os.getppid(), signal.SIGSTOP)
    return os.getppid()


def test_launch_ends_although_its_zygote_is_stopped(own_zygote: None) -> None:
    launch(1)
    pid = of_this_process.pid()
    assert pid is not None
    began = time.monotonic()
    assert run_local(stop_parent, num_proc=1, verbose=0) == [pid]
    assert time.monotonic() - began < 15
    os.kill(pid, signal.SIGCONT)
    of_this_process.forget()
    assert wait_until_gone({pid}) == set()


def end(how: str) -> None:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        sys.exit(7)
    if how == "child":
        subprocess.Popen(["sleep", "300"])
    if how != "child":
        raise ValueError(how)


def test_forked_trainers_report_their_exit_and_end_their_children(own_zygote: None) -> None:
    launch(1)
    for how, text in (("signal", "signal SIGSEGV"), ("exit", "exit 7"), ("error", "exception")):
        with pytest.raises(RankError) as caught:
            run_local(end, (how,), num_proc=1, verbose=0)
        assert caught.value.exit == text
    run_local(end, ("child",), num_proc=1, verbose=0)
    assert wait_until_gone(find("sleep 300")) == set()


PROGRAM = """
import os, sys, time
from sparkhvd.runner import run_local
from sparkhvd.runner.zygote_client import of_this_process

def pid_and_parent():
    return os.getpid(), os.getppid()

if __name__ == "__main__":
    run_local(pid_and_parent, num_proc=2, verbose=0)
    print(of_this_process.pid(), flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_zygote_ends_with_its_owner(tmp_path: Path, is_killed: bool) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    owner = subprocess.Popen(
        [sys.executable, str(script), "60" if is_killed else "0"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if is_killed:
            assert is_alive(pid)
            owner.kill()
    assert wait_until_gone({pid}, timeout_s=5) == set()


def test_unused_zygote_ends() -> None:
    program = (
        "import os, sys; from sparkhvd.runner import zygote; "
        "zygote.main(int(sys.argv[1]), os.pidfd_open(os.getppid()), '', 0.2)"
    )
    with ZygoteClient(("key",), dict(os.environ), os.getpid()) as kept:
        assert is_alive(kept.pid)
    assert wait_until_gone({kept.pid}) == set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        fd = listener.fileno()
        assert subprocess.run(
            [sys.executable, "-c", program, str(fd)], pass_fds=[fd], timeout=30, check=True
        )


def test_only_the_two_newest_and_used_zygotes_of_a_family_stay() -> None:
    program = (
        "import os, sys; from sparkhvd.runner import zygote; zygote._OLD_S = 0.5; "
        "zygote.main(int(sys.argv[1]), os.pidfd_open(os.getppid()), sys.argv[2], 60.0)"
    )
    family = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:

        def start() -> tuple[subprocess.Popen[bytes], ZygoteClient]:
            name = secrets.token_hex(16)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"\0sparkhvd-zygote-{name}")
            listener.listen()
            fd = listener.fileno()
            command = [sys.executable, "-c", program, str(fd), family]
            process = subprocess.Popen(command, pass_fds=[fd])
            stack.callback(process.wait)
            stack.callback(process.kill)
            found = stack.enter_context(ZygoteClient(("key",), dict(os.environ), os.getpid(), name))
            started.append(process)
            alive = sum(each.poll() is None for each in started)
            announced = f"@sparkhvd-zygotes-{family}-"
            wait_until(
                lambda: Path("/proc/net/unix").read_text().count(announced) == alive,
                "all are announced",
            )
            return process, found

        started: list[subprocess.Popen[bytes]] = []
        first, _ = start()
        second, in_use = start()
        assert first.poll() is None
        start()
        first.wait(timeout=10)
        in_use.prepare(["numpy"])
        third, _ = start()
        time.sleep(1.0)
        assert second.poll() is None
        start()
        second.wait(timeout=10)
        assert not in_use.is_usable()
        assert third.poll() is None


def test_zygote_with_threads_stops_forking(tmp_path: Path) -> None:
    (tmp_path / "has_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    reads, writes = os.pipe()
    try:
        with ZygoteClient(("key",), environ, os.getpid()) as kept:
            assert (
                kept.fork(["has_thread"], InheritedPipes(reads, writes, writes, (-1, -1))) is None
            )
            assert not kept.is_usable()
    finally:
        os.close(reads)
        os.close(writes)
    assert wait_until_gone({kept.pid}) == set()


@soak("a launch ends although its zygote is stopped, here")
def test_stopped_zygote_delays_a_launch_only_by_seconds(
    own_zygote: None, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(1)
    pid = of_this_process.pid()
    assert pid is not None
    began = time.monotonic()
    [(fresh_at, _)] = run_local(at_and_parent, num_proc=1, verbose=0, env={"SPARKHVD_NURSERY": "0"})
    fresh_s = fresh_at - began
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    [(began_at, parent)] = run_local(at_and_parent, num_proc=1, verbose=0)
    assert parent == os.getpid()
    assert began_at - began < 5 + fresh_s
    assert (
        f"the zygote of ranks does not answer (process {pid} is stopped)" in capfd.readouterr().err
    )
    [(_, parent)] = run_local(pid_and_parent, num_proc=1, verbose=0)
    assert parent == of_this_process.pid() != pid
    # It has the request, and forks a trainer for which no launch waits, and which ends at the gate.
    os.kill(pid, signal.SIGCONT)
    assert wait_until_gone({pid}) == set()


SHARED = """
import os, sys
from sparkhvd.runner import run_local
from sparkhvd.runner.zygote_client import of_this_process

def pid_and_parent():
    return os.getpid(), os.getppid()

if __name__ == "__main__":
    of_this_process.share(os.getppid())
    print(*(parent for _, parent in run_local(pid_and_parent, num_proc=2, verbose=0)), flush=True)
"""


def test_sibling_processes_share_a_zygote_that_ends_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SHARED)
    # Two at a time, then two more: the zygote outlives the process that started it.
    shell = f"for i in 1 2; do {sys.executable} {script} & {sys.executable} {script} & wait; done; read _"
    parent = subprocess.Popen(
        ["bash", "-c", shell],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with parent:
        assert parent.stdout is not None
        found = {int(pid) for _ in range(4) for pid in parent.stdout.readline().split()}
        assert len(found) == 1
        assert is_alive(*found)
        parent.kill()
    assert wait_until_gone(found, timeout_s=5) == set()


@soak("engine/test_leaks: generations of processes leave nothing")
def test_many_launches_leak_no_descriptors_or_processes(own_zygote: None) -> None:
    """500 launches end in random ways, some because the zygote is killed at a random moment."""
    launch(1)
    before = len(os.listdir("/proc/self/fd"))
    generator = random.Random(5)
    for number in range(500):
        how = generator.choice(["fine", "exit", "error", "killed"])
        pid = of_this_process.pid()
        if how == "killed" and pid is not None:
            delay = generator.random() / 3
            subprocess.Popen(
                [sys.executable, "-c", f"import os, time; time.sleep({delay}); os.kill({pid}, 9)"]
            ).wait() if number % 2 else os.kill(pid, signal.SIGKILL)
        if how in ("exit", "error"):
            with pytest.raises(RankError):
                run_local(end, (how,), num_proc=2, verbose=0)
        else:
            assert run_local(sleep_and_place, (0.0,), num_proc=2, verbose=0) == [0, 1]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert find("sparkhvd-rank") == set()


@pytest.mark.parametrize(
    ("nursery", "setting", "expected"),
    [("auto", "1", False), *left_to_soak("the setting 1, here", ("0", "0", True))],
)
def test_lazy_compiler_setting_applies_to_ranks(
    own_zygote: None, nursery: str, setting: str, expected: bool
) -> None:
    def trains() -> bool:
        import torch

        p = torch.nn.Parameter(torch.ones(2))
        torch.optim.SGD([p], lr=0.1)
        return lazy_compiler.is_loaded()

    env = {"SPARKHVD_LAZY_COMPILER": setting, "SPARKHVD_NURSERY": nursery}
    assert run_local(trains, num_proc=1, env=env, verbose=0) == [expected]
