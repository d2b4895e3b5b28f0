"""Which cluster it is, by what NCCL predicts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynamiccl_ray.agent.observation import Context, Topology, relative_cost
from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.presets import find_cluster, preset_names
from dynamiccl_ray.fabric.recognise import presets, recognised, taken_for
from dynamiccl_ray.knobs import OWN_PAIR, Collective
from dynamiccl_ray.simulation.sampling import recognised_of, sample_scenarios, told_of

COLLECTIVE = np.repeat([Collective.ALL_REDUCE, Collective.ALL_GATHER], 3).astype(np.int64)
NBYTES = np.tile([1 << 14, 1 << 20, 1 << 26], 2)


def _cost(cluster: Cluster, nodes: int, collective: Int64 = COLLECTIVE, nbytes: Int64 = NBYTES) -> Float32:
    return relative_cost(cluster.nccl_belief(nodes).cost_table_us(collective, nbytes).reshape(len(nbytes), -1))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_known_by_what_nccl_predicts_on_it(name: str) -> None:
    cluster = find_cluster(name)
    nodes = 4 if cluster.inter is not None else 1
    cost = _cost(cluster, nodes)
    like = recognised(nodes * cluster.gpus_per_node, nodes, COLLECTIVE, NBYTES, cost)
    assert like is not None
    assert like.distance == pytest.approx(0, abs=1e-6)
    # Some presets differ in what NCCL does not know of.
    assert np.array_equal(_cost(like.cluster, nodes), cost)


def test_what_is_not_offered_and_what_is_cheapest_make_no_difference() -> None:
    """A variable of the environment may forbid a pair, the cheapest one, too."""
    cluster = find_cluster("dgx-h100-ndr")
    table = cluster.nccl_belief(4).cost_table_us(COLLECTIVE, NBYTES).reshape(len(NBYTES), -1)
    table[:, table.argmin(-1)] = -1
    like = recognised(32, 4, COLLECTIVE, NBYTES, relative_cost(table))
    assert like is not None
    assert like.cluster.name.startswith("dgx-h100-ndr")
    assert like.distance < 1e-5


def test_the_likest_of_others_is_found_and_how_far_it_is() -> None:
    others = [cluster for cluster in presets() if "h100" not in cluster.name]
    like = recognised(32, 4, COLLECTIVE, NBYTES, _cost(find_cluster("dgx-h100-ndr"), 4), others)
    assert like is not None
    assert "h100" not in like.cluster.name
    assert like.distance > 1e-3


@pytest.mark.parametrize("ranks", [33, 32])
def test_nothing_is_known_by_nothing(ranks: int) -> None:
    cost = _cost(find_cluster("dgx-h100-ndr"), 4) * (ranks == 33)
    assert recognised(ranks, 4, COLLECTIVE, NBYTES, cost) is None


def test_a_communicator_of_some_gpus_of_each_node_is_of_a_part_of_the_cluster() -> None:
    part = find_cluster("dgx-h100-ndr").part(2)
    like = recognised(8, 4, COLLECTIVE, NBYTES, _cost(part, 4), [find_cluster("dgx-h100-ndr")])
    assert like is not None
    assert like.cluster == part


def test_the_cluster_that_was_said_stands_unless_nccl_predicts_what_it_does_on_another() -> None:
    here, other, small = (find_cluster(name) for name in ("dgx-h100-ndr", "cloud-tcp", "l40s-pcie"))
    of = (32, 4, COLLECTIVE, NBYTES, _cost(here, 4))
    assert taken_for(here, *of) is None
    like = taken_for(other, *of)
    assert like is not None
    assert like.cluster.name.startswith("dgx-h100-ndr")
    # No other is any nearer.
    assert taken_for(other, *of, [other]) is None
    # It cannot have such a communicator.
    assert small.inter is None or small.gpus_per_node < 8
    assert taken_for(small, *of) is not None
    assert taken_for(other, *of[:4], np.zeros_like(of[4])) is None, "nothing is known"
    assert taken_for(None, *of) is not None


def test_a_description_that_is_a_little_off_stands() -> None:
    """NCCL on this machine believes in links that are a tenth faster than in the description."""
    described = find_cluster("dgx-h100-ndr")
    assert described.inter is not None
    faster = described.inter.model_copy(update={"nic_gb_per_s": 1.1 * described.inter.nic_gb_per_s})
    cost = _cost(described.model_copy(update={"inter": faster}), 4)
    assert taken_for(described, 32, 4, COLLECTIVE, NBYTES, cost) is None


def test_what_a_person_said_of_the_links_stands() -> None:
    cluster = find_cluster("dgx-h100-ndr")
    like = recognised(32, 4, COLLECTIVE, NBYTES, _cost(cluster, 4))
    assert like is not None
    assert like.topology(Topology(ranks=32, nodes=4)) == topology_of(cluster, 4)
    said = Topology(ranks=32, nodes=4, intra="pcie")
    assert like.topology(said) is said


def test_a_job_that_does_not_say_where_it_runs_is_told_what_one_that_says_is() -> None:
    (says,) = sample_scenarios(np.random.default_rng(0), [(find_cluster("cloud-tcp"), 4)], 1)
    silent = told_of(says, None)
    found = recognised_of(silent)
    assert found.prior is not None
    assert says.prior is not None
    assert np.array_equal(found.prior, says.prior, equal_nan=True)
    assert found.context == Context(topology=says.context.topology), "the rest NCCL cannot know"
    assert recognised_of(says) is says
    # Links are no cluster; what is said of them stands.
    pcie = Context(topology=Topology(ranks=32, nodes=4, intra="pcie"))
    links = recognised_of(replace(silent, context=pcie))
    assert np.array_equal(links.prior if links.prior is not None else 0, says.prior, equal_nan=True)
    assert links.context == pcie
    wrong = recognised_of(told_of(says, find_cluster("gh200-slingshot")))
    assert np.array_equal(wrong.prior if wrong.prior is not None else 0, says.prior, equal_nan=True)
    assert wrong.context == says.context
    unknown = replace(silent, cost=np.zeros_like(silent.cost))
    assert recognised_of(unknown).prior is None
    assert OWN_PAIR == 0, "whose cost is 0 everywhere"
