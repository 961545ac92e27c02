"""Models by name: all of them can be built, accept their default input, and learn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from stepscope.errors import WorkloadError
from stepscope.workloads.frameworks.torch.model_names import MODEL_NAMES, TORCHVISION_VERSION
from stepscope.workloads.frameworks.torch.models import (
    Built,
    Shape,
    build_model,
    model_names,
    parameters_of,
    shape_of,
)
from stepscope.workloads.spec import Workload, make_workload

NAMES = model_names()
ONE_OF_EACH_FAMILY = (
    "alexnet",
    "cnn",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "lstm",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mvit_v1_b",
    "r3d_18",
    "regnet_x_400mf",
    "resnet18",
    "resnext50_32x4d",
    "s3d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin3d_t",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_32",
    "wide_resnet50_2",
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class WeightsOnMeta(TorchFunctionMode):
    """Create weights on the meta device, without memory: layers create them with torch.empty."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        device = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **device})


def on_meta(name: str) -> Any:
    """Create everything on the meta device, except for regnets: they compute their widths with
    tensors and need the values."""
    return WeightsOnMeta() if name.startswith("regnet") else torch.device("meta")


def build(name: str, **settings: Any) -> tuple[Built, Shape]:
    workload = make_workload(name, settings)
    shape = shape_of(workload)
    return build_model(workload, shape), shape


def batch_of(shape: Shape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(shape.classes, (count,))
    if shape.kind == "tokens":
        return torch.randint(shape.vocabulary, (count, shape.sequence_length)), labels
    frames = (shape.frames,) if shape.kind == "clip" else ()
    return torch.rand(count, 3, *frames, shape.size, shape.size), labels


def meta_loss(name: str) -> torch.Tensor:
    """The loss of two samples of the default shape on the meta device."""
    with on_meta(name):
        built, shape = build(name)
    with torch.device("meta"), torch.no_grad():
        return built.loss(built.model.to("meta"), batch_of(shape, 2))


@pytest.mark.parametrize("name", NAMES)
def test_every_model_can_be_built(name: str) -> None:
    with on_meta(name):
        built, _ = build(name, classes=7)
    sizes = [parameter.shape[0] for parameter in built.model.parameters()]
    assert 7 in sizes, "the classes of the last layer"
    assert built.model.training


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_one_model_of_each_family_accepts_its_default_shape(name: str) -> None:
    assert meta_loss(name).shape == ()


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*NAMES} - {*ONE_OF_EACH_FAMILY}))
def test_all_other_models_accept_their_default_shape(name: str) -> None:
    assert meta_loss(name).shape == ()


def test_names_are_the_classification_models_of_torchvision() -> None:
    from torchvision import models

    assert {"cnn", "lstm", "resnet50", "r3d_18"} <= set(NAMES)
    for name in {*NAMES} - {"cnn", "lstm"}:
        assert callable(models.get_model_builder(name))
    assert not [name for name in NAMES if re.search("quantized|rcnn|raft|deeplab", name)]


def test_the_table_of_names_matches_torchvision() -> None:
    import torchvision

    if torchvision.__version__.partition("+")[0] != TORCHVISION_VERSION:
        pytest.skip(f"the table is for torchvision {TORCHVISION_VERSION}")
    assert sorted(MODEL_NAMES) == NAMES


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("cnn", {}, Shape("image", 10, size=32)),
        ("cnn", {"data": "cifar100"}, Shape("image", 100, size=32)),
        ("cnn", {"data": "loader-only:cifar100"}, Shape("image", 100, size=32)),
        ("cnn", {"data": "cifar100", "classes": 20}, Shape("image", 20, size=32)),
        ("resnet50", {}, Shape("image", 1000, size=224)),
        ("resnet50", {"image_size": 128, "classes": 5}, Shape("image", 5, size=128)),
        ("inception_v3", {}, Shape("image", 1000, size=299)),
        ("efficientnet_b7", {}, Shape("image", 1000, size=600)),
        ("vit_h_14", {}, Shape("image", 1000, size=224)),
        ("swin_v2_t", {}, Shape("image", 1000, size=256)),
        ("r3d_18", {}, Shape("clip", 400, size=112, frames=16)),
        ("r3d_18", {"frames": 8}, Shape("clip", 400, size=112, frames=8)),
        ("mvit_v2_s", {}, Shape("clip", 400, size=224, frames=16)),
        ("lstm", {}, Shape("tokens", 10, sequence_length=200, vocabulary=10_000)),
        (
            "lstm",
            {"sequence_length": 50},
            Shape("tokens", 10, sequence_length=50, vocabulary=10_000),
        ),
    ],
)
def test_shapes(name: str, settings: dict[str, Any], shape: Shape) -> None:
    assert shape_of(make_workload(name, settings)) == shape


