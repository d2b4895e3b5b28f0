"""The plugin as NCCL drives it: every interface version, every table, and whatever a table must not do.

Everything goes through the emulated host, which fails where NCCL would: a cost written over -1, a result other
than success, a chunk below one grain, a channel count out of range. The sanitizer builds run this file too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig import KEYS, MIB, Rig, host_key, host_program, stage, table_key, write_at

from dynamiccl_ray.actions import Action
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.table import ENTRY_DTYPE, DecisionTable
from plugin_bridge.channel import AGGREGATE, APPLIED, DECIDED, Channel, remove_stale, segments
from plugin_bridge.emulation import EmulatedJob, HostProgram, agreement_violations

SHIPPED = [(2, 0), (3, 0), (3, 1), (4, 2), (4, 3), (4, 4), (5, 5), (5, 6), (6, 6)]
RELEASES = ["2.21", "2.22", "2.23", "2.24", "2.26", "2.27", "2.28", "2.29", "2.30"]

# Pairs that v2 knows to be there, too.
ACTIONS = {
    0: Action(pair=pair_index(Algorithm.TREE, Protocol.SIMPLE), channels=CHANNEL_VALUES.index(4)),
    1: Action(pair=pair_index(Algorithm.RING, Protocol.SIMPLE), channels=CHANNEL_VALUES.index(8), chunk=3),
    2: Action(pair=pair_index(Algorithm.RING, Protocol.LL), channels=CHANNEL_VALUES.index(2)),
    3: Action(pair=pair_index(Algorithm.RING, Protocol.SIMPLE)),
    4: Action(channels=CHANNEL_VALUES.index(1)),
}  # and key 5 is left to NCCL
OWN_PAIR = (Algorithm.RING, Protocol.LL128)

# Where things lie in a segment; docs/channel.md.
BASE, TABLES, TABLE_BYTES = 23304, 23488, 24992


def table_of(actions: dict[int, Action], version: int = 1, **options: Any) -> DecisionTable:
    by_key = {table_key(KEYS[index]): action for index, action in actions.items()}
    return DecisionTable.of(version, by_key, **{"max_channels": 16, **options})


def finish(job: EmulatedJob, total: int) -> None:
    job.set_credit(total)
    job.wait(60)


def drain_all(channel: Channel) -> np.ndarray[Any, Any]:
    parts = [channel.drain().copy()]
    while len(parts[-1]):
        parts.append(channel.drain().copy())
    return np.concatenate(parts)


def by_call(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return records[np.argsort(records["dseq"], kind="stable")]


def check_used(used: np.ndarray[Any, Any], program: HostProgram, switch_at: int, tuner_abi: int) -> None:
    """NCCL's own choice below call S, the table's from S on."""
    for call, row in enumerate(used, start=1):
        action = ACTIONS.get(int(row["key"]))
        pair = (int(row["algorithm"]), int(row["protocol"]))
        if call < switch_at or action is None:
            assert row["untouched"]
            assert pair == OWN_PAIR
            assert row["requested_channels"] == 0
            continue
        assert row["requested_channels"] == CHANNEL_VALUES[action.channels]
        assert row["channels"] <= program.max_channels
        assert pair == (divmod(action.pair - 1, 3) if action.pair else OWN_PAIR)
        if tuner_abi == 6 and action.chunk:
            assert row["chunk_bytes"] == CHUNK_VALUES[action.chunk]
        else:
            assert row["chunk_bytes"] == program.keys[row["key"]].own_chunk_bytes[pair]


def check_records(records: np.ndarray[Any, Any], used: np.ndarray[Any, Any], switch_at: int, profiler_abi: int) -> None:
    """Every call has its record: what was asked for, what was used, how long it took."""
    assert records["dseq"].tolist() == list(range(1, len(used) + 1))
    after = records["dseq"] >= switch_at
    assert np.array_equal(records["version"], after.astype(np.uint32))
    assert np.all(records["flags"] & DECIDED)
    touched = np.isin(used["key"], list(ACTIONS)) & after
    assert np.array_equal(records["flags"] & APPLIED != 0, touched)
    for name, theirs in (("algo", "algorithm"), ("proto", "protocol")):
        assert np.array_equal(records[name], used[theirs])
    for record, row in zip(records, used, strict=True):
        key, action = KEYS[row["key"]], ACTIONS.get(int(row["key"])) if record["version"] else None
        assert record["key"] == table_key(key)
        assert record["func"] == key.collective
        assert record["bytes"] == key.n_bytes
        asked = divmod(action.pair - 1, 3) if action and action.pair else (255, 255)
        assert (record["asked_algo"], record["asked_proto"]) == asked
        assert record["asked_channels"] == (CHANNEL_VALUES[action.channels] if action else 0)
        assert (1 << int(record["asked_chunk_log2"])) & ~1 == (CHUNK_VALUES[action.chunk] if action else 0)
    if profiler_abi >= 4:
        assert np.all(records["timing"] == 1)
        assert np.array_equal(records["channels"], used["channels"])
        assert np.array_equal(records["exec_ns"], used["exec_ns"])
    else:
        assert np.all(records["timing"] == (2 if profiler_abi == 3 else 3))
        # Host time: what the threads were late by is in it, which on a busy machine is most of it for most calls.
        ratio = records["exec_ns"] / used["exec_ns"]
        assert ratio.max() > 0.5
        assert np.median(ratio) < 2


def check_counts(channel: Channel, collectives: int) -> None:
    status = channel.status
    assert status.records + sum(status.dropped.values()) + status.merged == collectives
    assert status.backlog == 0
    assert status.applied + sum(status.passthrough.values()) == status.dseq


# ---- every pair of interface versions that shipped together ----


@pytest.mark.parametrize(("tuner_abi", "profiler_abi"), SHIPPED, ids=RELEASES)
def test_a_table_is_carried_out_and_measured(rig: Rig, tuner_abi: int, profiler_abi: int) -> None:
    total = 150
    program = host_program(total=total, time_us=400.0 if profiler_abi in (1, 2, 3) else 20.0)
    job = rig.start(program, ranks=(0, 5), tuner_abi=tuner_abi, profiler_abi=profiler_abi)
    channels = [of_process[0] for of_process in rig.channels(job)]
    switch_at = {stage(channel, table_of(ACTIONS), 9) for channel in channels}
    assert switch_at == {10}
    finish(job, total)
    logs = [job.used(i) for i in range(2)]
    assert agreement_violations(logs) == 0
    for rank, channel, used in zip((0, 5), channels, logs, strict=True):
        check_used(used, program, 10, tuner_abi)
        identity = channel.identity
        assert identity.closed
        assert (identity.tuner_abi, identity.profiler_abi) == (tuner_abi, profiler_abi)
        assert (identity.ranks, identity.nodes) == (8, 2)
        if profiler_abi:
            assert identity.rank == rank
            assert identity.comm_id == program.comm_id
            check_records(by_call(drain_all(channel)), used, 10, profiler_abi)
        assert channel.status.undecided == 0
        assert channel.status.passthrough["no_table"] == 9
        check_counts(channel, total if profiler_abi else 0)
        assert channel.status.dropped == dict.fromkeys(("full", "busy", "incomplete", "timer"), 0)
    assert list(segments()) == []


def test_shadow_looks_and_does_not_touch(rig: Rig) -> None:
    job = rig.start(host_program(total=60))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of(ACTIONS, apply=False), 0)
    finish(job, 60)
    assert np.all(job.used(0)["untouched"] == 1)
    records = drain_all(channel)
    assert np.all(records["version"] == 1)
    assert not np.any(records["flags"] & APPLIED)
    assert set(records["asked_algo"]) == {0, 1, 255}
    assert channel.status.passthrough["shadow"] == 50
    assert channel.status.passthrough["no_entry"] == 10


@pytest.mark.parametrize("variable", ["NCCL_ALGO", "NCCL_PROTO"])
def test_the_users_environment_wins(rig: Rig, variable: str) -> None:
    job = rig.start(host_program(total=60), env={variable: "ring"})
    ((channel,),) = rig.channels(job)
    assert channel.identity.user_env
    stage(channel, table_of(ACTIONS), 0)
    finish(job, 60)
    assert np.all(job.used(0)["untouched"] == 1)
    assert channel.status.passthrough["user_env"] == 50
    assert channel.status.applied == 0
    check_records_exist(channel, 60)


def check_records_exist(channel: Channel, n: int) -> None:
    assert len(drain_all(channel)) == n
    check_counts(channel, n)


# ---- chunks, CollNet, NVLS ----


@pytest.mark.parametrize("chunk", [1, 4, 7, 9])
@pytest.mark.parametrize("protocol", list(Protocol))
def test_chunks_stay_within_grain_and_buffer(rig: Rig, protocol: Protocol, chunk: int) -> None:
    action = Action(pair=pair_index(Algorithm.RING, protocol), chunk=chunk)
    job = rig.start(host_program(KEYS[:1], total=5))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of({0: action}), 0)
    finish(job, 5)
    grain = (16, 1920, 512)[protocol]
    limit = (4 << 12, (15 << 15) // 16 * 15, 1 << 21)[protocol]
    expected = min(CHUNK_VALUES[chunk] // grain * grain, limit // grain * grain)
    assert set(job.used(0)["chunk_bytes"]) == {expected}


def test_a_chunk_does_not_leak_into_ncclls_own_choice(rig: Rig) -> None:
    """A pair of NCCL's own choice keeps NCCL's chunk, although the same pair was just asked for with another."""
    ring_ll128 = pair_index(*OWN_PAIR)
    job = rig.start(host_program(KEYS[:2], total=20))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of({0: Action(pair=ring_ll128, chunk=1), 1: Action(channels=3)}), 0)
    finish(job, 20)
    used = job.used(0)
    own = int(KEYS[0].own_chunk_bytes[OWN_PAIR])
    assert set(used[used["key"] == 0]["chunk_bytes"]) == {CHUNK_VALUES[1] // 1920 * 1920}
    assert set(used[used["key"] == 1]["chunk_bytes"]) == {own}


@pytest.mark.parametrize("profiler_abi", [3, 4, 6])
def test_collnet_has_an_unknown_number_of_channels(rig: Rig, profiler_abi: int) -> None:
    """The Coll event says 0 channels there, KernelCh events come all the same; and no count is asked for."""
    keys = [
        host_key(algorithms=(Algorithm.RING, Algorithm.COLLNET_DIRECT)),
        host_key(n_bytes=2 * MIB),
        host_key(n_bytes=4 * MIB, algorithms=(Algorithm.COLLNET_CHAIN, Algorithm.RING)),
        host_key(n_bytes=8 * MIB, algorithms=(Algorithm.NVLS, Algorithm.RING)),
    ]
    table = DecisionTable.of(
        1,
        {
            table_key(keys[0]): Action(channels=4),
            table_key(keys[2]): Action(pair=pair_index(Algorithm.COLLNET_CHAIN, Protocol.SIMPLE), channels=4),
            table_key(keys[3]): Action(pair=pair_index(Algorithm.NVLS, Protocol.SIMPLE), channels=4),
        },
        max_channels=16,
    )
    total = 400
    job = rig.start(
        host_program(keys, total=total, time_us=60.0),
        tuner_abi=min(profiler_abi + 1, 6) if profiler_abi == 3 else profiler_abi,
        profiler_abi=profiler_abi,
    )
    ((channel,),) = rig.channels(job)
    stage(channel, table, 0)
    finish(job, total)
    used = job.used(0)
    assert set(used["requested_channels"]) == {0}
    assert set(used[used["key"] == 0]["algorithm"]) == {Algorithm.COLLNET_DIRECT}
    assert set(used[1:][used[1:]["key"] == 2]["algorithm"]) == {Algorithm.COLLNET_CHAIN}
    assert set(used[1:][used[1:]["key"] == 3]["algorithm"]) == {Algorithm.NVLS}
    assert channel.status.passthrough["masked"] == total // 4
    records = by_call(drain_all(channel))
    check_counts(channel, total)
    assert len(records) == total
    if profiler_abi >= 4:
        collnet = used["algorithm"] != Algorithm.RING
        assert np.all(records["channels"][collnet] == 0)
        assert np.array_equal(records["exec_ns"], used["exec_ns"])


@pytest.mark.parametrize(("other", "requested"), [(Algorithm.TREE, 8), (Algorithm.COLLNET_CHAIN, 0)])
def test_v2_asks_for_no_count_where_collnet_is_possible(rig: Rig, other: Algorithm, requested: int) -> None:
    """v2 shows no costs, so NCCL's own choice may be CollNet, where nothing clamps the count."""
    keys = [host_key(algorithms=(other, Algorithm.RING))]
    table = DecisionTable.of(1, {table_key(keys[0]): Action(channels=4)}, max_channels=16)
    job = rig.start(host_program(keys, total=5), tuner_abi=2, profiler_abi=0)
    ((channel,),) = rig.channels(job)
    stage(channel, table, 0)
    finish(job, 5)
    assert set(job.used(0)["requested_channels"]) == {requested}


