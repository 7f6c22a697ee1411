"""Times of an allreduce on many GPUs: alpha (seconds per message) and beta (seconds per byte). See docs/scaling.md.

Hosts of 8 GPUs, NVLink inside, one 400 Gbit/s adapter per GPU between. Pure functions; nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common import shown

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"4 KiB": 4 * KIB, "1 MiB": MIB, "32 MiB": 32 * MIB, "1 GiB": GIB}
WORLDS = (8, 16, 64, 256, 1024, 4096)
GPUS_PER_HOST = 8
# Published: bus bandwidth of NVLink on 8 x H100 without NVLS, and what one 400 Gbit/s adapter moves (bytes/s).
INSIDE = 370e9
ADAPTER = 46e9
# As native/src/collectives has it: hosts that exchange directly; above, halving and doubling up to so many bytes of a
# part, else a ring.
MAX_DIRECT_HOSTS = 16
MAX_HALVING_PART = 32 * KIB
# Operations of a measured step (benchmarks/scale_rank.py).
STEP = 32


@dataclass(frozen=True)
class Protocol:
    """Costs of a message protocol. NCCL's tuning tables have the two protocols used here.

    Attributes:
        base_s: once per operation (launch).
        inside_s: per message inside a host.
        between_s: per message between hosts.
        share: of the bandwidth that is payload.
    """

    base_s: float
    inside_s: float
    between_s: float
    share: float


# Flags beside every word: fast to notice, a fraction of the bandwidth. Plain: large messages.
PROTOCOLS = (Protocol(6.6e-6, 0.9e-6, 5.0e-6, 0.25), Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0))


def ring(num_bytes: int, hosts: int, protocol: Protocol) -> float:
    """Estimate the seconds of one ring per adapter through all GPUs.

    A ring has 2(N-1) messages, 2(P-1) of them between hosts.
    """
    world = hosts * GPUS_PER_HOST
    between = 2 * (hosts - 1)
    messages = (2 * (world - 1) - between) * protocol.inside_s + between * protocol.between_s
    bandwidth = INSIDE if hosts == 1 else min(INSIDE, GPUS_PER_HOST * ADAPTER)
    return messages + 2 * num_bytes * (world - 1) / world / (bandwidth * protocol.share)


def halving_doubling(num_bytes: int, hosts: int, protocol: Protocol) -> float:
    """Estimate the seconds of recursive halving, then doubling.

    The first (large) halves stay inside the host.
    """
    between = 2 * math.log2(hosts)
    messages = 2 * math.log2(GPUS_PER_HOST) * protocol.inside_s + between * protocol.between_s
    return messages + overlapped_s(num_bytes, hosts, protocol)


def tree(num_bytes: int, hosts: int, protocol: Protocol) -> float:
    """Estimate the seconds of two pipelined binary trees over the hosts, with a chain inside each.

    Every byte goes up and down.
    """
    chain = 2 * (GPUS_PER_HOST - 1) * protocol.inside_s
    bandwidth = INSIDE if hosts == 1 else min(INSIDE, GPUS_PER_HOST * ADAPTER)
    messages = chain + 2 * math.log2(hosts) * protocol.between_s
    return messages + 2 * num_bytes / (bandwidth * protocol.share)


def hierarchical(num_bytes: int, hosts: int, protocol: Protocol) -> float:
    """Reduce inside, each GPU exchanges its slice with its peers on the other hosts, share inside.

    Between hosts: directly (two steps), above 16 hosts by halving and doubling, or in a ring.
    """
    if hosts <= MAX_DIRECT_HOSTS:
        steps = min(2, 2 * (hosts - 1))
    elif num_bytes / (hosts * GPUS_PER_HOST) <= MAX_HALVING_PART:
        steps = 2 * math.ceil(math.log2(hosts))
    else:
        steps = 2 * (hosts - 1)
    # Inside, everyone sends to everyone at once: two steps over the switch.
    messages = 2 * protocol.inside_s + steps * protocol.between_s
    return messages + overlapped_s(num_bytes, hosts, protocol)


def overlapped_s(num_bytes: int, hosts: int, protocol: Protocol) -> float:
    """Estimate the seconds of the bytes inside and between hosts, with overlap.

    Consecutive chunks (or buckets) use both at once, so the slower counts.
    """
    inside = inside_bytes_s(num_bytes, protocol)
    return max(inside, slice_bytes_s(num_bytes, hosts, protocol))


def inside_bytes_s(num_bytes: int, protocol: Protocol) -> float:
    share = (GPUS_PER_HOST - 1) / GPUS_PER_HOST
    return 2 * num_bytes * share / (INSIDE * protocol.share)


def slice_bytes_s(num_bytes: int, hosts: int, protocol: Protocol) -> float:
    """Estimate the seconds to reduce a slice of 1/8 through each adapter over `hosts`."""
    part = num_bytes / GPUS_PER_HOST
    return 2 * part * (hosts - 1) / hosts / (ADAPTER * protocol.share)


ALGORITHMS: dict[str, Callable[[int, int, Protocol], float]] = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "tree": tree,
    "hierarchical": hierarchical,
}


def seconds(algorithm: str, num_bytes: int, world_size: int) -> float:
    """Estimate the seconds of an allreduce with the better protocol."""
    hosts = world_size // GPUS_PER_HOST
    call = ALGORITHMS[algorithm]
    return min(p.base_s + call(num_bytes, hosts, p) for p in PROTOCOLS)


def table_of_times(agreement: Mapping[str, tuple[float, float]]) -> str:
    """Make a Markdown table of the time by world, size and algorithm, with the best in bold.

    Args:
        agreement: by "agree": what agreeing on a step of 32 operations of a plan costs rank 0, (seconds, seconds per rank);
            the last column is that of one operation. Without it there is no such column.
    """
    columns = ["GPUs", "bytes", *ALGORITHMS]
    if "agree" in agreement:
        columns.append("agreement, one of 32 in a step")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for world in WORLDS:
        for label, num_bytes in SIZES.items():
            times = {name: seconds(name, num_bytes, world) for name in ALGORITHMS}
            best = min(times.values())
            cells = [str(world), label]
            cells += [f"**{shown(t)}**" if t == best else shown(t) for t in times.values()]
            if "agree" in agreement:
                offset, slope = agreement["agree"]
                cells.append(shown((max(0.0, offset) + slope * world) / STEP))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_choices() -> str:
    """Make a Markdown table of the best algorithm by world and size.

    Each cell also has the relative cost of the engine's choice.
    """
    lines = [f"| GPUs | {' | '.join(SIZES)} |", "|---|" + "---|" * len(SIZES)]
    for world in WORLDS:
        cells = [str(world)]
        for num_bytes in SIZES.values():
            times = {name: seconds(name, num_bytes, world) for name in ALGORITHMS}
            best = min(times, key=lambda name: times[name])
            ratio = times["hierarchical"] / times[best]
            cells.append("hierarchical" if ratio == 1 else f"{best}; {ratio:.2f} x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
