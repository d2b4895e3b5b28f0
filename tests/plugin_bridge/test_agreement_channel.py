"""Eight ranks through hundreds of table switches: no two ranks ever use different tables.

The coordinator is a few lines here, so that nothing but the channel is on trial: PREPARE everywhere, COMMIT at the
largest hold or ABORT, with random delays wherever a message would travel.
"""

from __future__ import annotations

import random
import time

import numpy as np
from rig import CALLS, Rig, play, stage, table_key, used_of, wait_for, write_at

from dynamiccl_ray.actions import Action
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING, agreement_violations

RANKS = 8
SWITCHES = 200
PAIRS = [pair_index(a, p) for a in (Algorithm.TREE, Algorithm.RING) for p in Protocol]
ACTIONS = [Action(pair=pair, channels=channels) for channels in range(len(CHANNEL_VALUES) - 1) for pair in PAIRS]
CALL = CALLS[0]


def action_of(version: int) -> Action:
    return ACTIONS[version % len(ACTIONS)]


def table_of(version: int) -> DecisionTable:
    return DecisionTable.of(version, {table_key(CALL): action_of(version)}, max_channels=24)


class Driver:
    """Plays the coordinator and all runners."""

    def __init__(self, channels: list[Channel], seed: int) -> None:
        self.channels = channels
        self.random = random.Random(seed)
        self.switches: list[tuple[int, int]] = []  # (S, version), ascending
        self.outcomes = {"committed": 0, "aborted": 0, "overtaken": 0}
        self.version = 0

    def dawdle(self, most_us: float) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * most_us * 1e-6)

    def folded(self) -> bool:
        return min(channel.fold() for channel in self.channels)

    def switch(self) -> None:
        self.version += 1
        version, table = self.version, table_of(self.version)
        order = self.random.sample(self.channels, RANKS)
        holds = []
        for channel in order:
            outcome, hold_at, digest = channel.prepare(table, self.random.choice([0, 0, 1, 2, 5, 40]))
            if outcome is Prepared.OVERTAKEN:
                break
            assert outcome is Prepared.PREPARED
            assert digest == table.digest
            assert channel.status.open_version == version
            holds.append(hold_at)
            self.dawdle(300)
        if len(holds) < RANKS:
            self.outcomes["overtaken"] += 1
            switch_at = None
        else:
            switch_at = max(holds) if self.random.random() < 0.8 else None
            self.outcomes["committed" if switch_at else "aborted"] += 1
        # Whoever was overtaken has aborted by itself and knows no better; the rest wait to be told.
        for channel in self.random.sample(order[: len(holds)], len(holds)):
            self.dawdle(500)
            assert channel.decide(version, switch_at)
            assert channel.decide(version, switch_at), "told twice"
            assert not channel.decide(version, None if switch_at else 10**6), "told otherwise"
        if switch_at:
            self.switches.append((switch_at, version))
        wait_for(self.folded, what="the switch")


def test_no_two_ranks_ever_use_different_tables(rig: Rig) -> None:
    job = rig.start(play([CALL], places=range(RANKS), rate_hz=3000.0, window=6, syncs=False))
    channels = [of_process[0] for of_process in rig.channels(job)]
    job.set_credit(FREE_RUNNING)
    driver = Driver(channels, seed=5)
    while len(driver.switches) < SWITCHES:
        driver.switch()
    total = job.stop()
    assert agreement_violations(job.logs()) == 0
    logs = [used_of(job.log(rank)) for rank in range(RANKS)]

    starts = [0] + [switch_at for switch_at, _ in driver.switches]
    assert starts == sorted(starts)
    assert starts[-1] <= total
    versions = np.array([0] + [version for _, version in driver.switches])
    in_force = versions[np.searchsorted(starts, np.arange(1, total + 1), side="right") - 1]
    channels_of = np.array([0] + [CHANNEL_VALUES[action_of(v).channels] for v in range(1, driver.version + 1)])
    pair_of = np.array([0] + [action_of(v).pair for v in range(1, driver.version + 1)])
    for log, channel in zip(logs, channels, strict=True):
        assert len(log) == total
        assert np.array_equal(log["own"] == 1, in_force == 0)
        assert np.array_equal(log["asked"], channels_of[in_force])
        asked = in_force > 0
        pair = 1 + 3 * log["algo"][asked].astype(int) + log["proto"][asked]
        assert np.array_equal(pair, pair_of[in_force[asked]])
        # The record carries the version that was really used.
        records = channel.drain()
        assert np.array_equal(records["version"], in_force[records["dseq"].astype(int) - 1])

    # It was not peace and quiet: ranks waited, and messages came in every order.
    waits = sum(channel.status.hold_waits for channel in channels)
    assert waits > 20
    assert driver.outcomes["aborted"] > 10
    assert driver.outcomes["committed"] == SWITCHES


def test_a_rank_waits_until_it_is_told(rig: Rig) -> None:
    job = rig.start(play([CALL]))
    ((channel,),) = rig.channels(job)
    outcome, hold_at, _ = channel.prepare(table_of(1), 4)
    assert (outcome, hold_at) == (Prepared.PREPARED, 5)
    job.set_credit(100)
    wait_for(lambda: channel.status.dseq == 5, what="the hold")
    time.sleep(0.05)
    status = channel.status
    assert (status.dseq, status.hold_waits) == (5, 1)
    assert channel.decide(1, 8)
    wait_for(channel.fold)
    wait_for(lambda: channel.status.dseq == 100)
    job.stop()
    assert np.flatnonzero(used_of(job.log(0))["own"]).tolist() == list(range(7))
    assert channel.status.hold_wait_us > 40_000


