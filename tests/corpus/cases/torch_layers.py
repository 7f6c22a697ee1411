"""Every family of layers of torch.nn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.corpus.case import (
    TABLE,
    Case,
    Data,
    Lambda,
    adam,
    binary,
    classes,
    floats,
    headed,
    labelled,
    mlp,
    rows,
    target,
    tokens,
    whole,
)

CE = nn.CrossEntropyLoss
IMAGES = labelled(2, 8, 8)
SERIES = rows(5, 4)
VOLUMES = rows(2, 4, 4, 4)
PAIRS = Data({"a": floats(3), "b": floats(4)}, {"y": target(floats(3))})


def activation(name: str, *arguments: float, **changes: object) -> Case:
    """An activation between two linear layers."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), getattr(nn, name)(*arguments), nn.Linear(6, 1))

    return Case(name, model, TABLE, **changes)  # type: ignore[arg-type]


ACTIVATIONS = [
    *map(activation, ("CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh")),
    *map(activation, ("LeakyReLU", "LogSigmoid", "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU")),
    *map(activation, ("Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink")),
    activation("RReLU", apart="random slopes"),
    activation("Threshold", 0.1, 0.0),
    Case("GLU", lambda: nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 1)), TABLE),
    Case("Softmax", lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(1), nn.Linear(6, 1)), TABLE),
    Case("Softmin", lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmin(1), nn.Linear(6, 1)), TABLE),
    Case(
        "LogSoftmax",
        lambda: nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)),
        labelled(4),
        nn.NLLLoss,
    ),
    Case(
        "Softmax2d",
        headed(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Softmax2d()), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
]

CONVOLUTIONS = [
    Case("Conv1d", headed(lambda: nn.Conv1d(5, 6, 2), 5, 4), SERIES),
    Case(
        "Conv2d", headed(lambda: nn.Conv2d(2, 4, 3), 2, 8, 8, outputs=3), IMAGES, CE, resumes=True
    ),
    Case(
        "Conv2d dilated",
        headed(lambda: nn.Conv2d(2, 4, 3, dilation=2), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
    Case(
        "Conv2d depthwise",
        headed(lambda: nn.Conv2d(2, 4, 3, groups=2), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
    Case(
        "Conv2d circular",
        headed(lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
    Case(
        "Conv2d channels_last",
        lambda: headed(lambda: nn.Conv2d(2, 4, 3), 2, 8, 8, outputs=3)().to(
            memory_format=torch.channels_last
        ),
        IMAGES,
        CE,
    ),
    Case("Conv3d", headed(lambda: nn.Conv3d(2, 3, 2), 2, 4, 4, 4), VOLUMES),
    Case("ConvTranspose1d", headed(lambda: nn.ConvTranspose1d(5, 3, 2), 5, 4), SERIES),
    Case(
        "ConvTranspose2d",
        headed(lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
    Case("ConvTranspose3d", headed(lambda: nn.ConvTranspose3d(2, 2, 2), 2, 4, 4, 4), VOLUMES),
    Case(
        "Fold, Unfold",
        headed(
            lambda: nn.Sequential(nn.Unfold(4, stride=4), nn.Linear(4, 4), nn.Fold(8, 4, stride=4)),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
    ),
    Case(
        "PixelShuffle",
        headed(
            lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(4)),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
    ),
    Case(
        "ChannelShuffle",
        headed(lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.ChannelShuffle(2)), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
]

POOLS = [
    *(
        Case(
            name,
            headed(
                lambda name=name: nn.Sequential(nn.Conv2d(2, 3, 1), getattr(nn, name)(2)),
                2,
                8,
                8,
                outputs=3,
            ),
            IMAGES,
            CE,
        )
        for name in ("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d")
    ),
    Case(
        "LPPool2d",
        headed(
            lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Sigmoid(), nn.LPPool2d(2, 2)),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
    ),
    Case(
        "FractionalMaxPool2d",
        headed(
            lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.FractionalMaxPool2d(2, output_size=4)),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
        apart="random regions",
    ),
    Case(
        "AvgPool1d",
        headed(lambda: nn.Sequential(nn.Conv1d(5, 4, 1), nn.AvgPool1d(2)), 5, 4),
        SERIES,
    ),
    Case(
        "MaxPool1d",
        headed(lambda: nn.Sequential(nn.Conv1d(5, 4, 1), nn.MaxPool1d(2)), 5, 4),
        SERIES,
    ),
    Case(
        "AvgPool3d",
        headed(lambda: nn.Sequential(nn.Conv3d(2, 2, 1), nn.AvgPool3d(2)), 2, 4, 4, 4),
        VOLUMES,
    ),
    Case(
        "MaxPool3d",
        headed(lambda: nn.Sequential(nn.Conv3d(2, 2, 1), nn.MaxPool3d(2)), 2, 4, 4, 4),
        VOLUMES,
    ),
]


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 1), nn.Linear(3 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = nn.functional.max_pool2d(self.first(x), 2, return_indices=True)
        return self.last(nn.functional.max_unpool2d(pooled, places, 2).flatten(1))


POOLS.append(Case("MaxUnpool2d", Unpooled, IMAGES, CE))

PADDING = [
    Case(
        "ReflectionPad2d",
        headed(
            lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(2, 3, 3)), 2, 8, 8, outputs=3
        ),
        IMAGES,
        CE,
    ),
    Case(
        "ReplicationPad2d",
        headed(
            lambda: nn.Sequential(nn.ReplicationPad2d(1), nn.Conv2d(2, 3, 3)), 2, 8, 8, outputs=3
        ),
        IMAGES,
        CE,
    ),
    Case(
        "ZeroPad2d",
        headed(lambda: nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(2, 3, 3)), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
    Case(
        "ConstantPad1d",
        headed(lambda: nn.Sequential(nn.ConstantPad1d(1, 0.5), nn.Conv1d(5, 3, 3)), 5, 4),
        SERIES,
    ),
    Case(
        "Upsample",
        headed(
            lambda: nn.Sequential(
                nn.Conv2d(2, 2, 3, stride=2), nn.Upsample(scale_factor=2, mode="bilinear")
            ),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
    ),
]

NORMS = [
    Case(
        "BatchNorm1d",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)),
        TABLE,
        resumes=True,
    ),
    Case(
        "BatchNorm1d without momentum",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 1)),
        TABLE,
    ),
    Case(
        "BatchNorm1d without statistics",
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 1)
        ),
        TABLE,
    ),
    Case(
        "BatchNorm2d",
        headed(
            lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
    ),
    Case(
        "BatchNorm3d",
        headed(lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)), 2, 4, 4, 4),
        VOLUMES,
    ),
    Case(
        "LayerNorm", lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1)), TABLE
    ),
    Case("RMSNorm", lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 1)), TABLE),
    Case(
        "GroupNorm",
        headed(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
    Case(
        "InstanceNorm2d",
        headed(
            lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
    ),
    Case(
        "InstanceNorm1d with statistics",
        headed(lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True), 5, 4),
        SERIES,
        apart="statistics of batches",
    ),
    Case(
        "LocalResponseNorm",
        headed(
            lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2)), 2, 8, 8, outputs=3
        ),
        IMAGES,
        CE,
    ),
    Case(
        "CrossMapLRN2d",
        headed(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.CrossMapLRN2d(2)), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
]

DROPOUTS = [
    Case(
        "Dropout",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)),
        TABLE,
        resumes=True,
    ),
    Case(
        "AlphaDropout",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(6, 1)),
        TABLE,
    ),
    Case(
        "FeatureAlphaDropout",
        headed(
            lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.FeatureAlphaDropout(0.3)),
            2,
            8,
            8,
            outputs=3,
        ),
        IMAGES,
        CE,
    ),
    Case(
        "Dropout1d",
        headed(lambda: nn.Sequential(nn.Conv1d(5, 4, 2), nn.Dropout1d(0.3)), 5, 4),
        SERIES,
    ),
    Case(
        "Dropout2d",
        headed(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.3)), 2, 8, 8, outputs=3),
        IMAGES,
        CE,
    ),
    Case(
        "Dropout3d",
        headed(lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Dropout3d(0.3)), 2, 4, 4, 4),
        VOLUMES,
    ),
]