# ---- what else comes along ----


@pytest.mark.parametrize(("tuner_abi", "profiler_abi"), [(3, 1), (4, 2), (4, 3), (4, 4), (6, 6)])
def test_aggregates_p2p_and_foreign_proxies(rig: Rig, tuner_abi: int, profiler_abi: int) -> None:
    total = 200
    program = host_program(KEYS[:4], total=total, time_us=20.0)
    job = rig.start(
        program,
        tuner_abi=tuner_abi,
        profiler_abi=profiler_abi,
        extra_args=("--aggregate-every", "3", "--p2p-every", "2", "--pxn-every", "5"),
    )
    ((channel,),) = rig.channels(job)
    stage(channel, table_of({0: ACTIONS[0]}), 0)
    finish(job, total)
    used = job.used(0)
    records = drain_all(channel)
    check_counts(channel, int(used["n_collectives"].sum()))
    assert channel.status.undecided == 0
    parts = records["flags"] & AGGREGATE != 0
    of_calls = used[records["dseq"] - 1]
    assert np.array_equal(parts, of_calls["n_collectives"] == 2)
    assert channel.status.merged == np.count_nonzero(parts) > 0
    assert sorted(records["dseq"]) == list(range(1, total + 1))
    sizes = np.array([KEYS[key].n_bytes for key in of_calls["key"]])
    assert np.array_equal(records["bytes"], sizes * of_calls["n_collectives"])
    if profiler_abi >= 4:
        assert np.array_equal(records["exec_ns"][~parts], of_calls["exec_ns"][~parts])
        assert np.all(records["exec_ns"][parts] >= 2 * of_calls["exec_ns"][parts])


