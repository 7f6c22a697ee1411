"""Cost of a lost and a joining rank for the other ranks, on one host and on two.

    .venv/bin/python benchmarks/elastic.py [--rounds 20] [--peer-rounds 5] [--json FILE] [--write]

The one host has three ranks, each killed in turn.
A training of 100 MB of parameters in float32, batches of one row, one thread a rank, a commit each step. A round kills a rank (SIGKILL), waits until both others have
finished a step, and until a process that has joined in its place has made five steps with them. The two hosts are network namespaces of this
machine (needs root, `ip` and sshd): two ranks on one, of which one dies, and one alone on the other, which dies. Beside, in the same run:
`torchrun --max-restarts` with DDP over Gloo and a checkpoint in memory (/dev/shm) each step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, Report, Target, median_and_quartiles

sys.path.insert(0, str(ROOT))
from tests.harness import sshd  # noqa: E402 - of the checkout
from tests.harness.netns import Host, two_hosts, why_not  # noqa: E402

RANK = ROOT / "benchmarks" / "elastic_rank.py"
RANKS, STEPS_TOGETHER = 3, 5
ONE_HOST, BESIDE, ALONE = "one host", "two hosts, beside another", "two hosts, alone on its own"
DEADLINE_S = 120.0
# To the next allreduce: on one host; of two, where a rank lives beside the lost one, and where none does (beyond the end of its connections, which is at once).
LOSS_MS = {ONE_HOST: 300.0, BESIDE: 500.0, ALONE: 300.0}


@dataclass(frozen=True)
class Line:
    """A line of a rank: what it finished, when, in a job of how many, and its step."""

    time: float
    event: str
    size: int
    step: int


@dataclass
class Found:
    """Seconds of every round.

    Attributes:
        allreduce: from the kill until every other rank has finished an allreduce.
        step: the same for a step.
        join: what a join adds to the step in which it falls, on the slower of the others.
        steps: of three ranks.
        broadcasts: of the parameters, by the slower rank.
    """

    allreduce: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    join: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    broadcasts: list[float] = field(default_factory=list)


class Job:
    """Training ranks, observed by their log lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: set[int] = set()

    def lines(self, pid: int) -> list[Line]:
        found = []
        text = (self.folder / str(pid)).read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            seconds, event, size, step = line.split()
            found.append(Line(float(seconds), event, int(size), int(step)))
        return found

    def ranks(self) -> list[int]:
        pids = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
        return sorted(
            pid for pid in pids if pid not in self.ended and Path(f"/proc/{pid}").exists()
        )

    def together(self) -> list[int]:
        """Wait until all ranks have made steps together and return their processes."""

        def are_there() -> list[int]:
            pids = self.ranks()
            last = [[x for x in self.lines(p) if x.event == "step"][-STEPS_TOGETHER:] for p in pids]
            works = all(len(x) == STEPS_TOGETHER and all(y.size == RANKS for y in x) for x in last)
            return pids if len(pids) == RANKS and works else []

        return wait_for(are_there, f"{RANKS} ranks that train together")

    def kill(self, pid: int) -> float:
        """Kill a rank and return the time."""
        self.ended.add(pid)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return killed


def wait_for(condition: Callable[[], list[int]], what: str) -> list[int]:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(0.02)
    return found


# Of ranks and the number of a round, the one to kill.
Choice = Callable[[list[int], int], int]


def by_turns(pids: list[int], number: int) -> int:
    return pids[number % RANKS]


def of_host(host: Host) -> Choice:
    """Choose the newest rank of a host."""
    own = os.stat(f"/var/run/netns/{host.namespace}").st_ino

    def choose(pids: list[int], _: int) -> int:
        return max(pid for pid in pids if os.stat(f"/proc/{pid}/ns/net").st_ino == own)

    return choose


def rounds(job: Job, count: int, found: Found, choose: Choice = by_turns) -> None:
    """Kill one of three ranks again and again."""
    pids = job.together()
    for number in range(count):
        for pid in pids:
            found.steps += between_steps(job.lines(pid))[-STEPS_TOGETHER + 1 :]
        victim = choose(pids, number)
        others = [pid for pid in pids if pid != victim]
        time.sleep(0.1 * (number % 5))  # anywhere in a step
        killed = job.kill(victim)
        again = job.together()
        after = {pid: [x for x in job.lines(pid) if x.time > killed] for pid in again}
        stayed = [pid for pid in others if pid in after] or again  # torchrun restarts all
        # What was under way may still end, with three.
        smaller = [x for pid in stayed for x in after[pid] if x.size < RANKS]
        size = min((x.size for x in smaller), default=RANKS)
        for into, events in ((found.allreduce, ("allreduce", "step")), (found.step, ("step",))):
            firsts = [
                next(x.time for x in after[pid] if x.size == size and x.event in events)
                for pid in stayed
            ]
            into.append(max(firsts) - killed)
        if size < RANKS:
            found.join.append(max(cost_of_join(after[pid]) for pid in stayed))
        pids = again


