"""`run_local` with real processes: values, errors, and nothing left behind."""

from __future__ import annotations

import io
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import sparkhvd
from sparkhvd.errors import InvalidArgumentError, RankError
from sparkhvd.runner import context, run_local
from sparkhvd.settings import Settings
from sparkhvd.topology import HOROVOD_NAMES
from tests.harness import faults
from tests.harness.by_value import by_value
from tests.harness.paths import ROOT
from tests.harness.processes import is_alive, wait_for_no_trainers, wait_until_gone
from tests.harness.soak import left_to_soak
from tests.harness.spark import started_script
from tests.harness.waiting import wait_until
from tests.runner.test_run_loggers import Kept

pytestmark = pytest.mark.processes

travels_by_value = by_value(__name__)


@pytest.fixture(autouse=True)
def no_trainer_is_left() -> Any:
    yield
    assert wait_for_no_trainers() == set()


# One zygote for launches of one rank and of two, whose numbers of threads differ by default.
LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
OF_THREADS = (
    "test_ranks_get_standard_variables_and_their_number_of_threads",
    "test_user_variables_override_defaults_for_one_run_only",
)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name not in OF_THREADS:
        for name in LIBRARIES:
            monkeypatch.setenv(name, "1")


def test_values_are_returned_in_rank_order() -> None:
    def place(base: int, *, step: int) -> tuple[int, Any]:
        here = context()
        assert here is not None
        return base + step * here.rank, here.size

    assert run_local(place, (100,), {"step": 5}, num_proc=3) == [(100, 3), (105, 3), (110, 3)]


def test_loggers_get_the_numbers_of_each_rank_in_order() -> None:
    def train() -> None:
        here = context()
        assert here is not None
        for step in range(1, 51):
            sparkhvd.log_metrics({f"loss_{here.rank}": step / 2}, step)
        print('metrics {"step": 1, "time": 0, "values": {"mine": 1}}')  # a line like any other
        time.sleep(1.5)  # the load of a second

    kept, shown = Kept(), io.StringIO()
    run_local(train, num_proc=2, loggers=[kept], stdout=shown)
    line = 'metrics {"step": 1, "time": 0, "values": {"mine": 1}}'
    assert sorted(shown.getvalue().splitlines()) == [f"[0] {line}", f"[1] {line}"]
    assert not any(m.name == "mine" for m in kept.metrics)
    for rank in range(2):
        found = [(m.step, m.value) for m in kept.metrics if m.name == f"loss_{rank}"]
        assert found == [(step, step / 2) for step in range(1, 51)]
        node = f"system/{socket.gethostname()}-rank-{rank}"
        (memory,) = (m for m in kept.metrics if m.name == f"{node}/rss_megabytes")
        assert memory.value > 5
        assert memory.step == 1
        (cpu,) = (m for m in kept.metrics if m.name == f"{node}/cpu_utilization_percentage")
        assert cpu.value < 200
    assert kept.state == "finished"


def test_a_message_follows_earlier_printed_lines() -> None:
    def talk() -> None:
        for number in range(300):
            print(f"line {number}")
            sparkhvd.log_to_driver(f"message {number}")

    shown = io.StringIO()
    run_local(talk, num_proc=1, stdout=shown)
    found = shown.getvalue().splitlines()
    assert sorted(found) == sorted(
        f"[0] {kind} {number}" for kind in ("line", "message") for number in range(300)
    )
    early = [
        number
        for number in range(300)
        if found.index(f"[0] message {number}") < found.index(f"[0] line {number}")
    ]
    assert early == []


def test_ranks_get_standard_variables_and_their_number_of_threads() -> None:
    def variables() -> dict[str, str]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE")
        return {name: os.environ[name] for name in (*names, *HOROVOD_NAMES)}

    found = run_local(variables, num_proc=2, env={"MINE": "x"})
    host = socket.gethostname()
    for rank, one in enumerate(found):
        horovod = [one[name] for name in HOROVOD_NAMES]
        assert horovod == [host, str(rank), "2", str(rank), "2", "0", "1"]
    assert [one["RANK"] for one in found] == ["0", "1"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["MINE"]) for one in found} == {
        ("2", "127.0.0.1", "x")
    }
    assert int(found[0]["OMP_NUM_THREADS"]) >= 1