def test_bad_timers_are_counted_and_not_recorded(rig: Rig) -> None:
    total = 300
    job = rig.start(host_program(total=total), extra_args=("--bad-timers", "50"))
    ((channel,),) = rig.channels(job)
    finish(job, total)
    used, records = job.used(0), drain_all(channel)
    check_counts(channel, total)
    assert 0 < channel.status.dropped["timer"] < total
    assert len(records) == total - channel.status.dropped["timer"]
    assert np.array_equal(records["exec_ns"], used["exec_ns"][records["dseq"] - 1])


@pytest.mark.parametrize(("tuner_abi", "profiler_abi"), [(4, 3), (4, 4), (6, 6)])
def test_several_communicators_in_a_process(rig: Rig, tuner_abi: int, profiler_abi: int) -> None:
    total, n = 90, 3
    program = host_program(total=total, time_us=50.0)
    job = rig.start(program, ranks=(2, 3), communicators=n, tuner_abi=tuner_abi, profiler_abi=profiler_abi, seed=3)
    found = rig.channels(job, n)
    for of_process in found:
        stage(of_process[1], table_of(ACTIONS), 4)
    finish(job, total)
    for index in range(n):
        assert agreement_violations([job.used(process, index) for process in range(2)]) == 0
    for process, of_process in enumerate(found):
        for index, channel in enumerate(of_process):
            used = job.used(process, index)
            assert len(used) == total // n
            assert channel.identity.comm_id == program.comm_id + index
            assert channel.identity.rank == (2, 3)[process]
            assert used["untouched"].all() == (index != 1)
            records = by_call(drain_all(channel))
            assert len(records) == len(used)
            if profiler_abi >= 4:
                assert np.array_equal(records["exec_ns"], used["exec_ns"])
            check_counts(channel, len(used))


