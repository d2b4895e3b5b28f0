"""A training job for real NCCL as it is laid out, and what is known of its times; no NCCL is needed for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from dynamiccl_ray.config.experiment import Actions, Online
from dynamiccl_ray.config.fabrics import RealNcclFabric
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.nccl_job import LOG_DTYPE
from dynamiccl_ray.plugin_bridge.real_job import RealJob, real_job
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl

MIB = 1 << 20
CHANNELS = Actions(channels=(0, 1, 2, 4, 8))
REDUCED = {"collective": "all_reduce", "sizes_bytes": [MIB]}
GROUPS = [
    {"name": "world", "of": "world", "once": [{"collective": "broadcast", "sizes_bytes": [8192]}]},
    {"name": "tensor", "of": "node", "step": [REDUCED]},
    {
        "name": "data",
        "of": "rail",
        "step": [REDUCED],
        "grouped": [{"collective": "all_reduce", "sizes_bytes": [4096, 8192]}],
    },
]


def described(**changes: Any) -> RealNcclFabric:
    raw = {"kind": "real_nccl", "cluster": "dgx-a100-hdr", "nodes": 2, "ranks_per_node": 2, "groups": GROUPS}
    return TypeAdapter(RealNcclFabric).validate_python(raw | changes)


def job(**changes: Any) -> RealJob:
    nowhere = RealNccl(version="0.0.0", source=Path(), tree=Path(), directory=Path())
    return RealJob(fabric=described(**changes), seed=0, build=nowhere)


def test_groups_divide_the_ranks() -> None:
    program = job().program
    members = {comm.name: comm.ranks for comm in program.comms}
    assert members == {
        "world": (0, 1, 2, 3),
        "tensor0": (0, 1),
        "tensor1": (2, 3),
        "data0": (0, 2),
        "data1": (1, 3),
    }
    once, every_step = program.ranks[3].setup.calls, program.ranks[3].step.calls
    assert [(comm.name, nbytes) for comm, _, nbytes in once] == [("world", 8192)]
    assert [(comm.name, nbytes) for comm, _, nbytes in every_step] == [
        ("tensor1", MIB),
        ("data1", MIB),
        ("data1", 4096),
        ("data1", 8192),
    ]


def test_times_are_the_models_under_every_load() -> None:
    played = job(events=[{"exploit_rounds": 1, "inter_bandwidth": 0.25}])
    (data,) = (comm for comm in played.program.comms if comm.name == "data0")
    physics = Physics(played.fabric.cluster.part(1), 2)
    pair = pair_index(Algorithm.RING, Protocol.SIMPLE) - 1
    for phase, load in enumerate((Load(), Load(inter_bandwidth=0.25))):
        expected = physics.price_us(4, MIB, Algorithm.RING, Protocol.SIMPLE, 2, chunk_bytes=1 << 19, load=load)
        assert played.times.price_us((data.number, 4, MIB), phase, pair, 2, 1 << 19) == pytest.approx(expected)
    assert np.isnan(played.times.price_us((data.number, 4, MIB), 0, pair, 64, 1 << 19))
    # Between two chunks, on a line over their logarithm.
    below, between, above = (
        played.times.price_us((data.number, 4, MIB), 0, pair, 2, round(chunk)) for chunk in (1 << 14, 2**14.5, 1 << 15)
    )
    assert between == pytest.approx((below + above) / 2, rel=1e-3)


def test_prices_are_of_what_nccl_took_and_the_best_is_of_what_it_offers() -> None:
    played = job(events=[{"exploit_rounds": 1, "intra_bandwidth": 0.25}])
    (tensor,) = (comm for comm in played.program.comms if comm.name == "tensor0")
    simple, ll = (pair_index(Algorithm.RING, protocol) for protocol in (Protocol.SIMPLE, Protocol.LL))
    log = np.zeros(3, LOG_DTYPE)
    log["comm"], log["number"], log["func"], log["bytes"], log["members"] = 77, tensor.number, 4, MIB, 1
    log["algo"], log["proto"], log["channels"] = (
        Algorithm.RING,
        (Protocol.LL, Protocol.SIMPLE, Protocol.SIMPLE),
        (1, 4, 8),
    )
    log["chunk_bytes"], log["phase"], log["step"] = 1 << 17, (0, 0, 1), (0, 5, 6)
    key = key_of(Collective.ALL_REDUCE, MIB, False)
    row = (tensor.number, 4, MIB)

    prices = played.priced(log, CHANNELS, {(77, key): [0, ll, simple]})
    assert prices.name(77) == "tensor0"
    assert prices.name(78) is prices.of(78, key, 0) is prices.of(77, key + 1, 0) is None
    for phase, last in ((0, (4, simple)), (1, (8, simple))):
        known = prices.of(77, key, phase)
        assert known is not None
        own = played.times.price_us(row, phase, ll - 1, 1, 1 << 17)
        assert known.default_us == own, "the first call is NCCL's own"
        channels, pair = last
        assert known.in_force_us(known.oracle_action) == played.times.price_us(row, phase, pair - 1, channels, 1 << 17)
        assert known.oracle_us <= min(own, known.in_force_us(known.oracle_action) or 0)
    everything, ll_alone = (
        played.priced(log, CHANNELS, {(77, key): pairs}).of(77, key, 0) for pairs in ([0, ll, simple], [0, ll])
    )
    assert everything is not None
    assert ll_alone is not None
    assert everything.oracle_us < ll_alone.oracle_us <= ll_alone.default_us
    assert ll_alone.oracle_action.pair in (0, ll)

    together = log.copy()
    together["members"] = 2
    assert played.priced(together).of(77, key, 0) is None, "what ran in a group alone has no time of its own"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": 8, "ranks_per_node": 8}, "8 nodes x 8 ranks: a job on real NCCL here has 2 to 16"),
        ({"nodes": 1, "ranks_per_node": 2}, "data: a rail has one rank here"),
        ({"ranks_per_node": 1}, "tensor: a node has one rank here"),
        ({"cluster": "gb200-nvl72", "ranks_per_node": 5}, "ranks_per_node: gb200-nvl72 has 4 GPUs a node"),
        ({"events": [{"at_collective": 5, "inter_bandwidth": 0.5}]}, "give exploit_rounds"),
        ({"nccl": "nowhere.tar"}, "nowhere.tar does not exist"),
        ({"groups": []}, "give exactly one of groups and trace"),
    ],
)
def test_what_cannot_be_played_is_said(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        described(**changes)


def test_without_sources_the_run_says_where_they_come_from() -> None:
    with pytest.raises(Exception, match=r"no sources of NCCL; git clone .* --nccl"):
        real_job(described(), seed=0)


def test_sources_are_only_for_experiments_on_real_nccl(tmp_path: Path) -> None:
    raw = {"name": "x", "fabric": described().model_dump(), "stop": {"rounds": 1}}
    experiment = Online.model_validate(raw)
    fabric = experiment.on_nccl(tmp_path).fabric
    assert isinstance(fabric, RealNcclFabric)
    assert fabric.nccl == tmp_path
    with pytest.raises(Exception, match="does not exist"):
        experiment.on_nccl(tmp_path / "nothing")
    measured = Online.model_validate({"name": "x", "fabric": {"kind": "measured"}, "stop": {"rounds": 1}})
    with pytest.raises(Exception, match="'x' is measured"):
        measured.on_nccl(tmp_path)
