"""Tables: TabNet, FT-Transformer, TabTransformer, TabM, embeddings of numbers."""

from __future__ import annotations

from typing import Any

import rtdl_num_embeddings
import rtdl_revisiting_models as rtdl
import tabm
import torch
from pytorch_tabnet import tab_network
from tab_transformer_pytorch import FTTransformer, TabTransformer
from torch import Tensor, nn

from tests.corpus.case import TABLE, Case, Data, adam, classes, floats, target, whole

CE = nn.CrossEntropyLoss
X = floats(6)
WIDE = Data({"x": X}, {"c": classes(X, 3)})
MIXED = Data({"numbers": floats(4), "categories": whole(5, 2)}, {"y": target(floats(4))})


class TabNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = tab_network.TabNet(
            6, 3, n_d=4, n_a=4, n_steps=2, virtual_batch_size=8, group_attention_matrix=torch.eye(6)
        )

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def tabnet_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    out, sparsity = model(batch["x"])
    return nn.functional.cross_entropy(out, batch["c"]) - 1e-3 * sparsity


class Mixed(nn.Module):
    """A model of categories and numbers, in the order of its library."""

    def __init__(self, body: nn.Module, *, numbers_first: bool = False) -> None:
        super().__init__()
        self.body, self.numbers_first = body, numbers_first

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        given = (numbers, categories) if self.numbers_first else (categories, numbers)
        return self.body(*given)


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = tabm.TabM.make(
            n_num_features=4, cat_cardinalities=None, d_out=1, k=4, n_blocks=1, d_block=8
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[..., 0]


def ensemble_loss(output: Tensor, label: Tensor) -> Tensor:
    return (output - label.reshape(-1, 1)).square().mean()


CASES = [
    Case("TabNet", TabNet, WIDE, None, adam, step=tabnet_step, resumes=True),
    Case(
        "rtdl MLP",
        lambda: rtdl.MLP(d_in=4, d_out=1, n_blocks=1, d_block=8, dropout=0.1),
        TABLE,
        optimizer=adam,
    ),
    Case(
        "rtdl ResNet",
        lambda: rtdl.ResNet(
            d_in=4,
            d_out=1,
            n_blocks=1,
            d_block=8,
            d_hidden=None,
            d_hidden_multiplier=2.0,
            dropout1=0.1,
            dropout2=0.0,
        ),
        TABLE,
        optimizer=adam,
    ),
    Case(
        "rtdl FTTransformer",
        lambda: Mixed(
            rtdl.FTTransformer(
                n_cont_features=4,
                cat_cardinalities=[5, 5],
                d_out=1,
                n_blocks=1,
                d_block=8,
                attention_n_heads=2,
                attention_dropout=0.0,
                ffn_d_hidden=None,
                ffn_d_hidden_multiplier=1.0,
                ffn_dropout=0.0,
                residual_dropout=0.0,
            ),
            numbers_first=True,
        ),
        MIXED,
        optimizer=adam,
    ),
    Case(
        "FTTransformer",
        lambda: Mixed(
            FTTransformer(
                categories=(5, 5), num_continuous=4, dim=8, dim_out=1, depth=1, heads=2, dim_head=4
            )
        ),
        MIXED,
        optimizer=adam,
    ),
    Case(
        "TabTransformer",
        lambda: Mixed(
            TabTransformer(
                categories=(5, 5),
                num_continuous=4,
                dim=8,
                dim_out=1,
                depth=1,
                heads=2,
                dim_head=4,
                mlp_act=nn.ReLU(),
            )
        ),
        MIXED,
        optimizer=adam,
    ),
    Case("TabM", Ensemble, TABLE, lambda: ensemble_loss, adam),
    Case(
        "periodic embeddings",
        lambda: nn.Sequential(
            rtdl_num_embeddings.PeriodicEmbeddings(4, 4, lite=False), nn.Flatten(), nn.Linear(16, 1)
        ),
        TABLE,
        optimizer=adam,
    ),
    Case(
        "piecewise-linear embeddings",
        lambda: nn.Sequential(
            rtdl_num_embeddings.PiecewiseLinearEmbeddings(
                [torch.tensor([-1.0, 0.0, 1.0])] * 4, 4, activation=False, version="B"
            ),
            nn.Flatten(),
            nn.Linear(16, 1),
        ),
        TABLE,
        optimizer=adam,
    ),
]
