"""Names of the models that PyTorch workloads can train.

The table is for checking names without importing torchvision, which takes seconds.
"""

from __future__ import annotations

from importlib import metadata

BUILT_IN = ("cnn", "lstm")
TORCHVISION_VERSION = "0.29.2"
"""The version of torchvision whose models are listed here."""
_IMAGE_MODELS = """
    alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161
    densenet169 densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3
    efficientnet_b4 efficientnet_b5 efficientnet_b6 efficientnet_b7 efficientnet_v2_l
    efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75
    mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf
    regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf
    regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf
    regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50 resnext101_32x8d
    resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
    shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s
    swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32
    vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
"""
_VIDEO_MODELS = "mc3_18 mvit_v1_b mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_b swin3d_s swin3d_t"
MODEL_NAMES = frozenset((*BUILT_IN, *_IMAGE_MODELS.split(), *_VIDEO_MODELS.split()))


def is_unknown(name: str) -> bool:
    """Whether there is certainly no model of this name.

    Other versions of torchvision may have other models, which only an import can show.
    """
    if name in MODEL_NAMES:
        return False
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return True
    return version.partition("+")[0] == TORCHVISION_VERSION or not name.isidentifier()
