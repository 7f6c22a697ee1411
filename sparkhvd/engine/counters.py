"""Counters of an engine since its start, as a table and in Prometheus' text format.

`Engine.counters()` reads the numbers; this module formats them. (A module `metrics` would hide the function
`sparkhvd.metrics`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Name in `Engine.counters()`, label in the table, description for Prometheus.
_TOTALS = (
    ("waits", "callers slept", "Times a caller slept for an operation."),
    ("spins", "spins in time", "Spins that something ended before sleep."),
    ("failed_spins", "spins in vain", "Spins that ended in sleep."),
    ("wakeups", "peers woken", "Times a sleeping rank of this host was woken."),
    ("sent_bytes", "bytes sent", "Bytes written to sockets."),
    ("received_bytes", "bytes received", "Bytes read from sockets."),
    ("shared_bytes", "bytes shared", "Bytes of tensors that passed through shared memory."),
    ("stall_warnings", "stall warnings", "Operations that this rank warned about."),
)


class Metrics:
    """Snapshot of one rank's counters. `str()` formats it as a table.

    Attributes:
        counters: the result of `Engine.counters()`.
    """

    def __init__(self, counters: Mapping[str, Any]) -> None:
        self.counters = counters

    def __repr__(self) -> str:
        operations = sum(entry["operations"] for entry in self.counters["collectives"])
        return f"<Metrics of rank {self.counters['rank']}: {operations} operations>"

    def __str__(self) -> str:
        counters = self.counters
        rows = [
            ("collective", "algorithm", "operations", "failed", "bytes")
            + ("agree us", "queue us", "run us", "p50 us", "p99 us", "max us")
        ]
        for entry in counters["collectives"]:
            count = entry["operations"] + entry["failures"]
            means = [
                entry[name] / max(1, count) for name in ("negotiation_us", "queue_us", "run_us")
            ]
            rows.append(
                (
                    entry["collective"],
                    entry["algorithm"],
                    str(entry["operations"]),
                    str(entry["failures"]),
                    _bytes(entry["bytes"]),
                    *(f"{mean:.1f}" for mean in means),
                    f"<{quantile(entry['histogram'], 0.5)}",
                    f"<{quantile(entry['histogram'], 0.99)}",
                    f"{entry['longest_us']:.0f}",
                )
            )
        shown = [
            f"rank {counters['rank']} of {counters['size']}, "
            f"{counters['uptime_us'] / 1e6:.1f} s, {counters['in_flight']} operations in flight",
            *_align(rows),
            ", ".join(
                f"{label} {_bytes(counters[name]) if name.endswith('bytes') else counters[name]}"
                for name, label, _ in _TOTALS
            ),
        ]
        timeline = counters["timeline"]
        if timeline is not None:
            shown.append(
                f"timeline {timeline['path']}: {timeline['written_events']} events written, "
                f"{timeline['dropped_events']} dropped"
            )
        return "\n".join(shown)

    def prometheus(self) -> str:
        """The counters in Prometheus' text format, one sample per line, labelled with the rank."""
        return "".join(f"{line}\n" for line in self._samples())

    def _samples(self) -> Iterator[str]:
        rank = f'rank="{self.counters["rank"]}"'
        for name, _, description in _TOTALS:
            yield f"# HELP sparkhvd_{name}_total {description}"
            yield f"# TYPE sparkhvd_{name}_total counter"
            yield f"sparkhvd_{name}_total{{{rank}}} {self.counters[name]}"
        yield "# HELP sparkhvd_in_flight Operations submitted and not finished."
        yield "# TYPE sparkhvd_in_flight gauge"
        yield f"sparkhvd_in_flight{{{rank}}} {self.counters['in_flight']}"
        entries = [
            (f'{rank},collective="{e["collective"]}",algorithm="{e["algorithm"]}"', e)
            for e in self.counters["collectives"]
        ]
        for name, description in (
            ("operations", "Operations that ended well."),
            ("failures", "Operations that ended with an error."),
            ("bytes", "Bytes of this rank's tensors in operations that ended well."),
        ):
            yield f"# HELP sparkhvd_{name}_total {description}"
            yield f"# TYPE sparkhvd_{name}_total counter"
            for labels, entry in entries:
                yield f"sparkhvd_{name}_total{{{labels}}} {entry[name]}"
        yield "# HELP sparkhvd_phase_seconds_total Time of operations, by phase."
        yield "# TYPE sparkhvd_phase_seconds_total counter"
        for labels, entry in entries:
            for phase in ("negotiation", "queue", "run"):
                seconds = entry[f"{phase}_us"] / 1e6
                yield f'sparkhvd_phase_seconds_total{{{labels},phase="{phase}"}} {seconds:.9f}'
        yield "# HELP sparkhvd_operation_seconds Time of an operation from submission to its end."
        yield "# TYPE sparkhvd_operation_seconds histogram"
        for labels, entry in entries:
            total = 0
            for power, count in enumerate(entry["histogram"][:-1]):
                total += count
                bound = f"{(1 << power) / 1e6:.6f}"
                yield f'sparkhvd_operation_seconds_bucket{{{labels},le="{bound}"}} {total}'
            total += entry["histogram"][-1]
            seconds = sum(entry[f"{phase}_us"] for phase in ("negotiation", "queue", "run")) / 1e6
            yield f'sparkhvd_operation_seconds_bucket{{{labels},le="+Inf"}} {total}'
            yield f"sparkhvd_operation_seconds_sum{{{labels}}} {seconds:.9f}"
            yield f"sparkhvd_operation_seconds_count{{{labels}}} {total}"


def quantile(histogram: Sequence[int], fraction: float) -> int:
    """Upper end, in us, of the bin with the `fraction` quantile. Bin i ends at 2**i."""
    wanted = fraction * sum(histogram)
    seen = 0
    for power, count in enumerate(histogram):
        seen += count
        if count and seen >= wanted:
            return 1 << power
    return 0


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Pad the columns: the first two to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
