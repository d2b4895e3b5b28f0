"""Tables that are not whole, or ask for the impossible: the plugin leaves NCCL as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rig import CALLS, Rig, indices, play, stage, table_key, used_of, write_at
from test_plugin import ACTIONS, BASE, PLAIN, TABLE_BYTES, TABLES, drain_all, finish, table_of

from dynamiccl_ray.control.table import ENTRY_DTYPE, DecisionTable
from dynamiccl_ray.keys import N_KEYS
from dynamiccl_ray.knobs import CHANNEL_VALUES
from dynamiccl_ray.plugin_bridge.segments import remove_stale, segments


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
    job = rig.start(play(steps=5))
    ((channel,),) = rig.channels(job)
    put_in_force(channel.path, version, slot, table)
    finish(job)
    assert np.all(used_of(job.log(0))["own"] == 1)
    assert channel.status.passthrough["bad_table"] == 30
    assert len(drain_all(channel)) == 25


def test_the_same_table_untouched_does_something(rig: Rig) -> None:
    """Keeps the test above honest."""
    job = rig.start(play(steps=5))
    ((channel,),) = rig.channels(job)
    put_in_force(channel.path, 1, 0, table_of(ACTIONS).to_bytes())
    finish(job)
    assert channel.status.applied == 25


channel_bytes = st.one_of(st.sampled_from(CHANNEL_VALUES), st.integers(0, 255))
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
    entries=st.lists(entry_bytes, min_size=len(CALLS), max_size=len(CALLS)),
    max_channels=st.sampled_from([0, 4, 16, 64, 2**32 - 1]),
    release=st.sampled_from(["2.21", "2.23", "2.30"]),
)
def test_an_entry_that_asks_for_the_impossible_changes_nothing(
    rig: Rig, entries: list[tuple[int, ...]], max_channels: int, release: str
) -> None:
    """A whole table with any entries. The job ends with an error where one of them could harm NCCL."""
    rows = np.zeros(N_KEYS, ENTRY_DTYPE)
    for call, entry in zip(CALLS, entries, strict=True):
        rows[table_key(call)] = entry
    table = DecisionTable(1, rows, max_channels)
    job = rig.start(play(steps=3, belief=PLAIN), release=release, env={"NCCL_PROFILER_PLUGIN": "none"})
    ((channel,),) = rig.channels(job)
    stage(channel, table, 0)
    finish(job)
    used = used_of(job.log(0))
    for row, index in zip(used, indices(used), strict=True):
        is_set, path, algo, proto, channels, _, _, _ = entries[index]
        cost = PLAIN.cost_table_us(*CALLS[index])
        own = algo == proto == 255
        # v2 shows no costs: ring and tree with LL and Simple are what it may ask for.
        offered = algo < 7 and proto < 3 and cost[algo, proto] >= 0 and (release != "2.21" or proto != 1)
        legal = is_set == 1 and path == 0 and channels <= min(64, max_channels) and (own or offered)
        if not legal:
            assert row["own"], entries[index]
        else:
            assert row["asked"] == channels
            assert own or (row["algo"], row["proto"]) == (algo, proto)
    rig.close()


# ---- no room, no permission ----


def test_a_dead_job_leaves_segments_that_can_be_removed(rig: Rig) -> None:
    job = rig.start(play(places=(0, 1)))
    rig.channels(job)
    job.kill(0)
    job._processes[0].popen.wait()
    (stale,) = remove_stale(rig.job_id)
    assert f"-{job.pids()[0]}-" in stale.name
    assert len(list(segments(rig.job_id))) == 1
    assert remove_stale(rig.job_id) == []
