"""Rank processes are killed at random steps: the run resumes inside the epoch and ends like an undisturbed run."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, RankError, SparkhvdError
from sparkhvd.estimator import Callback
from sparkhvd.estimator.fitting.runs import Finished, open_run
from sparkhvd.runner import context, run_local
from sparkhvd.torch.context import use_engine
from sparkhvd.training.checkpoints import saver
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.profile import Profile
from sparkhvd.training.program import PROGRAM_NAME
from sparkhvd.training.spec import TrainResult, TrainSpec
from sparkhvd.training.train import train
from tests.harness import faults
from tests.harness.ranks import RanksFailed, run_ranks
from tests.harness.soak import amount
from tests.training.ranks import RUN_DIR, Case, linear, without_times

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(300),
]  # processes start several times, perhaps on a busy machine
SIZE, BATCH_SIZE, ROWS, EPOCHS = 2, 4, 1200, 2
NUM_STEPS = EPOCHS * ROWS // (SIZE * BATCH_SIZE)
STEP_S = 0.01
INTERVAL_S = 1.0


class Restless(nn.Module):
    """Draws random numbers of every kind, keeps statistics that differ by rank, and may be killed at a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.folder = str(folder)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.note_step()
            self.seen.mul_(0.9).add_(x.mean(0))
            x = x + 0.01 * random.random() + 0.01 * np.random.random() + 0.01 * self.seen
        return self.layers(x)

    def note_step(self) -> None:
        place = context()
        assert place is not None
        with (Path(self.folder) / f"steps-{place.rank}").open("a") as log:
            log.write(f"{time.monotonic()}\n")  # one clock for all processes of a machine
        kill = Path(self.folder) / f"kill-{place.rank}"
        if kill.exists() and self.step == int(kill.read_text()):
            kill.unlink()
            faults.kill_self()
        self.step += 1
        time.sleep(STEP_S)


class Restive(Callback):
    """At some steps changes values outside of torch's state dicts, and group options."""

    def on_train_begin(self, ctx: Any) -> None:
        ctx.model.layers[3].bias.requires_grad_(False)
        ctx.model.layers[2].p = 0.3
        for group in ctx.optimizer.param_groups:
            group["betas"] = (0.8, 0.99)

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        linear, norm, dropout, last = ctx.model.layers
        if ctx.step % 70 == 30:
            norm.eval()
            linear.bias.requires_grad_(False)
            dropout.p = 0.2
        if ctx.step % 70 == 60:
            linear.bias.requires_grad_(True)
            last.bias.requires_grad_(True)
        if ctx.step == 90:
            (group,) = ctx.optimizer.param_groups
            rest = {**group, "params": [last.weight], "weight_decay": 0.01}
            group["params"] = [p for p in group["params"] if p is not last.weight]
            ctx.optimizer.param_groups.append(rest)


def case(folder: Path, *, rows: int = ROWS, **options: Any) -> Case:
    folder.mkdir()
    model = Restless(folder)
    return Case(
        Store.create(folder / "store"),
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        rows=rows,
        metrics=["mse"],
        lr_scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=NUM_STEPS),
        user={"callbacks": [Restive()]},
        options={
            "batch_size": BATCH_SIZE,
            "epochs": EPOCHS,
            "seed": 9,
            "lr_scheduler_interval": "step",
            "checkpoint_interval_s": INTERVAL_S,
            "shuffle_bytes": 100
            * 16,  # windows of 100 rows: the reader starts in the middle of one
            **options,
        },
    )


def run(one: Case) -> TrainResult:
    env = {faults.HAPPENED_AT: str(killed_at(one))}
    results = run_local(train, (one.spec(),), num_proc=SIZE, verbose=0, env=env)
    assert len({repr(without_times(r)) for r in results}) == 1
    result: TrainResult = results[0]
    return result


def killed_at(one: Case) -> Path:
    """Return the file with the time of the last kill."""
    return Path(one.store.local_path("") or "").parent / "killed"


def steps(one: Case, rank: int) -> list[float]:
    """Return the times at which the rank began each step, of all attempts."""
    folder = Path(one.store.local_path("") or "").parent
    path = folder / f"steps-{rank}"
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    one = case(tmp_path_factory.mktemp("whole") / "run", checkpoint_interval_s=300.0)
    result = run(one)
    assert len(steps(one, 0)) == NUM_STEPS
    return without_times(result), Checkpoints(one.store, RUN_DIR).load(EPOCHS)


