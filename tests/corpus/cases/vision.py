"""Models of images: torchvision, timm and segmentation-models-pytorch, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import timm
import torch
import torchvision
import torchvision.transforms.v2
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn

from tests.corpus.case import Case, Data, adam, classes, floats, sgd, whole

CE = nn.CrossEntropyLoss
SMALL = Data({"x": floats(3, 32, 32)}, {"c": classes(floats(3, 32, 32), 3)})
MASKS = Data({"x": floats(3, 32, 32)}, {"c": whole(2, 32, 32)})
VOLUMES = Data({"x": floats(1, 8, 8, 8)}, {"m": whole(2, 1, 8, 8, 8).astype(np.float32)})
MASK = Data({"x": floats(3, 32, 32)}, {"m": whole(2, 1, 32, 32).astype(np.float32)})
DROPS_PATHS = "random depth"
BATCHES = "statistics of batches"


def of_torchvision(name: str, data: Data = SMALL, **options: Any) -> Case:
    def model() -> nn.Module:
        return torchvision.models.get_model(name, weights=None, num_classes=3, **options)

    apart = DROPS_PATHS if name.startswith(("efficientnet", "convnext", "swin")) else ""
    return Case(f"torchvision {name}", model, data, CE, apart=apart)


def of_timm(name: str, data: Data = SMALL, **options: Any) -> Case:
    def model() -> nn.Module:
        return timm.create_model(name, pretrained=False, num_classes=3, **options)

    return Case(f"timm {name}", model, data, CE)


def of_smp(architecture: str, **options: Any) -> Case:
    def model() -> nn.Module:
        import segmentation_models_pytorch as smp

        return getattr(smp, architecture)("resnet18", encoder_weights=None, classes=2, **options)

    return Case(f"segmentation {architecture}", model, MASKS, CE)


def dice() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.losses.DiceLoss("binary")


def focal() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.losses.FocalLoss("binary")


def small_net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1))


class Features(nn.Module):
    """A frozen body of timm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = timm.create_model("resnet10t", pretrained=False, num_classes=0)
        self.body.requires_grad_(requires_grad=False)
        self.last = nn.Linear(512, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


def mixed_up(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    mix = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=3, label_smoothing=0.1)
    x, target = mix(batch["x"].clone(), batch["c"])
    return SoftTargetCrossEntropy()(model(x), target)


def timm_optimizer(name: str) -> Case:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2([*parameters], opt=name, lr=0.01)

    return Case(
        f"timm optimizer {name}",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 3)),
        SMALL,
        CE,
        optimizer,
        # LAMB divides by the norm of a step, which is rounded.
        twice_tolerance=1e-4 if name == "lamb" else 1e-5,
    )


def of_monai(name: str, **options: Any) -> Any:
    """Return a function that makes a network of MONAI by its name."""

    def model() -> nn.Module:
        import monai.networks.nets

        return getattr(monai.networks.nets, name)(
            spatial_dims=3, in_channels=1, out_channels=2, **options
        )

    return model


def dice_of_monai() -> nn.Module:
    import monai.losses

    return monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)


class OpenClip(nn.Module):
    """A small CLIP of open_clip, which returns the embeddings of image and text."""

    def __init__(self) -> None:
        super().__init__()
        import open_clip

        vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 8}
        text = {"context_length": 8, "vocab_size": 30, "width": 16, "heads": 2, "layers": 1}
        self.body = open_clip.CLIP(embed_dim=8, vision_cfg=vision, text_cfg=text)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(image, text)[:2]


def clip_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    import open_clip

    del ctx
    image, text = model(batch["image"], batch["text"])
    return open_clip.ClipLoss()(image, text, torch.tensor(10.0))