def between_steps(lines: list[Line]) -> list[float]:
    times = [x.time for x in lines if x.event == "step"]
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def cost_of_join(lines: list[Line]) -> float:
    """Compute the time from the last step of two ranks to the first of three, less one step."""
    steps = [x for x in lines if x.event == "step"]
    at = next(i for i in range(1, len(steps)) if steps[i].size > steps[i - 1].size)
    usual = statistics.median(between_steps(steps[at:]))
    return steps[at].time - steps[at - 1].time - usual


@contextlib.contextmanager
def started(*command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with open(os.devnull, "wb") as nothing:
        process = subprocess.Popen(
            command, stdout=nothing, stderr=nothing, env={**os.environ, **variables}
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def measure_sparkhvd(
    folder: Path,
    count: int,
    *,
    prefix: Sequence[str] = (),
    flags: Sequence[str] = (),
    choose: Choice = by_turns,
    **variables: str,
) -> Found:
    launcher = [sys.executable, "-m", "sparkhvd.runner.command", "-np", "3", "--min-np", "2"]
    limits = ["--max-np", "3", "--blacklist-cooldown-range", "1", "1"]
    rank = [sys.executable, str(RANK), "sparkhvd", str(folder)]
    job, found = Job(folder), Found()
    command = [*prefix, *launcher, *limits, *flags, *rank]
    with started(*command, PYTHONPATH=str(ROOT), **variables) as process:
        rounds(job, count, found, choose)
        pids = job.ranks()
        (folder / "end").touch()
        process.wait(DEADLINE_S)
    names = [[x.event for x in job.lines(pid) if x.event.startswith("broadcast")] for pid in pids]
    for same in zip(*names, strict=True):
        found.broadcasts.append(max(float(name.partition(":")[2]) for name in same))
    return found


def measure_two_hosts(folder: Path, count: int, *, is_alone: bool) -> Found:
    keys = folder / "keys"
    keys.mkdir()
    with two_hosts() as (a, b), sshd.serving(keys, [b.address], b.command()) as server:
        flags = ["-H", f"localhost:2,{b.address}:1"]
        choose = of_host(b if is_alone else a)
        prefix = a.command()
        return measure_sparkhvd(
            folder, count, prefix=prefix, flags=flags, choose=choose, SPARKHVD_SSH=server.ssh
        )


def measure_torchrun(folder: Path, count: int) -> Found:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    rank = [f"--max-restarts={count}", str(RANK), "torchrun", str(folder)]
    job, found = Job(folder), Found()
    # The store that ranks share with the agent by default still has the addresses of Gloo's former ranks.
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with started(*launcher, *rank, **variables) as process:
        rounds(job, count, found)
        (folder / "end").touch()
        process.wait(DEADLINE_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peer-rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report(
        f"A lost rank and one that joins: 3 ranks, 100 MB of parameters, load {os.getloadavg()[0]:.1f} at the start"
    )
    measures: dict[str, Callable[[Path], Found]] = {
        ONE_HOST: lambda folder: measure_sparkhvd(folder, given.rounds),
        "one host, torchrun, Gloo": lambda folder: measure_torchrun(folder, given.peer_rounds),
    }
    if missing := why_not() or sshd.why_not():
        report.note(f"Not measured with two hosts: {missing}.")
    else:
        measures[BESIDE] = lambda f: measure_two_hosts(f, given.rounds, is_alone=False)
        measures[ALONE] = lambda f: measure_two_hosts(f, given.rounds, is_alone=True)
    rows = []
    for name, measure in measures.items():
        with tempfile.TemporaryDirectory(prefix="sparkhvd-elastic-", dir="/dev/shm") as folder:
            found = measure(Path(folder))
        report.raw[name] = vars(found)
        targets = []
        if name in LOSS_MS:
            loss = statistics.median(found.allreduce) * 1e3
            targets.append(Target("to the next allreduce", loss, LOSS_MS[name], False, "ms"))
        if name == ONE_HOST:
            step = statistics.median(found.steps)
            broadcast = statistics.median(found.broadcasts)
            join = statistics.median(found.join)
            targets.append(Target("a join", join * 1e3, (step + broadcast) * 1e3, False, "ms"))
            report.note(
                f"Limit of a join: a step and a broadcast of the parameters, {step * 1e3:.0f} and {broadcast * 1e3:.0f} ms."
            )
        cells = (found.allreduce, found.step, found.join, found.steps)
        shown = [median_and_quartiles(times) if times else "-" for times in cells]
        rows.append([name, str(len(found.step)), *shown, targets])
        print(rows[-1], flush=True)
    columns = ["", "rounds", "kill to the next allreduce", "kill to the next step"]
    report.table([*columns, "a join costs", "a step of 3 ranks", "targets"], rows)
    report.note("Median (25 % to 75 %). Of the remaining ranks the slower rank counts.")
    report.finish("benchmarks/elastic.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
