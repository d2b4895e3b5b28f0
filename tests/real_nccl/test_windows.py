"""Windows of calls that are profiled and windows that are not, with NCCL's own reading of its mask."""

from __future__ import annotations

import numpy as np
from real_jobs import AG, AR, KIB, MIB, RS, Jobs, Seen, wait_for
from test_records import TOLERANCE, off_by, played

from dynamiccl_ray.plugin_bridge.layout import AGGREGATE, DECIDED
from dynamiccl_ray.plugin_bridge.program import Comm, Program

SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB)
STEPS, DUTY, WINDOW = 200, 2, 256
MASK = 2**64 - 1


def is_profiled(window: int) -> bool:
    """docs/channel.md"""
    x = window * 0x9E3779B97F4A7C15 & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) % (1 << DUTY) == 0


def governed(jobs: Jobs, program: Program, ranks: int) -> tuple[np.ndarray, list[Seen]]:
    job, reader = jobs.start(program, credit=0, least_us=20.0)
    wait_for(lambda: len(reader.seen) == ranks, what="the channels")
    with reader.lock:
        for seen in reader.seen.values():
            seen.channel.govern(DUTY)
    job.set_credit(STEPS)
    job.wait(300)
    return job.logs(), reader.finish()


def check(all_seen: list[Seen]) -> None:
    """All ranks of a communicator have measured the same calls, and every call is in some count."""
    expected: dict[str, list[int]] = {}
    for seen in all_seen:
        status = seen.status
        measured = sorted(seen.records["dseq"].tolist())
        lost = sum(status.dropped.values())
        assert np.all(seen.records["flags"] & DECIDED)
        calls = [d for d in range(1, status.dseq + 1) if is_profiled(d // WINDOW)]
        assert status.unprofiled == status.dseq - len(calls)
        # The proxy threads of a busy machine pass over a start now and then.
        assert len(measured) + lost == len(calls)
        assert set(measured) <= set(calls)
        assert lost <= 0.05 * len(calls)
        assert status.applied + sum(status.passthrough.values()) == status.dseq
        assert 0 < len(calls) < 0.7 * status.dseq
        expected.setdefault(seen.name, calls)
        assert calls == expected[seen.name]


def test_collectives_are_measured_whole_or_not_at_all(jobs: Jobs) -> None:
    program = Program(nodes=2, ranks_per_node=1, steps=STEPS, window=4)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        for nbytes in SIZES:
            for collective in (AR, AG, RS):
                rank.step.collective(world, collective, nbytes)
        rank.step.sync()
        rank.end.destroy(world)
    log, all_seen = governed(jobs, program, 2)
    check(all_seen)
    for seen in all_seen:
        rows, records = played(log, seen, program), seen.records
        believed = off_by(records, rows[records["dseq"] - 1]) <= TOLERANCE
        assert believed.mean() > 0.95
        for name in ("func", "algo", "proto", "channels", "bytes"):
            assert np.array_equal(records[name], rows[name][records["dseq"] - 1]), name


def test_groups_across_the_edges(jobs: Jobs) -> None:
    """A group is called as a whole before any of it is decided, so NCCL's mask is older than a window's edge."""
    program = Program(nodes=2, ranks_per_node=1, steps=STEPS, window=4)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        with rank.step.group():
            for nbytes in (MIB, 4 * KIB, 8 * KIB):
                rank.step.collective(world, AR, nbytes)
            rank.step.collective(world, AG, MIB)
            rank.step.collective(world, RS, MIB)
        with rank.step.group():
            for collective in (AR, AG, RS):
                rank.step.collective(world, collective, 64 * KIB)
        rank.step.collective(world, AR, 256 * KIB)
        rank.step.sync()
        rank.end.destroy(world)
    _, all_seen = governed(jobs, program, 2)
    check(all_seen)
    assert any(np.any(seen.records["flags"] & AGGREGATE) for seen in all_seen)


def test_two_communicators_share_the_mask(jobs: Jobs) -> None:
    program = Program(nodes=2, ranks_per_node=1, steps=STEPS, window=4)
    comms: list[Comm] = [program.comm("one"), program.comm("other")]
    for rank in program.ranks:
        for comm in comms:
            rank.setup.init(comm)
        for nbytes in SIZES:
            rank.step.collective(comms[0], AR, nbytes)
            rank.step.collective(comms[0], AG, nbytes)
            rank.step.collective(comms[0], RS, nbytes)
            rank.step.collective(comms[1], AR, nbytes, stream=1)
            rank.step.collective(comms[1], AG, nbytes, stream=1)
        rank.step.sync()
        for comm in comms:
            rank.end.destroy(comm)
    _, all_seen = governed(jobs, program, 4)
    check(all_seen)
    assert sum(seen.status.spared for seen in all_seen) > 0
