"""What the equations leave, put back where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.fabric.corrections import Corrections, RatioCurve, usual_variant
from dynamiccl_ray.fabric.crossover import crossover
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import CHANNEL_VALUES, OWN_PAIR, Algorithm, Collective, Protocol, pair_index

ALL_REDUCE, RING, TREE = int(Collective.ALL_REDUCE), int(Algorithm.RING), int(Algorithm.TREE)
LL, SIMPLE = int(Protocol.LL), int(Protocol.SIMPLE)


def curve(setting: str, *ratios: float, nodes: int = 2, variant: str = "") -> RatioCurve:
    return RatioCurve(
        variant=variant,
        collective=ALL_REDUCE,
        setting=setting,
        nodes=nodes,
        gpus_per_node=8,
        log2_bytes=tuple(10.0 + 10 * i for i in range(len(ratios))),
        log_ratio=ratios,
    )


def test_a_curve_is_straight_between_sizes_and_level_beyond_them() -> None:
    found = Corrections([curve("ring/ll", 0.0, 1.0)], 2, 8)
    np.testing.assert_allclose(
        found.log_ratio(ALL_REDUCE, [1, 1 << 10, 1 << 15, 1 << 20, 1 << 30], RING, LL, 4), [0, 0, 0.5, 1, 1]
    )
    assert found.log_ratio(ALL_REDUCE, 1 << 20, TREE, LL, 4) == 0, "never measured"
    assert found.log_ratio(int(Collective.BROADCAST), 1 << 20, RING, LL, 4) == 0
    assert found.own_log_ratio(ALL_REDUCE, np.array([1 << 20])) is None


def test_a_scale_in_between_has_of_both() -> None:
    found = Corrections([curve("ring/ll", 0.0, nodes=2), curve("ring/ll", 1.0, nodes=8)], 4, 8)
    assert found.log_ratio(ALL_REDUCE, 1 << 10, RING, LL, 4) == pytest.approx(0.5)


def test_channels_that_were_asked_for_go_before_nccls_own_and_these_before_others() -> None:
    curves = [curve("ring/ll", 0.1), curve("ring/ll/8", 0.8), curve("tree/ll/4", 0.4), curve("tree/ll/16", 1.6)]
    found = Corrections(curves, 2, 8)
    assert found.log_ratio(ALL_REDUCE, 1 << 10, RING, LL, [8, 4, 1]) == pytest.approx([0.8, 0.1, 0.1])
    assert found.log_ratio(ALL_REDUCE, 1 << 10, TREE, LL, [1, 4, 32]) == pytest.approx([0.4, 0.4, 1.6])


def test_half_of_a_pair_counts_where_the_pair_was_not_measured() -> None:
    found = Corrections([curve("ring/any", 0.3), curve("ring/ll", 0.1)], 2, 8)
    assert found.log_ratio(ALL_REDUCE, 1 << 10, RING, [LL, SIMPLE], 4) == pytest.approx([0.1, 0.3])


def test_the_variant_that_most_was_measured_of_is_usual() -> None:
    assert usual_variant([curve("nccl", 0.0, variant="a"), curve("nccl", 0.0, 0.0, variant="b")]) == "b"
    assert usual_variant([]) == ""


def test_a_cluster_with_curves_is_priced_by_them() -> None:
    cluster = find_cluster("dgx-h100-ndr")
    curves = (curve("ring/simple/8", np.log(3.0)), curve("nccl", np.log(2.0)))
    sizes = np.array([1 << 16, 1 << 24])
    before = Physics(cluster, 2).time_us(Collective.ALL_REDUCE, sizes)
    after = Physics(cluster.model_copy(update={"corrections": curves}), 2).time_us(Collective.ALL_REDUCE, sizes)
    pair, eight = pair_index(RING, SIMPLE), CHANNEL_VALUES.index(8)
    np.testing.assert_allclose(after[:, pair, eight], 3 * before[:, pair, eight])
    np.testing.assert_allclose(after[:, pair_index(TREE, LL)], before[:, pair_index(TREE, LL)])
    own = 2 * np.nanmin(before[:, 1:, 0], 1)
    np.testing.assert_allclose(after[:, OWN_PAIR, 0], own)


def test_nothing_is_better_than_nccls_own_choice_where_that_was_measured_to_be_the_best() -> None:
    cluster = find_cluster("dgx-h100-ndr").model_copy(update={"corrections": (curve("nccl", np.log(0.5)),)})
    found = crossover(cluster, [2], Collective.ALL_REDUCE, np.array([1 << 16]))
    assert found.ratio.tolist() == [[1.0]]
    assert [(row["best"], row["channels"]) for row in found.rows()] == [("nccl", 0)]