def last(result: tuple[Tensor, object]) -> Tensor:
    return result[0][:, -1]


class Packed(nn.Module):
    """An LSTM over sequences of given lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.body(packed)
        return self.last(hidden[-1])


class Cells(nn.Module):
    """A loop over the steps of a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.last = cell, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


RECURRENT = [
    Case("RNN", headed(lambda: nn.RNN(4, 6, batch_first=True), 5, 4, pick=last), SERIES),
    Case(
        "RNN relu",
        headed(lambda: nn.RNN(4, 6, nonlinearity="relu", batch_first=True), 5, 4, pick=last),
        SERIES,
    ),
    Case(
        "LSTM",
        headed(lambda: nn.LSTM(4, 6, batch_first=True), 5, 4, pick=last),
        SERIES,
        optimizer=adam,
        resumes=True,
    ),
    Case(
        "LSTM bidirectional",
        headed(
            lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True, dropout=0.2),
            5,
            4,
            pick=last,
        ),
        SERIES,
    ),
    Case(
        "LSTM with projections",
        headed(lambda: nn.LSTM(4, 6, batch_first=True, proj_size=3), 5, 4, pick=last),
        SERIES,
    ),
    Case("GRU", headed(lambda: nn.GRU(4, 6, batch_first=True), 5, 4, pick=last), SERIES),
    Case("RNNCell", lambda: Cells(nn.RNNCell(4, 6)), SERIES),
    Case("LSTMCell", lambda: Cells(nn.LSTMCell(4, 6)), SERIES),
    Case("GRUCell", lambda: Cells(nn.GRUCell(4, 6)), SERIES),
    Case(
        "LSTM packed",
        Packed,
        Data({"x": floats(5, 4), "lengths": whole(6, begin=1)}, {"y": target(floats(5, 4))}),
    ),
]


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.body, self.last = (
            nn.MultiheadAttention(4, 2, batch_first=True, **options),
            nn.Linear(4, 1),
        )  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        found, self.maps = self.body(x, x, x)
        return self.last(found.mean(1))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).chunk(3, -1)
        return self.last(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).mean(1)
        )


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x, x).mean(1))


