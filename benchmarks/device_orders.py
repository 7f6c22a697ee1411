"""Rank 0's CPU for operations on devices of process sets without it: passing orders on, beside negotiating them itself.

    .venv/bin/python benchmarks/device_orders.py [--rounds 7] [--json FILE] [--write]

Operations on devices have one order for all process sets, rank 0's (docs/engine.md): a set's first rank negotiates the next
operation with the set's ranks, and rank 0 passes it on. Alternatively, rank 0 could negotiate with the ranks of all sets. Its
cost would be the extra cost of a first rank over the others of its set.

One set of 8 ranks and rank 0, on the stand-in for CUDA and NCCL: the host's part alone. Rank 0 itself sleeps.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

from device_overhead import BUILD, IN_FLIGHT

from common import Report, median_and_quartiles

MEMBERS = 8
CALLS = 40 * IN_FLIGHT
ROUND_S = 2.0


def measure(rounds: int) -> list[float]:
    """Measure the CPU seconds of an operation in a rank, one mean per round."""
    import sparkhvd.torch as hvd
    from sparkhvd.engine.calls import Reduction, TensorView
    from sparkhvd.engine.library import Collective, DType, ReduceOp
    from sparkhvd.torch.context import context

    hvd.init()
    engine, rank = context().engine, hvd.rank()
    members = hvd.add_process_set(range(1, hvd.size()))
    number = members.process_set_id
    assert number is not None
    memory = ctypes.create_string_buffer(4)  # the stand-in's devices use the host's
    place = TensorView(ctypes.addressof(memory), ctypes.addressof(memory), (1,))
    sum_, device = Reduction(ReduceOp.SUM), rank - 1
    if rank > 0:
        engine.open_device(device, str(BUILD / "libfake_cuda.so"), str(BUILD / "libfake_nccl.so"))

    def work() -> None:
        if rank == 0:
            return
        call = engine.prepare(
            Collective.ALLREDUCE, [place], DType.FLOAT32, sum_, number, device=device
        )
        call.request.stream = 0
        for _ in range(CALLS // IN_FLIGHT):
            for each in [engine.start(call, f"{n}") for n in range(IN_FLIGHT)]:
                each.wait_stream(0)

    work()
    hvd.barrier()
    ctypes.CDLL(str(BUILD / "libfake_cuda.so")).fake_cuda_idle(1)
    found = []
    for _ in range(rounds):
        hvd.barrier()
        until, began = time.monotonic() + ROUND_S, time.process_time()
        work()
        time.sleep(max(0.0, until - time.monotonic()))  # rank 0 must not spin in a barrier
        found.append((time.process_time() - began) / CALLS)
    hvd.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="a file for the raw numbers")
    parser.add_argument("--write", action="store_true", help="keep the table in docs/results/")
    options = parser.parse_args()
    from sparkhvd.runner import run_local
    from sparkhvd.settings import Settings

    ranks = run_local(
        measure, args=(options.rounds,), num_proc=MEMBERS + 1, settings=Settings(spin_us=0)
    )
    others = [statistics.median(times) for times in zip(*ranks[2:], strict=True)]
    agreeing = [first - other for first, other in zip(ranks[1], others, strict=True)]
    report = Report("device_orders: CPU of the rank that gives the order of operations on devices")
    report.table(
        [f"one operation of a set of {MEMBERS} other ranks", "CPU"],
        [
            ["rank 0 passes the order on", median_and_quartiles(ranks[0])],
            ["the set's first rank agrees with the others", median_and_quartiles(agreeing)],
            ["a rank of the set, for its own operation", median_and_quartiles(others)],
        ],
    )
    report.note(f"Means of {CALLS} operations, {IN_FLIGHT} in flight, {options.rounds} rounds.")
    report.raw = {f"rank {rank}": times for rank, times in enumerate(ranks)}
    report.finish("benchmarks/device_orders.py", write=options.write, json_path=options.json)


if __name__ == "__main__":
    main()
