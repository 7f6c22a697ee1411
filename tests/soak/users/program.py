"""Trainings by libraries that know only the name "sparkhvd" of this package.

torchrun ... -m tests.soak.users.program BACKEND FILE USER...     rank 0 writes the file
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sparkhvd.distributed  # noqa: F401 - registers the backend

BATCH, ROWS, WIDTH = 8, 32, 5


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def numbers(model: nn.Module) -> list[float]:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).tolist()


def lightning(backend: str) -> dict[str, Any]:
    import lightning as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ranks = num_ranks()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=DDPStrategy(process_group_backend=backend),
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        model = Regression()
        trainer.fit(model, DataLoader(rows(), BATCH // ranks, shuffle=False))
        trainer.save_checkpoint(f"{folder}/last.ckpt")
    return {"backend": dist.get_backend(), "numbers": numbers(model.net), "metrics": model.losses}


def accelerate(backend: str) -> dict[str, Any]:
    from accelerate import Accelerator

    dist.init_process_group(backend)  # on CPUs Accelerate uses only an existing group
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), BATCH // num_ranks())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    plain = accelerator.unwrap_model(model)
    return {"backend": dist.get_backend(), "numbers": numbers(plain), "metrics": losses}


def trainer(backend: str) -> dict[str, Any]:
    import transformers

    dist.init_process_group(backend)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(0, 20, (ROWS, 6), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH // num_ranks(),
            per_device_eval_batch_size=BATCH // num_ranks(),
            max_steps=6,
            learning_rate=0.01,
            optim="sgd",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        training = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        training.train()
        loss = training.evaluate()["eval_loss"]
    return {"backend": dist.get_backend(), "numbers": numbers(model), "metrics": [loss]}


def forget() -> None:
    """Delete the group, and Accelerate's state of it, which stays for the life of the process."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    dist.destroy_process_group()


USERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "trainer": trainer,
}


def results(backend: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the result of each training, one after the other in this process."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        found[name] = USERS[name](backend)
        forget()
    return found


def main() -> None:
    found = results(sys.argv[1], sys.argv[3:])
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
