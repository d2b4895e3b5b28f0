"""What a job says of itself decides whether there is anything to decide."""

from __future__ import annotations

import numpy as np
import pytest

from dynamiccl_ray.actions import OWN_ACTION
from dynamiccl_ray.agent.gates import hands_off, path_of
from dynamiccl_ray.agent.observation import Context, Topology, WorkloadContext
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Carrier
from dynamiccl_ray.simulation.scenario import modelled

PLAIN = Topology(ranks=16, nodes=2)


def test_nccl_is_decided_for_and_nothing_else_is() -> None:
    assert hands_off(Context(topology=PLAIN)) is None
    assert path_of(Context(topology=PLAIN)) is Carrier.NCCL


@pytest.mark.parametrize(
    ("context", "path", "why"),
    [
        (Context(topology=PLAIN.model_copy(update={"ina_active": True})), Carrier.INA_PASSTHROUGH, "network"),
        (Context(topology=PLAIN.model_copy(update={"library": "rccl"})), Carrier.NCCL, "rccl"),
        (
            Context(topology=PLAIN, workload=WorkloadContext(architecture="parameter-server")),
            Carrier.NCCL,
            "parameter-server",
        ),
        (Context(topology=PLAIN, workload=WorkloadContext(architecture="gossip")), Carrier.NCCL, "gossip"),
    ],
)
def test_hands_off(context: Context, path: Carrier, why: str) -> None:
    assert path_of(context) is path
    assert why in str(hands_off(context))


def test_a_scenario_of_a_parameter_server_has_nothing_to_choose() -> None:
    about = {"workload": WorkloadContext(architecture="parameter-server")}
    closed = modelled(find_cluster("cloud-tcp"), 2, collective=4, nbytes=[1 << 20, 1 << 24], about=about)
    assert [np.flatnonzero(valid).tolist() for valid in closed.valid] == [[OWN_ACTION]] * 2
    free = modelled(find_cluster("cloud-tcp"), 2, collective=4, nbytes=[1 << 20, 1 << 24])
    assert free.valid.sum() > 4
    assert (free.default_us == closed.default_us).all()
