"""Rows lost and doubled by loaders after a kill and a resume with other numbers of ranks.

    python benchmarks/exactly_once.py [--pure 100000] [--histories 500] [--peer-histories 20] [--only NAME] [--json FILE] [--write]

A history is one epoch. Ranks take steps, all are killed at a random moment, and the next stage resumes from the last state that all of them have had, with
another number of ranks and another batch size. The rows before that state are those of the training; what comes after it is lost with the weights and must
come again. At the end each row must have come once.

Most histories are the plans of the reader, as a pure function. The others are processes: a fork per rank reads files, writes the rows of each step and its
state into a log, and ends by kill -9. Peers are run likewise, by the procedure that their documentation describes, with the same number of ranks and with
others: MosaicML's StreamingDataset, `datasets` with torchdata's StatefulDataLoader, and Ray Data. Those that are not installed are left out. Start the
program with the Python that has them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from common import Report, Target, percentile, shown
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.dataset import load
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.reading.sampler import Stage, epoch_plan
from sparkhvd.data.store.store import Store

ROWS, BATCH, MOST_RANKS = 480, 10, 4
STATE_BYTES, PLACE_S = 1000, 0.05
DEADLINE_S = 120.0
# Of a step of training; without it, ranks would end before a kill.
STEP_S = 0.002
# (state or None, rank, number of ranks, rows per rank and step) -> (row numbers of a step, state after it)
Steps = Callable[[Any, int, int, int], Iterator[tuple[list[int], Any]]]


@dataclass(frozen=True)
class Loader:
    """A loader to kill.

    Attributes:
        name: with its way of resuming.
        package: whose version is shown.
        steps: of a rank.
        sizes: whether another number of ranks resumes.
        is_common: whether one rank's state is that of all.
    """

    name: str
    package: str
    steps: Steps
    sizes: bool
    is_common: bool = True


# ----------------------------------------------------------------------------------------------------
# Histories of plans.


def pure(count: int, seed: int) -> tuple[Counter[str], int]:
    """Count rows lost and doubled over random histories of plans, and find the longest state."""
    chosen, found, longest = random.Random(seed), Counter[str](), 0
    for number in range(count):
        rows = chosen.randint(1, 200)
        window = chosen.choice([None, chosen.randint(1, 60)])
        options = {"seed": number, "shuffle": chosen.random() < 0.8, "window_rows": window}
        seen, before = np.zeros(rows, np.int64), list[Stage]()
        while seen.sum() < rows:
            size, batch_size = chosen.randint(1, 16), chosen.randint(1, 12)
            plan = epoch_plan(rows, size=size, batch_size=batch_size, before=before, **options)
            is_last = len(before) == 6 or chosen.random() < 0.4
            stop = plan.num_steps if is_last else chosen.randint(0, plan.num_steps)
            used = 0
            for rank in range(size):
                until = plan.rows_before(rank, stop)
                for window_ in plan.windows(rank):
                    if until <= 0:
                        break
                    taken = window_.row_numbers()[:until]
                    np.add.at(seen, taken, 1)
                    until -= len(taken)
                    used += len(taken)
            if used:
                before.append(Stage(size, batch_size, used))
            found["stages"] += 1
            if is_last:
                break
        found["lost"] += int((seen == 0).sum())
        found["doubled"] += int((seen > 1).sum())
        state = [[s.size, s.batch_size, s.rows] for s in before]
        longest = max(longest, len(json.dumps(state)))
    return found, longest


# ----------------------------------------------------------------------------------------------------
# Histories of processes.


def stage(
    steps: Steps, folder: Path, states: Sequence[Any], batch_size: int, kill_after: int | None
) -> tuple[list[list[int]], list[Any], bool]:
    """Run ranks until they end, or have taken some steps and are killed.

    Returns the rows of each common step, the ranks' states after the last of them, and whether they have ended.
    """
    size, pids = len(states), []
    with socket.create_server(("127.0.0.1", 0)) as server:  # for peers whose ranks meet
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(server.getsockname()[1]))
    logs = [folder / f"rank-{rank}" for rank in range(size)]
    for rank, log in enumerate(logs):
        log.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with open(log, "ab", 0) as file:
                    for rows, state in steps(states[rank], rank, size, batch_size):
                        file.write(json.dumps([rows, state]).encode() + b"\n")
                        time.sleep(STEP_S)
                    file.write(b"end\n")
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    left, deadline = set(pids), time.monotonic() + DEADLINE_S
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                if status and kill_after is None:
                    print(f"a rank ended with {status}", flush=True)
        begun = min((log.read_bytes().count(b"\n") if log.exists() else 0) for log in logs)
        if (kill_after is not None and begun >= kill_after) or time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            for pid in left:
                os.waitpid(pid, 0)
            break
        time.sleep(0.001)
    lines = [log.read_bytes().split(b"\n")[:-1] for log in logs]
    has_ended = all(each and each[-1] == b"end" for each in lines)
    lines = [[line for line in each if line != b"end"] for each in lines]
    if has_ended:  # ranks of some loaders have other numbers of steps
        parsed = [[json.loads(line) for line in each] for each in lines]
        return [each[0] for one in parsed for each in one], [], True
    common = min(map(len, lines))
    parsed = [[json.loads(line) for line in each[:common]] for each in lines]
    after = [one[-1][1] if one else states[rank] for rank, one in enumerate(parsed)]
    return [each[0] for one in parsed for each in one], after, False


def histories(loader: Loader, count: int, *, resizes: bool, folder: Path) -> dict[str, Any]:
    """Kill and resume a loader, and return rows lost and doubled, and the longest state."""
    chosen, found, longest = random.Random(7), Counter[str](), 0
    for _ in range(count):
        size, batch_size = chosen.randint(1, MOST_RANKS), BATCH
        states: list[Any] = [None] * size
        seen = Counter[int]()
        for number in itertools.count():
            is_last = number == 3 or (number and chosen.random() < 0.3)
            steps = None if is_last else chosen.randint(1, max(1, ROWS // (3 * size * batch_size)))
            taken, after, has_ended = stage(loader.steps, folder, states, batch_size, steps)
            found["stages"] += 1
            found["kills"] += not has_ended
            for rows in taken:
                seen.update(rows)
            if has_ended or is_last:
                found["unfinished"] += not has_ended
                break
            longest = max([longest, *(len(json.dumps(state)) for state in after)])
            if resizes:
                size = chosen.randint(1, MOST_RANKS)
                batch_size = chosen.choice([5, 8, 10, 12])
            states = [after[0 if loader.is_common else rank % len(after)] for rank in range(size)]
        found["lost"] += sum(row not in seen for row in range(ROWS))
        found["doubled"] += sum(n - 1 for n in seen.values() if n > 1)
        found["rows"] += ROWS
    return {**found, "state_bytes": longest}


def ours(path: str, shuffle_bytes: int) -> Steps:
    """Make the steps of `sparkhvd.data`."""
    store = Store(str(Path(path).parent))
    dataset = load(store, "data/k/o")

    def steps(state: Any, rank: int, size: int, batch_size: int) -> Iterator[tuple[list[int], Any]]:
        loader = dataset.loader(rank, size, batch_size, seed=3, shuffle_bytes=shuffle_bytes)
        if state is not None:
            loader.load_state_dict(state)
            if state["epoch"]:
                return
        for batch in loader:
            yield batch["id"].tolist(), loader.state_dict()

    return steps


def written(folder: Path) -> str:
    """Write the rows for `sparkhvd.data` and return a path in their store."""
    column = Column("id", "scalar", "int64", (), source="long", tensor_dtype="int64")
    store = Store.create(folder / "store")
    file = write_packed(
        store, "data/k/o/part-0.parquet", [column], {"id": np.arange(ROWS)}, row_group_bytes=512
    )
    Manifest((file,), DataSchema((column,), ()), ROWS).save(store, "data/k/o")
    return str(folder / "store" / "data")


# --- Peers, as their documentation describes a resume. ---


def mosaic(folder: Path) -> Steps:
    """https://docs.mosaicml.com/projects/streaming: StreamingDataLoader's state_dict and load_state_dict."""
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    with MDSWriter(out=str(folder / "mds"), columns={"id": "int"}, size_limit=512) as out:
        for row in range(ROWS):
            out.write({"id": row})

    def steps(state: Any, rank: int, size: int, batch_size: int) -> Iterator[tuple[list[int], Any]]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in place.items()})
        clean_stale_shared_memory()  # of killed ranks
        dataset = StreamingDataset(
            local=str(folder / "mds"), shuffle=True, batch_size=batch_size, num_canonical_nodes=4
        )
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=0)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch["id"].tolist(), loader.state_dict()

    return steps


