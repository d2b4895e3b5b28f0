"""The observation has every field that was promised, and training shows each of them more than one value."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from looped import loop_of, observed, random_choices, some_keys

from dynamiccl_ray.agent import observation
from dynamiccl_ray.agent.observation import (
    PAIR_FIELDS,
    Context,
    Floats,
    KeyView,
    Llm,
    Scheduler,
    Topology,
    WorkloadContext,
    decode,
    encode,
    encode_context,
    part,
)
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.simulation.splits import stage_scenarios
from dynamiccl_ray.simulation.streams import Simulation

CURRICULUM: Final = Path(__file__).parents[3] / "experiments" / "curricula" / "default.yaml"


def _pair(name: str) -> tuple[str, Any]:
    return "pairs", (Ellipsis, PAIR_FIELDS.index(name))


EVERYTHING: Final = (Ellipsis,)
# What is promised, by block: the record's field, the encoded segment, and where in the segment.
FIELDS: Final[dict[str, dict[str, tuple[str, str, Any]]]] = {
    "topology": {
        "ranks": ("ranks", "shape", (Ellipsis, 0)),
        "nodes": ("nodes", "shape", (Ellipsis, 1)),
        "GPUs per node": ("ranks", "shape", (Ellipsis, 2)),
        "topology class": ("kind", "kind", EVERYTHING),
        "link in a node": ("intra", "intra", EVERYTHING),
        "link between nodes": ("inter", "inter", EVERYTHING),
        "farthest tier": ("tier_max", "tier_max", EVERYTHING),
        "mix of tiers": ("tier_mix", "tier_mix", EVERYTHING),
        "aggregation in the network": ("ina_active", "ina_active", EVERYTHING),
        "NVLS": ("nvls", "nvls", EVERYTHING),
        "library": ("library", "library", EVERYTHING),
    },
    "workload": {
        "sync mode": ("sync", "sync", EVERYTHING),
        "tau": ("tau", "tau", EVERYTHING),
        "architecture": ("architecture", "architecture", EVERYTHING),
        "compression method": ("compression", "compression", EVERYTHING),
        "compression rate": ("rate", "rate", EVERYTHING),
        "pipelining of the caller": ("caller", "caller", EVERYTHING),
        "priority-critical": ("priority_critical", "priority_critical", EVERYTHING),
        "model intensity": ("intensity", "intensity", EVERYTHING),
        "local batch": ("local_batch", "local_batch", EVERYTHING),
        "communication to computation": ("communication_ratio", "communication_ratio", EVERYTHING),
    },
    "scheduler": {
        "pipeline stage": ("stage", "stage", EVERYTHING),
        "role": ("role", "role", EVERYTHING),
        "coflow priority": ("priority", "priority", EVERYTHING),
        "sharing of the GPU": ("sharing", "sharing", EVERYTHING),
        "pipeline template": ("template_active", "template_active", EVERYTHING),
    },
    "llm": {
        "parallelism": ("parallelism", "parallelism", EVERYTHING),
        "parameters": ("parameters", "parameters", EVERYTHING),
        "fault tolerance": ("fault_tolerance", "fault_tolerance", EVERYTHING),
    },
    "collective": {
        "type": ("collective", "collective", EVERYTHING),
        "effective bytes": ("nbytes", "log_bytes", EVERYTHING),
        "pipelined operations": ("pipelined", "pipelined", EVERYTHING),
        "last action": ("last_pair", *_pair("current")),
        "last time": ("last_time", "last_time", EVERYTHING),
        "time since last use": ("idle_epochs", "idle", EVERYTHING),
        "NCCL's costs": ("cost", *_pair("cost")),
        "times measured, by pair": ("channels", *_pair("best")),
        "how sure they are": ("channels", *_pair("sure")),
        "samples, by pair": ("samples", *_pair("samples")),
        "times measured, by channels": ("channels", "channels", EVERYTHING),
        "times measured, by chunk": ("chunks", "chunks", EVERYTHING),
        "noise": ("noise", "noise", EVERYTHING),
        "excess of the baseline": ("excess", "excess", EVERYTHING),
        "channels that may be chosen": ("valid_channels", "valid_channels", EVERYTHING),
        "chunks that may be chosen": ("valid_chunks", "valid_chunks", EVERYTHING),
    },
    "anomaly": {
        "CUSUM": ("cusum", "cusum", EVERYTHING),
        "reconstruction error": ("reconstruction", "reconstruction", EVERYTHING),
        "congestion": ("congestion", "congestion", EVERYTHING),
        "skew between ranks": ("skew", "skew", EVERYTHING),
        "heat of adaptation": ("heat", "heat", EVERYTHING),
    },
}
RECORDS: Final = {
    "topology": set(Topology.model_fields),
    "workload": set(WorkloadContext.model_fields),
    "scheduler": set(Scheduler.model_fields),
    "llm": set(Llm.model_fields),
    "collective": {f.name for f in fields(KeyView)},
    "anomaly": {f.name for f in fields(KeyView)},
}
MISSING: Final = {
    "reconstruction error": "there is no autoencoder yet",
}
"""Promised and not there, with the reason."""
CONSTANT: Final = {
    "aggregation in the network": "then no collective is NCCL's, and there is nothing to choose",
    "library": "the model prices NCCL alone",
    "architecture": "a parameter server or gossip has no collective to tune in the model",
    "fault tolerance": "has no effect in the model",
    "pipelined operations": "only a job that runs groups several calls",
    "heat of adaptation": "the same for every draw, and only draws are learned from",
    "skew between ranks": "the model has one time for all ranks",
}
"""The same throughout training, with the reason."""
ALL: Final = [(block, name) for block, names in FIELDS.items() for name in names]


@cache
def _observed() -> Floats:
    """(N, SIZE): random decisions on fresh scenarios of every stage of the default curriculum."""
    curriculum = load_curriculum(CURRICULUM)
    scenarios = [s for stage in curriculum.stages for s in stage_scenarios(stage, curriculum, 0, 24)]
    simulation = Simulation(scenarios, control=Control(), seed=0, shifted=0.3)
    rng = np.random.default_rng(0)
    observed = [simulation.reset()]
    for _ in range(5):
        observed.append(simulation.step(random_choices(observed[-1], rng))[0])
    return np.concatenate(observed)


@pytest.mark.parametrize(("block", "name"), ALL, ids=[name for _, name in ALL])
def test_what_was_promised_is_observed_and_varies(block: str, name: str) -> None:
    field, segment, where = FIELDS[block][name]
    known = {segment for segment, _ in observation._SEGMENTS}
    if name in MISSING:
        assert field not in RECORDS[block], f"{name} is there: strike it from MISSING"
        return
    assert field in RECORDS[block], f"the record of the block {block} has no field {field!r} for {name!r}"
    assert segment in known, f"the encoding has no segment {segment!r} for {name!r}"
    values = part(_observed(), segment)[where]
    varies = bool((np.ptp(values, axis=0) > 0).any())
    assert varies != (name in CONSTANT), (
        f"{name} is {'not ' if varies else ''}constant in training: "
        f"{'strike it from' if varies else 'vary it, or give the reason in'} CONSTANT"
    )


def test_the_list_is_complete() -> None:
    """What is encoded is on the list, so that a new field cannot be forgotten here."""
    assert {segment for names in FIELDS.values() for _, segment, _ in names.values()} - {"reconstruction"} == {
        segment for segment, _ in observation._SEGMENTS
    }
    for block, names in FIELDS.items():
        if block in ("topology", "workload", "scheduler", "llm"):
            assert {field for field, _, _ in names.values()} == RECORDS[block]


def test_values_stay_within_what_the_encoder_documents() -> None:
    assert _observed().min() >= -2
    assert _observed().max() <= 4


def _view(nbytes: int) -> KeyView:
    loop = loop_of(replace(some_keys(1), nbytes=np.array([nbytes])))
    observed(loop, [0] * 4, 0.0)
    rows = np.zeros(1, np.int64)
    return loop.view(rows, loop.allowed(rows))


def _one_of(kind: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(kind))


def _scale(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(np.log(least), np.log(most)).map(lambda x: float(np.exp(x)))


contexts = st.builds(
    Context,
    topology=st.builds(
        Topology,
        ranks=st.integers(1, 4096),
        nodes=st.integers(1, 4096),
        kind=_one_of(observation.TopologyClass),
        intra=_one_of(observation.IntraLink),
        inter=_one_of(observation.InterLink),
        tier_max=st.integers(0, 4),
        tier_mix=st.tuples(*[st.floats(0, 1)] * 5),
        ina_active=st.booleans(),
        nvls=st.booleans(),
        library=_one_of(observation.Library),
    ),
    workload=st.builds(
        WorkloadContext,
        sync=_one_of(observation.SyncMode),
        tau=st.integers(1, 1024),
        architecture=_one_of(observation.Architecture),
        compression=_one_of(observation.Compression),
        rate=_scale(0.01, 100),
        caller=_one_of(observation.Caller),
        priority_critical=st.booleans(),
        intensity=_scale(1, 1e6),
        local_batch=_scale(2**-10, 2**12),
        communication_ratio=_scale(1e-3, 90),
    ),
    scheduler=st.builds(
        Scheduler,
        stage=st.integers(0, 63),
        role=_one_of(observation.Role),
        priority=st.integers(0, 7),
        sharing=_one_of(observation.GpuSharing),
        template_active=st.booleans(),
    ),
    llm=st.builds(
        Llm,
        parallelism=_one_of(observation.Parallelism),
        parameters=_scale(1, 1e15),
        fault_tolerance=_one_of(observation.FaultTolerance),
    ),
)


@settings(max_examples=60, deadline=None)
@given(contexts, st.integers(1, 1 << 30))
def test_a_context_can_be_read_back(context: Context, nbytes: int) -> None:
    read = decode(encode(encode_context(context)[None], _view(nbytes))[0])
    record: dict[str, Any] = {}
    for block in (context.topology, context.workload, context.scheduler, context.llm):
        record |= block.model_dump()
    record["topology"] = record.pop("kind")
    record["bytes"] = nbytes
    for name, value in record.items():
        if isinstance(value, float | tuple) or name == "bytes":
            assert read[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        else:
            assert read[name] == value, name
