"""`_reconfigure` of torch.distributed: sums stay right while processes leave, join, split, merge and are killed."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.fork_server import ForkServer
from tests.harness.page_ranks import run_program
from tests.harness.rank_process import RankProcess, rank_processes
from tests.harness.soak import amount, left_to_soak, soak

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not hasattr(dist.distributed_c10d, "_reconfigure"),
        reason=f"torch {torch.__version__} has no reconfigure; make test-torch runs these tests with 2.14",
    ),
]

_TARGET = "tests.distributed.members:member"
_names = itertools.count()


@pytest.fixture(scope="module")
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Job:
    """Processes, and a store that outlives them."""

    def __init__(self, processes: list[RankProcess], port: int) -> None:
        self.processes = processes
        self.place = f"127.0.0.1:{port}/{next(_names)}"
        self.handles: list[str] = []
        self._numbers = itertools.count(1)

    def start(
        self, size: int | None = None, backend: str = "sparkhvd", timeout_s: float = 30
    ) -> None:
        """Call init_process_group on every process, and collect the handles. Nothing is connected yet."""
        size = size or len(self.processes)
        ranks = range(len(self.processes))
        self.all("init", [(self.place, rank, size, backend, timeout_s) for rank in ranks])
        self.handles = self.all("handle")

    def all(self, name: str, args: Sequence[Sequence[Any]] | None = None, **named: Any) -> Any:
        return self.some(range(len(self.processes)), name, args, **named)

    def some(
        self,
        who: Sequence[int],
        name: str,
        args: Sequence[Sequence[Any]] | None = None,
        **named: Any,
    ) -> list[Any]:
        """Run a call on some processes at the same time, each with its arguments, and return the results."""
        return [result(answer) for answer in self.answers(who, name, args, **named)]

    def answers(
        self,
        who: Sequence[int],
        name: str,
        args: Sequence[Sequence[Any]] | None = None,
        **named: Any,
    ) -> list[Any]:
        for index, process in enumerate(who):
            self.processes[process].tell([name, list(args[index]) if args else [], named])
        return [self.processes[process].expect(60) for process in who]

    def number(self) -> int:
        """Return a new uuid."""
        return next(self._numbers)

    def join(self, who: Sequence[int], **named: Any) -> None:
        """Make processes the ranks of one group, in this order, and check it."""
        handles = [self.handles[each] for each in who]
        call = (self.number(), handles)
        assert self.some(who, "reconfigure", [call] * len(who), **named) == [
            [rank, len(who)] for rank in range(len(who))
        ]
        self.check(who)

    def check(self, who: Sequence[int]) -> None:
        values = [random.randrange(1000) for _ in who]
        assert self.some(who, "sum", [[value] for value in values]) == [sum(values)] * len(who)


def result(answer: dict[str, Any]) -> Any:
    assert "text" not in answer, answer["text"]
    return answer["result"]


@pytest.fixture
def job(request: pytest.FixtureRequest, fork_server: ForkServer, store: Any) -> Iterator[Job]:
    size = getattr(request, "param", 3)
    with rank_processes(_TARGET, size, with_engine=False, server=fork_server) as processes:
        yield Job(processes, store.port)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_leave_rejoin_and_change_their_order(job: Job, kind: str, tmp_path: Path) -> None:
    if kind == "file":
        job.place = str(tmp_path / "store")
    job.start()
    job.join([0, 1, 2])
    assert job.all("around") == [3.0, 1.0, 2.0]
    job.join([0, 1])
    job.join([2])  # alone
    job.join([2, 1, 0])
    assert job.some([2, 1, 0], "around") == [3.0, 1.0, 2.0]
    assert job.all("sequence_number") == [job.all("sequence_number")[0]] * 3
    job.join([0, 2])
    assert job.all("handle") == job.handles  # of all, whatever happened
    job.join([0, 1, 2])
    job.join([0, 1, 2])
    for process in range(3):  # each for itself
        job.join([process])
    job.join([1, 2, 0])
    job.all("destroy")


def test_late_process_joins_and_groups_split_and_merge(job: Job) -> None:
    job.start(size=2)  # as the first two know it
    job.join([0, 1])
    job.join([0, 1, 2])
    for process in (0, 1, 2):
        job.processes[process].tell(
            [
                "reconfigure",
                [100 + (process > 0), job.handles[:1] if process == 0 else job.handles[1:]],
                {},
            ]
        )
    assert [result(job.processes[process].expect()) for process in range(3)] == [
        [0, 1],
        [0, 2],
        [1, 2],
    ]
    job.check([1, 2])
    number = job.number()
    mixed = [job.handles[1], job.handles[2], job.handles[0]]
    found = job.all("reconfigure", [(number, mixed)] * 3, is_set=True)
    assert found == [[0, 3], [1, 3], [2, 3]]  # of a set, in the order of their first ranks
    job.check([0, 1, 2])


def test_calls_before_reconfigure_and_wrong_handles_raise(job: Job, tmp_path: Path) -> None:
    job.start()
    assert job.all("numbers") == [[0, 3], [1, 3], [2, 3]]
    assert job.all("error") == ["SUCCESS"] * 3
    for call in ("sum", "around"):
        (answer,) = job.answers([0], call, [[1.0]] if call == "sum" else None)
        assert "RuntimeError" in answer["kinds"]
        assert "_reconfigure(uuid, handles) on every rank first" in answer["text"]
    wrong = [
        (["gloo:0:-1:0:127.0.0.1:1"], "is not a handle of backend 'sparkhvd'"),
        ([], "not among the 0 given"),
        ([job.handles[0]] * 2, "only 1 of the 2 handles are different"),
        (job.handles[1:], "not among the 2 given"),
    ]
    for handles, text in wrong:
        (answer,) = job.answers([0], "reconfigure", [(7, handles)])
        assert text in answer["text"]
    job.join([0, 1, 2])
    job.all("destroy")
    place = str(tmp_path / "store")
    errors = job.all("init_without", [(place, rank, 3) for rank in range(3)])
    assert all("enable_reconfigure=True" in error for error in errors)


def test_reused_uuid_is_refused_on_every_rank(job: Job) -> None:
    job.start()
    job.join([0, 1, 2])
    before = job.all("numbers")
    for answer in job.answers(range(3), "reconfigure", [(1, job.handles)] * 3):
        assert "uuid was already used" in answer["text"]
        assert "DistBackendError" in answer["kinds"]
    for answer in job.answers([0, 1], "reconfigure", [(1, job.handles[:2])] * 2):
        assert "uuid was already used" in answer["text"]
    assert job.all("numbers") == before
    job.check([0, 1, 2])  # on the ranks as they were
    job.join([0, 1])


def test_group_stays_unchanged_if_a_new_rank_does_not_arrive(job: Job) -> None:
    job.start()
    job.join([0, 1])
    began = time.monotonic()
    for answer in job.answers([0, 1], "reconfigure", [(50, job.handles)] * 2, timeout_s=1.0):
        assert "ranks [2] of 3 did not arrive within the timeout of 1 s" in answer["text"]
        assert "CollectiveTimeoutError" in answer["kinds"]
    assert time.monotonic() - began < 4
    (late,) = job.answers([2], "reconfigure", [(50, job.handles)], timeout_s=20.0)
    assert "It failed on rank" in late["text"]
    assert job.some([0, 1], "numbers") == [[0, 2], [1, 2]]
    job.check([0, 1])
    job.join([0, 1, 2])


def test_pending_operations_end_after_a_kill_or_an_abort(job: Job) -> None:
    job.start()
    job.join([0, 1, 2])
    job.some([0, 1], "pending")
    job.processes[2].kill()
    began = time.monotonic()
    for text in job.some([0, 1], "end_of_pending"):
        assert "rank 2" in text
    job.join([0, 1])
    assert time.monotonic() - began < 5
    job.some([0], "pending")
    assert job.some([0, 1], "abort") == ["SUCCESS", "SUCCESS"]
    assert "aborted" in job.some([0], "end_of_pending")[0]
    (answer,) = job.answers([0], "sum", [[1.0]])
    assert "aborted" in answer["text"]
    job.join([1, 0])


def test_subgroups_and_gloo_groups_can_be_created_after_reconfigure(job: Job) -> None:
    job.start(backend="cpu:gloo,cuda:sparkhvd")
    job.join([0, 1, 2])
    job.join([2, 0])
    job.join([0, 1, 2])
    job.all("subgroup", [("pair", [0, 2])] * 3)
    job.check([0, 1, 2])
    job.join([1, 0, 2])
    job.all("subgroup", [("new pair", [0, 1])] * 3)  # the same name on a process that joins later


@pytest.mark.parametrize("job", [4], indirect=True)
def test_ddp_with_changing_ranks_equals_one_process_on_all_rows(job: Job) -> None:
    steps = itertools.count()

    def train(who: Sequence[int], hook: str) -> None:
        """Train some processes, and process 3 alone on the rows of all. Afterwards all have equal parameters."""
        for seed in itertools.islice(steps, 3):
            # PowerSGD's approximation of a gradient depends on the number of ranks, unless all have the same rows.
            is_same = hook == "powersgd_hook"
            calls = [(seed, 0, 1) if is_same else (seed, n, len(who)) for n in range(len(who))]
            *found, wanted = job.some([*who, 3], "step", [*calls, (seed, 0, 1)])
            for parameters in found:
                assert parameters == pytest.approx(wanted, rel=1e-9, abs=1e-12)

    for hook in ("powersgd_hook", "ddp_hook", ""):
        job.start()
        job.join([0, 1, 2])
        job.join([3])
        job.all("wrap", [[hook]] * 4)
        train([0, 1, 2], hook)
        job.join([2, 0])
        train([2, 0], hook)
        if hook:
            job.all("destroy")
            job.place += "."
    job.processes[0].kill()
    job.processes[0].wait()
    job.join([2])
    train([2], "")


@pytest.mark.parametrize("job", [4], indirect=True)
@pytest.mark.parametrize(
    "hook",
    ["", *left_to_soak("without a hook: the same works", "ddp_hook", "powersgd_hook")],
)
def test_ddp_continues_after_losing_a_rank_anywhere_in_a_step(job: Job, hook: str) -> None:
    job.start()
    job.join([0, 1, 2, 3])
    job.all("wrap", [[hook]] * 4)
    for overlaps, lost in ((False, 3), (True, 2)):
        who = range(lost)
        for each in range(lost + 1):
            job.processes[each].tell(["steps_until_a_loss", [overlaps], {}])
        time.sleep(1 + random.random() / 4)
        job.processes[lost].kill()
        for each in who:
            assert f"rank {lost} is lost" in result(job.processes[each].expect(60))
        job.join(who)
        same = [(7, 0, 1)] * lost
        before = job.some(who, "parameters")
        after = job.some(who, "step", same)
        assert all(new != old for new, old in zip(after, before, strict=True))
        job.some(who, "step", same)


def test_every_backward_error_reaches_the_caller(job: Job) -> None:
    job.start()
    job.join([0, 1, 2])
    job.all("wrap_with_hooks")
    job.processes[2].kill()
    job.processes[2].wait()
    for found in job.some([0, 1], "errors_in_backward"):
        assert found == ["PeerLostError"] * 5
    job.join([0, 1])


@pytest.mark.parametrize("job", [4], indirect=True)
def test_hsdp_continues_without_one_replica_and_names_lost_shards(job: Job) -> None:
    job.start()
    job.join([0, 1, 2, 3])
    job.all("shard")
    job.all("step", [(1, share, 4) for share in range(4)])
    for lost in (2, 3):  # the second replica: both of its shards
        job.processes[lost].kill()
        job.processes[lost].wait()
    handles = [job.some([process], "handle", [["replicas"]])[0] for process in (0, 1)]
    for process in (0, 1):
        alone = job.some(
            [process], "reconfigure", [(job.number(), [handles[process]])], group="replicas"
        )
        assert alone == [[0, 1]]
    before = job.some([0, 1], "parameters")
    after = job.some([0, 1], "step", [(2, 0, 2), (2, 1, 2)])
    assert after[0] == after[1] != before[0]
    job.processes[1].kill()  # the only one with the other shard
    job.processes[1].wait()
    (answer,) = job.answers([0], "step", [(3, 0, 1)])
    assert "rank 1" in answer["text"]


def test_repeated_reconfigure_leaks_no_memory_descriptor_or_thread(job: Job) -> None:
    job.start()
    times = amount(60, 1000)
    job.all("reconfigure_often", [(1000, 30, job.handles)] * 3)
    before = job.all("used")
    for first in range(2000, 2000 + times, 20):
        assert job.all("reconfigure_often", [(first, 20, job.handles)] * 3) == [6.0] * 3
    for old, new in zip(before, job.all("used"), strict=True):
        assert new["resident"] - old["resident"] < (2 << 20) + times * (4 << 10)
        for kind in ("descriptors", "threads", "tasks"):
            assert new[kind] <= old[kind] + 1


@pytest.mark.parametrize("seed", range(amount(4, 200)))
def test_sums_are_right_after_random_membership_changes(
    seed: int, fork_server: ForkServer, store: Any
) -> None:
    """Processes are killed, stopped, joined, split and merged in random order, and every group must add up."""
    draw = random.Random(seed)
    with rank_processes(_TARGET, 5, with_engine=False, server=fork_server) as processes:
        job = Job(processes, store.port)
        job.start(size=draw.randint(1, 5))
        alive = set(range(5))
        for _ in range(8):
            what = draw.choice(["one group", "split", "missing", "kill", "stop", "abort"])
            if what == "kill" and len(alive) > 2:
                lost = draw.choice(sorted(alive))
                alive.discard(lost)
                processes[lost].kill()
                processes[lost].wait()
            who = draw.sample(sorted(alive), draw.randint(1, len(alive)))
            if what == "stop" and len(who) > 1:  # it continues, and may join again
                processes[who[0]].kill(signal.SIGSTOP)
                job.join(who[1:])
                processes[who[0]].kill(signal.SIGCONT)
                continue
            if what == "abort":
                job.answers(who[:1], "abort")
            if what == "missing" and len(who) > 1:
                call = (job.number(), [job.handles[each] for each in who])
                calls = [call] * (len(who) - 1)
                answers = job.answers(who[1:], "reconfigure", calls, timeout_s=0.3)
                assert all("did not arrive" in answer["text"] for answer in answers)
                continue
            if what == "split" and len(who) > 1:
                cut = draw.randrange(1, len(who))
                _split(job, [who[:cut], who[cut:]])
                continue
            job.join(who)


def _split(job: Job, parts: list[list[int]]) -> None:
    """Make groups at the same time."""
    for part in parts:
        call = [job.number(), [job.handles[each] for each in part]]
        for process in part:
            job.processes[process].tell(["reconfigure", call, {}])
    for part in parts:
        for rank, process in enumerate(part):
            assert result(job.processes[process].expect(60)) == [rank, len(part)]
    for part in parts:
        job.check(part)


@soak("DDP, the store and losses: tests above; the loader's places: data/test_loader")
def test_page_program_uses_each_row_once_after_losing_a_rank(tmp_path: Path) -> None:
    printed = run_program("reconfigure", tmp_path, 6001)
    assert sorted(line.split(":")[0] for line in printed) == ["rank 0 of 2", "rank 1 of 2"]
    assert len({line.split(":")[1] for line in printed}) == 1
