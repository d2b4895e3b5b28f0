"""ResNet-50 (He et al. 2016, arXiv:1512.03385, as in torchvision) and VGG-16 (Simonyan, Zisserman 2015, 1409.1556)."""

from __future__ import annotations

from dynamiccl_ray.workloads.layers import Builder, Model

_TORCHVISION = "torchvision model documentation, num_params"


def resnet50() -> Model:
    """Bottleneck blocks (3, 4, 6, 3) on 224 x 224 images; the stride sits in the 3x3 convolution."""
    b = Builder()
    _conv(b, "conv1", 3, 64, kernel=7, side=112)
    b.norm("bn1", 64)
    channels = 64
    for stage, (count, width, side) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)), start=1):
        for block in range(count):
            name = f"layer{stage}.{block}"
            # The 1x1 convolution before the stride still works on the larger image.
            first_side = side * 2 if block == 0 and stage > 1 else side
            _conv(b, f"{name}.conv1", channels, width, kernel=1, side=first_side)
            b.norm(f"{name}.bn1", width)
            _conv(b, f"{name}.conv2", width, width, kernel=3, side=side)
            b.norm(f"{name}.bn2", width)
            _conv(b, f"{name}.conv3", width, 4 * width, kernel=1, side=side)
            b.norm(f"{name}.bn3", 4 * width)
            if block == 0:
                _conv(b, f"{name}.downsample", channels, 4 * width, kernel=1, side=side)
                b.norm(f"{name}.downsample_bn", 4 * width)
            channels = 4 * width
    b.linear("fc", channels, 1000)
    return Model(
        name="ResNet-50",
        unit="sample",
        layers=tuple(b.layers),
        tensors=tuple(b.tensors),
        published=25_557_032,
        source=_TORCHVISION,
    )


def vgg16() -> Model:
    """Configuration D, without batch normalisation, on 224 x 224 images."""
    b = Builder()
    channels, side = 3, 224
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), start=1):
        for i in range(count):
            _conv(b, f"conv{stage}_{i + 1}", channels, width, kernel=3, side=side, bias=True)
            channels = width
        side //= 2
    b.linear("fc6", channels * side * side, 4096)
    b.linear("fc7", 4096, 4096)
    b.linear("fc8", 4096, 1000)
    return Model(
        name="VGG-16",
        unit="sample",
        layers=tuple(b.layers),
        tensors=tuple(b.tensors),
        published=138_357_544,
        source=_TORCHVISION,
    )


def _conv(b: Builder, name: str, inputs: int, outputs: int, *, kernel: int, side: int, bias: bool = False) -> None:
    """``side`` is the width of the square output."""
    flops = 2.0 * inputs * outputs * kernel**2 * side**2
    shape = (outputs, inputs, kernel, kernel)
    if bias:
        b.add(name, flops, weight=shape, bias=(outputs,))
    else:
        b.add(name, flops, weight=shape)
