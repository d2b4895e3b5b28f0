"""What is expected of a communicator's keys, by the model of the cluster that the experiment names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from driven import member_of

from dynamiccl_ray.actions import OWN_ACTION, flat_action
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.agent.earlier import Decisions, Earlier, record
from dynamiccl_ray.arrays import Float32
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.columns import Keys
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.pricing import expected
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.trainers.online.run import plan_of

SIZES = [1 << 20, 1 << 26]
H100 = find_cluster("dgx-h100-ndr")
V100 = find_cluster("dgx-v100").model_copy(update={"inter": None, "groups": (), "in_network": None})


def _keys(plan: Plan, **of: Any) -> Keys:
    comm = cast(Communicator, type("_", (), {"number": 0, "example": member_of(0, **of), "like": None}))
    return plan.keys(comm, [key_of(Collective.ALL_REDUCE, size, False) for size in SIZES])


def _prior(plan: Plan, **of: Any) -> Float32:
    return _keys(plan, **of).prior


def _plan(fabric: dict[str, Any]) -> Plan:
    experiment = Online.model_validate({"name": "x", "fabric": fabric, "stop": {"rounds": 1}})
    return plan_of(experiment, "r")


def test_a_real_job_is_told_what_its_clusters_model_expects_and_which_links_it_has() -> None:
    plan = _plan({"kind": "nccl", "cluster": "dgx-h100-ndr"})
    said = _prior(plan, ranks=32, nodes=4)
    assert np.array_equal(said, expected(H100, 4, Collective.ALL_REDUCE, SIZES), equal_nan=True)
    assert plan.topology_of(member_of(0, ranks=32, nodes=4)).inter == "ib"
    assert plan.sms == H100.sms


def test_communicators_of_some_gpus_of_each_node_have_their_share_of_the_network() -> None:
    plan = _plan({"kind": "nccl", "cluster": "dgx-h100-ndr"})
    said = _prior(plan, ranks=4, nodes=4)
    assert np.array_equal(said, expected(H100.part(1), 4, Collective.ALL_REDUCE, SIZES), equal_nan=True)


@pytest.mark.parametrize(
    ("why", "ranks", "nodes"),
    [("more on some nodes than on others", 17, 4), ("more than a node has", 64, 4), ("no network between", 16, 2)],
)
def test_of_what_the_cluster_cannot_have_nothing_is_expected(why: str, ranks: int, nodes: int) -> None:
    plan = Plan(run="r", experiment=_plan({"kind": "nccl"}).experiment, model=V100 if "network" in why else H100)
    assert np.isnan(_prior(plan, ranks=ranks, nodes=nodes)).all(), why


def test_without_a_described_cluster_nothing_is_expected() -> None:
    assert np.isnan(_prior(_plan({"kind": "nccl", "inter": "ib"}), ranks=32, nodes=4)).all()


def test_a_played_job_is_never_told_the_model_that_plays_it() -> None:
    calls = {"collective": "all_reduce", "sizes_bytes": SIZES}
    emulated = _plan({"kind": "emulated", "cluster": "dgx-h100-ndr", "nodes": 4, "collectives": [calls]})
    assert np.isnan(_prior(emulated, ranks=32, nodes=4)).all()
    assert np.isnan(_prior(_plan({"kind": "measured"}), ranks=64, nodes=8)).all(), "it does not say where it runs"
    said = _plan({"kind": "measured", "cluster": "p5en-h200-efa"})
    assert np.isfinite(_prior(said, ranks=64, nodes=8)).any(), "measurements are no model"


def test_keys_are_told_what_earlier_runs_measured_of_such_a_communicator() -> None:
    key = np.full(3, key_of(Collective.ALL_REDUCE, SIZES[0], False))
    of = Decisions(
        key=key,
        action=np.array([OWN_ACTION, *[flat_action(5, 0, 0)] * 2]),
        samples=np.full(3, 100.0),
        log_us=np.array([3.0, 1.99, 2.01]),
        own_log_us=np.array([np.nan, 3.0, 3.0]),
        anew=np.zeros(3, np.int64),
    )
    plan = replace(_plan({"kind": "nccl"}), earlier=Earlier([[record(32, 4, "", of)]]))
    keys, others = _keys(plan, ranks=32, nodes=4), _keys(plan, ranks=16, nodes=2)
    assert keys.earlier[:, 5, 0].tolist() == [pytest.approx(-1.0), pytest.approx(np.nan, nan_ok=True)]
    assert keys.lead.tolist() == [pytest.approx(1.0), 0]
    assert keys.noise.tolist() == pytest.approx([0.1 * 2**0.5, np.nan], nan_ok=True)
    assert np.isnan(others.earlier).all()
    assert not others.lead.any()
