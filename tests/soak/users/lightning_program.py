"""Trainings by Lightning with `strategy="sparkhvd"` that give the same result on any number of ranks, because they divide the global batch.

sparkhvdrun -np 2 python -m tests.soak.users.lightning_program FILE CASE...     rank 0 writes the file
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# The last optimizer step of an epoch has one batch instead of two accumulated ones.
BATCH, ROWS, WIDTH, ACCUMULATED = 12, 60, 5, 2
Row = dict[str, Any]


def packages(name: str) -> Any:
    """Import a package of Lightning, and register the strategy there."""
    found = importlib.import_module(name)
    import sparkhvd.lightning  # noqa: F401 - registers

    return found


def rows(dtype: torch.dtype = torch.float32) -> TensorDataset:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x.to(dtype), x.sum(1, keepdim=True).to(dtype))


def network(seed: int, *, normalized: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(8) if normalized else nn.Identity()
    return nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Tanh(), nn.Linear(8, 1))


def numbers(model: nn.Module) -> list[float]:
    """Return parameters and buffers."""
    return torch.cat([each.double().reshape(-1) for each in model.state_dict().values()]).tolist()


class Runs:
    """Makes trainers of one package, whose ranks share the rows."""

    def __init__(self, pl: Any, folder: Path) -> None:
        self.pl = pl
        self.folder = folder

    def trainer(self, strategy: Any = "sparkhvd", **options: Any) -> Any:
        given = {
            "accelerator": "cpu",
            "strategy": strategy,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": self.folder,
        }
        return self.pl.Trainer(**{**given, **options})

    def loader(self, trainer: Any, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
        return DataLoader(rows(dtype), BATCH // trainer.world_size)

    def regression(self, optimizers: Callable[[Any], Any] | None = None, **options: Any) -> Any:
        """Return a module. If ranks do not share rank 0's weights, each rank's weights differ."""
        import sparkhvd.torch as hvd

        class Regression(self.pl.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = network(hvd.rank() if hvd.is_initialized() else 0, **options)
                self.unused = nn.Linear(2, 2)
                self.seen: list[float] = []

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.net(x)
                return out

            def training_step(self, batch: list[Tensor], _: int) -> Tensor:
                loss = nn.functional.mse_loss(self(batch[0]), batch[1])
                self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
                return loss

            def on_train_epoch_end(self) -> None:
                self.seen.append(float(self.trainer.callback_metrics["loss"]))

            def validation_step(self, batch: list[Tensor], _: int) -> None:
                loss = nn.functional.mse_loss(self(batch[0]), batch[1])
                self.log("val_loss", loss, sync_dist=True)

            test_step = validation_step

            def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
                return torch.cat([batch[0][:, :1], self(batch[0])], dim=1)

            def configure_optimizers(self) -> Any:
                if optimizers is not None:
                    return optimizers(self)
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        return Regression()


def fitted(runs: Runs, trainer: Any, model: Any, dtype: torch.dtype = torch.float32) -> Row:
    trainer.fit(model, runs.loader(trainer, dtype), runs.loader(trainer, dtype))
    return {"numbers": numbers(model.net), "metrics": [*model.seen, evaluated(trainer)]}


def evaluated(trainer: Any) -> float:
    return float(trainer.callback_metrics["val_loss"])


# --- Cases: every rank's result is compared with that of one process. ---


def everything(runs: Runs) -> Row:
    """Accumulation, clipping by the norm, synchronized layers, a schedule, evaluation and prediction."""
    trainer = runs.trainer(
        accumulate_grad_batches=ACCUMULATED, gradient_clip_val=0.5, sync_batchnorm=True
    )
    model = runs.regression()
    found = fitted(runs, trainer, model)
    loader = runs.loader(trainer)
    tested = trainer.test(model, loader, verbose=False)[0]["val_loss"]
    validated = trainer.validate(model, loader, verbose=False)[0]["val_loss"]
    own = torch.cat(trainer.predict(model, loader))
    found["metrics"] += [tested, validated]
    predicted = torch.cat([each for each in gathered(own)]).double()
    found["predicted"] = predicted[predicted[:, 0].argsort()].reshape(-1).tolist()
    found["plain layer"] = type(model.net[1]) is nn.BatchNorm1d
    again = fitted(runs, runs.trainer(max_epochs=1, sync_batchnorm=True), runs.regression())
    found["metrics"] += again["metrics"]
    return found


def gathered(value: Any) -> list[Any]:
    import sparkhvd.torch as hvd

    hvd.init()
    return list(hvd.allgather_object(value))


def buffers(runs: Runs) -> Row:
    """Running statistics of rank 0 on all ranks at the end of a fit, without synchronized layers."""
    trainer, model = runs.trainer(), runs.regression()
    trainer.fit(model, runs.loader(trainer))
    found = gathered(numbers(model.net))
    return {"same": all(each == found[0] for each in found)}


class Scaled(torch.optim.SGD):
    """Its training step has an additional argument."""

    def step(self, closure: Any = None, *, factor: float = 0.0) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.05 * factor
        return super().step(closure)


def manual(runs: Runs) -> Row:
    """Two adversarial networks with an optimizer each, clipping in the module, and an argument of a step."""

    class Two(runs.pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net, self.other = network(1, normalized=False), network(2, normalized=False)

        def training_step(self, batch: list[Tensor], number: int) -> None:
            first, second = self.optimizers()
            gap = self.net(batch[0]) - self.other(batch[0])
            first.zero_grad()
            self.manual_backward((gap - batch[1]).square().mean(), retain_graph=True)
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            if number % 2 == 0:
                self.toggle_optimizer(second)
                second.zero_grad()
                gap = self.net(batch[0]) - self.other(batch[0])
                self.manual_backward(gap.square().mean())
                second.step(factor=1.0)
                self.untoggle_optimizer(second)

        def configure_optimizers(self) -> Any:
            return (
                torch.optim.Adam(self.net.parameters(), lr=0.01),
                Scaled(self.other.parameters(), lr=0.05, momentum=0.9),
            )

    trainer, model = runs.trainer(), Two()
    trainer.fit(model, runs.loader(trainer))
    return {"numbers": numbers(model), "metrics": [trainer.global_step]}


def double(runs: Runs) -> Row:
    """Float64, in registered memory."""
    strategy = of(runs, gradient_as_bucket_view=True)
    trainer = runs.trainer(strategy, precision="64-true", gradient_clip_val=0.5)
    return fitted(runs, trainer, runs.regression(normalized=False), torch.float64)


def mixed(runs: Runs) -> Row:
    """Half precision of forward and backward, and of gradients in transit."""
    import sparkhvd.torch as hvd

    trainer = runs.trainer(of(runs, compression=hvd.Compression.bf16), precision="bf16-mixed")
    return fitted(runs, trainer, runs.regression(normalized=False))


def scaled(runs: Runs) -> Row:
    """Learning rates divided by the number of ranks, by which the strategy multiplies them, and two schedulers in a row."""
    ranks = len(gathered(0))

    def optimizers(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / ranks)
        parts = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2 / ranks, total_steps=9),
        ]
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])]

    monitor = runs.pl.callbacks.LearningRateMonitor()
    logger = runs.pl.loggers.CSVLogger(runs.folder)
    trainer = runs.trainer(
        of(runs, lr_scaling="linear"), callbacks=[monitor], logger=logger, max_epochs=4
    )
    found = fitted(runs, trainer, runs.regression(optimizers, normalized=False))
    found["rates"] = list(monitor.lrs)
    return found


def of(runs: Runs, **options: Any) -> Any:
    from sparkhvd.lightning.strategy import register

    return register(runs.pl)(**options)


def sharded(runs: Runs) -> Row:
    """Sharded AdamW, whose checkpoint a second run loads."""

    def optimizers(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    file = Path(gathered(str(runs.folder))[0]) / "sharded.ckpt"
    first = runs.trainer(of(runs, sharded=True), gradient_clip_val=0.5, max_epochs=1)
    fitted(runs, first, runs.regression(optimizers, normalized=False))
    first.save_checkpoint(file)
    again = runs.trainer(of(runs, sharded=True), gradient_clip_val=0.5)
    model = runs.regression(optimizers, normalized=False)
    again.fit(model, runs.loader(again), ckpt_path=file)
    return {"numbers": numbers(model.net), "metrics": model.seen}


def lbfgs(runs: Runs) -> Row:
    def optimizers(model: Any) -> Any:
        return torch.optim.LBFGS(model.net.parameters(), lr=0.5, max_iter=4)

    return fitted(runs, runs.trainer(), runs.regression(optimizers, normalized=False))


def goes_on(runs: Runs) -> Row:
    """A run that ends after an epoch and resumes from the checkpoint, with the best checkpoint and early stopping."""
    callbacks = runs.pl.callbacks
    folder = Path(gathered(str(runs.folder))[0]) / "kept"
    keeps = callbacks.ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_last=True)
    options = {"enable_checkpointing": True, "sync_batchnorm": True}
    first = runs.trainer(callbacks=[keeps], max_epochs=1, **options)
    fitted(runs, first, runs.regression())
    second = runs.trainer(callbacks=[keeps], max_epochs=3, **options)
    model = runs.regression()
    second.fit(model, runs.loader(second), runs.loader(second), ckpt_path=folder / "last.ckpt")
    whole_model = runs.regression()
    stops = callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0)
    stopped = runs.trainer(callbacks=[stops], max_epochs=9)
    fitted(runs, stopped, runs.regression())
    whole = fitted(runs, runs.trainer(max_epochs=3, sync_batchnorm=True), whole_model)
    return {
        "numbers": numbers(model.net),
        "whole": whole["numbers"],
        "metrics": [float(keeps.best_model_score), stopped.current_epoch],
        "best": Path(keeps.best_model_path).name,
    }


def collectives(runs: Runs) -> Row:
    """Results of the strategy's collectives, from numbers that identify the rank."""
    trainer = runs.trainer()
    found: Row = {}

    class Asks(runs.pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            own = float(self.global_rank + 1)
            for name in ("mean", "sum", "max", "min"):
                self.log(name, own, sync_dist=True, reduce_fx=name, on_step=False, on_epoch=True)
            if number == 0 and self.current_epoch == 0:
                everyone = self.all_gather({"a": self.weight * own}, sync_grads=True)["a"]
                found["gathered"] = everyone.flatten().tolist()
                found["broadcast"] = self.trainer.strategy.broadcast({"rank": self.global_rank})
                strategy = self.trainer.strategy
                found["last"] = strategy.broadcast(self.global_rank, src=strategy.world_size - 1)
                votes = [
                    strategy.reduce_boolean_decision(own == 1, all=each) for each in (True, False)
                ]
                found["votes"] = votes
                strategy.barrier("named")
            return self.weight.sum()

        def on_train_epoch_end(self) -> None:
            names = ("mean", "sum", "max", "min")
            found["logged"] = [float(self.trainer.callback_metrics[name]) for name in names]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer.fit(Asks(), runs.loader(trainer))
    sampler = trainer.train_dataloader.sampler
    found["sampler"] = [sampler.rank, sampler.num_replicas, sampler.shuffle]
    found["ranks"] = [trainer.local_rank, trainer.node_rank, trainer.num_devices]
    return found


def frozen(package: str, folder: str) -> list[tuple[int, float]]:
    """Train one layer beside a large frozen one that differs on rank 1 in the second fit. Return the broadcast bytes and the layer's sum."""
    torch.set_num_threads(1)
    import sparkhvd.torch as hvd

    runs = Runs(packages(package), Path(folder))
    found = []
    for added in (0.0, 1.0):
        model, trainer = runs.regression(normalized=False), runs.trainer()
        model.unused = nn.Linear(1000, 1000).requires_grad_(False)
        model.unused.weight.data.fill_(added * trainer.global_rank)
        before = broadcast_bytes(hvd)
        trainer.fit(model, runs.loader(trainer))
        found.append((broadcast_bytes(hvd) - before, float(model.unused.weight.sum())))
    return found


def broadcast_bytes(hvd: Any) -> int:
    entries = hvd.metrics().counters["collectives"]
    return sum(entry["bytes"] for entry in entries if entry["collective"] == "broadcast")


def fails(package: str, how: str, folder: str) -> str:
    """Fail on rank 1 in the third step. Return the others' error, and its seconds."""
    torch.set_num_threads(1)
    runs = Runs(packages(package), Path(folder))
    # A callback that saves, and waits for all ranks, when a run ends in an exception.
    saves = runs.pl.callbacks.OnExceptionCheckpoint(folder)
    model, trainer = runs.regression(), runs.trainer(callbacks=[saves], enable_checkpointing=True)
    plain, mark = model.training_step, Path(folder) / "failed"

    def training_step(batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and trainer.global_rank == 1:
            mark.touch()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the third step")
        loss: Tensor = plain(batch, batch_idx)
        return loss

    model.training_step = training_step
    try:
        trainer.fit(model, runs.loader(trainer))
    except ValueError:
        if how == "raised":
            raise
        time.sleep(8)  # stays alive, longer than the others may need to learn of the failure
    except Exception as error:
        seconds = time.time() - mark.stat().st_mtime
        learned = f"{type(error).__name__} {seconds:.1f} {error}"
        (Path(folder) / "learned").write_text(learned)
        return learned
    return "no error"


def refused(package: str) -> str:
    """Request more devices than ranks."""
    runs = Runs(packages(package), Path())
    try:
        runs.trainer(devices=4)
    except ValueError as error:
        return str(error)
    return "no error"


def caught(package: str, folder: str) -> list[bool]:
    """Fail on every rank, catch it, and train again: with the same trainer, and with a new one."""
    torch.set_num_threads(1)
    runs = Runs(packages(package), Path(folder))
    model, trainer = runs.regression(), runs.trainer()
    plain = model.training_step

    def training_step(batch: list[Tensor], batch_idx: int) -> Tensor:
        raise ValueError("on every rank")

    found = []
    for _ in range(2):
        model.training_step = training_step
        try:
            trainer.fit(model, runs.loader(trainer))
        except ValueError as error:
            found.append(str(error) == "on every rank")
        model.training_step = plain
    trainer.fit(model, runs.loader(trainer))
    other = runs.trainer()
    other.fit(model, runs.loader(other))
    everyone = gathered(numbers(model.net))
    return [*found, len(everyone) == 2, all(each == everyone[0] for each in everyone)]


def on_host(rendezvous: Any, talk: Any) -> list[float]:
    """Train on a host with one rank."""
    from sparkhvd.rendezvous import install_rendezvous

    install_rendezvous(rendezvous)  # as a launcher does
    return results(PACKAGES[0], ["double"])["double"]["numbers"]


CASES = {
    each.__name__: each
    for each in (everything, manual, double, mixed, scaled, sharded, lbfgs, goes_on, buffers)
}


def results(package: str, names: list[str]) -> dict[str, Row]:
    """Return this rank's result of each case, one after the other in this process."""
    torch.set_num_threads(1)
    pl = packages(package)
    known = CASES | {"collectives": collectives}
    with tempfile.TemporaryDirectory() as folder:
        found = {name: known[name](Runs(pl, Path(folder))) for name in names}
        gathered(None)  # all have read what rank 0 wrote
    return found


def main() -> None:
    import sparkhvd.torch as hvd

    found = results(PACKAGES[0], sys.argv[2:])
    hvd.barrier()
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
