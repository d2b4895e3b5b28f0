"""NCCL finds the newest interface of each kind that it knows and the plugin has, and works through it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from real_jobs import AR, KIB, MIB, Jobs, wait_for

from dynamiccl_ray.control.table import Action, DecisionTable
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.program import Program

# Tuner and profiler, as releases have them together; the plugin has no others.
TOGETHER = [(6, 6), (5, 5), (4, 4), (4, 3), (4, 2), (3, 1), (2, 1)]
NEWEST = {"2.28": (5, 5)}
STEPS, BEFORE = 40, 10


def hidden(plugin: Path, directory: Path, tuner: int, profiler: int) -> Path:
    """A copy of the plugin without the interfaces that are newer than these: their names are spelled otherwise."""
    data = plugin.read_bytes()
    for name, newest in ((b"ncclTunerPlugin_v", tuner), (b"ncclProfiler_v", profiler)):
        for version in range(newest + 1, 7):
            symbol = name + str(version).encode() + b"\0"
            assert symbol in data
            data = data.replace(symbol, b"_" + symbol[1:])
    copy = directory / f"libnccl-tuner-{tuner}-{profiler}.so"
    copy.write_bytes(data)
    return copy


@pytest.mark.parametrize(("tuner", "profiler"), TOGETHER, ids=lambda version: f"v{version}")
def test_each_interface_is_found_and_obeyed(jobs: Jobs, tmp_path: Path, tuner: int, profiler: int) -> None:
    newest = NEWEST.get(jobs.nccl.version.rpartition(".")[0], (6, 6))
    program = Program(nodes=2, ranks_per_node=1, steps=STEPS)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        rank.step.collective(world, AR, MIB)
        rank.step.collective(world, AR, 64 * KIB)
        rank.step.sync()
        rank.end.destroy(world)
    job, reader = jobs.start(program, plugin=hidden(plugin_path(), tmp_path, tuner, profiler), credit=BEFORE)
    job.await_ranks()
    wait_for(lambda: set(job.states()) == {"waiting"}, what="the first steps")
    wait_for(lambda: len(reader.seen) == 2, what="the channels")
    asked = Action(pair=pair_index(Algorithm.TREE, Protocol.SIMPLE), channels=CHANNEL_VALUES.index(2))
    table = DecisionTable.of(1, {key_of(AR, MIB, False): asked}, max_channels=16)
    with reader.lock:
        for seen in reader.seen.values():
            outcome, switch_at, _ = seen.channel.prepare(table, 0)
            assert outcome is Prepared.PREPARED
            assert switch_at == 2 * BEFORE + 1
            assert seen.channel.decide(1, switch_at)
    job.set_credit(STEPS)
    job.wait()
    for seen in reader.finish():
        identity, status = seen.channel.identity, seen.status
        assert (identity.tuner_abi, identity.profiler_abi) == (min(tuner, newest[0]), min(profiler, newest[1]))
        assert (identity.ranks, identity.nodes, identity.closed) == (2, 2, True)
        assert status.dseq == 2 * STEPS
        assert status.applied == STEPS - BEFORE
        records = seen.records
        # Version 1 and 2 measure nothing but the network, and not where it is other processes' proxies that send.
        assert len(records) + sum(status.dropped.values()) == 2 * STEPS
        assert len(records) > STEPS
        obeyed = records[records["version"] == 1]
        obeyed = obeyed[obeyed["bytes"] == MIB]
        assert set(zip(obeyed["algo"].tolist(), obeyed["proto"].tolist(), strict=True)) == {(0, 2)}
    log = job.logs()
    of_table = (log["bytes"] == MIB) & (log["ordinal"] >= 2 * BEFORE)
    used = np.stack([log[name] for name in ("algo", "proto", "channels")], -1)
    assert np.all(used[of_table] == (Algorithm.TREE, Protocol.SIMPLE, 2))
    assert not np.any(np.all(used[~of_table] == (Algorithm.TREE, Protocol.SIMPLE, 2), -1))
