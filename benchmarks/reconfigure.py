"""A lost rank of a torch.distributed program: `_reconfigure` on the engine beside Gloo, alone and under torchft.

    build/torch-env-2.14.1/bin/python benchmarks/reconfigure.py [--rounds 20] [--torchft-rounds 10] [--json FILE] [--write]

Three ranks of one host train 100 MB of parameters with DDP, one thread a rank. A round kills one of them (SIGKILL) at a random moment. The
others exchange handles through a TCPStore of another process, call `_reconfigure`, and reduce 100 MB. Rounds of the backends alternate.
Needs torch 2.14; torchft's rounds need a torchft whose Manager takes a native group (nightly of October 2026 or newer). Ranks are forks of
this process, so no round imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common import ROOT, Report, Target, median_and_quartiles, percentile, shown

sys.path.insert(0, str(ROOT))
import sparkhvd.distributed  # noqa: E402 - of the checkout

try:
    import torchft
    from torchft.coordination import LighthouseServer
except ImportError:
    torchft = None

RANKS, TENSORS, NUMEL = 3, 25, 1 << 20
STEPS_BEFORE = 4
DEADLINE_S = 120.0
LOSS_MS, RATIO, STEP_PERCENT = 300.0, 10.0, 1.0
BACKENDS = ("sparkhvd", "gloo")
_fork = multiprocessing.get_context("fork")
_torch: Any = dist.distributed_c10d


def serve_store(port: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def serve_lighthouse(pipe: Any) -> None:
    """Run torchft's lighthouse until this process is killed: forks of a process with its threads crash."""
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=2,
        join_timeout_ms=200,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )
    pipe.send(server.address().replace(os.uname().nodename, "127.0.0.1"))
    signal.pause()


def connect(backend: str, store: Any, rank: int, size: int, *, is_fixed: bool = False) -> None:
    """Create the default group, without ranks unless it is fixed."""
    options: Any = {} if is_fixed else {"enable_reconfigure": True}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30), **options
    )


def reconfigure(store: Any, who: Sequence[int], rank: int, uuid: int) -> None:
    """Exchange handles among the ranks of the start, and make them the group."""
    store.set(f"handle/{uuid}/{rank}", _torch._get_reconfigure_handle())
    keys = [f"handle/{uuid}/{each}" for each in who]
    store.wait(keys, timedelta(seconds=60))
    handles = [store.get(key).decode() for key in keys]
    _torch._reconfigure(uuid, handles, timeout=timedelta(seconds=10)).wait()


