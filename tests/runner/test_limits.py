"""A machine with tight limits: no /dev/shm, no locked memory, few descriptors, a small control group."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.runner import run_local
from sparkhvd.settings import Settings
from tests.engine.fault_bodies import limited
from tests.harness.netns import two_hosts, why_not
from tests.harness.paths import ROOT
from tests.harness.rank_process import Talk, rank_processes
from tests.harness.soak import left_to_soak

pytestmark = pytest.mark.processes

RESULTS = [3.0 * 300_001, 7.0 * (1 + 4), 200_000.0]  # of two ranks
SHARED, PRIVATE = 1.0, 0.0


def test_job_shares_memory_without_locked_memory_and_with_few_descriptors(
    capfd: pytest.CaptureFixture[str],
) -> None:
    limits = "memlock 0, 64 descriptors"
    assert run_local(limited, (limits,), num_proc=2) == [[SHARED, *RESULTS]] * 2
    assert "sparkhvd warning" not in capfd.readouterr().err


@pytest.mark.parametrize("tcp_only", [False, *left_to_soak("connections on one host, here", True)])
def test_descriptor_shortage_gives_a_result_or_an_error(tcp_only: bool) -> None:
    """Rank 1 may open 0, 1, 2, ... more descriptors, so that each step fails once. The next job must work."""
    count = 16
    settings = Settings(connect_timeout_s=1.5)
    body = "tests.engine.fault_bodies:too_few_descriptors"
    with rank_processes(body, 3, tcp_only=tcp_only, settings=settings) as ranks:
        for rank in ranks:
            rank.tell(count)
        reports = [rank.expect(60) for rank in ranks]
    assert [report[-1] for report in reports] == [""] * 3
    failed = reasons = 0
    for room in range(count):
        endings = [report[room] for report in reports]
        assert all(endings) or not any(endings), (room, endings)
        # If no rank is lost, all give up at the same time, and the others may name each other.
        assert all(re.search("[Rr]ank|Too many open files", e) for e in endings if e), (
            room,
            endings,
        )
        reasons += "Too many open files" in endings[1]
        failed += bool(endings[1])
    assert failed >= 4, "no shortage was made"
    # In at most one of them, rank 1 first learns of its own error from the others.
    assert reasons >= failed - 1, reports[1]


def test_job_raises_the_soft_descriptor_limit_for_its_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 40
    settings = Settings(connect_timeout_s=20, streams=64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with rank_processes(f"{__name__}:room", 4, settings=settings) as ranks:
            rooms = [rank.expect() for rank in ranks]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for connections, limit in rooms:
        assert connections >= 3 * 64 > few, (connections, few)
        assert limit == hard


def room(engine: Engine, talk: Talk) -> tuple[int, int]:
    """Return the number of open descriptors, and the limit."""
    engine.barrier(name="all have met").wait()
    found = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    engine.barrier(name="all have looked").wait()  # a leaving rank closes connections
    return found


# Both ways to start two ranks on this host.
STARTS = {
    "run_local": "from sparkhvd.runner import run_local\nfrom tests.engine.fault_bodies import summed\nprint(run_local(summed, num_proc=2))",
    "sparkhvdrun": "import sys\nfrom sparkhvd.runner.command import main\nsys.exit(main(['-np', '2', sys.executable, '-c', "
    "'from tests.engine.fault_bodies import summed; print(summed())']))",
}


def started(way: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Start two ranks by `STARTS[way]`, after a command prefix."""
    return subprocess.run(
        [*before, sys.executable, "-c", STARTS[way]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("way", STARTS)
def test_launcher_names_a_too_low_descriptor_limit(way: str) -> None:
    # 25 or 26 are enough, one more or less depending on the host's addresses.
    ended = started(way, "sh", "-c", 'ulimit -n 20 && exec "$@"', "sh")
    assert ended.returncode != 0
    assert "num_proc=2: this process may open 20 files (RLIMIT_NOFILE)" in ended.stderr
    assert "Raise the limit (ulimit -n 1024; the hard limit is 20)" in ended.stderr


@pytest.mark.skipif(why_not() is not None, reason=f"a network of its own: {why_not()}")
@pytest.mark.parametrize("way", ["sparkhvdrun", *left_to_soak("sparkhvdrun, here", "run_local")])
def test_ranks_connect_over_an_ipv6_only_loopback(way: str) -> None:
    with two_hosts(ipv6_only=True) as (host, _):
        ended = started(way, *host.command())
        addresses = json.loads(host.run("ip", "-json", "-4", "address"))
    assert not any(device.get("addr_info") for device in addresses), addresses
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("3.0") == 2


# --- Own mounts ---


def in_own_mounts(script: str, *mounts: str) -> str:
    """Return the output of a script with other mounts than the rest of the machine."""
    setup = " && ".join(["mount --make-rprivate /", *mounts])
    command = ["unshare", "--mount", "sh", "-c", f'{setup} && exec "$@"', "sh"]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"needs mounts of its own, which are refused here: {probe.stderr.strip()}")
    ended = subprocess.run(
        [*command, sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "sparkhvd warning" not in ended.stderr, ended.stderr
    return ended.stdout


def test_job_shares_memory_without_dev_shm() -> None:
    script = """
        import os
        from sparkhvd.runner import run_local
        from tests.engine.fault_bodies import limited
        try:
            open("/dev/shm/x", "w")
        except OSError as error:
            print("refused:", error.strerror)
        print(run_local(limited, ("none",), num_proc=2))
    """
    output = in_own_mounts(script, "mount -t tmpfs -o ro tmpfs /dev/shm")
    assert output.splitlines() == [
        "refused: Read-only file system",
        str([[SHARED, *RESULTS]] * 2),
    ]


def test_a_killed_process_leaves_no_files_in_dev_shm_or_tmp() -> None:
    script = """
        import os, signal, sys
        from sparkhvd.errors import RankError
        from sparkhvd.runner import run_local
        from tests.engine.fault_bodies import killed_in_the_middle, limited

        def left():
            return sorted(os.listdir("/dev/shm") + os.listdir("/tmp"))

        open("/dev/shm/mine", "w").close()  # the listing is the one that counts
        print(left())
        print(run_local(limited, ("none",), num_proc=2)[0][0])
        print(left())
        try:
            run_local(killed_in_the_middle, num_proc=2)
        except RankError as error:
            print(error.rank, error.exit)
        print(left())
    """
    # If the checkout or the interpreter is below /tmp, only /dev/shm gets its own mount.
    mounts = ["mount -t tmpfs tmpfs /dev/shm"]
    below_tmp = any(str(path).startswith("/tmp/") for path in (ROOT, sys.executable, sys.prefix))
    mounts.append("true" if below_tmp else "mount -t tmpfs tmpfs /tmp")
    if below_tmp:
        script = script.replace(' + os.listdir("/tmp")', "")
    output = in_own_mounts(script, *mounts)
    assert output.splitlines() == [
        "['mine']",
        str(SHARED),
        "['mine']",
        "1 signal SIGKILL",
        "['mine']",
    ]


# --- An own control group ---

GROUPS_V1 = Path("/sys/fs/cgroup/memory")
GROUPS_V2 = Path("/sys/fs/cgroup")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group below this process's own that allows 600 MB."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    v1 = [line.split(":", 2)[2] for line in lines if ":memory:" in line]
    v2 = [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    if v1:
        parent, limit_file = GROUPS_V1 / v1[0].lstrip("/"), "memory.limit_in_bytes"
    else:
        parent, limit_file = GROUPS_V2 / v2[0].lstrip("/"), "memory.max"
    group = parent / f"sparkhvd-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group of its own, which is refused here: {error}")
    try:
        try:
            (group / limit_file).write_text(str(600 << 20))
        except OSError as error:
            pytest.skip(f"needs a memory controller here: {error}")
        yield group
    finally:
        group.rmdir()


def test_small_memory_limit_uses_sockets_and_kills_no_rank(
    small_group: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(slot_bytes=256 << 20, slots=4)
    limit = f"group {small_group}"
    assert run_local(limited, (limit,), num_proc=2, settings=settings) == [[PRIVATE, *RESULTS]] * 2
    said = capfd.readouterr().err
    assert f"because the control group {small_group}/ allows {600 << 20} bytes, of which" in said
