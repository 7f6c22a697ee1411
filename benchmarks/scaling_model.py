"""Model of training on many GPUs: buckets of gradients reduced while backward runs. See docs/scaling.md.

The times of an allreduce are those of scale_model.py, for hosts of other kinds too. Pure functions; nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scale_model import ADAPTER, GPUS_PER_HOST, INSIDE, MAX_DIRECT_HOSTS, PROTOCOLS, Protocol

MIB = 1 << 20
# Of float32; a larger layer is a bucket of its own. As Horovod's fusion buffer; docs/scaling.md has other sizes.
BUCKET_BYTES = 64 * MIB
BUCKETS = {"4 MiB": 4 * MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB}
WORLDS = (8, 32, 128, 512, 1024)
# Of a step's computation; the backward pass multiplies twice where the forward pass does once.
FORWARD = 1 / 3
# Of the peak that networks of large matrix products reach: an assumption, see docs/scaling.md.
SHARE_OF_PEAK = 0.30
# Rank 0's CPU time to agree on an operation: seconds, and seconds per rank. Measured over TCP, docs/scaling.md.
AGREEMENT = (44e-6, 36.4e-6)


# --- What is trained ---


@dataclass(frozen=True)
class Layer:
    """Parameters, and multiply-adds of one sample's forward pass."""

    parameters: int
    work: float


def convolution(inputs: int, outputs: int, size: int, side: int, *, extra: int) -> Layer:
    """Count the parameters and multiply-adds of a convolution with a square kernel.

    The output has `side` x `side` positions, and `extra` parameters per output channel (bias, or normalisation's two).
    """
    weights = inputs * outputs * size * size
    return Layer(weights + extra * outputs, weights * side * side)


def linear(inputs: int, outputs: int, rows: float = 1) -> Layer:
    return Layer(inputs * outputs + outputs, inputs * outputs * rows)


def vgg16() -> list[Layer]:
    """List the layers of VGG-16 (arXiv 1409.1556), 224 x 224, in forward order."""
    layers, inputs = [], 3
    for outputs, number, side in (
        (64, 2, 224),
        (128, 2, 112),
        (256, 3, 56),
        (512, 3, 28),
        (512, 3, 14),
    ):
        for _ in range(number):
            layers.append(convolution(inputs, outputs, 3, side, extra=1))
            inputs = outputs
    return [*layers, linear(512 * 7 * 7, 4096), linear(4096, 4096), linear(4096, 1000)]


def resnet(*blocks: int) -> list[Layer]:
    """List the layers of a bottleneck ResNet (arXiv 1512.03385), 224 x 224, in forward order."""
    layers, inputs = [convolution(3, 64, 7, 112, extra=2)], 64
    for stage, number in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(number):
            # The first block of a stage halves the side in its 3x3 convolution.
            before = side * 2 if block == 0 and stage > 0 else side
            layers.append(convolution(inputs, width, 1, before, extra=2))
            layers.append(convolution(width, width, 3, side, extra=2))
            layers.append(convolution(width, 4 * width, 1, side, extra=2))
            if block == 0:
                layers.append(convolution(inputs, 4 * width, 1, side, extra=2))
            inputs = 4 * width
    return [*layers, linear(inputs, 1000)]


def bert_large() -> list[Layer]:
    """List the layers of BERT-large (arXiv 1810.04805), 128 words, in forward order.

    The word embedding is also the head's matrix.
    """
    width, words, length = 1024, 30522, 128
    # The first layer's gradient comes last, and the head's matrix waits with it.
    embedding = Layer((words + 512 + 2 + 2) * width, 0)
    attention = Layer(4 * (width * width + width), (4 * width**2 + 2 * length * width) * length)
    feed_forward = Layer(8 * width**2 + 5 * width + 4 * width, 8 * width**2 * length)
    # 20 of the 128 words are predicted.
    head = Layer(2 * (width**2 + width) + 2 * width + words, 20 * (words + width) * width)
    return [embedding, *[attention, feed_forward] * 24, head]