def test_cost_rows_are_nccls_own(rig: Rig) -> None:
    job = rig.start(host_program(total=30))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of(ACTIONS), 0)
    finish(job, 30)
    rows = channel.cost_rows()
    assert rows["key"].tolist() == [table_key(key) for key in KEYS]
    for row, key in zip(rows, KEYS, strict=True):
        assert np.array_equal(row["cost_us"], key.cost_us)
    assert channel.cost_rows(4)["key"].tolist() == rows["key"][4:].tolist()
    assert len(channel.cost_rows(6)) == len(channel.cost_rows(999)) == 0


def test_fingerprints_tell_ranks_apart_that_call_in_another_order(rig: Rig) -> None:
    total = 3 * 1024 + 10
    found = []
    for order in ([0, 1, 2], [0, 1, 2], [0, 2, 1]):
        program = host_program(total=total, order=np.array(order, np.uint32))
        job = rig.start(program, ranks=(0, 1))
        channels = [of_process[0] for of_process in rig.channels(job)]
        finish(job, total)
        first, second = (channel.fingerprints() for channel in channels)
        assert first == second
        assert sorted(first) == [0, 1, 2]
        found.append(first)
    assert found[0] == found[1]
    assert all(found[0][window] != found[2][window] for window in range(3))


# ---- tables that should never have been ----


def put_in_force(path: Path, version: int, slot: int, table: bytes) -> None:
    """Behind the runner's back."""
    write_at(path, TABLES + TABLE_BYTES * (slot % 2), table)
    write_at(path, BASE, (version << 8 | slot).to_bytes(8, "little"))