def encoder(dropout: float = 0.0, **options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True, **options)  # type: ignore[arg-type]
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


TRANSFORMERS = [
    Case("MultiheadAttention", Attention, SERIES),
    Case(
        "MultiheadAttention with dropout", lambda: Attention(dropout=0.2, add_bias_kv=True), SERIES
    ),
    Case("scaled_dot_product_attention", Causal, SERIES),
    Case("TransformerEncoder", headed(encoder, 5, 4), SERIES, optimizer=adam),
    Case(
        "TransformerEncoder with dropout",
        headed(lambda: encoder(0.1, norm_first=True, activation="gelu"), 5, 4),
        SERIES,
        optimizer=adam,
    ),
    Case("Transformer", Seq2Seq, SERIES, optimizer=adam),
]


class Bags(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.body, self.last = nn.EmbeddingBag(20, 4, **options), nn.Linear(4, 3)  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.body(ids))


EMBEDDINGS = [
    Case(
        "Embedding",
        lambda: nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(24, 3)),
        tokens(),
        CE,
    ),
    Case(
        "Embedding with padding",
        lambda: nn.Sequential(nn.Embedding(20, 4, padding_idx=0), nn.Flatten(), nn.Linear(24, 3)),
        tokens(),
        CE,
    ),
    Case(
        "Embedding with max_norm",
        lambda: nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 3)),
        tokens(),
        CE,
        apart="forward renormalizes the rows of its batch",
        no_ddp="forward renormalizes the rows of a rank's batch in place, and the ranks drift apart",
    ),
    Case("EmbeddingBag", Bags, tokens(), CE),
    Case("EmbeddingBag max", lambda: Bags(mode="max"), tokens(), CE),
]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Bilinear(3, 4, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(self.body(a, b))


class Distances(nn.Module):
    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 3), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.a(x), self.b(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.embedding(ids).mean(1))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 1)})
        self.scales = nn.ParameterList([torch.ones(4), torch.zeros(4)])
        self.more = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(1))})
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scales[0] + self.scales[1]
        return self.heads["one"](x) + self.more["bias"]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = mlp(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Gates(nn.Module):
    """Uses one of two experts for a batch, so a rank may have no gradient for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x[:, 0].sum() > 0 else self.b(x)


class Experts(nn.Module):
    """Routes each row to one of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(4, 3),
            nn.ModuleList([nn.Linear(4, 1) for _ in range(3)]),
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(1)
        best = weights.argmax(1)
        out = x.new_zeros(len(x), 1)
        for index, expert in enumerate(self.experts):
            chosen = best == index
            out[chosen] = expert(x[chosen]) * weights[chosen, index : index + 1]
        return out


def checkpointed() -> nn.Module:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.body, x, use_reentrant=False))

    return Recomputed()


OTHERS = [
    Case("Linear", lambda: nn.Linear(4, 1), TABLE, resumes=True),
    Case(
        "Linear of scalars",
        lambda: nn.Linear(4, 1),
        Data({f"x{i}": floats(seed=i) for i in range(4)}, TABLE.labels, is_joined=True),
    ),
    Case("Identity", lambda: nn.Sequential(nn.Identity(), mlp()), TABLE),
    Case("Bilinear", Pair, PAIRS),
    Case("CosineSimilarity", lambda: Distances(nn.CosineSimilarity()), TABLE),
    Case("PairwiseDistance", lambda: Distances(nn.PairwiseDistance()), TABLE),
    Case(
        "Unflatten",
        lambda: nn.Sequential(
            nn.Linear(4, 12), nn.Unflatten(1, (3, 4)), nn.Flatten(), nn.Linear(12, 1)
        ),
        TABLE,
    ),
    Case(
        "Lambda", lambda: nn.Sequential(nn.Linear(4, 6), Lambda(torch.sin), nn.Linear(6, 1)), TABLE
    ),
    Case("tied weights", Shared, Data({"ids": whole(20, 6)}, {"c": whole(20)}), CE),
    Case("containers", Lists, TABLE, apart="a buffer counts steps"),
    Case("an unused layer", Unused, TABLE),
    Case("layers by batch", Gates, TABLE, apart="each rank chooses by its batch"),
    Case("experts by row", Experts, TABLE),
    Case("recomputed activations", checkpointed, TABLE),
    Case("binary of one logit", mlp, binary(4), nn.BCEWithLogitsLoss, optimizer=adam),
    Case(
        "flattened images",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3)),
        Data({"x": floats(2, 8, 8)}, {"c": classes(floats(2, 8, 8), 3)}),
        CE,
    ),
]

CASES = [
    *(*ACTIVATIONS, *CONVOLUTIONS, *POOLS, *PADDING, *NORMS, *DROPOUTS),
    *(*RECURRENT, *TRANSFORMERS, *EMBEDDINGS, *OTHERS),
]
