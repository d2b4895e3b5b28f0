"""A table that is staged and committed while a job runs is what NCCL chooses from the same call on, on every rank."""

from __future__ import annotations

import numpy as np
from real_jobs import AG, AR, KIB, MIB, Jobs, wait_for

from dynamiccl_ray.control.table import Action, DecisionTable
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.nccl_job import agreement_violations
from dynamiccl_ray.plugin_bridge.program import Program

CALLS = ((AR, MIB), (AR, 64 * KIB), (AG, 4 * MIB))
TABLES, MARGIN, STEPS = 12, 40, 2000


def choices(version: int) -> list[tuple[Algorithm, Protocol, int]]:
    """What table ``version`` asks for, for each of the calls; no two tables in a row ask for the same."""
    algorithms = (Algorithm.TREE, Algorithm.RING) if version % 2 else (Algorithm.RING, Algorithm.TREE)
    protocols = list(Protocol)
    return [
        (algorithms[i] if call[0] == AR else Algorithm.RING, protocols[(version + i) % 3], (1, 2, 4, 8)[version % 4])
        for i, call in enumerate(CALLS)
    ]


def table(version: int) -> DecisionTable:
    actions = {}
    for (collective, nbytes), (algorithm, protocol, channels) in zip(CALLS, choices(version), strict=True):
        actions[key_of(collective, nbytes, False)] = Action(
            pair=pair_index(algorithm, protocol),
            channels=CHANNEL_VALUES.index(channels),
            chunk=CHUNK_VALUES.index(64 * KIB),
        )
    return DecisionTable.of(version, actions, max_channels=8)


def test_no_call_sees_two_tables(jobs: Jobs) -> None:
    program = Program(nodes=2, ranks_per_node=2, window=4)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        for collective, nbytes in CALLS:
            rank.step.collective(world, collective, nbytes)
        rank.step.sync()
        rank.end.destroy(world)
    job, reader = jobs.start(program, least_us=0.0, credit=5)
    job.await_ranks()
    wait_for(lambda: len(reader.seen) == 4, what="the channels")
    channels = [seen.channel for seen in reader.seen.values()]
    job.set_credit(STEPS)
    switches = []
    for version in range(1, TABLES + 1):
        with reader.lock:
            prepared = [channel.prepare(table(version), MARGIN) for channel in channels]
        assert {outcome for outcome, _, _ in prepared} == {Prepared.PREPARED}
        assert {digest for _, _, digest in prepared} == {table(version).digest}
        switch_at = max(hold_at for _, hold_at, _ in prepared)
        with reader.lock:
            assert all(channel.decide(version, switch_at) for channel in channels)
            switches.append(switch_at)
            for channel in channels:
                wait_for(channel.fold, what="the switch")
    wait_for(
        lambda: min(channel.status.dseq for channel in channels) >= switches[-1] + 2 * len(CALLS), what="the last table"
    )
    job.stop()
    log = job.logs()
    assert agreement_violations(log) == 0
    assert len(log) == 4 * channels[0].status.dseq
    in_force = np.searchsorted(switches, log["ordinal"] + 1, "right")
    used = np.stack([log[name] for name in ("algo", "proto")], -1)
    for version in range(1, TABLES + 1):
        assert np.any(in_force == version)
        for i, expected in enumerate(choices(version)):
            mine = (in_force == version) & (log["ordinal"] % len(CALLS) == i)
            assert np.all(used[mine] == expected[:2]), (version, expected)
            assert log["channels"][mine].max() <= expected[2]
    own = np.unique(used[in_force == 0][log["ordinal"][in_force == 0] % len(CALLS) == 0], axis=0)
    assert len(own) == 1