def test_idle_threads_spin_briefly_unless_the_user_sets_their_policy() -> None:
    def spins() -> list[str | None]:
        return [os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")]

    settings = Settings(nursery="0")  # a zygote per environment would take seconds
    for env, expected in (
        ({}, ["3000", None]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", None]),
        ({"OMP_WAIT_POLICY": "active"}, [None, "active"]),
    ):
        assert run_local(spins, num_proc=1, env=env, settings=settings) == [expected]


def test_user_variables_override_defaults_for_one_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> tuple[int, list[str | None]]:
        here = context()
        assert here is not None
        return here.num_threads, [os.environ.get(name) for name in LIBRARIES]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = Settings(nursery="0")  # a zygote per environment would take seconds

    def found(**env: str) -> list[Any]:
        return run_local(threads, num_proc=1, env=env, settings=settings)

    assert found(OMP_NUM_THREADS="7") == [(7, ["7"] * 4)]
    assert found() != [(7, ["7"] * 4)]
    # So do those of this process.
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert found() == [(5, ["5,2", "3", "5", "5"])]


@pytest.mark.parametrize("nursery", ["auto", *left_to_soak("by the zygote, here", "0")])
def test_ranks_inherit_the_variables_of_hadoops_library(
    monkeypatch: pytest.MonkeyPatch, nursery: str
) -> None:
    """YARN gives them to a container, and so to its tasks: tokens, tickets and classes."""
    expected = {
        "HADOOP_TOKEN_FILE_LOCATION": "/yarn/container/tokens",
        "KRB5CCNAME": "FILE:/tmp/krb5cc_1000",
        "CLASSPATH": "/hadoop/a.jar:/hadoop/b.jar",
    }
    for name, value in expected.items():
        monkeypatch.setenv(name, value)

    def found() -> dict[str, str | None]:
        names = ("HADOOP_TOKEN_FILE_LOCATION", "KRB5CCNAME", "CLASSPATH")
        return {name: os.environ.get(name) for name in names}

    assert run_local(found, num_proc=2, env={"SPARKHVD_NURSERY": nursery}) == [expected, expected]


def _settings_of(variables: dict[int, dict[str, str]]) -> tuple[float, str, int]:
    here = context()
    assert here is not None
    os.environ.update(variables.get(here.rank, {}))
    import sparkhvd.torch as hvd
    from sparkhvd.torch import context as _context

    hvd.init()
    hvd.barrier()
    found = _context.context().engine.settings
    return found.stall_shutdown_s, found.timeline, found.bucket_bytes


@pytest.mark.usefixtures("torch_in_the_zygote")
def test_settings_variables_apply_from_env_and_from_rank_code(tmp_path: Path) -> None:
    path = str(tmp_path / "timeline.json")
    env = {"SPARKHVD_STALL_SHUTDOWN_S": "20", "HOROVOD_TIMELINE": path}
    own = dict.fromkeys(range(2), {"HOROVOD_FUSION_THRESHOLD": "0"})
    assert run_local(_settings_of, (own,), num_proc=2, env=env) == [(20.0, path, 0)] * 2
    assert (tmp_path / "timeline.json").exists()


def test_wrong_or_differing_settings_raise_errors_that_name_them() -> None:
    with pytest.raises(InvalidArgumentError, match="^HOROVOD_FUSION_THRESHOLD is -5; it must be"):
        run_local(len, ("",), num_proc=1, env={"HOROVOD_FUSION_THRESHOLD": "-5"})
    with pytest.raises(InvalidArgumentError, match=r"settings is 'fast'; it must be a"):
        run_local(len, ("",), num_proc=1, settings="fast")  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"ranks disagree on slots\. Rank [01] has [46], rank [01]"):
        run_local(_settings_of, ({1: {"SPARKHVD_SLOTS": "6"}},), num_proc=2)


def test_the_key_is_in_no_environment_or_command_line() -> None:
    def secrets_seen() -> bool:
        from sparkhvd import rendezvous

        current: Any = rendezvous.current_rendezvous()
        key = next(
            value.key for value in vars(current).values() if isinstance(value, rendezvous.Job)
        )
        me = Path("/proc/self")
        text = (me / "environ").read_bytes() + (me / "cmdline").read_bytes()
        text += repr(os.environ).encode()
        return key in text or key.hex().encode() in text

    assert run_local(secrets_seen, num_proc=1) == [False]


def test_too_little_address_space_raises_before_ranks_start() -> None:
    script = """
from sparkhvd.runner import run_local

def trains():
    import sparkhvd.torch as hvd
    hvd.init()

def counts():
    return 1 + 1

if __name__ == "__main__":
    print(run_local(counts, num_proc=1))
    run_local(trains, num_proc=1)
"""
    limit = 512 << 20
    ended = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stdout == "[2]\n", ended
    last = ended.stderr.splitlines()[-1]
    assert (
        "PreflightError: Processes that this process starts may have 512 MiB of address space each"
        in last
    )
    assert last.endswith("'ulimit -v unlimited' in the shell that starts it.")


@pytest.mark.usefixtures("torch_in_the_zygote")
def test_forked_child_cannot_be_a_rank_and_keeps_its_exit_status() -> None:
    def forks() -> list[int]:
        import sparkhvd.torch as hvd

        hvd.init()

        def again() -> None:
            hvd.shutdown()
            try:
                hvd.init()
            except hvd.NotInitializedError as e:
                sys.exit(7 if "was forked by rank" in str(e) else 8)

        found = []
        for ends in (lambda: sys.exit(0), lambda: sys.exit(3), lambda: {}["x"], print, again):
            child = os.fork()
            if child == 0:
                ends()  # type: ignore[no-untyped-call, operator]
                return []
            found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        hvd.barrier()
        return found

    assert run_local(forks, num_proc=1) == [[0, 3, 1, 0, 7]]


def test_main_module_objects_are_sent_to_spawned_processes_and_back() -> None:
    class Batch:
        def __init__(self, first: int) -> None:
            self.first = first

        def __call__(
            self, add: int
        ) -> Batch:  # as a Dataset of __main__ for a DataLoader that spawns
            return Batch(self.first + add)

    def spawns() -> list[int]:
        import multiprocessing

        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return [found.first for found in pool.map(Batch(10), [1, 2]) if type(found) is Batch]

    Batch.__module__ = "__main__"
    assert run_local(spawns, num_proc=1) == [[11, 12]]


def test_large_arguments_and_results_are_transferred() -> None:
    blob = os.urandom(5 << 20)
    assert run_local(lambda data: data[::-1], (blob,), num_proc=1) == [blob[::-1]]


def test_an_exception_names_the_rank_with_its_traceback(tmp_path: Path) -> None:
    def fails_on_one() -> None:
        here = context()
        assert here is not None
        if here.rank == 1:
            print("before it failed")
            faults.note()
            raise KeyError("missing piece")
        time.sleep(30)

    with pytest.raises(RankError) as e:
        run_local(fails_on_one, num_proc=2, env={faults.HAPPENED_AT: str(tmp_path / "raised")})
    assert faults.seconds_since(tmp_path / "raised") < 5
    assert (e.value.rank, e.value.exit) == (1, "exception")
    assert "raised KeyError: 'missing piece'" in str(e.value)
    assert 'raise KeyError("missing piece")' in e.value.traceback
    assert "runner/child.py" not in e.value.traceback
    assert e.value.log_tail == "before it failed"


def test_a_killed_rank_is_named_with_its_signal_and_output() -> None:
    def dies_on_zero() -> None:
        here = context()
        assert here is not None
        if here.rank == 0:
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    with pytest.raises(RankError, match="probably memory") as e:
        run_local(dies_on_zero, num_proc=2)
    assert (e.value.rank, e.value.exit, e.value.log_tail) == (0, "signal SIGKILL", "last words")


def test_a_segfault_leaves_its_stack_in_the_output() -> None:
    def crashes() -> None:
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(RankError, match="signal SIGSEGV") as e:
        run_local(crashes, num_proc=1)
    assert "Segmentation fault" in e.value.log_tail
    assert "in crashes" in e.value.log_tail


@pytest.mark.parametrize(("code", "text"), [(3, "exit 3"), ("no data", "exit 1. no data")])
def test_sys_exit_with_a_code_is_a_failure(code: object, text: str) -> None:
    with pytest.raises(RankError, match=text):
        run_local(sys.exit, (code,), num_proc=1)


def test_sys_exit_without_a_code_returns_none() -> None:
    assert run_local(sys.exit, num_proc=1) == [None]


def test_os_exit_without_report_is_a_failure() -> None:
    with pytest.raises(RankError, match="ended with exit 0 and left no report"):
        run_local(os._exit, (0,), num_proc=1)


def test_a_crash_after_the_function_is_a_failure() -> None:
    def dies_at_exit() -> int:
        import atexit

        atexit.register(lambda: os.kill(os.getpid(), signal.SIGKILL))
        return 1

    with pytest.raises(RankError, match="signal SIGKILL") as e:
        run_local(dies_at_exit, num_proc=2)
    assert e.value.rank in (0, 1)


def test_error_explains_an_unpicklable_result() -> None:
    def gives_a_lock() -> Any:
        import threading

        return threading.Lock()

    with pytest.raises(RankError) as e:
        run_local(gives_a_lock, num_proc=1)
    assert "raised TypeError: the function returned a _thread.lock, which cannot be pickled" in str(
        e.value
    )
    assert "Return plain data such as numbers, lists or tensors." in str(e.value)


def no_stream() -> None:
    return None


class Tee:
    """A user's stream without `flush`."""

    def __init__(self) -> None:
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        return self._stream.write(text)


class Broken(Tee):
    def flush(self) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize("make", [no_stream, Tee, Broken])
def test_function_may_replace_its_standard_output(make: Any) -> None:
    def replaces() -> int:
        sys.stdout.write("before, ")
        sys.stdout = make()
        print("after", end="")
        return 3

    shown = io.StringIO()
    assert run_local(replaces, num_proc=1, stdout=shown) == [3]
    assert shown.getvalue() == ("[0] before, \n" if make is no_stream else "[0] before, after\n")


def test_exception_whose_message_raises_is_reported() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def raises_odd() -> None:
        raise OddError

    with pytest.raises(RankError, match="OddError"):
        run_local(raises_odd, num_proc=1)


@pytest.mark.parametrize("bad", [0, -2, 1.5, True, None])
def test_invalid_num_proc_raises(bad: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="num_proc is .*at least 1"):
        run_local(len, num_proc=bad)


@pytest.mark.parametrize("nursery", ["0", "auto"])
def test_child_processes_end_with_their_rank(nursery: str) -> None:
    def leaves_some() -> tuple[list[int], float]:
        options: list[dict[str, Any]] = [
            {},
            {"start_new_session": True},  # holds the rank's pipe
            {"start_new_session": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
        ]
        return [
            subprocess.Popen(["sleep", "300"], **each).pid for each in options
        ], time.monotonic()

    # Counted from the end of the function: the start of a process takes seconds on a busy machine.
    ((pids, ended),) = run_local(leaves_some, num_proc=1, env={"SPARKHVD_NURSERY": nursery})
    assert time.monotonic() - ended < 4
    assert wait_until_gone(set(pids), 5) == set()


def test_output_lines_begin_with_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    run_local(print, ("some words",), num_proc=2, verbose=None)
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == ["[0] some words", "[1] some words"]
    output = io.StringIO()
    sparkhvd.run_local(
        print, ("others",), {}, 1, verbose=0, stdout=output, prefix_output_with_timestamp=True
    )
    assert capfd.readouterr().err == ""
    moment, _, line = output.getvalue().partition(" ")
    assert line == "[0] others\n"
    assert datetime.fromisoformat(moment).tzinfo is not None
    run_local(print, ("some words",), num_proc=1, verbose=0)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("torch_in_the_zygote")
def test_torch_distributed_program_runs_unmodified() -> None:
    def sums() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return float(value)

    assert run_local(sums, num_proc=2) == [3.0, 3.0]


_DRIVER = """
import ctypes, os, subprocess, sys, time
from sparkhvd.runner import run_local

def stays(folder, hold):
    sleeper = subprocess.Popen(["sleep", "300"])
    apart = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with open(os.path.join(folder, os.environ["RANK"]), "w") as f:
        f.write(f"{os.getpid()} {sleeper.pid} {apart.pid}")
    os.rename(f.name, f.name + ".pids")
    if hold:
        ctypes.PyDLL(None).sleep(300)  # keeps the GIL
    time.sleep(300)

if __name__ == "__main__":
    try:
        run_local(stays, (sys.argv[1], sys.argv[2] == "hold"), num_proc=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_rank_processes_end_with_a_killed_driver_despite_shadowing_modules(
    tmp_path: Path,
) -> None:
    folder, script = tmp_path / "own", tmp_path / "driver.py"
    folder.mkdir()
    (folder / "secrets.py").write_text("raise RuntimeError('not the library')")
    script.write_text(_DRIVER)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path), "lets go"]
    with subprocess.Popen(command, cwd=folder, env=environ) as driver:
        try:
            files = [tmp_path / f"{rank}.pids" for rank in range(2)]
            wait_until(lambda: all(map(Path.exists, files)), "both run", within_s=60)
        finally:
            driver.kill()
    pids = {int(pid) for file in files for pid in file.read_text().split()}
    assert len(pids) == 6
    assert wait_until_gone(pids) == set()


_SAVING = """
import os, sys, time
from sparkhvd import Settings, rendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.runner import run_local

def saves(folder, is_stubborn):
    def note(what):
        open(os.path.join(folder, what + os.environ["RANK"]), "w").close()

    met = rendezvous.current_rendezvous()
    with Engine(met.connect(), Settings()) as engine:
        engine.barrier(name="all").wait()
        while True:
            try:
                note("ready")
                if met.rank == 0:
                    engine.barrier(name="rank 1 stays away").wait()
                time.sleep(300)
            except KeyboardInterrupt:
                time.sleep(0.2)
                note("saved")
                if not is_stubborn:
                    raise

if __name__ == "__main__":
    try:
        run_local(saves, (sys.argv[1], sys.argv[2] == "twice"), num_proc=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("how_often", ["once", "twice"])
def test_ctrl_c_lets_functions_save_and_second_ctrl_c_ends_them(
    tmp_path: Path, how_often: str
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(_SAVING)
    with started_script(script, str(tmp_path), how_often) as driver:
        for what in ("ready", "saved")[: 1 + (how_often == "twice")]:
            files = [tmp_path / f"{what}{rank}" for rank in range(2)]
            wait_until(lambda f=files: all(map(Path.exists, f)), f"both {what}", within_s=30)  # type: ignore[misc]
            began = time.monotonic()
            os.kill(driver.pid, signal.SIGINT)
        driver.wait(10)
        assert time.monotonic() - began < 4  # five seconds are only for functions that need them
        assert driver.stdout is not None
        assert driver.stdout.read() == "interrupted\n"
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))


def _started(folder: Path) -> set[int]:
    wait_until(
        lambda: len(list(folder.glob("*.pids"))) >= 2, "both ranks have started", within_s=30
    )
    found = list(folder.glob("*.pids"))
    pids = {int(pid) for path in found for pid in path.read_text().split()}
    assert all(is_alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("hold", ["sleep", "hold"])
def test_no_process_outlives_the_driver(tmp_path: Path, how: signal.Signals, hold: str) -> None:
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    with started_script(script, str(tmp_path), hold) as driver:
        pids = _started(tmp_path)
        os.kill(driver.pid, how)
        assert wait_until_gone(pids, 5) == set()
        driver.wait(10)
        assert driver.stdout is not None
        assert ("interrupted" in driver.stdout.read()) == (how == signal.SIGINT)
