"""The plugin as NCCL drives it: every interface version, every table, and whatever a table must not do.

Everything goes through the emulated NCCL, which fails where NCCL would: a cost written over -1, a result other than
success, a chunk below one grain, a channel count out of range. The sanitizer builds run this file too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rig import BELIEF, CALLS, MIB, Rig, belief_of, exec_ns, indices, play, stage, table_key, used_of

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import AGGREGATE, APPLIED, DECIDED
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.program import Comm, Ops
from dynamiccl_ray.plugin_bridge.segments import segments

SHIPPED = {
    "2.21": (2, 0),
    "2.22": (3, 0),
    "2.23": (3, 1),
    "2.24": (4, 2),
    "2.26": (4, 3),
    "2.27": (4, 4),
    "2.28": (5, 5),
    "2.29": (5, 6),
    "2.30": (6, 6),
}
"""The newest tuner and profiler interface of each release; 0 where it has none."""

# Pairs that v2 knows to be there, too.
ACTIONS = {
    0: Action(pair=pair_index(Algorithm.TREE, Protocol.SIMPLE), channels=CHANNEL_VALUES.index(4)),
    1: Action(pair=pair_index(Algorithm.RING, Protocol.SIMPLE), channels=CHANNEL_VALUES.index(8), chunk=3),
    2: Action(pair=pair_index(Algorithm.RING, Protocol.LL), channels=CHANNEL_VALUES.index(2)),
    3: Action(pair=pair_index(Algorithm.RING, Protocol.SIMPLE)),
    4: Action(channels=CHANNEL_VALUES.index(1)),
}  # and call 5 is left to NCCL
# No NVLS and no CollNet: v2 is told of neither, and asks for no count where there are any.
PLAIN = belief_of("dgx-a100-hdr")
OWN_CHUNKS = {
    (Algorithm.TREE, Protocol.SIMPLE): 512 << 10,
    (Algorithm.RING, Protocol.SIMPLE): 2 << 20,
    (Algorithm.RING, Protocol.LL): 32 << 10,
    (Algorithm.RING, Protocol.LL128): 576_000,
}
"""What NCCL's buffers hold: its chunk of a large message, but for rooted collectives."""

# Where things lie in a segment; docs/channel.md.
BASE, TABLES, TABLE_BYTES = 23304, 23488, 24992


def own_pair(index: int) -> tuple[int, int]:
    choice = BELIEF.choose(*CALLS[index])
    return int(choice.algorithm), int(choice.protocol)


def has_events(log: LOG, release: str) -> np.ndarray[Any, Any]:
    """Which collectives a profiler hears of: from 2.29 on no broadcasts."""
    return np.asarray((log["func"] != Collective.BROADCAST) | (int(release[2:]) < 29))


def table_of(actions: dict[int, Action], version: int = 1, **options: Any) -> DecisionTable:
    by_key = {table_key(CALLS[index]): action for index, action in actions.items()}
    return DecisionTable.of(version, by_key, **{"max_channels": 16, **options})


def finish(job: NcclJob) -> None:
    job.set_credit(job.program.steps)
    job.wait(60)


def drain_all(channel: Channel) -> np.ndarray[Any, Any]:
    parts = [channel.drain().copy()]
    while len(parts[-1]):
        parts.append(channel.drain().copy())
    return np.concatenate(parts)


