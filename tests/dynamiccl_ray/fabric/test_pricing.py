"""What a model of the cluster says to expect, before anything is measured."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.actions import N_CHANNELS
from dynamiccl_ray.fabric.load import IDLE, Load
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.pricing import action_times_us, expected
from dynamiccl_ray.knobs import OWN_PAIR, Collective

MIB = 1 << 20
SIZES = np.array([4096, MIB, 256 * MIB])


def test_it_is_the_models_time_over_that_of_nccls_own_choice() -> None:
    cluster = find_cluster("dgx-h100-ndr")
    times = action_times_us(Physics(cluster, 4), Collective.ALL_REDUCE, SIZES)[0]
    said = expected(cluster, 4, Collective.ALL_REDUCE, SIZES)
    own = times[:, OWN_PAIR, 0, 0][:, None]
    for pair in (1, 4, 6):
        np.testing.assert_allclose(np.exp(said[:, pair, :N_CHANNELS]), times[:, pair, :, 0] / own, rtol=1e-5)
        np.testing.assert_allclose(np.exp(said[:, pair, N_CHANNELS:]), times[:, pair, 0] / own, rtol=1e-5)


def test_nothing_is_expected_of_nccls_own_choice_and_of_what_it_does_not_offer() -> None:
    said = expected(find_cluster("dgx-h100-ndr"), 4, Collective.BROADCAST, SIZES)
    assert np.isnan(said[:, OWN_PAIR]).all()
    ring = said[:, 4:7]
    assert np.isfinite(ring[..., 0]).any()
    assert np.isnan(said[:, 1:4]).all(), "a broadcast has no tree"


def test_some_gpus_of_each_node_share_its_network_devices() -> None:
    whole = find_cluster("dgx-h100-ndr")
    assert whole.inter is not None
    half = whole.part(4)
    assert half.gpus_per_node == 4
    assert half.inter is not None
    assert half.inter.nics == whole.inter.nics // 2
    assert find_cluster("dgx-v100").part(1).gpus_per_node == 1


@pytest.mark.parametrize("load", [IDLE, Load(inter_bandwidth=0.5)])
def test_each_load_is_priced_alone(load: Load) -> None:
    physics = Physics(find_cluster("cloud-tcp"), 2)
    both = action_times_us(physics, Collective.ALL_REDUCE, SIZES, [IDLE, load])
    assert np.array_equal(both[1], action_times_us(physics, Collective.ALL_REDUCE, SIZES, [load])[0], equal_nan=True)
