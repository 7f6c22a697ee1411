"""Layers, losses and whole models of smaller libraries."""

from __future__ import annotations

from typing import Any

import coral_pytorch.layers
import coral_pytorch.losses
import diffusers
import einops.layers.torch
import entmax
import iTransformer
import kan
import kornia
import linformer
import local_attention
import loralib
import ncps.torch
import ncps.wirings
import pytorch_msssim
import pytorch_tcn
import snntorch
import torch
import torchcrf
import vector_quantize_pytorch as vq
import vit_pytorch
import x_transformers
from pytorch_metric_learning import losses as metric_losses
from pytorch_metric_learning import miners
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name

from tests.corpus.case import (
    TABLE,
    Case,
    Data,
    adam,
    floats,
    headed,
    labelled,
    mlp,
    positive,
    rows,
    tokens,
    whole,
)

CE = nn.CrossEntropyLoss
SERIES, IDS, IMAGES, CLASSES = rows(8, 4), tokens(8), labelled(3, 16, 16), labelled(4)
PICTURES = Data({"x": positive(1, 16, 16)}, {"y": positive(1, 16, 16, seed=1)})
PAIRS, RANDOM, BATCHES = "compares the rows of a batch", "random numbers", "statistics of batches"


def metric(name: str, **options: Any) -> Case:
    """A loss of pytorch-metric-learning on embeddings."""

    def loss() -> Any:
        return getattr(metric_losses, name)(**options)

    has_weights = "num_classes" in options
    why = "DistributedDataParallel does not average the gradients of a loss" if has_weights else ""
    return Case(
        f"metric learning {name}", lambda: mlp(4, 3), CLASSES, loss, adam, apart=PAIRS, no_ddp=why
    )


class Mined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.miner, self.loss = miners.MultiSimilarityMiner(), metric_losses.TripletMarginLoss()

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return self.loss(output, label, self.miner(output, label))


class Spikes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.neuron = snntorch.Leaky(beta=0.9)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.neuron.init_leaky()
        total: Any = 0.0
        for _ in range(3):
            spike, memory = self.neuron(self.first(x), memory)
            total = total + self.last(spike)
        return total / 3


class Tagger(nn.Module):
    """A conditional random field after embeddings. Returns the best tags, or the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.field = (
            nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3)),
            torchcrf.CRF(3, batch_first=True),
        )

    def forward(self, ids: Tensor, tags: Tensor | None = None) -> Tensor:
        scores = self.body(ids)
        if tags is None:
            return torch.tensor(self.field.decode(scores))
        return -self.field(scores, tags, reduction="mean")


def tagger_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    return model(batch["ids"], batch["tags"])


class Quantized(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.encode, self.layer, self.decode = mlp(4, 4), layer, mlp(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layer(self.encode(x)[:, None])
        loss = found[2] if len(found) > 2 else x.new_zeros(())
        return self.decode(found[0][:, 0]), loss.sum() + x.new_zeros(len(x))


def quantized_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    out, loss = model(batch["x"])
    return F.mse_loss(out, batch["x"]) + loss.mean()


class Mapped(nn.Module):
    """Applies a layer of attention to a series."""

    def __init__(self, layer: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, width), layer, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)).mean(1))


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 24), nn.Linear(8, 1)
        self.layer = local_attention.LocalAttention(window_size=4, dim=8, causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).chunk(3, -1)
        return self.last(self.layer(q, k, v).mean(1))


class Ordinal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = mlp(4, 4), coral_pytorch.layers.CoralLayer(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


def ordinal(output: Tensor, label: Tensor) -> Tensor:
    levels = (label[:, None] > torch.arange(2)).float()
    return coral_pytorch.losses.coral_loss(output, levels)


def next_word(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    ids = batch["ids"]
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def ssim(output: Tensor, label: Tensor) -> Tensor:
    return 1 - pytorch_msssim.ssim(output.sigmoid(), label, data_range=1.0, win_size=5)


def psnr(output: Tensor, label: Tensor) -> Tensor:
    return kornia.losses.psnr_loss(output, label, 1.0)


def kornia_ssim(output: Tensor, label: Tensor) -> Tensor:
    return kornia.losses.ssim_loss(output.sigmoid(), label, 5)


def noise_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    """Return the loss of a step of DDPM."""
    del ctx
    x = batch["x"]
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)
    noise, moments = torch.randn_like(x), torch.randint(0, 10, (len(x),))
    noisy = scheduler.add_noise(x, noise, moments)
    return F.mse_loss(model(noisy, moments)[0], noise)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = diffusers.UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )

    def forward(self, x: Tensor, moments: Tensor | None = None) -> tuple[Tensor, ...]:
        moments = torch.zeros(len(x), dtype=torch.int64) if moments is None else moments
        return self.body(x, moments, return_dict=False)


class Sentences(nn.Module):
    """Two texts through the pooling of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.pool = Pooling(8)
        self.dense = Dense(8, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(self.embed(a), self.embed(b))

    def embed(self, ids: Tensor) -> Tensor:
        mask = (ids > 0).long()
        features = {"token_embeddings": self.words(ids), "attention_mask": mask}
        return self.dense(self.pool(features))["sentence_embedding"]


def low_rank() -> nn.Module:
    module = nn.Sequential(loralib.Linear(4, 6, r=2), nn.Tanh(), nn.Linear(6, 1))
    loralib.mark_only_lora_as_trainable(module)
    return module


def rearranged() -> nn.Module:
    return nn.Sequential(
        einops.layers.torch.Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4),
        nn.Linear(48, 8),
        einops.layers.torch.Reduce("b n d -> b d", "mean"),
        nn.Linear(8, 3),
    )


