"""What a model is to the network: tensors in forward order, and how much work each layer is.

FLOPs count a multiply-add as two and only matrix products and convolutions; the rest of a layer moves memory, and is
under 2% of the arithmetic of every model here. Backward costs twice the forward: one product for the gradient of the
input, one for that of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

Unit = Literal["sample", "token"]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    layer: int
    """Index into the model's layers: its gradient is ready when that layer's backward ends. A tied tensor belongs to
    the first layer that uses it, because the last contribution to its gradient comes from there."""

    expert: int = -1
    """Which expert of its block it belongs to; -1 for none."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Work of one layer in the forward pass."""

    name: str
    flops: float
    """Per sample, or per token where the model's unit is the token."""
    attention_flops: float = 0.0
    """Per token and position that it attends to: the products of queries with keys, and of scores with values."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A network by formula; ``published`` is the count that its authors or their checkpoint state."""

    name: str
    unit: Unit
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    """In forward order; gradients come in the reverse order."""
    published: int
    source: str
    hidden: int = 0
    """Width of the activations between blocks; 0 where the model has no blocks."""
    blocks: int = 0
    experts: int = 0
    active_experts: int = 0
    tables: int = 0
    """Embedding tables of a recommender, which are sharded and exchanged by all-to-all, not all-reduced."""

    @cached_property
    def elements(self) -> npt.NDArray[np.int64]:
        """Elements of each tensor, shape (tensors,)."""
        return np.array([t.elements for t in self.tensors], dtype=np.int64)

    @property
    def parameters(self) -> int:
        """Sum over the tensors."""
        return int(self.elements.sum())

    def forward_flops(self, sequence_length: int = 1) -> npt.NDArray[np.float64]:
        """Forward FLOPs of each layer for one sample, shape (layers,).

        A sample of a language model is ``sequence_length`` tokens, each of which attends to all of them: causal models
        are counted like BERT, as their dense kernels work.
        """
        tokens = sequence_length if self.unit == "token" else 1
        return np.array([tokens * (x.flops + sequence_length * x.attention_flops) for x in self.layers])


@dataclass
class Builder:
    """Collects layers and their tensors in forward order."""

    layers: list[Layer] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(
        self, name: str, flops: float = 0.0, attention_flops: float = 0.0, expert: int = -1, **shapes: tuple[int, ...]
    ) -> None:
        """One layer, and its tensors as keyword arguments: ``weight=(out, in)``."""
        for tensor, shape in shapes.items():
            self.tensors.append(Tensor(name=f"{name}.{tensor}", shape=shape, layer=len(self.layers), expert=expert))
        self.layers.append(Layer(name=name, flops=flops, attention_flops=attention_flops))

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> None:
        """A dense layer: 2 x inputs x outputs FLOPs per row."""
        flops = 2.0 * inputs * outputs
        if bias:
            self.add(name, flops, weight=(outputs, inputs), bias=(outputs,))
        else:
            self.add(name, flops, weight=(outputs, inputs))

    def norm(self, name: str, width: int, *, bias: bool = True) -> None:
        """Layer or batch normalisation, or RMSNorm without a bias."""
        if bias:
            self.add(name, weight=(width,), bias=(width,))
        else:
            self.add(name, weight=(width,))