@pytest.mark.parametrize("round_", range(amount(1, 10)))
def test_run_killed_at_random_steps_gives_the_same_bits(
    tmp_path: Path, undisturbed: tuple[Any, Checkpoint], round_: int
) -> None:
    one = case(tmp_path / "run")
    seed = time.time_ns()
    print(f"seed {seed}")
    generator = random.Random(seed)
    position = 0
    # Rank 0 writes the checkpoints, so it is killed at least once.
    for victim in [0, generator.randrange(SIZE)][: amount(1, 2)]:
        kill_after = generator.randrange(110, 140)  # of this attempt
        if position + kill_after >= NUM_STEPS:
            break
        # The module's counter is an attribute, so a resumed run continues it.
        (tmp_path / "run" / f"kill-{victim}").write_text(str(position + kill_after))
        before = len(steps(one, victim))
        with pytest.raises(RankError) as killed:
            run(one)
        assert faults.seconds_since(killed_at(one)) < 10
        assert (killed.value.rank, killed.value.exit) == (victim, "signal SIGKILL")
        began = steps(one, victim)[before:]
        assert len(began) == kill_after + 1
        epoch, step = Checkpoints(one.store, RUN_DIR).latest_position()
        safe = epoch * (NUM_STEPS // EPOCHS) + step
        assert position < safe <= position + kill_after
        # The first repeated step began at most the interval before the kill.
        # A stopped machine has not trained.
        repeated = began[safe - position :]
        stood = sum(max(0.0, b - a - 0.1) for a, b in itertools.pairwise(repeated))
        assert repeated[-1] - repeated[0] - stood <= INTERVAL_S
        position = safe
    before = len(steps(one, 0))
    result = run(one)
    assert len(steps(one, 0)) - before == NUM_STEPS - position  # nothing else is repeated
    assert without_times(result) == undisturbed[0]
    assert_same(Checkpoints(one.store, RUN_DIR).load(EPOCHS), undisturbed[1])


SHORT_EPOCHS = amount(50, 100)


def of_short_epochs(folder: Path) -> Case:
    rows = 2 * SIZE * BATCH_SIZE
    return case(folder, rows=rows, epochs=SHORT_EPOCHS, checkpoint_interval_s=0.3)


@pytest.fixture(scope="module")
def undisturbed_short_epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    one = of_short_epochs(tmp_path_factory.mktemp("short") / "run")
    result = without_times(run(one))
    return result, Checkpoints(one.store, RUN_DIR).load(SHORT_EPOCHS)


@pytest.mark.parametrize("round_", range(amount(1, 20)))
def test_run_of_short_epochs_killed_at_random_steps_gives_the_same_records(
    tmp_path: Path, undisturbed_short_epochs: tuple[Any, Checkpoint], round_: int
) -> None:
    """Most epochs have no checkpoint, and a checkpoint names its records in the metrics file."""
    one = of_short_epochs(tmp_path / "run")
    seed = time.time_ns()
    print(f"seed {seed}")
    generator = random.Random(seed)
    position = 0
    for victim in [0, generator.randrange(SIZE)][: amount(1, 2)]:
        kill_at = position + generator.randrange(50, 80)
        (tmp_path / "run" / f"kill-{victim}").write_text(str(kill_at))
        with pytest.raises(RankError):
            run(one)
        checkpoints = Checkpoints(one.store, RUN_DIR)
        epoch, step = checkpoints.latest_position()
        assert position < 2 * epoch + step <= kill_at
        assert len(checkpoints.history()) >= epoch > 16  # each of the first 16 has a checkpoint
        position = 2 * epoch + step
    assert without_times(run(one)) == undisturbed_short_epochs[0]
    found = Checkpoints(one.store, RUN_DIR).load(SHORT_EPOCHS)
    assert_same(found, undisturbed_short_epochs[1])
    assert [record["epoch"] for record in found.history] == [*range(1, SHORT_EPOCHS + 1)]


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    for part in ("model", "optimizer", "scheduler", "buffers"):
        assert_equal(getattr(found, part), getattr(expected, part), part)


def assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    else:
        assert found == expected, where


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_after_every_step_does_not_change_the_weights(
    tmp_path: Path, size: int
) -> None:
    """One run writes a checkpoint after nearly every step, the other none inside an epoch."""

    def weights(name: str, interval_s: float) -> dict[str, torch.Tensor]:
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        options = {"batch_size": 4, "epochs": 2, "checkpoint_interval_s": interval_s}
        one = Case(Store.create(tmp_path / name), model, optimizer, rows=100, options=options)
        one.train(size)
        return one.weights(2)

    often = weights("often", 1e-6)
    for name, value in weights("never", 300.0).items():
        assert torch.equal(value, often[name]), name


def test_training_does_not_wait_for_a_slow_store(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"batch_size": 4, "epochs": 1, "checkpoint_interval_s": 0.01}
    store = SlowStore.create(tmp_path / "store")
    SlowStore.is_trained.clear()
    user = {"callbacks": [Trained()]}
    one = Case(store, model, optimizer, rows=400, options=options, user=user)
    one.train(1)
    assert SlowStore.came_in_time
    assert Checkpoints(store, RUN_DIR).latest_epoch() == 1  # the last one was waited for


class SlowStore(Store):
    """Writes no checkpoint before the epoch's last step."""

    is_trained = threading.Event()
    came_in_time = False

    def open_output(self, path: str) -> Any:
        if path.endswith(".pt"):
            SlowStore.came_in_time = SlowStore.is_trained.wait(60)
        return super().open_output(path)


class Trained(Callback):
    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        if ctx.step == 100:  # the last one
            SlowStore.is_trained.set()


def test_waiting_for_a_hanging_store_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "WRITE_LIMIT_S", 0.5)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    store = HangingStore.create(tmp_path / "store")
    one = Case(store, model, optimizer, rows=8, options={"batch_size": 4, "epochs": 1})
    try:
        with pytest.raises(Exception, match="epoch-1.pt is not written after 0.5 s"):
            one.train(1)
    finally:
        HangingStore.goes_on.set()


