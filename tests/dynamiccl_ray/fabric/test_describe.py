"""What a policy is told of a communicator: of all ranks of a job, of one node, of one rank a node."""

from __future__ import annotations

import pytest

from dynamiccl_ray.fabric.describe import described, topology_of
from dynamiccl_ray.fabric.presets import find_cluster

TOLD = {"intra": "nvlink", "inter": "ib", "nvls": True, "tier_max": 2}


def test_a_whole_job_is_described_alike_by_its_cluster_and_by_a_person() -> None:
    cluster = find_cluster("dgx-h100-ndr")
    whole = topology_of(cluster, 4)
    assert (whole.ranks, whole.nodes, whole.tier_max) == (32, 4, 2)
    assert whole.tier_mix == pytest.approx((0, 28 / 32, 4 / 32, 0, 0))
    assert described({**TOLD, "kind": whole.kind}, 4, 32) == whole


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_part_of_a_job_crosses_no_more_than_it_does(by_hand: bool) -> None:
    cluster = find_cluster("dgx-h100-ndr")

    def part(nodes: int, ranks: int):  # type: ignore[no-untyped-def]
        return described(TOLD, nodes, ranks) if by_hand else topology_of(cluster, nodes, ranks)

    node, rail = part(1, 8), part(4, 4)
    assert (node.inter, node.tier_max, node.tier_mix) == ("none", 1, (0, 1, 0, 0, 0))
    assert (rail.inter, rail.tier_max, rail.tier_mix) == ("ib", 2, (0, 0, 1, 0, 0))
    assert (rail.ranks, rail.nodes) == (4, 4)
