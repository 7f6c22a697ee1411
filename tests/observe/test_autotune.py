"""The search for the fastest settings, which ranks change together."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkhvd.engine.engine import Engine
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.autotune import Search, TunedKnob, Tuner, knobs
from sparkhvd.settings import Settings
from tests.harness.ranks import run_ranks
from tests.harness.soak import amount

pytestmark = pytest.mark.ranks

BUCKET = TunedKnob.powers("bucket_bytes", 4 << 20, low=1 << 20, high=64 << 20)
CHUNK = TunedKnob.powers("chunk_bytes", 256 << 10, low=32 << 10, high=256 << 10)


def speed_of(choice: Mapping[str, int], bucket: int = 16 << 20, chunk: int = 128 << 10) -> float:
    """Compute a speed: a smooth hill with its top at the given settings."""
    away = abs(math.log2(choice["bucket_bytes"] / bucket))
    away += abs(math.log2(choice["chunk_bytes"] / chunk))
    return 1e9 / (1 + 0.1 * away)


def test_search_finds_the_fastest_settings_without_noise() -> None:
    search = Search([BUCKET, CHUNK])
    while not search.done:
        search.report(speed_of(search.choice))
    assert search.best == {"bucket_bytes": 16 << 20, "chunk_bytes": 128 << 10}
    assert search.choice == search.best
    assert search.speedup == pytest.approx(1.3)
    assert search.windows < 100


@pytest.mark.parametrize("seed", range(amount(5, 200)))
def test_search_finds_almost_the_fastest_settings_under_noise_and_drift(seed: int) -> None:
    chance = random.Random(seed)
    search = Search([BUCKET, CHUNK])
    while not search.done:
        drift = 1 + 0.3 * math.sin(search.windows / 20)  # the machine is slower for a while
        outlier = 0.5 if chance.random() < 0.05 else 1.0
        search.report(speed_of(search.choice) * drift * outlier * chance.gauss(1, 0.01))
    best = speed_of({"bucket_bytes": 16 << 20, "chunk_bytes": 128 << 10})
    assert speed_of(search.best) > 0.9 * best > speed_of({k.name: k.start for k in (BUCKET, CHUNK)})


def test_search_keeps_the_settings_if_no_change_helps() -> None:
    chance = random.Random(3)
    search = Search([BUCKET, CHUNK])
    while not search.done:
        search.report(1e9 * chance.gauss(1, 0.001))
    assert search.best == {"bucket_bytes": 4 << 20, "chunk_bytes": 256 << 10}


def test_search_drops_slow_candidates_early_and_has_a_limit() -> None:
    search = Search([TunedKnob("x", (1, 2), 1)])
    assert search.choice == {"x": 1}
    for _ in range(2):
        search.report(100)
        assert search.choice == {"x": 2}
        search.report(50)
        assert search.choice == {"x": 1}
    assert search.done
    assert search.windows == 4
    endless = Search([TunedKnob("x", tuple(range(1, 10_000)), 1)], max_windows=50)
    while not endless.done:
        endless.report(endless.choice["x"])
    assert endless.windows == 50
    assert Search([]).done


def test_tuned_values_ascend_and_contain_the_initial_value() -> None:
    assert TunedKnob.powers("x", 3, low=1, high=8).values == (1, 2, 3, 4, 8)
    assert TunedKnob.powers("x", 100, low=1, high=8).values == (1, 2, 4, 8, 100)
    with pytest.raises(
        InvalidArgumentError, match=r"Knob\('x'\): values are \(1, 2\) and start is 3"
    ):
        TunedKnob("x", (1, 2), 3)


class Machine:
    """A rank whose settings determine the duration of its steps, with its own clock."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        self.bytes = 0
        self.history: list[tuple[int, dict[str, int]]] = []  # (step, settings)
        self.step = 0
        self.tuner = Tuner(
            engine, [BUCKET, CHUNK], self.apply, lambda: self.bytes, seconds=lambda: self.seconds
        )

    def apply(self, values: Mapping[str, int]) -> None:
        self.history.append((self.step, dict(values)))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.bytes += 10**6
            self.seconds += 10**6 / speed_of(self.tuner.values)
            self.tuner.step()


