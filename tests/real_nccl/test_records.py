"""What the channel says of each operation, against what NCCL launched and the virtual GPU played."""

from __future__ import annotations

from typing import Any

import numpy as np
from real_jobs import AG, AR, KIB, MIB, RS, Jobs, Seen

from dynamiccl_ray.plugin_bridge.layout import AGGREGATE, DECIDED
from dynamiccl_ray.plugin_bridge.nccl_job import LOG
from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.timers import HELD_S, TimerCheck

TOLERANCE = 0.05
CALLS, BATCH = 600, 64
SIZES = (1 * KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB)


def played(log: LOG, seen: Seen, program: Program) -> LOG:
    """What one rank of a communicator played, in order."""
    number = next(comm.number for comm in program.comms if comm.name == seen.name)
    mine = log[(log["number"] == number) & (log["rank"] == seen.channel.identity.rank)]
    return mine[np.argsort(mine["ordinal"])]


def off_by(records: np.ndarray[Any, Any], rows: LOG) -> np.ndarray[Any, Any]:
    """How much of the planned time each recorded one is off by."""
    planned = (rows["stop_ns"] - rows["start_ns"]).astype(float)
    return np.asarray(np.abs(records["exec_ns"] / planned - 1))


def test_every_operation_is_recorded_as_it_was_played(jobs: Jobs) -> None:
    program = Program(nodes=2, ranks_per_node=2, steps=2)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
    halves = program.split(world, {"left": (0, 1), "right": (2, 3)})
    for rank in program.ranks:
        half = halves[rank.rank // 2]
        for nbytes in SIZES:
            for collective in (AR, AG, RS):
                rank.step.collective(world, collective, nbytes)
            rank.step.collective(half, AR, nbytes, stream=1)
        rank.step.sync()
        for comm in (half, world):
            rank.end.destroy(comm)
    job, all_seen = jobs.run(program)
    log = job.logs()
    assert len(all_seen) == 8
    for seen in all_seen:
        rows, records = played(log, seen, program), seen.records
        records = records[np.argsort(records["dseq"])]
        assert np.all(records["flags"] & DECIDED)
        assert records["dseq"].tolist() == list(range(1, len(rows) + 1))
        assert seen.status.dropped == dict.fromkeys(("full", "busy", "incomplete", "timer"), 0)
        for name in ("func", "algo", "proto", "channels", "bytes"):
            assert np.array_equal(records[name], rows[name]), name
        assert off_by(records, rows).max() <= TOLERANCE


def test_groups_are_recorded_as_they_were_played(jobs: Jobs) -> None:
    """Those that NCCL runs together have one record, from the first start to the last end."""
    program = Program(nodes=2, ranks_per_node=1, steps=3)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        with rank.step.group():
            for nbytes in (64 * MIB, MIB, 4 * KIB, 8 * KIB):
                rank.step.collective(world, AR, nbytes)
            rank.step.collective(world, AG, 4 * MIB)
            rank.step.collective(world, RS, 2 * MIB)
        rank.step.sync()
        rank.end.destroy(world)
    job, all_seen = jobs.run(program)
    log = job.logs()
    for seen in all_seen:
        rows, records = played(log, seen, program), seen.records
        assert seen.status.dropped == dict.fromkeys(("full", "busy", "incomplete", "timer"), 0)
        assert len(records) + seen.status.merged == len(rows)
        assert len(np.unique(records["dseq"])) == len(records) == seen.status.dseq
        assert np.any(records["flags"] & AGGREGATE)
        for record in records:
            # Of one group, which is one step.
            of_step = rows[rows["step"] == (record["dseq"] - 1) // (seen.status.dseq // program.steps)]
            of_kind = of_step[(of_step["func"] == record["func"]) & (of_step["algo"] == record["algo"])]
            of_kind = of_kind[of_kind["proto"] == record["proto"]]
            if record["flags"] & AGGREGATE:
                of_kind = of_kind[_in_aggregate(of_kind["bytes"], int(record["bytes"]))]
            else:
                of_kind = of_kind[of_kind["bytes"] == record["bytes"]]
            assert of_kind["bytes"].sum() == record["bytes"]
            planned = int(of_kind["stop_ns"].max()) - int(of_kind["start_ns"].min())
            assert abs(int(record["exec_ns"]) / planned - 1) <= TOLERANCE


def _in_aggregate(sizes: np.ndarray[Any, Any], total: int) -> np.ndarray[Any, Any]:
    """Which of some sizes, the smallest first, come to a total."""
    order = np.argsort(sizes, kind="stable")
    kept = np.zeros(len(sizes), np.bool_)
    kept[order[: int(np.searchsorted(np.cumsum(sizes[order]), total, "right"))]] = True
    return kept


def _believed(records: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], TimerCheck]:
    """What is booked of records that come little by little."""
    now = [0.0]
    check = TimerCheck(clock=lambda: now[0])
    believed = [check.take(records[at : at + BATCH]) for at in range(0, len(records), BATCH)]
    now[0] = 2 * HELD_S
    return np.concatenate([*believed, check.take(records[:0])]), check


def test_times_that_a_starved_proxy_thread_read_too_late_are_not_believed(jobs: Jobs) -> None:
    """Kernels take no real time here, so that NCCL's proxy thread falls behind by more than the 64 of a channel that
    are kept.
    """
    program = Program(ranks_per_node=2, steps=6)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        for call in range(CALLS):
            rank.step.collective(world, AR, SIZES[call * 7 % 11 % len(SIZES)])
        rank.step.sync()
        rank.end.destroy(world)
    job, all_seen = jobs.run(program, least_us=0.0)
    log = job.logs()
    rejected = wrong = 0
    for seen in all_seen:
        rows, records = played(log, seen, program), seen.records
        booked, check = _believed(records)
        assert check.held == 0
        assert len(booked) + check.rejected == len(records)
        assert len(records) + sum(seen.status.dropped.values()) == len(rows)
        assert off_by(booked, rows[booked["dseq"] - 1]).max(initial=0) <= TOLERANCE
        rejected += check.rejected + seen.status.dropped["timer"]
        wrong += np.count_nonzero(off_by(records, rows[records["dseq"] - 1]) > TOLERANCE)
        assert len(booked) > 0
    assert wrong > 0, "the proxy threads were not starved"
    assert rejected >= wrong
