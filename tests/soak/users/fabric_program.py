"""Training loops of Lightning Fabric: over Gloo, or with this package's strategy, plain ("sparkhvd") or with shared gradients ("views").

torchrun ... -m tests.soak.users.fabric_program STRATEGY FILE LOOP...     rank 0 writes the file
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

PACKAGES = ("lightning.fabric", "lightning_fabric")
RANKS, BATCH, ROWS, CLASSES = 2, 8, 64, 3
Found = dict[str, Any]


def fabric(package: Any, strategy: str, **options: Any) -> Any:
    """Make a Fabric and launch it."""
    import sparkhvd.lightning  # registers

    made: Any = strategy
    if strategy == "gloo":
        made = package.strategies.DDPStrategy(process_group_backend="gloo")
    elif strategy == "views":
        made = sparkhvd.lightning.FabricStrategy(gradient_as_bucket_view=True)
    # The job has the number of ranks. Fabric's own strategies require it.
    options |= {"devices": RANKS} if strategy == "gloo" else {}
    found = package.Fabric(accelerator="cpu", strategy=made, **options)
    found.launch()
    return found


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    noise = torch.randn(ROWS, 1, 8, 8, generator=generator)
    return TensorDataset(noise + labels[:, None, None, None], labels)


def classifier_net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, CLASSES)),
    )


def numbers(*modules: nn.Module) -> list[float]:
    values = [each.detach().reshape(-1) for m in modules for each in m.state_dict().values()]
    return torch.cat([each.double() for each in values]).tolist()


def classifier(package: Any, strategy: str) -> Found:
    """Train with accumulation, clipping and a scheduler, measure, save, and resume from the file."""
    f = fabric(package, strategy)

    def parts() -> tuple[Any, Any, Any]:
        model = classifier_net(1 + f.global_rank)  # all ranks get rank 0's
        model, optimizer = f.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    train, test = f.setup_dataloaders(
        DataLoader(images(), BATCH // f.world_size),
        DataLoader(images(), BATCH // f.world_size),
    )

    def epoch(number: int, model: Any, optimizer: Any, scheduler: Any) -> tuple[float, float]:
        model.train()
        for index, (x, y) in enumerate(train):
            is_accumulating = index % 2 == 0
            with f.no_backward_sync(model, enabled=is_accumulating):
                f.backward(F.cross_entropy(model(x), y) / 2)
            if not is_accumulating:
                if number:
                    f.clip_gradients(model, optimizer, max_norm=0.5)
                else:
                    f.clip_gradients(model, optimizer, clip_val=0.05)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            outputs = [(model(x), y) for x, y in test]
        losses = torch.stack([F.cross_entropy(out, y) for out, y in outputs]).mean()
        right = torch.tensor(sum(int((out.argmax(1) == y).sum()) for out, y in outputs))
        return f.all_reduce(losses).item(), f.all_reduce(right, reduce_op="sum").item()

    with tempfile.TemporaryDirectory() as folder:
        file = Path(f.broadcast(folder), "state.ckpt")
        model, optimizer, scheduler = parts()
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 1}
        metrics = [epoch(0, model, optimizer, scheduler)]
        f.save(file, state)
        metrics.append(epoch(1, model, optimizer, scheduler))
        again, optimizer, scheduler = parts()
        with torch.no_grad():
            next(again.parameters()).zero_()
        state = {"model": again, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
        f.load(file, state)
        resumed = epoch(int(state["epoch"]), again, optimizer, scheduler)
        f.barrier()
    assert (resumed, numbers(again)) == (metrics[1], numbers(model))
    return {"numbers": numbers(model), "metrics": metrics}


def folds(package: Any, strategy: str) -> Found:
    """Train and measure a model on each of three folds."""
    f = fabric(package, strategy)
    f.seed_everything(5)  # of the shuffled rows
    data, found = images(), {}
    for fold in range(3):
        held = [row for row in range(ROWS) if row % 3 == fold]
        rest = [row for row in range(ROWS) if row % 3 != fold]
        train, test = f.setup_dataloaders(
            DataLoader(Subset(data, rest), BATCH // f.world_size, shuffle=True),
            DataLoader(Subset(data, held), BATCH // f.world_size),
        )
        model = classifier_net(fold)
        model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for x, y in train:
            optimizer.zero_grad()
            f.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        with torch.no_grad():
            losses = torch.stack([F.cross_entropy(model(x), y) for x, y in test])
        found[f"fold {fold}"] = [f.all_gather(losses).reshape(-1).tolist(), numbers(model)]
    return found


def gan(package: Any, strategy: str) -> Found:
    """Train two networks in turn. The generator's loss passes through the discriminator."""
    f = fabric(package, strategy)
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 64))
    judge = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    adam = {"lr": 0.002, "betas": (0.5, 0.999)}
    maker, of_maker = f.setup(maker, torch.optim.Adam(maker.parameters(), **adam))
    judge, of_judge = f.setup(judge, torch.optim.Adam(judge.parameters(), **adam))
    loader = f.setup_dataloaders(DataLoader(images(), BATCH // f.world_size))
    noise = torch.Generator().manual_seed(10 + f.global_rank)
    losses = []
    for x, _ in loader:
        real, fake = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        judge.zero_grad()
        f.backward(F.binary_cross_entropy_with_logits(judge(x), real))
        made = maker(torch.randn(len(x), 4, generator=noise))
        f.backward(F.binary_cross_entropy_with_logits(judge(made.detach()), fake))
        of_judge.step()
        maker.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(made), real)
        f.backward(loss)
        of_maker.step()
        losses.append(f.all_reduce(loss.detach()).item())
    return {"numbers": numbers(maker, judge), "losses": losses}


def tasks(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and values of two sine curves for each of four steps."""
    generator = torch.Generator().manual_seed(20 + rank)
    for _ in range(8):
        height, shift = torch.rand(2, generator=generator)
        x = torch.rand(10, 1, generator=generator) * 6
        yield x, height * (x + shift).sin()


def meta_learning(package: Any, strategy: str) -> Found:
    """Adapt copies of a model to each rank's tasks. The script averages the ranks' gradients."""
    f = fabric(package, strategy)
    torch.manual_seed(1)
    model = f.to_device(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = f.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    rows = list(tasks(f.global_rank))
    for step in range(4):
        optimizer.zero_grad()
        for x, y in rows[2 * step : 2 * step + 2]:
            learner = copy.deepcopy(model)
            own = torch.optim.SGD(learner.parameters(), lr=0.05)
            own.zero_grad()
            F.mse_loss(learner(x[:5]), y[:5]).backward()
            own.step()
            f.backward(loss := F.mse_loss(learner(x[5:]), y[5:]))
            for param, adapted in zip(model.parameters(), learner.parameters(), strict=True):
                param.grad = adapted.grad if param.grad is None else param.grad + adapted.grad
        for param in model.parameters():
            param.grad = f.all_reduce(param.grad / 2, reduce_op="mean")
        optimizer.step()
    return {"numbers": numbers(model), "loss": f.all_reduce(loss.detach()).item()}


def lbfgs(package: Any, strategy: str) -> Found:
    """Train by closures."""
    f = fabric(package, strategy)
    model = nn.Linear(64, CLASSES)
    torch.manual_seed(1)
    nn.init.normal_(model.weight, std=0.1)
    nn.init.zeros_(model.bias)
    model, optimizer = f.setup(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    loader = f.setup_dataloaders(DataLoader(images(), ROWS // f.world_size))
    x, y = next(iter(loader))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.flatten(1)), y)
        f.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return {"numbers": numbers(model)}


def collectives(package: Any, strategy: str) -> Found:
    """Call Fabric's functions as a program does."""
    f = fabric(package, strategy)
    own = torch.tensor([f.global_rank + 1.0])
    grads = own.clone().requires_grad_()
    f.all_gather(grads, sync_grads=True).sum().backward()
    with f.rank_zero_first():
        pass
    return {
        "place": [f.world_size, f.node_rank, f.is_global_zero == (f.global_rank == 0)],
        "reduced": [f.all_reduce(own.clone(), reduce_op=op).item() for op in ("mean", "sum")],
        "whole": f.all_reduce(torch.tensor([f.global_rank, 3, 10 * f.global_rank])).tolist(),
        "dict": f.all_reduce({"a": own.clone(), "b": "text"}, reduce_op="sum")["a"].item(),
        "gathered": f.all_gather({"a": own, "b": 2.0 * f.global_rank})["a"].tolist(),
        "grad": grads.grad.tolist(),
        "broadcast": f.broadcast({"rank": f.global_rank}, src=1),
        "votes": [
            f.strategy.reduce_boolean_decision(f.global_rank == 0, all=each)
            for each in (True, False)
        ],
        "device": str(f.device),
    }


LOOPS: dict[str, Callable[[Any, str], Found]] = {
    each.__name__: each for each in (classifier, folds, gan, meta_learning, lbfgs, collectives)
}


def results(package: str, strategy: str, names: Iterable[str]) -> dict[str, Found]:
    """Return the results of loops, one after the other in this process."""
    torch.set_num_threads(1)
    found = importlib.import_module(package)
    return {name: LOOPS[name](found, strategy) for name in names}


def refused(package: str) -> list[str]:
    """Return the messages for a Fabric that does not match the job, and for options that the job determines."""
    import sparkhvd.lightning
    from sparkhvd.errors import InvalidArgumentError

    found = importlib.import_module(package)
    messages = []
    for ask in (
        lambda: found.Fabric(accelerator="cpu", strategy="sparkhvd", devices=4),
        lambda: sparkhvd.lightning.FabricStrategy(process_group_backend="gloo"),
    ):
        try:
            ask()
        except InvalidArgumentError as error:
            messages.append(str(error))
    return messages


def main() -> None:
    found = results(PACKAGES[0], sys.argv[1], sys.argv[3:])
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
