"""cnn, alexnet and resnet: known sizes, shapes from small to large, options and their effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError
from echelon.models.alexnet import AlexNet, AlexNetOptions
from echelon.models.cnn import CNN, CNNOptions
from echelon.models.layers import BatchNorm2d
from echelon.models.resnet import Residual, ResNet, ResNetOptions

Image = tuple[int, int, int]


def cnn(image: Image, outputs: int = 10, **values: Any) -> nn.Module:
    return CNN(image, outputs, CNNOptions.model_validate(values))


def alexnet(image: Image, outputs: int = 10, **values: Any) -> nn.Module:
    return AlexNet(image, outputs, AlexNetOptions.model_validate(values))


def resnet(image: Image, outputs: int = 10, **values: Any) -> nn.Module:
    return ResNet(image, outputs, ResNetOptions.model_validate(values))


def parameters(family: Callable[..., nn.Module], *args: Any, **values: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in family(*args, **values).parameters())


PHOTO = (3, 224, 224)


@pytest.mark.parametrize(
    ("depth", "count"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_resnets_have_the_sizes_of_the_paper(depth: int, count: int) -> None:
    assert parameters(resnet, PHOTO, 1000, depth=depth) == count


def test_the_small_resnet_has_the_size_known_for_cifar() -> None:
    assert parameters(resnet, (3, 32, 32), 10) == 11_173_962


def test_alexnet_has_its_known_size() -> None:
    assert parameters(alexnet, PHOTO, 1000) == 61_100_840


def test_lenet_has_its_known_size() -> None:
    lenet = {"channels": (6, 16), "kernel": 5, "padding": "valid", "hidden": (120, 84)}
    assert parameters(cnn, (1, 32, 32), 10, **lenet) == 61_706


@pytest.mark.parametrize("image", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 33, 47)])
@pytest.mark.parametrize("family", [cnn, alexnet])
def test_small_images_of_any_shape_are_taken(family: Any, image: Image) -> None:
    assert family(image, 7)(torch.randn(2, *image)).shape == (2, 7)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("image", [(1, 8, 8), (3, 20, 33)])
def test_resnets_take_small_images(depth: int, image: Image) -> None:
    assert resnet(image, 7, depth=depth)(torch.randn(2, *image)).shape == (2, 7)


@pytest.mark.parametrize("image", [(3, 64, 64), (3, 96, 70)])
def test_alexnet_takes_large_images(image: Image) -> None:
    assert alexnet(image, 7, hidden=32)(torch.randn(1, *image)).shape == (1, 7)


def test_grey_images_need_no_channel() -> None:
    model = cnn((1, 8, 8)).eval()
    x = torch.randn(3, 8, 8)
    torch.testing.assert_close(model(x), model(x.unsqueeze(1)))


@pytest.mark.parametrize(
    ("stem", "side", "stride"),
    [("auto", 64, 1), ("auto", 65, 2), ("large", 64, 2), ("small", 65, 1)],
)
def test_the_stem_goes_with_the_size_of_the_image(stem: str, side: int, stride: int) -> None:
    with torch.device("meta"):
        model = resnet((3, side, side), stem=stem)
    first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
    assert first.stride == (stride, stride)


def test_a_resnet_is_a_list_of_blocks() -> None:
    model = resnet((3, 8, 8)).eval()
    assert isinstance(model, nn.Sequential)
    assert sum(isinstance(block, Residual) for block in model) == 8
    x = torch.randn(2, 3, 8, 8)
    blocks = list(model)
    first, second = nn.Sequential(*blocks[:5]), nn.Sequential(*blocks[5:])
    assert torch.equal(second(first(x)), model(x))


def test_a_residual_block_adds_to_what_it_was_given() -> None:
    block = Residual(64, 64, 1, ResNetOptions(depth=18)).eval()
    last = [part for part in block.modules() if isinstance(part, BatchNorm2d)][-1]
    nn.init.zeros_(last.weight)
    x = torch.rand(2, 64, 4, 4)
    torch.testing.assert_close(block(x), x)


def kinds(model: nn.Module) -> set[type]:
    return {type(part) for part in model.modules()}


@pytest.mark.parametrize("family", [cnn, alexnet, resnet])
def test_options_choose_the_parts(family: Any) -> None:
    with torch.device("meta"):
        chosen = kinds(family((3, 32, 32), norm="layer", activation="tanh", dropout=0.25))
        plain = kinds(family((3, 32, 32), norm="none", dropout=0.0))
    assert {nn.GroupNorm, nn.Tanh, nn.Dropout} <= chosen
    assert nn.ReLU not in chosen
    assert not {nn.GroupNorm, BatchNorm2d, nn.Dropout} & plain


@pytest.mark.parametrize("family", [cnn, alexnet, resnet])
def test_batch_norm_leaves_no_bias_before_it(family: Any) -> None:
    with torch.device("meta"):
        model = family((3, 32, 32), norm="batch")
    parts = list(model.modules())
    norms = [at for at, part in enumerate(parts) if isinstance(part, BatchNorm2d)]
    assert len(norms) >= 2
    for at in norms:
        convolution = parts[at - 1]
        assert isinstance(convolution, nn.Conv2d)
        assert convolution.bias is None


def test_dropout_is_off_in_evaluation() -> None:
    x = torch.randn(2, 3, 8, 8)
    for model in (cnn((3, 8, 8), dropout=0.5), alexnet((3, 8, 8), hidden=64)):
        model.eval()
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.equal(model(x), model(x))


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    """Images are channels last within; fused optimizers rely on gradients being like weights."""
    model = cnn((3, 8, 8))
    torch.autograd.backward(model(torch.randn(4, 3, 8, 8)).sum())
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.stride() == p.stride()


def test_initial_scores_do_not_explode_with_depth() -> None:
    assert resnet((3, 8, 8), depth=50)(torch.randn(8, 3, 8, 8)).std().item() < 5


def test_more_pooling_than_there_is_image_is_refused() -> None:
    message = "3 convolutions with pooling leave nothing of an image side of 7"
    with pytest.raises(ConfigError, match=message) as caught:
        cnn((1, 7, 9), channels=(4, 4, 4))
    assert caught.value.path == ("model", "channels")
    with pytest.raises(ConfigError, match="leave nothing of an image side of 9"):
        cnn((1, 28, 9), channels=(4, 4), kernel=5, padding="valid")


def test_an_image_too_small_for_alexnet_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8×8, not 7×30") as caught:
        alexnet((1, 7, 30))
    assert caught.value.path == ("model", "name")