NETWORKS: dict[str, list[Layer]] = {
    "ResNet-50": resnet(3, 4, 6, 3),
    "ResNet-101": resnet(3, 4, 23, 3),
    "VGG-16": vgg16(),
    "BERT-large": bert_large(),
}


def parameters_of(network: str) -> int:
    return sum(layer.parameters for layer in NETWORKS[network])


def peak_rate(network: str, peak: float) -> float:
    """Estimate a GPU's samples per second from its peak operations per second and SHARE_OF_PEAK."""
    # A multiply-add is two operations; forward and backward are three times the forward pass.
    return SHARE_OF_PEAK * peak / (6 * sum(layer.work for layer in NETWORKS[network]))


# --- Where ---


@dataclass(frozen=True)
class Fabric:
    """GPUs and what joins them.

    Attributes:
        title: in words.
        gpus_per_host: number of them.
        inside: bytes per second that an allreduce moves over the links inside a host (bus bandwidth).
        between: bytes per second of all adapters of a host, each way.
    """

    title: str
    gpus_per_host: int
    inside: float
    between: float


FABRICS = {
    "Pascal": Fabric("4 P100 on PCIe, one 25 Gbit/s RoCE per host", 4, 10e9, ADAPTER * 25 / 400),
    "Volta": Fabric("8 V100 on NVLink, one 100 Gbit/s adapter per host", 8, 130e9, ADAPTER / 4),
    "DGX-1": Fabric("8 V100 on NVLink, four 100 Gbit/s adapters per host", 8, 130e9, ADAPTER),
    "Hopper": Fabric(
        "8 H100 on NVLink, one 400 Gbit/s adapter per GPU",
        GPUS_PER_HOST,
        INSIDE,
        GPUS_PER_HOST * ADAPTER,
    ),
}


@dataclass(frozen=True)
class Computation:
    """Speed of one GPU alone: samples per second, and samples per step."""

    rate: float
    batch: int

    @property
    def step_s(self) -> float:
        """Seconds of a step without communication."""
        return self.batch / self.rate


# By fabric and network; where each comes from is in docs/scaling.md.
COMPUTATIONS: dict[str, dict[str, Computation]] = {
    "Pascal": {
        "ResNet-50": Computation(219, 64),
        "ResNet-101": Computation(1656.82 / 16, 64),
        "VGG-16": Computation(154, 64),
        "BERT-large": Computation(33.36 * 2 / 3, 8),
    },
    "Volta": {
        "ResNet-50": Computation(1200, 256),
        "VGG-16": Computation(peak_rate("VGG-16", 125e12), 64),
        "BERT-large": Computation(125.44, 16),
    },
    "DGX-1": {"BERT-large": Computation(125.44, 16)},
    "Hopper": {
        "ResNet-50": Computation(2 * 2470, 256),
        "VGG-16": Computation(peak_rate("VGG-16", 989e12), 64),
        "BERT-large": Computation(peak_rate("BERT-large", 989e12), 64),
    },
}


# --- An allreduce ---

Algorithm = Callable[[float, int, Fabric, Protocol], float]


def ring(num_bytes: float, world: int, fabric: Fabric, protocol: Protocol) -> float:
    """Estimate the seconds of one ring through all GPUs, as in scale_model."""
    hosts = world // fabric.gpus_per_host
    between = 2 * (hosts - 1)
    messages = (2 * (world - 1) - between) * protocol.inside_s + between * protocol.between_s
    bandwidth = fabric.inside if hosts == 1 else min(fabric.inside, fabric.between)
    return messages + 2 * num_bytes * (world - 1) / world / (bandwidth * protocol.share)