def reduce_all(tensors: Sequence[torch.Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        assert work is not None
        work.wait()


def gradients() -> list[torch.Tensor]:
    return [torch.full((NUMEL,), 1e-6) for _ in range(TENSORS)]


def native_rank(pipe: Any, port: int, prefix: str, backend: str, rank: int) -> None:
    """Reduce until a rank is lost, go on without it, and send the times."""
    torch.set_num_threads(1)
    server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    store = dist.PrefixStore(prefix, server)
    connect(backend, store, rank, RANKS)
    reconfigure(store, range(RANKS), rank, 1)
    tensors, width = gradients(), 1024  # a layer has as many parameters as a tensor
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(TENSORS)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    inputs = torch.ones(1, width)
    try:
        while True:
            model(inputs).sum().backward()
            pipe.send("step")
    except RuntimeError:
        known = time.monotonic()
    for uuid in range(2, 30):
        try:
            reconfigure(store, [0, 1], rank, uuid)
            break
        except RuntimeError:
            continue
    done = time.monotonic()
    reduce_all(tensors)
    pipe.send((known, done, time.monotonic(), uuid - 1))
    pipe.recv()


def native_round(port: int, prefix: str, backend: str) -> dict[str, float]:
    """Seconds from the kill until a rank knows of it, until the last knows, to the new group, and to its next reduction."""
    with ranks(native_rank, port, prefix, backend) as (processes, pipes):
        killed = kill_in_a_step(processes, pipes)
        times = [last(pipe) for pipe in pipes[:2]]
        for pipe in pipes[:2]:
            pipe.send("end")
    first = min(times)[0]
    known, done, following, tries = (max(values) for values in zip(*times, strict=True))
    return {
        "first": first - killed,
        "known": known - first,
        "reconfigured": done - known,
        "next": following - first,
        "whole": following - killed,
        "tries": tries,
    }


class ranks:  # noqa: N801 - a context manager
    """Forks of this process, with a pipe to each."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        self.body, self.args = body, args

    def __enter__(self) -> tuple[list[Any], list[Any]]:
        self.processes, self.pipes = [], []
        for rank in range(RANKS):
            ours, theirs = _fork.Pipe()
            process = _fork.Process(target=self.body, args=(theirs, *self.args, rank))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        return self.processes, self.pipes

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()


def kill_in_a_step(processes: Sequence[Any], pipes: Sequence[Any]) -> float:
    """Kill the last rank after some steps, and return when."""
    for pipe in pipes:
        for _ in range(STEPS_BEFORE):
            assert pipe.poll(DEADLINE_S), "no step in time"
            assert pipe.recv() == "step"
    time.sleep(random.uniform(0, 0.2))
    os.kill(processes[-1].pid, signal.SIGKILL)
    return time.monotonic()


def last(pipe: Any) -> Any:
    """Wait for the first message other than a step."""
    while pipe.poll(DEADLINE_S):
        message = pipe.recv()
        if message != "step":
            return message
    raise TimeoutError("a rank did not go on in time")


def steady_rank(pipe: Any, port: int, rounds: int, rank: int) -> None:
    """Send a step's wall and CPU seconds, in groups with and without reconfiguration by turns."""
    torch.set_num_threads(1)
    server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    tensors = gradients()
    for number in range(2 * rounds):
        is_fixed = number % 4 in (0, 3)
        store = dist.PrefixStore(f"steady/{number}", server)
        connect("sparkhvd", store, rank, RANKS, is_fixed=is_fixed)
        if not is_fixed:
            reconfigure(store, range(RANKS), rank, 1)
        for _ in range(3):
            reduce_all(tensors)
        for _ in range(5):
            began, cpu = time.monotonic(), time.process_time()
            for _ in range(4):
                reduce_all(tensors)
            pipe.send((is_fixed, (time.monotonic() - began) / 4, (time.process_time() - cpu) / 4))
        dist.destroy_process_group()
        sparkhvd.torch.shutdown()
    pipe.send("end")


def steady(port: int, rounds: int) -> dict[bool, list[tuple[float, float]]]:
    found: dict[bool, list[tuple[float, float]]] = defaultdict(list)
    with ranks(steady_rank, port, rounds) as (_, pipes):
        for pipe in pipes:
            while pipe.poll(DEADLINE_S):
                message = pipe.recv()
                if message == "end":
                    break
                found[message[0]].append(message[1:])
    return found


def torchft_rank(pipe: Any, port: int, address: str, prefix: str, backend: str, rank: int) -> None:
    """Train under torchft's Manager, and send the end of each step and the parts of each quorum."""
    torch.set_num_threads(1)
    logging.disable()
    server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    connect(backend, dist.PrefixStore(prefix, server), rank, RANKS)
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.ParameterList([torch.zeros(NUMEL) for _ in range(TENSORS)])
    manager = torchft.Manager(
        pg=dist.group.WORLD,
        min_replica_size=2,
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=f"replica_{rank}",
        lighthouse_addr=address,
        store_addr="127.0.0.1",
        store_port=own.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        use_async_quorum=False,
        init_sync=False,
        hostname="127.0.0.1",
    )
    ask, form = manager._client._quorum, manager._reconfigure_pg
    spent = {"quorum": 0.0, "reconfigure": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*args, **named)
            finally:
                spent[name] = time.monotonic() - began

        return run

    class Client:
        _quorum = staticmethod(timed("quorum", ask))

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

    client = manager._client
    manager._client = Client()
    manager._reconfigure_pg = timed("reconfigure", form)
    while True:
        spent |= {"quorum": 0.0, "reconfigure": 0.0}
        manager.start_quorum()
        for parameter in model:
            parameter.grad = torch.full_like(parameter, 1e-6)
        for work in [manager.allreduce(parameter.grad) for parameter in model]:
            work.wait()
        committed = manager.should_commit()
        pipe.send((time.monotonic(), committed, manager.num_participants(), dict(spent)))
        if pipe.poll():
            return


def torchft_round(port: int, prefix: str, backend: str) -> dict[str, float]:
    """Seconds from the kill to the next step of the survivors, and of the lighthouse and `_reconfigure` in it."""
    ours, theirs = _fork.Pipe()
    lighthouse = _fork.Process(target=serve_lighthouse, args=(theirs,))
    lighthouse.start()
    address = ours.recv()
    try:
        with ranks(torchft_rank, port, address, prefix, backend) as (processes, pipes):
            for pipe in pipes:
                full = 0
                while full < STEPS_BEFORE:
                    assert pipe.poll(DEADLINE_S), "no step in time"
                    _, committed, participants, _ = pipe.recv()
                    full += committed and participants == RANKS
            time.sleep(random.uniform(0, 0.2))
            os.kill(processes[-1].pid, signal.SIGKILL)
            killed = time.monotonic()
            ends, parts = [], {"quorum": 0.0, "reconfigure": 0.0}
            for pipe in pipes[:2]:
                while True:
                    assert pipe.poll(DEADLINE_S), "no step in time"
                    end, committed, participants, spent = pipe.recv()
                    if end > killed and spent["reconfigure"]:
                        parts = {name: max(parts[name], spent[name]) for name in parts}
                    if committed and participants == RANKS - 1:
                        break
                ends.append(end)
            for pipe in pipes[:2]:
                pipe.send("end")
    finally:
        lighthouse.kill()
        lighthouse.join()
    whole = max(ends) - killed
    return {"whole": whole, **parts, "rest": whole - parts["quorum"] - parts["reconfigure"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--torchft-rounds", type=int, default=10)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report(
        f"A lost rank of torch.distributed: {RANKS} ranks, 100 MB, load {os.getloadavg()[0]:.1f} at the start"
    )
    ours, theirs = _fork.Pipe()
    server = _fork.Process(target=serve_store, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()

    native: dict[str, dict[str, list[float]]] = {each: defaultdict(list) for each in BACKENDS}
    for number in range(given.rounds):
        for backend in random.sample(BACKENDS, 2):
            found = native_round(port, f"native/{backend}/{number}", backend)
            print(backend, {name: round(value, 3) for name, value in found.items()}, flush=True)
            for name, value in found.items():
                native[backend][name].append(value)
    rows: list[list[Any]] = []
    slowest = {each: percentile(native[each]["next"], 0.95) for each in BACKENDS}
    for backend in BACKENDS:
        targets = []
        if backend == "sparkhvd":
            targets = [
                Target("p95 to the next allreduce", slowest[backend] * 1e3, LOSS_MS, False, "ms"),
                Target("as fast as Gloo (p95)", slowest["gloo"] / slowest[backend], RATIO, True),
            ]
        times = native[backend]
        names = ("first", "known", "reconfigured", "next")
        cells = [median_and_quartiles(times[name]) for name in names]
        tries = f"{statistics.mean(times['tries']):.1f}"
        rows.append([backend, str(given.rounds), *cells, shown(slowest[backend]), tries, targets])
    columns = ["", "rounds", "kill to the first rank that knows", "to the last", "`_reconfigure`"]
    columns += ["first to the next allreduce", "p95 of it", "calls of `_reconfigure`", "targets"]
    report.table(columns, rows)
    report.raw["native"] = native
    late = sum(seconds > 1 for seconds in native["gloo"]["known"])
    report.note(
        f"In {late} of {given.rounds} rounds of Gloo a rank detected the loss only by the group's time-out of 30 s, because the other remaining rank had "
        "already ended the operation. These rounds cause the ratio of p95. The table also has the medians."
    )

    found = steady(port, given.rounds)
    wall, cpu = (
        [statistics.median(times[part] for times in found[kind]) for kind in (False, True)]
        for part in (0, 1)
    )
    cost = Target("CPU of a step", (cpu[0] / cpu[1] - 1) * 100, STEP_PERCENT, False, "% more")
    report.table(
        ["a step without faults", "wall", "CPU", "targets"],
        [
            ["group that reconfigures", shown(wall[0]), shown(cpu[0]), [cost]],
            ["group that keeps its ranks", shown(wall[1]), shown(cpu[1]), "-"],
        ],
    )
    report.raw["steady"] = {str(kind): times for kind, times in found.items()}

    if torchft is None or not given.torchft_rounds:
        report.note("Without torchft.")
    else:
        under: dict[str, dict[str, list[float]]] = {each: defaultdict(list) for each in BACKENDS}
        for number in range(given.torchft_rounds):
            for backend in random.sample(BACKENDS, 2):
                try:
                    times = torchft_round(port, f"torchft/{backend}/{number}", backend)
                except AssertionError as error:
                    report.note(f"torchft over {backend}: a round did not end: {error}.")
                    continue
                print("torchft", backend, {k: round(v, 3) for k, v in times.items()}, flush=True)
                for name, value in times.items():
                    under[backend][name].append(value)
        rows = []
        for backend in BACKENDS:
            columns = ["whole", "quorum", "reconfigure", "rest"]
            cells = [median_and_quartiles(under[backend][name]) for name in columns]
            rows.append([backend, str(len(under[backend]["whole"])), *cells])
        report.table(
            [
                "torchft over",
                "rounds",
                "kill to the next step",
                "lighthouse",
                "`_reconfigure`",
                "rest",
            ],
            rows,
        )
        report.note(
            "The lighthouse ends its wait for a lost replica after the heartbeat's time-out of 1 s and the join time-out of 0.2 s."
        )
        report.raw["torchft"] = under
    report.note("Median (25 % to 75 %). Of the remaining ranks the slower rank counts.")
    with contextlib.suppress(ProcessLookupError):
        server.kill()
    report.finish("benchmarks/reconfigure.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()