class FirstOutput(nn.Module):
    """The output of a segmentation model of torchvision, which returns a dict."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)["out"]


CASES = [
    *map(
        of_torchvision,
        (
            "resnet18",
            "shufflenet_v2_x0_5",
            "mnasnet0_5",
            "mobilenet_v2",
            "mobilenet_v3_small",
            "squeezenet1_1",
            "efficientnet_b0",
            "regnet_y_400mf",
        ),
    ),
    of_torchvision("densenet121", memory_efficient=False),
    Case(
        "torchvision SwinTransformer",
        lambda: torchvision.models.SwinTransformer(
            [4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=3, stochastic_depth_prob=0.0
        ),
        SMALL,
        CE,
    ),
    Case(
        "torchvision ConvNeXt",
        lambda: torchvision.models.ConvNeXt(
            [
                torchvision.models.convnext.CNBlockConfig(8, 16, 1),
                torchvision.models.convnext.CNBlockConfig(16, None, 1),
            ],
            num_classes=3,
        ),
        SMALL,
        CE,
    ),
    Case(
        "torchvision VisionTransformer",
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=3),
        SMALL,
        CE,
        sgd,
    ),
    Case(
        "torchvision transforms in forward",
        lambda: nn.Sequential(
            torchvision.transforms.v2.RandomHorizontalFlip(0.5),
            torchvision.transforms.v2.Normalize([0.0] * 3, [1.0] * 3),
            nn.Flatten(),
            nn.Linear(3072, 3),
        ),
        SMALL,
        CE,
        apart="random flips",
    ),
    Case(
        "torchvision FCN",
        lambda: FirstOutput(
            torchvision.models.segmentation.lraspp_mobilenet_v3_large(
                weights=None, weights_backbone=None, num_classes=2
            )
        ),
        MASKS,
        CE,
    ),
    *map(
        of_timm,
        (
            "resnet10t",
            "mobilenetv3_small_050",
            "efficientnet_lite0",
            "ghostnet_050",
            "convnext_atto",
            "repvgg_a0",
            "mixnet_s",
            "lcnet_035",
        ),
    ),
    of_timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2),
    of_timm("deit_tiny_patch16_224", img_size=32, patch_size=8, depth=2),
    Case(
        "timm MlpMixer",
        lambda: timm.models.mlp_mixer.MlpMixer(3, 32, patch_size=8, num_blocks=2, embed_dim=16),
        SMALL,
        CE,
    ),
    Case(
        "timm with stochastic depth",
        lambda: timm.create_model(
            "vit_tiny_patch16_224",
            pretrained=False,
            num_classes=3,
            img_size=32,
            patch_size=8,
            depth=2,
            drop_path_rate=0.2,
        ),
        SMALL,
        CE,
        apart=DROPS_PATHS,
    ),
    Case("timm frozen body", Features, SMALL, CE, apart=BATCHES),
    Case(
        "timm mixup",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 3)),
        SMALL,
        None,
        step=mixed_up,
        apart="random numbers",
    ),
    *map(timm_optimizer, ("adamp", "lamb", "lion", "adan", "nadamw", "madgrad", "lars", "adopt")),
    Case(
        "MONAI UNet",
        of_monai("UNet", channels=(4, 8), strides=(2,)),
        VOLUMES,
        dice_of_monai,
        adam,
        options={"label_shapes": [[1, 8, 8, 8]]},
        apart="a ratio of sums over the batch",
    ),
    Case(
        "MONAI SegResNet",
        of_monai("SegResNet", init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
        VOLUMES,
        dice_of_monai,
        adam,
        options={"label_shapes": [[1, 8, 8, 8]]},
        apart="a ratio of sums over the batch",
    ),
    Case(
        "open_clip CLIP",
        OpenClip,
        Data({"image": floats(3, 32, 32), "text": whole(30, 8)}),
        None,
        adam,
        step=clip_step,
        apart="compares the rows of a batch",
    ),
    *map(of_smp, ("Unet", "FPN", "Linknet", "PSPNet", "DeepLabV3Plus")),
    Case(
        "segmentation DiceLoss",
        lambda: small_net(1),
        MASK,
        dice,
        apart="a ratio of sums over the batch",
    ),
    Case("segmentation FocalLoss", lambda: small_net(1), MASK, focal),
]
