"""A job beside which nobody says where it runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from driven import COMM, KEY, OTHER, Run, member_of, one_term
from test_reduction import collectives

from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.agent.observation import Context, encode_context
from dynamiccl_ray.control.agreement import MemoryStore
from dynamiccl_ray.fabric.describe import topology_of
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.fabric.pricing import expected
from dynamiccl_ray.keys import key_parts

__all__ = ["one_term"]
pytestmark = pytest.mark.usefixtures("one_term")


@pytest.mark.parametrize("said", [None, "cloud-tcp"])
def test_the_cluster_of_a_job_that_does_not_say_or_is_wrong_is_known_by_nccls_costs_and_so_it_is_after_a_resume(
    said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, other = find_cluster("dgx-h100-ndr"), find_cluster(said) if said else None
    sizes = {key: key_parts(key)[2] for key in (KEY, OTHER)}
    tables = cluster.nccl_belief(2).cost_table_us(4, list(sizes.values()))
    store = MemoryStore()
    run = Run(store)
    plan = dataclasses.replace(run.core.plan, recognises=True, model=other, cluster=other)
    run.core.plan = run.core.intake._plan = plan
    run.join(ranks=16, nodes=2)
    none = collectives([])
    run.hand_in(*(run.report(rank, none, costs=dict(zip(sizes, tables, strict=True))) for rank in (0, 1)))
    assert ("not like those on cloud-tcp" in caplog.text) == (said is not None)
    comm, loop = run.core.comms[COMM], run.core.loop
    assert comm.like is not None
    assert comm.like.cluster.name == "dgx-h100-ndr"
    of = comm.position([KEY, OTHER])
    assert np.array_equal(loop.keys.prior[comm.rows[of]], expected(cluster, 2, 4, list(sizes.values())), equal_nan=True)
    assert (loop.keys.context == encode_context(Context(topology=topology_of(cluster, 2)))).all()
    run.core.save()
    second = Coordinator(run.core.plan, store, run.epochs.append)
    second.join("a", [member_of(0, comm=COMM, ranks=16, nodes=2)])
    assert np.array_equal(second.loop.keys.prior, loop.keys.prior, equal_nan=True)


def test_a_cluster_that_is_said_rightly_stands() -> None:
    cluster = find_cluster("dgx-h100-ndr")
    tables = cluster.nccl_belief(2).cost_table_us(4, [key_parts(KEY)[2]])
    run = Run()
    plan = dataclasses.replace(run.core.plan, recognises=True, model=cluster, cluster=cluster)
    run.core.plan = run.core.intake._plan = plan
    run.join(ranks=16, nodes=2)
    run.hand_in(*(run.report(rank, collectives([]), costs={KEY: tables[0]}) for rank in (0, 1)))
    assert run.core.comms[COMM].like is None