def by_call(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return records[np.argsort(records["dseq"], kind="stable")]


def check_used(used: LOG, switch_at: int, tuner_abi: int) -> None:
    """NCCL's own choice below call S, the table's from S on."""
    for call, (row, index) in enumerate(zip(used, indices(used), strict=True), start=1):
        action = ACTIONS.get(int(index))
        pair = (int(row["algo"]), int(row["proto"]))
        if call < switch_at or action is None:
            assert row["own"]
            assert pair == own_pair(index)
            assert row["asked"] == 0
            continue
        assert row["asked"] == CHANNEL_VALUES[action.channels]
        assert row["channels"] <= (row["asked"] or BELIEF.channels)
        assert pair == (divmod(action.pair - 1, 3) if action.pair else own_pair(index))
        if tuner_abi == 6 and action.chunk:
            assert row["chunk_bytes"] == CHUNK_VALUES[action.chunk]
        else:
            assert row["chunk_bytes"] == OWN_CHUNKS[Algorithm(pair[0]), Protocol(pair[1])]


def check_records(records: np.ndarray[Any, Any], used: LOG, switch_at: int, profiler_abi: int) -> None:
    """Every call that has events has its record: what was asked for, what was used, how long it took."""
    assert records["dseq"].tolist() == (used["ordinal"] + 1).tolist()
    after = records["dseq"] >= switch_at
    assert np.array_equal(records["version"], after.astype(np.uint32))
    assert np.all(records["flags"] & DECIDED)
    index_of = indices(used)
    touched = np.isin(index_of, list(ACTIONS)) & after
    assert np.array_equal(records["flags"] & APPLIED != 0, touched)
    for name in ("algo", "proto", "func", "bytes"):
        assert np.array_equal(records[name], used[name])
    for record, index in zip(records, index_of, strict=True):
        action = ACTIONS.get(int(index)) if record["version"] else None
        assert record["key"] == table_key(CALLS[index])
        asked = divmod(action.pair - 1, 3) if action and action.pair else (255, 255)
        assert (record["asked_algo"], record["asked_proto"]) == asked
        assert record["asked_channels"] == (CHANNEL_VALUES[action.channels] if action else 0)
        assert (1 << int(record["asked_chunk_log2"])) & ~1 == (CHUNK_VALUES[action.chunk] if action else 0)
    if profiler_abi >= 4:
        assert np.all(records["timing"] == 1)
        assert np.array_equal(records["channels"], used["channels"])
        assert np.array_equal(records["exec_ns"], exec_ns(used))
    else:
        assert np.all(records["timing"] == (2 if profiler_abi == 3 else 3))
        # Host time: what the threads were late by is in it, which on a busy machine is most of it for most calls.
        ratio = records["exec_ns"] / exec_ns(used)
        assert ratio.max() > 0.5
        assert np.median(ratio) < 2


def check_counts(channel: Channel, collectives: int) -> None:
    status = channel.status
    assert status.records + sum(status.dropped.values()) + status.merged == collectives
    assert status.backlog == 0
    assert status.applied + sum(status.passthrough.values()) == status.dseq


def paced(release: str) -> dict[str, float]:
    """Real time for profilers that have no times of the GPU: they tell the end of a collective by later ones."""
    return {"pace": float(SHIPPED[release][1] in (1, 2, 3))}


def one_at_a_time(ops: Ops, comm: Comm) -> None:
    for collective, nbytes in CALLS:
        ops.collective(comm, collective, nbytes)
        ops.sync()


# ---- every pair of interface versions that shipped together ----


@pytest.mark.parametrize("release", SHIPPED)
def test_a_table_is_carried_out_and_measured(rig: Rig, release: str) -> None:
    tuner_abi, profiler_abi = SHIPPED[release]
    steps = 25
    what = play(places=(0, 5), steps=steps, us=2000.0, per_step=one_at_a_time)
    job = rig.start(what, release=release, **paced(release))
    channels = [of_process[0] for of_process in rig.channels(job)]
    switch_at = {stage(channel, table_of(ACTIONS), 9) for channel in channels}
    assert switch_at == {10}
    finish(job)
    assert agreement_violations(job.logs()) == 0
    for process, (place, channel) in enumerate(zip((0, 5), channels, strict=True)):
        used = used_of(job.log(process))
        assert len(used) == steps * len(CALLS)
        check_used(used, 10, tuner_abi)
        identity = channel.identity
        assert identity.closed
        assert (identity.tuner_abi, identity.profiler_abi) == (tuner_abi, profiler_abi)
        assert (identity.ranks, identity.nodes) == (8, 2)
        heard = used[has_events(used, release)]
        if profiler_abi:
            assert identity.rank == place
            assert identity.comm_id == used["comm"][0]
            check_records(by_call(drain_all(channel)), heard, 10, profiler_abi)
        assert channel.status.undecided == 0
        assert channel.status.passthrough["no_table"] == 9
        check_counts(channel, len(heard) if profiler_abi else 0)
        assert channel.status.dropped == dict.fromkeys(("full", "busy", "incomplete", "timer"), 0)
    assert list(segments()) == []


def test_shadow_looks_and_does_not_touch(rig: Rig) -> None:
    job = rig.start(play(steps=10))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of(ACTIONS, apply=False), 0)
    finish(job)
    assert np.all(used_of(job.log(0))["own"] == 1)
    records = drain_all(channel)
    assert np.all(records["version"] == 1)
    assert not np.any(records["flags"] & APPLIED)
    assert set(records["asked_algo"]) == {0, 1, 255}
    assert channel.status.passthrough["shadow"] == 50
    assert channel.status.passthrough["no_entry"] == 10