def stateful(buffer: int) -> Steps:
    """https://huggingface.co/docs/datasets/stream: split_dataset_by_node, and the state_dict of StatefulDataLoader."""
    from datasets import Dataset as Rows
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    made = Rows.from_dict({"id": list(range(ROWS))}).to_iterable_dataset(num_shards=12)

    def steps(state: Any, rank: int, size: int, batch_size: int) -> Iterator[tuple[list[int], Any]]:
        rows = made.shuffle(seed=3, buffer_size=buffer) if buffer else made
        part = split_dataset_by_node(rows, rank=rank, world_size=size)
        loader = StatefulDataLoader(part, batch_size=batch_size, num_workers=0)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch["id"].tolist(), loader.state_dict()

    return steps


def ray_data() -> Steps:
    """https://docs.ray.io/en/latest/data: stateless iterators, so a restart iterates again."""
    import ray.data
    from ray.data import DataContext, DataIterator

    assert not hasattr(DataIterator, "state_dict"), "this version can resume: use that"

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    DataContext.get_current().enable_progress_bars = False
    blocks = [
        block["id"].tolist()
        for block in ray.data.range(ROWS).random_shuffle(seed=3).iter_batches(batch_size=ROWS)
    ]
    order = [row for block in blocks for row in block]
    ray.shutdown()

    def steps(state: Any, rank: int, size: int, batch_size: int) -> Iterator[tuple[list[int], Any]]:
        # What `streaming_split` gives a rank: equal parts of the order. A fork cannot use the cluster of its parent.
        part = order[rank::size]
        for start in range(0, len(part), batch_size):
            yield part[start : start + batch_size], None

    return steps