class HangingStore(Store):
    """Does not return from the write of a checkpoint."""

    goes_on = threading.Event()

    def open_output(self, path: str) -> Any:
        if path.endswith(".pt"):
            self.goes_on.wait()
        return super().open_output(path)


def test_start_weights_must_match_the_model(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    one = Case(store, linear(), lambda p: torch.optim.SGD(p, lr=0.0))
    one.train(2)
    first = Checkpoints(store, RUN_DIR).path(1)
    started = Case(store, linear(seed=5), lambda p: torch.optim.SGD(p, lr=0.0))
    program = started.spec()
    store.write_bytes("runs/warm/program.pkl", store.read_bytes(f"{RUN_DIR}/program.pkl"))
    started.train(2, run_dir="runs/warm", start_from=first)
    warm = Checkpoints(store, "runs/warm").load(1).model
    assert_equal(warm, linear().state_dict(), "model")
    assert program.start_from == ""

    wider = Case(store, linear(outputs=2), lambda p: torch.optim.SGD(p, lr=0.0), label="class")
    wider.spec()
    store.write_bytes("runs/wider/program.pkl", store.read_bytes(f"{RUN_DIR}/program.pkl"))
    with pytest.raises(RanksFailed) as failed:
        wider.train(2, run_dir="runs/wider", start_from=first)
    assert set(failed.value.errors) == {0, 1}
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error).startswith(f"warm_start: the weights of {first} do not fit this model: ")
        assert "size mismatch for 2.weight" in str(error)


# --- damaged files --------------------------------------------------------------------------------------------------

DAMAGED_EPOCHS = 3