@pytest.mark.parametrize("variable", ["NCCL_ALGO", "NCCL_PROTO"])
def test_the_users_environment_wins(rig: Rig, variable: str) -> None:
    job = rig.start(play(steps=10), env={variable: "ring"})
    ((channel,),) = rig.channels(job)
    assert channel.identity.user_env
    stage(channel, table_of(ACTIONS), 0)
    finish(job)
    assert np.all(used_of(job.log(0))["own"] == 1)
    assert channel.status.passthrough["user_env"] == 50
    assert channel.status.applied == 0
    assert len(drain_all(channel)) == 50
    check_counts(channel, 50)


@pytest.mark.parametrize(("hidden", "tuner_abi", "profiler_abi"), [("TUNER", 0, 6), ("PROFILER", 6, 0)])
def test_either_half_alone(rig: Rig, hidden: str, tuner_abi: int, profiler_abi: int) -> None:
    job = rig.start(play(CALLS[:3], steps=10), env={f"NCCL_{hidden}_PLUGIN": "none"})
    ((channel,),) = rig.channels(job)
    stage(channel, table_of(ACTIONS), 0)
    finish(job)
    assert (channel.identity.tuner_abi, channel.identity.profiler_abi) == (tuner_abi, profiler_abi)
    assert channel.status.applied == (30 if tuner_abi else 0)
    records = drain_all(channel)
    assert len(records) == (30 if profiler_abi else 0)
    if profiler_abi:
        assert np.array_equal(records["exec_ns"], exec_ns(used_of(job.log(0))))
        assert not np.any(records["flags"] & DECIDED)
        assert channel.status.undecided == 30


@pytest.mark.parametrize(("tuner_abi", "profiler_abi"), [(2, 1), (3, 2), (4, 3), (5, 4), (5, 5)])
def test_a_new_release_takes_an_old_interface(rig: Rig, tuner_abi: int, profiler_abi: int) -> None:
    """Interfaces that are hidden are not found. From 2.27 on v1 to v3 are not told which communicator it is."""
    newer = [f"ncclTunerPlugin_v{v}" for v in range(tuner_abi + 1, 7)]
    newer += [f"ncclProfiler_v{v}" for v in range(profiler_abi + 1, 7)]
    what = play(CALLS[:4], steps=10, us=1000.0, belief=PLAIN)
    job = rig.start(what, env={"EMULATED_NCCL_HIDE": ",".join(newer)}, pace=float(profiler_abi < 4))
    ((channel,),) = rig.channels(job)
    assert (channel.identity.tuner_abi, channel.identity.profiler_abi) == (tuner_abi, profiler_abi)
    stage(channel, table_of({0: ACTIONS[0]}), 0)
    finish(job)
    used, records = used_of(job.log(0)), by_call(drain_all(channel))
    assert set(used[indices(used) == 0]["asked"]) == {4}
    assert records["dseq"].tolist() == list(range(1, 41))
    assert np.array_equal(records["algo"], used["algo"])
    assert np.array_equal(records["flags"] & APPLIED != 0, indices(used) == 0)
    assert channel.identity.rank == 0