def hierarchical(num_bytes: float, world: int, fabric: Fabric, protocol: Protocol) -> float:
    """Estimate the seconds of a hierarchical allreduce, with both kinds of link in use at once.

    Steps: reduce inside a host, each GPU its slice between the hosts, share inside.

    Between hosts: directly (two messages), above 16 hosts by halving and doubling. As scale_model has these two.
    """
    gpus, hosts = fabric.gpus_per_host, world // fabric.gpus_per_host
    if hosts <= MAX_DIRECT_HOSTS:
        messages = 2 * protocol.inside_s + min(2, 2 * (hosts - 1)) * protocol.between_s
    else:
        inside, between = math.log2(gpus), math.log2(hosts)
        messages = 2 * (inside * protocol.inside_s + between * protocol.between_s)
    inside_s = 2 * num_bytes * (gpus - 1) / gpus / (fabric.inside * protocol.share)
    between_s = 2 * num_bytes * (hosts - 1) / hosts / (fabric.between * protocol.share)
    return messages + max(inside_s, between_s)


def allreduce_s(algorithm: Algorithm, num_bytes: float, world: int, fabric: Fabric) -> float:
    """Estimate the seconds of an allreduce with the better protocol."""
    return min(p.base_s + algorithm(num_bytes, world, fabric, p) for p in PROTOCOLS)


# --- A step ---


@dataclass(frozen=True)
class Bucket:
    """Parameters reduced together, and the share of backward until all gradients are ready."""

    parameters: int
    ready: float


