"""How counters are shown."""

from __future__ import annotations

from typing import Any

import pytest

from sparkhvd.engine.counters import Metrics, quantile

pytestmark = pytest.mark.ranks


def counters() -> dict[str, Any]:
    histogram = [0] * 26
    histogram[5], histogram[6], histogram[10] = 60, 38, 2
    return {
        "rank": 1,
        "size": 4,
        "uptime_us": 2500000.0,
        "in_flight": 3,
        "waits": 11,
        "spins": 12,
        "failed_spins": 13,
        "wakeups": 14,
        "sent_bytes": 15 << 20,
        "received_bytes": 16,
        "shared_bytes": 17 << 10,
        "stall_warnings": 1,
        "collectives": [
            {
                "collective": "allreduce",
                "algorithm": "shared_allreduce",
                "operations": 99,
                "failures": 1,
                "bytes": 99 << 20,
                "negotiation_us": 1000.0,
                "queue_us": 200.0,
                "run_us": 3000.0,
                "longest_us": 777.7,
                "histogram": histogram,
            }
        ],
        "timeline": {"path": "/tmp/t.json", "written_events": 5, "dropped_events": 2},
    }


def test_metrics_table_shows_every_number_once() -> None:
    assert str(Metrics(counters())).splitlines() == [
        "rank 1 of 4, 2.5 s, 3 operations in flight",
        "collective  algorithm         operations  failed     bytes  agree us  queue us  run us"
        "  p50 us  p99 us  max us",
        "allreduce   shared_allreduce          99       1  99.0 MiB      10.0       2.0    30.0"
        "     <32   <1024     778",
        "callers slept 11, spins in time 12, spins in vain 13, peers woken 14, bytes sent 15.0 MiB, "
        "bytes received 16 B, bytes shared 17.0 KiB, stall warnings 1",
        "timeline /tmp/t.json: 5 events written, 2 dropped",
    ]
    assert repr(Metrics(counters())) == "<Metrics of rank 1: 99 operations>"


def test_metrics_table_of_an_idle_engine_is_empty() -> None:
    empty = {**counters(), "collectives": [], "timeline": None}
    lines = str(Metrics(empty)).splitlines()
    assert len(lines) == 3
    assert "timeline" not in "".join(lines)


def test_prometheus_text_has_one_sample_per_line_and_a_whole_histogram() -> None:
    text = Metrics(counters()).prometheus()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    values = dict(line.rsplit(" ", 1) for line in samples)
    assert len(values) == len(samples)
    labels = 'rank="1",collective="allreduce",algorithm="shared_allreduce"'
    assert values['sparkhvd_waits_total{rank="1"}'] == "11"
    assert values[f"sparkhvd_operations_total{{{labels}}}"] == "99"
    assert values[f'sparkhvd_phase_seconds_total{{{labels},phase="run"}}'] == "0.003000000"
    assert values[f'sparkhvd_operation_seconds_bucket{{{labels},le="0.000016"}}'] == "0"
    assert values[f'sparkhvd_operation_seconds_bucket{{{labels},le="0.000064"}}'] == "98"
    assert values[f'sparkhvd_operation_seconds_bucket{{{labels},le="+Inf"}}'] == "100"
    assert values[f"sparkhvd_operation_seconds_count{{{labels}}}"] == "100"
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert {line.split("{")[0].rsplit("_bucket")[0] for line in samples} - set(declared) == {
        "sparkhvd_operation_seconds_sum",
        "sparkhvd_operation_seconds_count",
    }


def test_quantile_is_the_upper_bound_of_its_histogram_bin() -> None:
    assert quantile([0, 0, 10, 0], 0.5) == 4
    assert quantile([10, 0, 0, 1], 0.99) == 8
    assert quantile([0, 0], 0.5) == 0
