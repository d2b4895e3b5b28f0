"""Parameter counts from the formulas against the published ones, and the arithmetic."""

from __future__ import annotations

import pytest

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.models import MODEL_NAMES, model, pretraining_bert


@pytest.mark.parametrize("name", [n for n in MODEL_NAMES if n != "DLRM"])
def test_counts_are_exactly_the_published_ones(name: str) -> None:
    assert model(name).parameters == model(name).published


def test_dlrm_has_about_the_published_count() -> None:
    dlrm = model("DLRM")
    assert dlrm.parameters == pytest.approx(dlrm.published, rel=0.01)
    assert dlrm.elements[: dlrm.tables].sum() > 0.999 * dlrm.parameters


@pytest.mark.parametrize(
    ("name", "gflops"),
    # Published multiply-adds, twice: 4.09 G and 15.47 G (torchvision's GFLOPS).
    [("ResNet-50", 2 * 4.09), ("VGG-16", 2 * 15.47)],
)
def test_flops_of_convolutional_networks(name: str, gflops: float) -> None:
    assert model(name).forward_flops().sum() / 1e9 == pytest.approx(gflops, rel=0.01)


@pytest.mark.parametrize("name", ["Llama-3-8B", "GPT-2 XL", "Phi-2"])
def test_flops_of_a_transformer_are_two_per_parameter_and_token(name: str) -> None:
    net = model(name)
    embedding = net.elements[0] if "GPT" not in name else net.elements[1]  # a tied embedding does work as the head
    assert net.forward_flops(1).sum() == pytest.approx(2 * (net.parameters - embedding), rel=0.01)
    assert net.forward_flops(2).sum() > 2 * net.forward_flops(1).sum()  # attention grows with the square


def test_a_mixture_works_with_its_active_experts_only() -> None:
    net = model("Mixtral-8x7B")
    assert net.forward_flops(1).sum() == pytest.approx(2 * 12.8e9, rel=0.02)  # "13B active", embedding excluded
    assert len({t.expert for t in net.tensors}) == 9


def test_pretraining_heads_add_little() -> None:
    for name, count in (("BERT-Base", 110e6), ("BERT-Large", 336e6)):
        assert pretraining_bert(name).parameters == pytest.approx(count, rel=0.002)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'AlexNet'; there are ResNet-50"):
        model("AlexNet")