def fit_again(store: Store, spec: TrainSpec, program: bytes, *, warm_start: bool) -> dict[str, Any]:
    """Act as a driver and its ranks on the run in a store, and return the weights of the fit."""
    run = open_run(store, "r", warm_start=warm_start)
    seed = run.seed(7 if warm_start else None)
    fingerprint = json.dumps({"rows": 40, "random_seed": seed})
    run.check(fingerprint, DAMAGED_EPOCHS)
    store.write_bytes(f"{run.run_dir}/{PROGRAM_NAME}", program)
    changed = replace(
        spec,
        store=store,
        run_dir=run.run_dir,
        start_from=run.start_from,
        seed=seed,
        fingerprint=fingerprint,
        epochs=DAMAGED_EPOCHS,
    )
    (result,) = run_ranks(1, lambda engine: train(changed), using=use_engine)
    run.finish(Finished(result.epoch), 1)
    return Checkpoints(store, run.run_dir).load(result.epoch).model


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainSpec, bytes, Any]:
    """The folder of a run after its second epoch, and its final weights, also after a warm start."""
    folder = tmp_path_factory.mktemp("damaged") / "store"
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"batch_size": 8, "checkpoint_interval_s": 1e-6}
    one = Case(Store.create(folder), model, optimizer, rows=40, options=options)
    spec = one.spec()
    program = one.store.read_bytes(f"{RUN_DIR}/{PROGRAM_NAME}")
    run = open_run(one.store, "r", warm_start=False)
    fingerprint = json.dumps({"rows": 40, "random_seed": run.seed(None)})
    run.check(fingerprint, DAMAGED_EPOCHS)
    early = {"seed": run.seed(None), "fingerprint": fingerprint, "epochs": 2}
    run_ranks(1, lambda engine: train(replace(spec, **early)), using=use_engine)
    whole = folder.parent / "whole"
    shutil.copytree(folder, whole)
    resumed = fit_again(Store.create(whole), spec, program, warm_start=False)
    warm = folder.parent / "warm"
    shutil.copytree(whole, warm)
    shutil.copytree(whole, folder.parent / "finished")
    again = fit_again(Store.create(warm), spec, program, warm_start=True)
    return folder.parent, spec, program, {False: resumed, True: again}


def damage(path: Path, generator: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = generator.choice(["truncated", "flipped", "zeroed"])
    position = generator.randrange(len(data))
    if kind == "truncated":
        del data[position:]
    elif kind == "flipped":
        data[position] ^= 1 << generator.randrange(8)
    else:
        data[position : position + 512] = bytes(len(data[position : position + 512]))
    path.write_bytes(data)
    return f"{path} {kind} at {position}"


@pytest.mark.timeout(amount(300, 3600))
def test_damaged_run_file_is_repaired_or_named(
    tmp_path: Path, interrupted: tuple[Path, TrainSpec, bytes, Any]
) -> None:
    """Damage to any file except the rows gives the same weights bit by bit, or an error that names the file."""
    folder, spec, program, expected = interrupted
    seed = time.time_ns()
    generator = random.Random(seed)
    named: set[str] = set()
    for number in range(amount(40, 3000)):
        warm_start = generator.random() < 0.3
        here = tmp_path / str(number)
        shutil.copytree(folder / ("finished" if warm_start else "store"), here)
        files = sorted(p for p in here.rglob("*") if p.is_file() and p.stat().st_size)
        victim = generator.choice([p for p in files if p.suffix != ".parquet"])
        what = f"seed {seed}: {damage(victim, generator)}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = fit_again(Store(here.as_uri()), spec, program, warm_start=warm_start)
        except (SparkhvdError, RanksFailed) as e:
            causes = list(e.errors.values()) if isinstance(e, RanksFailed) else [e]
            assert all(isinstance(c, SparkhvdError) for c in causes), what
            assert all(victim.name in str(c) for c in causes), f"{what}: {causes}"
            named.add(victim.name)
        else:
            for name, value in expected[warm_start].items():
                assert torch.equal(found[name], value), what
        shutil.rmtree(here)
    # Files that exist only once and are not written again.
    assert named <= {"_manifest.json", "finished.json", f"epoch-{DAMAGED_EPOCHS}.pt"}, seed


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["epochs"][0].pop("epoch"),
        lambda state: state["epochs"].append(3),
        lambda state: state.pop("every"),
        lambda state: state.update(every=0),
        lambda state: state["steps"].update(counts=["x"]),
        lambda state: state.update(steps=None),
    ],
)
def test_damaged_profile_of_a_run_is_ignored(damage: Callable[[Any], Any]) -> None:
    counts = {"counts": [1.0] * len(Profile().state()["steps"]["counts"])}
    state: Any = {"every": 2, "epochs": [{"epoch": 1}, {"epoch": 3}], "steps": counts}
    whole = Profile()
    whole.resume(state, 2)
    assert whole.state()["epochs"] == [{"epoch": 1}]
    damage(state)
    damaged = Profile()
    damaged.resume(state, 2)
    assert damaged.state() == Profile().state()