def buckets(layers: Sequence[Layer], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets from the last layer's gradients on. A bucket closes before it would outgrow `bucket_bytes` of float32."""
    total = sum(layer.work for layer in layers)
    made: list[Bucket] = []
    parameters, done = 0, 0.0
    for layer in reversed(layers):
        if parameters and 4 * (parameters + layer.parameters) > bucket_bytes:
            made.append(Bucket(parameters, done / total))
            parameters = 0
        parameters += layer.parameters
        done += layer.work
    return [*made, Bucket(parameters, 1.0)]


@dataclass(frozen=True)
class Case:
    """A network on GPUs of a kind, and how its gradients travel.

    Attributes:
        network: a name of NETWORKS.
        fabric: a name of FABRICS.
        algorithm: `hierarchical` or `ring`.
        bytes_each: of a parameter's gradient on the wire: 4, or 2 for fp16 and bf16.
        agreement: seconds, and seconds per rank, that rank 0 needs for each bucket; one after the other.
        share_of_line: of the adapters' bandwidth that is reached.
        overlaps: whether buckets are reduced while backward still runs.
        bucket_bytes: see BUCKET_BYTES.
    """

    network: str
    fabric: str
    algorithm: Algorithm = hierarchical
    bytes_each: int = 4
    agreement: tuple[float, float] = (0.0, 0.0)
    share_of_line: float = 1.0
    overlaps: bool = True
    bucket_bytes: int = BUCKET_BYTES


def step_s(case: Case, world: int) -> float:
    """Estimate the seconds of a step.

    Buckets are reduced one after the other, each once it is ready.
    """
    fabric = FABRICS[case.fabric]
    fabric = Fabric(
        fabric.title, fabric.gpus_per_host, fabric.inside, fabric.between * case.share_of_line
    )
    alone_s = COMPUTATIONS[case.fabric][case.network].step_s
    offset, slope = case.agreement
    agreed = reduced = 0.0
    for bucket in buckets(NETWORKS[case.network], case.bucket_bytes):
        ready = alone_s * (FORWARD + (1 - FORWARD) * bucket.ready) if case.overlaps else alone_s
        agreed = max(ready, agreed) + offset + slope * world
        num_bytes = bucket.parameters * case.bytes_each
        reduced = max(agreed, reduced) + allreduce_s(case.algorithm, num_bytes, world, fabric)
    return max(alone_s, reduced)


def efficiency(case: Case, world: int) -> float:
    """Divide the throughput by `world` times the throughput of one GPU."""
    return COMPUTATIONS[case.fabric][case.network].step_s / step_s(case, world)


# --- Tables ---

WAYS: dict[str, dict[str, Any]] = {
    "hierarchical, 4 bytes": {},
    "hierarchical, 2 bytes": {"bytes_each": 2},
    "flat ring, 4 bytes": {"algorithm": ring},
    "hierarchical, 4 bytes, every bucket agreed on": {"agreement": AGREEMENT},
}


def table_of_efficiency() -> str:
    """Make a Markdown table of the efficiency at every size, by fabric, network and way."""
    lines = [
        f"| hosts | network | gradients | {' | '.join(f'{world} GPUs' for world in WORLDS)} |",
        "|---|---|---|" + "---|" * len(WORLDS),
    ]
    for fabric in ("Pascal", "Volta", "Hopper"):
        for network in ("ResNet-50", "VGG-16", "BERT-large"):
            for way, options in WAYS.items():
                case = Case(network, fabric, **options)
                cells = [percent(efficiency(case, world)) for world in WORLDS]
                lines.append(f"| {fabric} | {network} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


@dataclass(frozen=True)
class Published:
    """Published efficiency, for comparison with the model."""

    case: Case
    world: int
    found: float
    source: str


HOROVOD = "Horovod, docs/benchmarks"
PUBLISHED = (
    Published(Case("VGG-16", "Pascal"), 512, 0.68, HOROVOD),
    Published(Case("ResNet-101", "Pascal"), 512, 0.90, HOROVOD),
    Published(
        Case("BERT-large", "DGX-1", bytes_each=2),
        128,
        12144.64 / (128 * 125.44),
        "NVIDIA DeepLearningExamples, PyTorch BERT",
    ),
)


def table_of_published() -> str:
    """Make a Markdown table of the published figures and the model's."""
    ways: dict[str, dict[str, Any]] = {
        "hierarchical": {},
        "flat ring": {"algorithm": ring},
        "no overlap": {"overlaps": False},
    }
    lines = [
        f"| network | where | GPUs | published | {' | '.join(f'model, {way}' for way in ways)} | source |",
        "|---|---|---|---|" + "---|" * len(ways) + "---|",
    ]
    for each in PUBLISHED:
        cells = [percent(each.found)]
        for options in ways.values():
            share = efficiency(replace(each.case, **options), each.world)
            cells.append(f"{percent(share)} ({100 * (share - each.found):+.0f} points)")
        where = FABRICS[each.case.fabric].title
        lines.append(
            f"| {each.case.network} | {where} | {each.world} | {' | '.join(cells)} | {each.source} |"
        )
    return "\n".join(lines)


def table_of_buckets(world: int = 1024) -> str:
    """Make a Markdown table of the efficiency by bucket size."""
    lines = [
        f"| hosts | network | gradients | {' | '.join(BUCKETS)} |",
        "|---|---|---|" + "---|" * len(BUCKETS),
    ]
    for fabric in ("Pascal", "Hopper"):
        for network in ("ResNet-50", "BERT-large"):
            for way, options in WAYS.items():
                cases = [Case(network, fabric, bucket_bytes=b, **options) for b in BUCKETS.values()]
                cells = [percent(efficiency(case, world)) for case in cases]
                lines.append(f"| {fabric} | {network} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def share_of_line_for(network: str, world: int, wanted: float) -> float:
    """Find the share of the Pascal adapters for the efficiency `wanted`, by bisection."""
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        reached = efficiency(Case(network, "Pascal", share_of_line=middle), world)
        low, high = (middle, high) if reached < wanted else (low, middle)
    return high


def table_of_computations() -> str:
    """Make a Markdown table of the speed of one GPU alone."""
    lines = [
        "| hosts | network | samples per second | batch | step alone |",
        "|---|---|---|---|---|",
    ]
    for fabric, networks in COMPUTATIONS.items():
        for network, alone in networks.items():
            step_ms = alone.step_s * 1e3
            lines.append(
                f"| {fabric} | {network} | {alone.rate:.0f} | {alone.batch} | {step_ms:.0f} ms |"
            )
    return "\n".join(lines)
