"""``dynamiccl bench activation``: from new weights in the learner to the new table in force on every rank."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID

from dynamiccl_ray.actors.messages import Member
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.rank_runner import RankRunner
from dynamiccl_ray.actors.remote import remote_coordination, start_coordinator
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.config.fabrics import EmulatedJob
from dynamiccl_ray.control.agreement import Answer
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.plugin_bridge.bench import hardware
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING
from dynamiccl_ray.plugin_bridge.played import play
from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.online.learning import ppo_config

_JOB = "dynamiccl_bench_activation"
_SIMULATED = 1000
_SIMULATED_PER_RUNNER = 8
# Enough rounds for every key to have been seen before anything is timed.
_WARM_UP_ROUNDS = 3


def bench_activation(repeats: int = 60) -> dict[str, Any]:
    """Milliseconds from handing out weights to the moment at which the last of 8 emulated ranks has passed the switch,
    through the object store, two runner actors, the coordinator and the real plugin.

    ``simulated`` is the agreement alone, over as many ranks as no machine here could emulate: their answers arrive at
    the coordinator actor as the runners of those ranks would send them.
    """
    started = not ray.is_initialized()
    if started:
        start_ray()
    try:
        times = _emulated(repeats)
        simulated = [agreement_ms(_SIMULATED) for _ in range(5)]
    finally:
        if started:
            ray.shutdown()
    return {
        "ranks": 8,
        "repeats": repeats,
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "simulated": {"ranks": _SIMULATED, "p50_ms": float(np.median(simulated)), "max_ms": max(simulated)},
        "hardware": hardware(),
    }


def _experiment() -> Online:
    return Online.model_validate(
        {
            "name": "bench-activation",
            "job": _JOB,
            "fabric": {"kind": "measured", "rate_hz": 4000},
            "stop": {"rounds": 1_000_000},
            # Stay in the learning phase: its decisions differ from epoch to epoch, so every switch is a real one.
            "control": {"learning": {"draws": 1_000_000}},
        }
    )


def _emulated(repeats: int) -> list[float]:
    experiment = _experiment()
    assert isinstance(experiment.fabric, EmulatedJob)
    fabric = play(experiment.fabric, seed=0)
    run = f"bench-activation-{time.time_ns()}"
    plan = Plan(
        run=run,
        experiment=experiment,
        cluster=fabric.cluster,
        played=fabric.processes,
        valid=fabric.valid,
    )
    with tempfile.TemporaryDirectory() as directory, fabric.job(_JOB, Path(directory)) as job:
        job.start()
        coordinator = start_coordinator(plan)
        config = ppo_config(experiment, coordination=remote_coordination(run), per_node=2)
        actor = ray.remote(num_cpus=0)(RankRunner)
        runners = [actor.remote(config=config, worker_index=i + 1) for i in range(2)]
        module = config.rl_module_spec.build()
        state = {COMPONENT_RL_MODULE: {DEFAULT_MODULE_ID: module.get_state()}}
        ray.get([r.set_state.remote(state) for r in runners])
        for _ in range(_WARM_UP_ROUNDS):
            ray.get([r.sample.remote(share=(i, 2)) for i, r in enumerate(runners)])
        times = []
        for i in range(repeats + 5):
            begin = time.monotonic()
            handed_out = ray.put(state)
            at = max(ray.get([r.activate.remote(handed_out) for r in runners]))
            if i >= 5:
                times.append((at - begin) * 1e3)
        job.set_credit(FREE_RUNNING)
        job.stop()
        for runner in runners:
            ray.kill(runner)
        ray.kill(coordinator)
    return times


def agreement_ms(ranks: int) -> float:
    """Milliseconds of one agreement through a coordinator actor, over ranks that exist only as answers: a multiple of
    ``_SIMULATED_PER_RUNNER``. Ray has to be up.
    """
    run = f"bench-simulated-{time.time_ns()}"
    plan = Plan(run=run, experiment=_experiment())
    coordinator = start_coordinator(plan)
    table = DecisionTable.of(1, {}, max_channels=16)
    nodes = ranks // _SIMULATED_PER_RUNNER
    members = [
        Member(comm=1, rank=r, ranks=ranks, nodes=nodes, tuner_abi=6, profiler_abi=6, user_env=False)
        for r in range(ranks)
    ]
    shares = [members[i : i + _SIMULATED_PER_RUNNER] for i in range(0, ranks, _SIMULATED_PER_RUNNER)]
    term = ray.get(coordinator.join.remote("runner0", [], frozenset())).term
    shares = [[replace(member, term=term) for member in share] for share in shares]
    ray.get([coordinator.join.remote(f"runner{i}", share, frozenset()) for i, share in enumerate(shares)])
    closed = ray.get([coordinator.report.remote(f"runner{i}", 0, [], None) for i in range(len(shares))])
    version = closed[-1].version
    begin = time.monotonic()
    decisions = ray.get(
        [
            coordinator.promise.remote(
                f"runner{i}",
                1,
                version,
                [Answer(rank=m.rank, digest=table.digest, hold_at=100 + m.rank) for m in share],
                table.to_bytes() if i == 0 else None,
                term,
            )
            for i, share in enumerate(shares)
        ]
    )
    took = (time.monotonic() - begin) * 1e3
    assert {d.switch_at for d in decisions} == {100 + ranks - 1}
    ray.kill(coordinator)
    return took
