"""Transformers by formula, layer by layer as their published checkpoints are laid out.

BERT: Devlin et al. 2019 (arXiv:1810.04805). GPT-2: Radford et al. 2019. Llama 3: Grattafiori et al. 2024
(arXiv:2407.21783). Mixtral 8x7B: Jiang et al. 2024 (arXiv:2401.04088). Phi-2: Microsoft 2023.
"""

from __future__ import annotations

from dynamiccl_ray.workloads.layers import Builder, Model

_HUGGING_FACE = "Hugging Face transformers, num_parameters() of the checkpoint's configuration"


def bert(name: str, hidden: int, blocks: int, published: int, *, vocabulary: int = 30522, heads: bool = False) -> Model:
    """The encoder with its pooler; ``heads`` adds those of pre-training (masked words, next sentence).

    The masked-word decoder shares the word embedding, so it is work without a tensor of its own, except its bias.
    """
    b = Builder()
    b.add("embeddings", word=(vocabulary, hidden), position=(512, hidden), token_type=(2, hidden))
    b.norm("embeddings.norm", hidden)
    for i in range(blocks):
        for part in ("query", "key", "value"):
            b.linear(f"block{i}.{part}", hidden, hidden)
        b.add(f"block{i}.attention", attention_flops=4.0 * hidden)
        b.linear(f"block{i}.output", hidden, hidden)
        b.norm(f"block{i}.attention_norm", hidden)
        b.linear(f"block{i}.up", hidden, 4 * hidden)
        b.linear(f"block{i}.down", 4 * hidden, hidden)
        b.norm(f"block{i}.norm", hidden)
    # The pooler and the next-sentence head see one token of a sequence: no arithmetic to speak of.
    b.add("pooler", weight=(hidden, hidden), bias=(hidden,))
    if heads:
        b.linear("transform", hidden, hidden)
        b.norm("transform.norm", hidden)
        b.add("decoder", flops=2.0 * hidden * vocabulary, bias=(vocabulary,))
        b.add("next_sentence", weight=(2, hidden), bias=(2,))
    return _model(name, b, published, _HUGGING_FACE, hidden, blocks)


def gpt2(name: str, hidden: int, blocks: int, published: int) -> Model:
    """Vocabulary of 50257, 1024 positions; the output layer shares the word embedding."""
    b = Builder()
    b.add("embeddings", word=(50257, hidden), position=(1024, hidden))
    for i in range(blocks):
        b.norm(f"block{i}.norm1", hidden)
        b.linear(f"block{i}.qkv", hidden, 3 * hidden)
        b.add(f"block{i}.attention", attention_flops=4.0 * hidden)
        b.linear(f"block{i}.output", hidden, hidden)
        b.norm(f"block{i}.norm2", hidden)
        b.linear(f"block{i}.up", hidden, 4 * hidden)
        b.linear(f"block{i}.down", 4 * hidden, hidden)
    b.norm("norm", hidden)
    b.add("head", flops=2.0 * hidden * 50257)
    return _model(name, b, published, _HUGGING_FACE, hidden, blocks)


def llama(
    name: str,
    hidden: int,
    blocks: int,
    published: int,
    *,
    key_value: int,
    inner: int,
    vocabulary: int,
    experts: int = 0,
    active: int = 0,
) -> Model:
    """RMSNorm, grouped queries (``key_value`` is their total width), a gated feed-forward of width ``inner``.

    With ``experts`` the feed-forward is a mixture of them, ``active`` per token, behind a linear router.
    """
    b = Builder()
    b.add("embeddings", word=(vocabulary, hidden))
    for i in range(blocks):
        b.norm(f"block{i}.norm1", hidden, bias=False)
        b.linear(f"block{i}.query", hidden, hidden, bias=False)
        b.linear(f"block{i}.key", hidden, key_value, bias=False)
        b.linear(f"block{i}.value", hidden, key_value, bias=False)
        b.add(f"block{i}.attention", attention_flops=4.0 * hidden)
        b.linear(f"block{i}.output", hidden, hidden, bias=False)
        b.norm(f"block{i}.norm2", hidden, bias=False)
        if experts:
            b.linear(f"block{i}.router", hidden, experts, bias=False)
        for e in range(max(experts, 1)):
            share = active / experts if experts else 1.0
            b.add(
                f"block{i}.expert{e}" if experts else f"block{i}.feed_forward",
                flops=6.0 * hidden * inner * share,
                expert=e if experts else -1,
                gate=(inner, hidden),
                up=(inner, hidden),
                down=(hidden, inner),
            )
    b.norm("norm", hidden, bias=False)
    b.linear("head", hidden, vocabulary, bias=False)
    return _model(name, b, published, _HUGGING_FACE, hidden, blocks, experts, active)


def phi2() -> Model:
    """Attention and feed-forward side by side behind one norm; every linear layer has a bias."""
    hidden, blocks, vocabulary = 2560, 32, 51200
    b = Builder()
    b.add("embeddings", word=(vocabulary, hidden))
    for i in range(blocks):
        b.norm(f"block{i}.norm", hidden)
        for part in ("query", "key", "value"):
            b.linear(f"block{i}.{part}", hidden, hidden)
        b.add(f"block{i}.attention", attention_flops=4.0 * hidden)
        b.linear(f"block{i}.output", hidden, hidden)
        b.linear(f"block{i}.up", hidden, 4 * hidden)
        b.linear(f"block{i}.down", 4 * hidden, hidden)
    b.norm("norm", hidden)
    b.linear("head", hidden, vocabulary)
    return _model("Phi-2", b, 2_779_683_840, _HUGGING_FACE, hidden, blocks)


def _model(
    name: str, b: Builder, published: int, source: str, hidden: int, blocks: int, experts: int = 0, active: int = 0
) -> Model:
    return Model(
        name=name,
        unit="token",
        layers=tuple(b.layers),
        tensors=tuple(b.tensors),
        published=published,
        source=source,
        hidden=hidden,
        blocks=blocks,
        experts=experts,
        active_experts=active,
    )