# ---- chunks, CollNet, NVLS ----


@pytest.mark.parametrize("chunk", [1, 4, 7, 9])
@pytest.mark.parametrize("protocol", list(Protocol))
def test_chunks_stay_within_grain_and_buffer(rig: Rig, protocol: Protocol, chunk: int) -> None:
    action = Action(pair=pair_index(Algorithm.RING, protocol), chunk=chunk)
    job = rig.start(play(CALLS[:1], steps=5))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of({0: action}), 0)
    finish(job)
    grain = (16, 1920, 512)[protocol]
    limit = OWN_CHUNKS[Algorithm.RING, protocol]
    expected = min(CHUNK_VALUES[chunk] // grain * grain, limit // grain * grain)
    assert set(used_of(job.log(0))["chunk_bytes"]) == {expected}


def test_a_chunk_does_not_leak_into_ncclls_own_choice(rig: Rig) -> None:
    """A pair of NCCL's own choice keeps NCCL's chunk, although the same pair was just asked for with another."""
    asked, own = 2, 3
    assert own_pair(own) == (Algorithm.RING, Protocol.LL128)
    job = rig.start(play([CALLS[asked], CALLS[own]], steps=10))
    ((channel,),) = rig.channels(job)
    pair = pair_index(Algorithm.RING, Protocol.LL128)
    stage(channel, table_of({asked: Action(pair=pair, chunk=1), own: Action(channels=3)}), 0)
    finish(job)
    used = used_of(job.log(0))
    of_call = indices(used)
    assert np.all((used["algo"] == Algorithm.RING) & (used["proto"] == Protocol.LL128))
    assert set(used[of_call == asked]["chunk_bytes"]) == {CHUNK_VALUES[1] // 1920 * 1920}
    assert set(used[of_call == own]["chunk_bytes"]) == {OWN_CHUNKS[Algorithm.RING, Protocol.LL128]}


@pytest.mark.parametrize(
    ("algorithm", "asked"),
    [(Algorithm.TREE, 8), (Algorithm.COLLNET_DIRECT, 0), (Algorithm.COLLNET_CHAIN, 0), (Algorithm.NVLS, 0)],
)
def test_no_count_is_asked_for_where_nccl_does_not_clamp_it(rig: Rig, algorithm: Algorithm, asked: int) -> None:
    job = rig.start(play(CALLS[:1], steps=5, belief=belief_of("dgx-h100-ndr-sharp")))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of({0: Action(pair=pair_index(algorithm, Protocol.SIMPLE), channels=4)}), 0)
    finish(job)
    used = used_of(job.log(0))
    assert set(used["algo"]) == {algorithm}
    assert set(used["asked"]) == {asked}


@pytest.mark.parametrize("release", ["2.26", "2.27", "2.30"])
def test_collnet_has_an_unknown_number_of_channels(rig: Rig, release: str) -> None:
    """The Coll event says 0 channels there, KernelCh events come all the same; and no count is asked for."""
    # All on 16 channels: one that others leave out is reported ahead of them where the proxy thread is far behind.
    belief = belief_of("dgx-h100-ndr-sharp", channels=16)
    calls = [(Collective.ALL_REDUCE, n * MIB) for n in (32, 24, 28)] + [(Collective.ALL_GATHER, 64 * MIB)]
    assert belief.choose(*calls[0]).algorithm == Algorithm.COLLNET_DIRECT
    table = DecisionTable.of(
        1,
        {
            table_key(calls[0]): Action(channels=4),
            table_key(calls[1]): Action(pair=pair_index(Algorithm.COLLNET_CHAIN, Protocol.SIMPLE), channels=4),
            table_key(calls[2]): Action(pair=pair_index(Algorithm.NVLS, Protocol.SIMPLE), channels=4),
        },
        max_channels=16,
    )
    steps = 100
    job = rig.start(play(calls, steps=steps, us=60.0, belief=belief), release=release)
    ((channel,),) = rig.channels(job)
    stage(channel, table, 0)
    finish(job)
    used = used_of(job.log(0))
    of_call = indices(used, calls)
    assert set(used["asked"]) == {0}
    algorithms = (Algorithm.COLLNET_DIRECT, Algorithm.COLLNET_CHAIN, Algorithm.NVLS, Algorithm.RING)
    assert used["algo"].tolist() == [*algorithms] * steps
    assert channel.status.passthrough["masked"] == steps
    assert set(used["channels"]) == {16}
    records = by_call(drain_all(channel))
    check_counts(channel, len(used))
    assert len(records) == len(used)
    if SHIPPED[release][1] >= 4:
        assert np.array_equal(records["channels"], np.where(of_call == 3, 16, 0))
        assert np.array_equal(records["exec_ns"], exec_ns(used))


@pytest.mark.parametrize(
    ("preset", "asked"), [("dgx-a100-hdr", 8), ("dgx-h100-ndr-sharp", 0)], ids=["neither", "collnet and nvls"]
)
def test_v2_asks_for_no_count_where_collnet_is_possible(rig: Rig, preset: str, asked: int) -> None:
    """v2 shows no costs, so NCCL's own choice may be CollNet, where nothing clamps the count."""
    job = rig.start(play(CALLS[:1], steps=5, belief=belief_of(preset)), release="2.21")
    ((channel,),) = rig.channels(job)
    stage(channel, table_of({0: Action(channels=4)}), 0)
    finish(job)
    assert set(used_of(job.log(0))["asked"]) == {asked}


# ---- what else comes along ----


@pytest.mark.parametrize("release", ["2.23", "2.24", "2.26", "2.27", "2.30"])
def test_aggregates_p2p_and_foreign_proxies(rig: Rig, release: str) -> None:
    calls, steps = CALLS[:4], 50

    def per_step(ops: Ops, comm: Comm) -> None:
        """Every other call twice in a group, one of them with a transfer in it; and transfers alone."""
        for i, (collective, nbytes) in enumerate(calls):
            with ops.group():
                for _ in range(1 + i % 2):
                    ops.collective(comm, collective, nbytes)
                if i in (1, 2):
                    ops.send(comm, 1, MIB)
                    ops.recv(comm, 1, MIB)
            if i % 2:
                ops.send(comm, 1, 4096)
            ops.sync()

    what = play(calls, steps=steps, us=1000.0, per_step=per_step)
    job = rig.start(what, release=release, env={"EMULATED_NCCL_FAULTS": "foreign_ops=300"}, **paced(release))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of({0: ACTIONS[0]}), 0)
    finish(job)
    used, records = used_of(job.log(0)), by_call(drain_all(channel))
    assert len(used) == 6 * steps
    check_counts(channel, len(used))
    assert channel.status.undecided == 0
    assert records["dseq"].tolist() == list(range(1, 4 * steps + 1))
    aggregated = np.tile([False, True, False, True], steps)
    assert np.array_equal(records["flags"] & AGGREGATE != 0, aggregated)
    assert channel.status.merged == np.count_nonzero(aggregated)
    sizes = np.array([nbytes * (1 + i % 2) for i, (_, nbytes) in enumerate(calls)])
    assert np.array_equal(records["bytes"], np.tile(sizes, steps))
    if SHIPPED[release][1] >= 4:
        # Where each call's collectives begin in the log.
        first = np.cumsum(np.r_[0, 1 + aggregated])[:-1]
        start, stop = (reduce.reduceat(used[name] // 32 * 32, first) for reduce, name in
                       ((np.minimum, "start_ns"), (np.maximum, "stop_ns")))  # fmt: skip
        assert np.array_equal(records["exec_ns"], stop - start)
        assert np.all(used["members"][:6] == 1)


def test_bad_timers_are_counted_and_not_recorded(rig: Rig) -> None:
    job = rig.start(play(CALLS[:4], steps=75), env={"EMULATED_NCCL_FAULTS": "zero_timers=3"})
    ((channel,),) = rig.channels(job)
    finish(job)
    used, records = used_of(job.log(0)), drain_all(channel)
    check_counts(channel, len(used))
    assert 0 < channel.status.dropped["timer"] < len(used)
    assert len(records) == len(used) - channel.status.dropped["timer"]
    assert np.array_equal(records["exec_ns"], exec_ns(used[records["dseq"] - 1]))


def test_a_start_that_was_missed_is_counted_and_not_recorded(rig: Rig) -> None:
    job = rig.start(play(CALLS[:4], steps=75), env={"EMULATED_NCCL_FAULTS": "late_starts=3"})
    ((channel,),) = rig.channels(job)
    finish(job)
    used, records = used_of(job.log(0)), drain_all(channel)
    check_counts(channel, len(used))
    assert 0 < channel.status.dropped["incomplete"] < len(used)
    assert np.array_equal(records["exec_ns"], exec_ns(used[records["dseq"] - 1]))


@pytest.mark.parametrize("release", ["2.26", "2.27", "2.30"])
def test_several_communicators_in_a_process(rig: Rig, release: str) -> None:
    n, steps, calls = 3, 15, [call for call in CALLS if call[0] is not Collective.BROADCAST]
    job = rig.start(play(calls, places=(2, 3), comms=n, steps=steps, us=1000.0), release=release, **paced(release))
    found = rig.channels(job, n)
    for of_process in found:
        stage(of_process[1], table_of(ACTIONS), 4)
    finish(job)
    assert agreement_violations(job.logs()) == 0
    ids = {channel.identity.comm_id for of_process in found for channel in of_process}
    assert len(ids) == n
    for process, of_process in enumerate(found):
        for index, channel in enumerate(of_process):
            used = used_of(job.log(process), index)
            assert len(used) == steps * len(calls)
            assert channel.identity.comm_id == used["comm"][0]
            assert channel.identity.rank == (2, 3)[process]
            assert used["own"].all() == (index != 1)
            records = by_call(drain_all(channel))
            assert len(records) == len(used)
            if SHIPPED[release][1] >= 4:
                assert np.array_equal(records["exec_ns"], exec_ns(used))
            check_counts(channel, len(used))


def test_cost_rows_are_nccls_own(rig: Rig) -> None:
    job = rig.start(play(steps=5))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of(ACTIONS), 0)
    finish(job)
    rows = channel.cost_rows()
    assert rows["key"].tolist() == [table_key(call) for call in CALLS]
    for row, call in zip(rows, CALLS, strict=True):
        assert np.array_equal(row["cost_us"], BELIEF.cost_table_us(*call))
    assert channel.cost_rows(4)["key"].tolist() == rows["key"][4:].tolist()
    assert len(channel.cost_rows(6)) == len(channel.cost_rows(999)) == 0


def test_fingerprints_tell_ranks_apart_that_call_in_another_order(rig: Rig) -> None:
    steps = 1028  # three windows of 1024 calls, and some
    found = []
    for order in ([0, 1, 2], [0, 1, 2], [0, 2, 1]):
        job = rig.start(play([CALLS[i] for i in order], places=(0, 1), steps=steps, syncs=False))
        channels = [of_process[0] for of_process in rig.channels(job)]
        finish(job)
        first, second = (channel.fingerprints() for channel in channels)
        assert first == second
        assert sorted(first) == [0, 1, 2]
        found.append(first)
    assert found[0] == found[1]
    assert all(found[0][window] != found[2][window] for window in range(3))


# ---- tables that should never have been ----