@pytest.mark.parametrize(
    ("name", "count"), [("cnn", 89_450), ("resnet18", 11_689_512), ("r3d_18", 33_371_472)]
)
def test_parameters(name: str, count: int) -> None:
    with on_meta(name):
        assert parameters_of(build(name)[0].model) == count


@pytest.mark.parametrize("size", [18, 31, 64])
def test_the_cnn_accepts_other_sizes(size: int) -> None:
    built, shape = build("cnn", image_size=size)
    assert built.loss(built.model, batch_of(shape, 2)).isfinite()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "alexnet",
            {"image_size": 16},
            "32 images of 16×16 pixels: .* default input is .* 224×224",
        ),
        ("vit_b_16", {"image_size": 225}, "Input shape indivisible by patch size"),
        ("maxvit_t", {"image_size": 100}, "not divisible by partition size"),
        ("cnn", {"image_size": 17}, "cannot train with a batch of 32 images of 17×17"),
        ("inception_v3", {"batch_size": 1}, "Expected more than 1 value per channel"),
        ("mvit_v1_b", {"frames": 8}, "clips of 8 frames of 224×224 pixels: .* input is clips"),
        ("s3d", {"image_size": 112}, "smaller than kernel size"),
    ],
)
def test_invalid_shapes(name: str, settings: dict[str, Any], message: str) -> None:
    with on_meta(name), pytest.raises(WorkloadError, match=message):
        build(name, **settings)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("cnn", "frames"), ("resnet18", "sequence_length"), ("lstm", "image_size")],
)
def test_a_setting_without_effect_is_an_error(name: str, setting: str) -> None:
    option = "--" + setting.replace("_", "-")
    with pytest.raises(
        WorkloadError, match=f"`{option}` has no effect on {name}, which needs .*Remove {option}"
    ):
        shape_of(make_workload(name, {setting: 20}))


def test_torchvision_decides_about_names_that_are_not_in_the_table() -> None:
    with pytest.raises(
        WorkloadError, match=r"Unknown model 'resnet5O'\. Did you mean 'resnet50'\?"
    ):
        shape_of(Workload("resnet5O"))


def test_auxiliary_classifiers_have_less_weight() -> None:
    built, shape = build("googlenet", image_size=64, classes=3)
    images, labels = batch_of(shape, 2)
    torch.manual_seed(1)
    loss = built.loss(built.model, (images, labels))
    torch.manual_seed(1)
    outputs = built.model(images)
    main, *others = (torch.nn.functional.cross_entropy(output, labels) for output in outputs)
    assert len(others) == 2
    assert loss.item() == pytest.approx((main + 0.3 * sum(others)).item(), rel=1e-4)


@pytest.mark.parametrize(("name", "settings"), [("cnn", {}), ("lstm", {"sequence_length": 5})])
def test_models_learn(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    built, shape = build(name, **settings)
    inputs, _ = batch_of(shape, 16)
    labels = torch.arange(16) % 2
    batch = inputs * labels.view(-1, *[1] * (inputs.dim() - 1)), labels
    optimizer = torch.optim.Adam(built.model.parameters(), lr=0.003)
    losses = []
    for _ in range(12):
        loss = built.loss(built.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