def test_an_aborted_version_leaves_the_old_table(rig: Rig) -> None:
    job = rig.start(play([CALL]))
    ((channel,),) = rig.channels(job)
    stage(channel, table_of(1), 0)
    job.set_credit(10)
    wait_for(channel.fold)
    wait_for(lambda: channel.status.dseq == 10)
    outcome, hold_at, _ = channel.prepare(table_of(2), 0)
    assert (outcome, hold_at) == (Prepared.PREPARED, 11)
    job.set_credit(30)
    wait_for(lambda: channel.status.hold_waits == 1)
    assert channel.decide(2, None)
    assert channel.decide(2, None)
    assert not channel.decide(2, 11)
    wait_for(lambda: channel.status.dseq == 30)
    job.stop()
    assert set(used_of(job.log(0))["asked"]) == {CHANNEL_VALUES[action_of(1).channels]}
    assert channel.status.base_version == 1


def test_what_prepare_and_decide_refuse(rig: Rig) -> None:
    job = rig.start(play([CALL]))
    ((channel,),) = rig.channels(job)
    assert not channel.decide(0, 5)
    assert not channel.decide(1, 5)
    assert not channel.decide(1, None)
    assert channel.prepare(table_of(0), 0)[0] is Prepared.REFUSED
    assert channel.prepare(table_of(2**32), 0)[0] is Prepared.REFUSED
    outcome, hold_at, digest = channel.prepare(table_of(3), 9)
    assert outcome is Prepared.PREPARED
    assert channel.prepare(table_of(3), 500) == (Prepared.PREPARED, hold_at, digest), "the same answer again"
    assert channel.prepare(table_of(4), 9)[0] is Prepared.BUSY
    assert not channel.decide(3, 0)
    assert not channel.decide(3, hold_at - 1), "calls below the hold do not ask"
    assert not channel.decide(2, hold_at)
    assert channel.decide(3, hold_at)
    assert channel.prepare(table_of(4), 9)[0] is Prepared.BUSY, "S has not passed"
    assert not channel.fold()
    job.set_credit(hold_at)
    wait_for(channel.fold)
    assert channel.decide(3, hold_at), "known already"
    assert channel.prepare(table_of(3), 9)[0] is Prepared.REFUSED
    assert channel.prepare(table_of(2), 9)[0] is Prepared.REFUSED
    assert channel.prepare(table_of(4), 9)[0] is Prepared.PREPARED
    assert channel.decide(4, None)
    job.stop()


def test_a_new_runner_finds_the_promise_of_the_old_one(rig: Rig) -> None:
    """The runner is lost while its rank waits; the next one knows the version and the hold, and tells it."""
    job = rig.start(play([CALL]))
    ((channel,),) = rig.channels(job)
    outcome, hold_at, digest = channel.prepare(table_of(7), 3)
    assert outcome is Prepared.PREPARED
    job.set_credit(20)
    wait_for(lambda: channel.status.hold_waits == 1)
    channel.close()
    heir = rig.channel(channel.path)
    status = heir.status
    assert (status.open_version, status.hold_at, status.decision) == (7, hold_at, 0)
    assert heir.prepare(table_of(7), 1000) == (Prepared.PREPARED, hold_at, digest)
    assert heir.status.dseq == hold_at
    assert heir.decide(7, hold_at + 2)
    heir.close()
    heir = rig.channel(channel.path)
    wait_for(lambda: heir.status.dseq == 20)
    assert heir.fold()
    assert heir.status.base_version == 7
    job.stop()
    assert np.flatnonzero(used_of(job.log(0))["own"]).tolist() == list(range(hold_at + 1))


def test_an_unpromised_hold_is_never_waited_at(rig: Rig) -> None:
    """A runner that dies on the way to its promise leaves the words as they are here; nobody may wait for it."""
    job = rig.start(play([CALL]))
    ((channel,),) = rig.channels(job)
    hold_at, pending, promise = 23296, 23320, 23336  # docs/channel.md
    for round_, promised in enumerate((1 << 2, 1 << 2 | 2, 4 << 2 | 1)):  # open, refused, another version's
        write_at(channel.path, pending, (1 << 8).to_bytes(8, "little"))
        write_at(channel.path, promise, promised.to_bytes(8, "little"))
        write_at(channel.path, hold_at, (1).to_bytes(8, "little"))
        calls = 10 * (round_ + 1)
        job.set_credit(calls)
        wait_for(lambda calls=calls: channel.status.dseq == calls, what="ten calls")
        time.sleep(0.01)
    assert channel.status.hold_waits == 0
    # And the next runner starts over.
    outcome, switch_at, _ = channel.prepare(table_of(1), 0)
    assert outcome is Prepared.PREPARED
    assert channel.decide(1, switch_at)
    job.add_credit(10)
    wait_for(channel.fold)
    job.stop()
    assert np.count_nonzero(used_of(job.log(0))["own"]) == switch_at - 1


def test_prepare_keeps_its_word_at_no_margin_at_all(rig: Rig) -> None:
    """Against a rank that calls as fast as it can, PREPARE promises or says that it could not."""
    job = rig.start(play([CALL], us=1.0))
    ((channel,),) = rig.channels(job)
    job.set_credit(FREE_RUNNING)
    version = 0
    while channel.status.dseq < 3000:
        version += 1
        outcome, hold_at, _ = channel.prepare(table_of(version), 0)
        if outcome is Prepared.PREPARED:
            assert channel.status.dseq <= hold_at
            assert channel.decide(version, None)
        else:
            assert outcome is Prepared.OVERTAKEN
    total = job.stop()
    used = used_of(job.log(0))
    assert np.all(used["own"] == 1)
    assert len(used) == total
