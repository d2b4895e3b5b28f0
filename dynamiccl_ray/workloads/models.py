"""The models by name, and how much arithmetic they do per parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Final

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.convnets import resnet50, vgg16
from dynamiccl_ray.workloads.layers import Builder, Model
from dynamiccl_ray.workloads.transformers import bert, gpt2, llama, phi2

# Rows of the 26 tables of the Criteo terabyte set with indices taken modulo 40 million, as MLPerf training's DLRM has
# it (mlcommons/training, recommendation_v2 and facebookresearch/dlrm, --max-ind-range=40000000).
_CRITEO_ROWS: Final = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)


def dlrm() -> Model:
    """DLRM (Naumov et al. 2019, arXiv:1906.00091) as MLPerf trains it on Criteo's terabyte.

    13 dense features through 512-256-128, 26 tables of width 128, all pairs of the 27 vectors, then
    1024-1024-512-256-1.
    """
    b = Builder()
    for table, rows in enumerate(_CRITEO_ROWS):
        b.add(f"table{table}", weight=(rows, 128))
    for i, (inputs, outputs) in enumerate(pairwise((13, 512, 256, 128))):
        b.linear(f"bottom{i}", inputs, outputs)
    b.add("interaction", flops=2.0 * 27 * 27 * 128)
    for i, (inputs, outputs) in enumerate(pairwise((128 + 27 * 26 // 2, 1024, 1024, 512, 256, 1))):
        b.linear(f"top{i}", inputs, outputs)
    return Model(
        name="DLRM",
        unit="sample",
        layers=tuple(b.layers),
        tensors=tuple(b.tensors),
        published=24_000_000_000,
        source="MLPerf training's DLRM: about 24 billion, nearly all of them in the tables",
        hidden=128,
        tables=len(_CRITEO_ROWS),
    )


_LLAMA3 = {"key_value": 1024, "vocabulary": 128256}

_MODELS: Final[dict[str, Callable[[], Model]]] = {
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "BERT-Base": lambda: bert("BERT-Base", 768, 12, 109_482_240),
    "BERT-Large": lambda: bert("BERT-Large", 1024, 24, 335_141_888),
    "GPT-2": lambda: gpt2("GPT-2", 768, 12, 124_439_808),
    "GPT-2 Medium": lambda: gpt2("GPT-2 Medium", 1024, 24, 354_823_168),
    "GPT-2 Large": lambda: gpt2("GPT-2 Large", 1280, 36, 774_030_080),
    "GPT-2 XL": lambda: gpt2("GPT-2 XL", 1600, 48, 1_557_611_200),
    "Llama-3-8B": lambda: llama("Llama-3-8B", 4096, 32, 8_030_261_248, inner=14336, **_LLAMA3),
    "Llama-3-70B": lambda: llama("Llama-3-70B", 8192, 80, 70_553_706_496, inner=28672, **_LLAMA3),
    "Mixtral-8x7B": lambda: llama(
        "Mixtral-8x7B",
        4096,
        32,
        46_702_792_704,
        key_value=1024,
        inner=14336,
        vocabulary=32000,
        experts=8,
        active=2,
    ),
    "DLRM": dlrm,
    "Phi-2": phi2,
}

MODEL_NAMES: Final = tuple(_MODELS)


@cache
def model(name: str) -> Model:
    """The model called ``name``. Raises ConfigError with the names that exist."""
    if name not in _MODELS:
        raise ConfigError(f"no model is called {name!r}; there are {', '.join(MODEL_NAMES)}")
    return _MODELS[name]()


@cache
def pretraining_bert(name: str) -> Model:
    """BERT-Base or BERT-Large with the heads of pre-training and the vocabulary padded to 30528, a multiple of 8.

    This is what benchmarks of training run; its count is 0.5% above that of the bare encoder.
    """
    bare = model(name)
    return bert(f"{name} pre-training", bare.hidden, bare.blocks, bare.published, vocabulary=30528, heads=True)