def garbage_tables() -> list[tuple[str, bytes, int, int]]:
    good = table_of(ACTIONS).to_bytes()
    random = np.random.default_rng(0).bytes(len(good))
    return [
        ("noise", random, 1, 0),
        ("noise behind a good header", good[:32] + random[32:], 1, 0),
        ("zeros", bytes(len(good)), 1, 0),
        ("another magic", b"\1" + good[1:], 1, 0),
        ("another layout version", good[:4] + bytes([good[4] + 1]) + good[5:], 1, 0),
        ("another table version", good, 2, 0),
        ("another digest", good[:16] + bytes([good[16] ^ 1]) + good[17:], 1, 0),
        ("one bit of an entry", good[:40] + bytes([good[40] ^ 1]) + good[41:], 1, 0),
        ("a slot that is none", good, 1, 200),
    ]


@pytest.mark.parametrize(
    ("table", "version", "slot"), [row[1:] for row in garbage_tables()], ids=[row[0] for row in garbage_tables()]
)
def test_a_table_that_is_not_whole_changes_nothing(rig: Rig, table: bytes, version: int, slot: int) -> None:
    job = rig.start(host_program(total=30))
    ((channel,),) = rig.channels(job)
    put_in_force(channel.path, version, slot, table)
    finish(job, 30)
    assert np.all(job.used(0)["untouched"] == 1)
    assert channel.status.passthrough["bad_table"] == 30
    assert len(drain_all(channel)) == 30


def test_the_same_table_untouched_does_something(rig: Rig) -> None:
    """Keeps the test above honest."""
    job = rig.start(host_program(total=30))
    ((channel,),) = rig.channels(job)
    put_in_force(channel.path, 1, 0, table_of(ACTIONS).to_bytes())
    finish(job, 30)
    assert channel.status.applied == 25


# The host can price these channel counts and no others, so what lies between them stands for the rest.
channel_bytes = st.one_of(st.sampled_from(CHANNEL_VALUES), st.integers(65, 255))
entry_bytes = st.one_of(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([0, 1, 2, 4, 6, 7, 255]),
        st.sampled_from([0, 1, 2, 3, 255]),
        channel_bytes,
        st.just(0),
        st.integers(0, 33),
        st.just(0),
    ),
    st.tuples(*(st.integers(0, 255) for _ in range(4)), channel_bytes, *(st.integers(0, 255) for _ in range(3))),
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    entries=st.lists(entry_bytes, min_size=len(KEYS), max_size=len(KEYS)),
    max_channels=st.sampled_from([0, 4, 16, 64, 2**32 - 1]),
    tuner_abi=st.sampled_from([2, 3, 6]),
)
def test_an_entry_that_asks_for_the_impossible_changes_nothing(
    rig: Rig, entries: list[tuple[int, ...]], max_channels: int, tuner_abi: int
) -> None:
    """A whole table with any entries. The host ends with an error where one of them could harm NCCL."""
    rows = np.zeros(N_KEYS, ENTRY_DTYPE)
    for key, entry in zip(KEYS, entries, strict=True):
        rows[table_key(key)] = entry
    table = DecisionTable(1, rows, max_channels)
    total = 3 * len(KEYS)
    # 32 channels are within what a table of 64 allows and the emulated communicator clamps them.
    job = rig.start(host_program(total=total), tuner_abi=tuner_abi, profiler_abi=0)
    ((channel,),) = rig.channels(job)
    stage(channel, table, 0)
    finish(job, total)
    for row in job.used(0):
        is_set, path, algo, proto, channels, _, _, _ = entries[row["key"]]
        cost = KEYS[row["key"]].cost_us
        own = algo == proto == 255
        # v2 shows no costs: ring and tree with LL and Simple are what it may ask for.
        offered = algo < 7 and proto < 3 and cost[algo, proto] >= 0 and (tuner_abi > 2 or proto != 1)
        legal = is_set == 1 and path == 0 and channels <= min(64, max_channels) and (own or offered)
        if not legal:
            assert row["untouched"], entries[row["key"]]
        else:
            assert row["requested_channels"] == channels
            assert own or (row["algorithm"], row["protocol"]) == (algo, proto)
    job.wait(1)
    rig.close()


# ---- no room, no permission ----


def test_a_dead_job_leaves_segments_that_can_be_removed(rig: Rig) -> None:
    job = rig.start(host_program(), ranks=(0, 1))
    rig.channels(job)
    job.kill(0)
    job._processes[0].popen.wait()
    (stale,) = remove_stale(rig.job_id)
    assert f"-{job.pids()[0]}-" in stale.name
    assert len(list(segments(rig.job_id))) == 1
    assert remove_stale(rig.job_id) == []
