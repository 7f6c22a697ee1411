"""Tables of cases, by library."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from tests.corpus.case import Case

# Modules of this package, with their imports besides torch.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "torch_layers": (),
    "torch_losses": (),
    "torch_optimizers": (),
    "torch_programs": (),
    "torch_habits": (),
    "transformers_models": ("transformers", "peft"),
    "vision": ("torchvision", "timm", "segmentation_models_pytorch"),
    "tabular": ("pytorch_tabnet", "rtdl_revisiting_models", "tabm"),
    "optimizers": ("schedulefree", "torch_optimizer", "pytorch_optimizer"),
    "science": ("torchdiffeq", "gpytorch", "torch_geometric"),
    "layers": ("x_transformers", "pytorch_metric_learning", "kornia"),
}


def tables() -> Iterator[tuple[str, list[Case]]]:
    """Yield the tables whose libraries are installed, by name."""
    for name, needed in LIBRARIES.items():
        if all(importlib.util.find_spec(each) for each in needed):
            yield name, importlib.import_module(f"{__name__}.{name}").CASES


def find(name: str) -> Case:
    """Return a case by its full name, such as "torch_layers.Linear"."""
    table, _, rest = name.partition(".")
    (case,) = (c for c in importlib.import_module(f"{__name__}.{table}").CASES if c.name == rest)
    return case