def tune(engine: Engine, steps: int = 2000) -> dict[str, Any]:
    machine = Machine(engine)
    machine.train(steps)
    return {
        "history": machine.history,
        "done": machine.tuner.is_done,
        "values": machine.tuner.values,
    }


def test_ranks_change_settings_at_the_same_steps_and_find_the_fastest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "tuned.json"
    settings = Settings(autotune="on", autotune_file=str(saved))
    outcomes = run_ranks(3, tune, settings=settings)
    assert outcomes[0]["done"]
    assert outcomes[0]["values"] == {"bucket_bytes": 16 << 20, "chunk_bytes": 128 << 10}
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0]["history"]) > 5
    printed = capfd.readouterr().err
    assert (
        printed.count("sparkhvd autotune: chose bucket_bytes=16777216, chunk_bytes=131072, 1.30")
        == 1
    )
    assert json.loads(saved.read_text()) == {
        "format": 1,
        "world": {"ranks": 3, "local_ranks": 3},
        "choice": {"bucket_bytes": 16 << 20, "chunk_bytes": 128 << 10},
        "speedup": 1.3,
    }
    # The next run uses it from its first step.
    again = run_ranks(3, lambda engine: tune(engine, 5), settings=settings)
    for outcome in again:
        assert outcome["done"]
        assert outcome["history"] == [(1, {"bucket_bytes": 16 << 20, "chunk_bytes": 128 << 10})]
    assert "loaded from" in capfd.readouterr().err
    # Another number of ranks tunes again.
    other = run_ranks(2, lambda engine: tune(engine, 5), settings=settings)
    assert not other[0]["done"]
    assert "was made for other ranks or knobs; tuning again" in capfd.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', '{"format": 1, "world": 3, "choice": 7}']
)
def test_unrecognized_autotune_file_is_reported_and_replaced(
    content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "tuned.json"
    saved.write_text(content)
    settings = replace(Settings(), autotune="on", autotune_file=str(saved))
    outcomes = run_ranks(2, tune, settings=settings)
    assert outcomes[0]["done"]
    assert "is not a file of autotune" in capfd.readouterr().err
    assert json.loads(saved.read_text())["choice"]["bucket_bytes"] == 16 << 20


def test_unwritable_autotune_file_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    settings = Settings(autotune="on", autotune_file="/nowhere/tuned.json")
    outcomes = run_ranks(2, tune, settings=settings)
    assert outcomes[0]["done"]
    assert "could not save its choice" in capfd.readouterr().err


def test_autotune_of_one_rank_changes_nothing() -> None:
    (outcome,) = run_ranks(1, lambda engine: tune(engine, 50), settings=Settings(autotune="on"))
    assert outcome["done"]
    assert outcome["history"] == []


def test_search_discards_a_choice_caused_by_noise() -> None:
    search = Search([BUCKET])
    windows = 0
    while not search.done:
        # For a while, all settings other than the initial ones look faster.
        is_start = search.choice["bucket_bytes"] == 4 << 20
        search.report(1.0 if is_start or windows > 6 else 1.2)
        windows += 1
    assert search.best == {"bucket_bytes": 4 << 20}
    assert search.speedup == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tuning", "hosts", "expected"),
    [
        ("on", (0, 0, 0, 0), ["bucket_bytes", "chunk_bytes"]),
        ("all", (0, 0, 0, 0), ["bucket_bytes", "chunk_bytes"]),
        ("on", (0, 0, 1, 1), ["bucket_bytes", "chunk_bytes", "streams"]),
        ("all", (0, 0, 1, 1), ["bucket_bytes", "chunk_bytes", "streams"]),
        # A ring: the position of an element decides the order of its additions.
        ("on", tuple(range(17)), ["streams"]),
        ("all", tuple(range(17)), ["bucket_bytes", "streams"]),
    ],
)
def test_only_autotune_mode_all_tunes_settings_that_change_results(
    tuning: str, hosts: tuple[int, ...], expected: list[str]
) -> None:
    settings = Settings(autotune=tuning, streams=2)
    topology = SimpleNamespace(hosts=hosts, size=len(hosts), local_size=hosts.count(0))
    engine: Any = SimpleNamespace(settings=settings, topology=topology)
    assert [knob.name for knob in knobs(engine)] == expected