def decoder() -> nn.Module:
    layers = x_transformers.Decoder(dim=32, depth=1, heads=1, attn_dim_head=32, rotary_pos_emb=True)
    return x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=8, attn_layers=layers)


def forecaster() -> nn.Module:
    return iTransformer.iTransformer(
        num_variates=4,
        lookback_len=8,
        dim=8,
        depth=1,
        heads=2,
        dim_head=4,
        pred_length=2,
        use_reversible_instance_norm=True,
    )


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = forecaster()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


METRIC_LEARNING = [
    *map(
        metric,
        (
            "ContrastiveLoss",
            "TripletMarginLoss",
            "NTXentLoss",
            "SupConLoss",
            "CircleLoss",
            "MultiSimilarityLoss",
            "LiftedStructureLoss",
            "NPairsLoss",
        ),
    ),
    *(
        metric(n, num_classes=3, embedding_size=3)
        for n in (
            "ArcFaceLoss",
            "CosFaceLoss",
            "ProxyAnchorLoss",
            "ProxyNCALoss",
            "SoftTripleLoss",
            "NormalizedSoftmaxLoss",
        )
    ),
    Case("metric learning with a miner", lambda: mlp(4, 3), CLASSES, Mined, adam, apart=PAIRS),
]

CASES = [
    *METRIC_LEARNING,
    Case("einops", rearranged, IMAGES, CE),
    Case(
        "x-transformers encoder",
        lambda: Mapped(x_transformers.Encoder(dim=8, depth=1, heads=2, attn_dim_head=4)),
        SERIES,
        optimizer=adam,
    ),
    Case(
        "x-transformers language model",
        decoder,
        Data({"ids": whole(20, 8)}),
        None,
        adam,
        step=next_word,
        resumes=True,
    ),
    Case(
        "vit-pytorch ViT",
        lambda: vit_pytorch.ViT(
            image_size=16,
            patch_size=4,
            num_classes=3,
            dim=8,
            depth=1,
            heads=2,
            dim_head=4,
            mlp_dim=16,
        ),
        IMAGES,
        CE,
        adam,
    ),
    Case(
        "vit-pytorch SimpleViT",
        lambda: vit_pytorch.SimpleViT(
            image_size=16,
            patch_size=4,
            num_classes=3,
            dim=8,
            depth=1,
            heads=2,
            dim_head=4,
            mlp_dim=16,
        ),
        IMAGES,
        CE,
        adam,
    ),
    Case("local-attention", Local, SERIES, optimizer=adam),
    Case(
        "linformer",
        lambda: Mapped(linformer.Linformer(dim=8, seq_len=8, depth=1, heads=2, k=4)),
        SERIES,
        optimizer=adam,
    ),
    Case(
        "vector quantization",
        lambda: Quantized(vq.VectorQuantize(dim=4, codebook_size=8)),
        Data({"x": floats(4)}),
        None,
        adam,
        step=quantized_step,
        apart=BATCHES,
        no_ddp="the module uses torch.distributed to average its codebook over ranks",
    ),
    Case(
        "finite scalar quantization",
        lambda: Quantized(vq.FSQ(levels=[4, 4, 4], dim=4)),
        Data({"x": floats(4)}),
        None,
        adam,
        step=quantized_step,
    ),
    Case(
        "entmax",
        lambda: nn.Sequential(nn.Linear(4, 6), entmax.Entmax15(dim=1), nn.Linear(6, 1)),
        TABLE,
    ),
    Case("sparsemax loss", lambda: mlp(4, 3), CLASSES, lambda: entmax.SparsemaxLoss(), adam),
    Case(
        "CRF",
        Tagger,
        Data({"ids": whole(20, 6)}, {"tags": whole(3, 6)}),
        None,
        adam,
        step=tagger_step,
    ),
    Case("snntorch", Spikes, TABLE, optimizer=adam),
    Case(
        "ncps CfC",
        headed(lambda: ncps.torch.CfC(4, 6), 8, 4, pick=lambda r: r[0][:, -1]),
        SERIES,
        optimizer=adam,
    ),
    Case(
        "ncps LTC",
        headed(
            lambda: ncps.torch.LTC(4, ncps.wirings.AutoNCP(8, 2)), 8, 4, pick=lambda r: r[0][:, -1]
        ),
        SERIES,
        optimizer=adam,
    ),
    Case(
        "TCN",
        headed(lambda: pytorch_tcn.TCN(8, [4, 4], kernel_size=2, dropout=0.1), 8, 4),
        SERIES,
        optimizer=adam,
    ),
    Case(
        "KAN",
        lambda: kan.MultKAN([4, 3, 1], grid=3, k=3, seed=1, auto_save=False, save_act=False),
        TABLE,
        optimizer=adam,
        tolerance=1e-5,
        because="two plain loops differ in the last bits, too",
    ),
    Case("iTransformer", Forecast, Data({"x": floats(8, 4)}, {"y": floats(2, 4)}), optimizer=adam),
    Case("coral", Ordinal, CLASSES, lambda: ordinal, adam),
    Case("loralib", low_rank, TABLE, optimizer=adam),
    Case("pytorch-msssim", lambda: nn.Conv2d(1, 1, 3, padding=1), PICTURES, lambda: ssim, adam),
    Case("kornia SSIM", lambda: nn.Conv2d(1, 1, 3, padding=1), PICTURES, lambda: kornia_ssim, adam),
    Case(
        "kornia PSNR",
        lambda: nn.Conv2d(1, 1, 3, padding=1),
        PICTURES,
        lambda: psnr,
        adam,
        apart="a logarithm of a mean over the batch",
    ),
    Case(
        "kornia filters",
        lambda: nn.Sequential(
            kornia.filters.GaussianBlur2d((3, 3), (1.0, 1.0)), nn.Flatten(), nn.Linear(768, 3)
        ),
        IMAGES,
        CE,
    ),
    Case("kornia augmentation", lambda: Augmented(), IMAGES, CE, apart=RANDOM),
    Case(
        "diffusers UNet2DModel",
        Denoiser,
        Data({"x": floats(1, 8, 8)}),
        None,
        adam,
        step=noise_step,
        apart=RANDOM,
    ),
    Case(
        "sentence-transformers layers",
        Sentences,
        Data({"a": whole(20, 6), "b": whole(20, 6, seed=1)}, {"y": positive()}),
        optimizer=adam,
    ),
]


class Augmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.augment = kornia.augmentation.RandomHorizontalFlip(p=0.5)
        self.last = nn.Linear(768, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.augment(x) if self.training else x).flatten(1))