# ----------------------------------------------------------------------------------------------------


def places(rounds: int) -> dict[str, list[float]]:
    """Measure the seconds to find row 10^9 of 2 x 10^9 and to plan its window, by window size."""
    found: dict[str, list[float]] = {}
    rows, size, batch_size = 2 * 10**9, 8, 256
    for name, window in (("64 MiB", 1 << 19), ("1 GiB", 1 << 23)):
        for _ in range(rounds):
            for resized in (False, True):
                before = [Stage(6, 250, 10**9 // 1500 * 1500)] if resized else []
                start = 0 if resized else 10**9 // (size * batch_size)
                began = time.perf_counter()
                plan = epoch_plan(
                    rows,
                    size=size,
                    batch_size=batch_size,
                    seed=1,
                    window_rows=window,
                    block_rows=8192,
                    before=before,
                )
                first = plan.rows_before(3, start)
                order: Any = plan._order
                next(cut for cut in order._cuts(plan, 3) if cut[2] > first)
                what = f"{name}, {'other ranks' if resized else 'equal ranks'}"
                found.setdefault(f"{what}: place", []).append(time.perf_counter() - began)
                next(plan.windows(3, start)).row_numbers()
                found.setdefault(f"{what}: rows of its window", []).append(
                    time.perf_counter() - began
                )
    return found


def peers(folder: Path) -> Iterator[Loader]:
    """Yield the installed peers."""
    for name, package, make, is_common, sizes in (
        (
            "StreamingDataset, StreamingDataLoader.state_dict",
            "mosaicml-streaming",
            partial(mosaic, folder),
            True,
            True,
        ),
        ("datasets, StatefulDataLoader, in order", "datasets", partial(stateful, 0), False, False),
        (
            "datasets, StatefulDataLoader, shuffle buffer of 100",
            "datasets",
            partial(stateful, 100),
            False,
            False,
        ),
        ("Ray Data, which starts the epoch again", "ray", ray_data, True, False),
    ):
        try:
            yield Loader(name, package, make(), sizes, is_common)
        except ImportError as error:
            print(f"{name}: left out ({error})"[:200], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pure", type=int, default=100_000)
    parser.add_argument("--histories", type=int, default=500)
    parser.add_argument("--peer-histories", type=int, default=20)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report(
        f"Rows lost and doubled by kills, resumes and other numbers of ranks: epochs of {ROWS} rows"
    )
    rows: list[list[str | list[Target]]] = []

    def line(
        name: str, what: str, count: int, found: dict[str, Any], state: str, *, is_ours: bool
    ) -> None:
        wrong = found["lost"] + found["doubled"]
        targets = [Target("wrong rows", wrong, 0, at_least=False, unit="")] if is_ours else []
        kills = f"{found.get('kills', found['stages'] - count):,}"
        rows.append(
            [
                name,
                what,
                f"{count:,}",
                kills,
                f"{found['lost']:,}",
                f"{found['doubled']:,}",
                state,
                targets,
            ]
        )
        print(name, what, found, flush=True)
        report.raw[f"{name}, {what}"] = dict(found)

    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as scratch:
        folder = Path(scratch)
        if not given.only or given.only == "pure":
            found, longest = pure(given.pure, 1)
            line(
                "sparkhvd.data, plans",
                "1 to 16 ranks",
                given.pure,
                found,
                f"{longest} of sizes",
                is_ours=True,
            )
        loaders: list[tuple[Loader, int, bool]] = []
        if not given.only or given.only == "ours":
            path = written(folder)
            for name, limit in (("in memory", 1 << 30), ("beyond shuffle_bytes", 600)):
                loaders.append(
                    (
                        Loader(f"sparkhvd.data, {name}", "sparkhvd", ours(path, limit), True),
                        given.histories // 2,
                        True,
                    )
                )
        if not given.only or given.only == "peers":
            loaders += [(each, given.peer_histories, False) for each in peers(folder)]
        for loader, count, is_ours in loaders:
            for resizes in (True,) if is_ours else (False, True):
                found = histories(loader, count, resizes=resizes, folder=folder)
                what = "1 to 4 ranks" if resizes else "equal ranks"
                if resizes and not loader.sizes:
                    what += ", no documented way"
                state = f"{found['state_bytes']:,}"
                line(
                    f"{loader.name} ({metadata.version(loader.package)})",
                    what,
                    count,
                    found,
                    state,
                    is_ours=is_ours,
                )
                if is_ours:
                    rows[-1][-1].append(
                        Target(
                            "state", found["state_bytes"], STATE_BYTES, at_least=False, unit="bytes"
                        )
                    )  # type: ignore[union-attr]
    report.table(
        [
            "loader",
            "resumed by",
            "histories",
            "kills",
            "rows lost",
            "rows doubled",
            "state, bytes",
            "targets",
        ],
        rows,
    )
    timed: list[list[str | list[Target]]] = []
    for name, seconds in (places(5) if not given.only or given.only == "place" else {}).items():
        median = percentile(seconds, 0.5)
        is_place = name.endswith("place")
        timed.append(
            [
                name,
                shown(median),
                [Target("", median * 1e3, PLACE_S * 1e3, at_least=False, unit="ms")]
                if is_place
                else [],
            ]
        )
    if timed:
        report.table(["row 10^9 of 2 x 10^9, windows of 128-byte rows", "median", "targets"], timed)
    report.note(
        "A history is one epoch in up to four stages. Histories of plans have up to seven stages. Ranks of a stage are processes that end by SIGKILL at a "
        'random step. In histories of plans a stage ends without a kill. Except with "equal ranks", the next stage has a random number of ranks and a '
        "random batch size. Rows after the last state that all ranks have received are read again, and are not counted. If the ranks of a stage end "
        "without a kill, all their rows are counted."
    )
    report.finish("benchmarks/exactly_once.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
