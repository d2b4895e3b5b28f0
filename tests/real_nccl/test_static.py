"""Static tables under NCCL's own host code, and our CSV under NVIDIA's own tuner for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_jobs import AG, AR, KIB, MIB, RS, Jobs, wait_for
from tuners import Tuner

from dynamiccl_ray.control.table import ENTRY_DTYPE, DecisionTable
from dynamiccl_ray.keys import N_BINS, N_KEYS, bin_bytes, key_of
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol
from dynamiccl_ray.plugin_bridge.bench_nccl import csv_tuner
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.nccl_job import LOG, agreement_violations
from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl
from dynamiccl_ray.static.blocks import Block, text_of, write_text
from dynamiccl_ray.static.formats import nccl_csv

RANKS, NODES, STEPS, CHANNELS = 4, 2, 2, 8
RNG = np.random.default_rng(0)
CALLS = [(Collective(int(RNG.choice([AR, AG, RS]))), int(2 ** RNG.uniform(10, 24)) // 64 * 64) for _ in range(120)]
CSV_CALLS = 10_000


def learned(*, csv: bool = False) -> DecisionTable:
    """What a run could have learned of these calls; of three in four. With ``csv``, what CSV can say, of all."""
    rng = np.random.default_rng(1)
    entries = np.zeros(N_KEYS, ENTRY_DTYPE)
    for n, (collective, nbytes) in enumerate(CALLS):
        algorithm = Algorithm(int(rng.integers(2))) if collective == AR else Algorithm.RING
        chunk = 0 if csv else int(rng.choice([0, 15, 16]))
        key = key_of(collective, nbytes, False)
        if csv or n % 4:
            entries[key] = (1, 0, algorithm, rng.integers(3), rng.choice([0, 1, 2, 4]), 0, chunk, 0)
    return DecisionTable(1, entries, CHANNELS)


def block_of(table: DecisionTable, ranks: int = RANKS) -> Block:
    return Block(ranks=ranks, nodes=NODES, max_channels=CHANNELS, entries=table.entries)


def program() -> Program:
    made = Program(nodes=NODES, ranks_per_node=RANKS // NODES, steps=STEPS)
    world = made.comm("world")
    for rank in made.ranks:
        rank.setup.init(world)
        for collective, nbytes in CALLS:
            rank.step.collective(world, collective, nbytes)
        rank.step.sync()
        rank.end.destroy(world)
    return made


def used(log: LOG) -> list[tuple[Any, ...]]:
    """What each rank used in each of its calls."""
    assert agreement_violations(log) == 0
    assert len(log) == RANKS * STEPS * len(CALLS)
    order = log[np.lexsort((log["ordinal"], log["rank"]))]
    return order[["rank", "ordinal", "func", "bytes", "algo", "proto", "channels", "chunk_bytes"]].tolist()


def play_live(jobs: Jobs, table: DecisionTable) -> list[tuple[Any, ...]]:
    job, reader = jobs.start(program(), least_us=0.0, credit=0)
    job.await_ranks()
    wait_for(lambda: len(reader.seen) == RANKS, what="the channels")
    with reader.lock:
        for seen in reader.seen.values():
            outcome, switch_at, _ = seen.channel.prepare(table, 0)
            assert (outcome, switch_at) == (Prepared.PREPARED, 1)
            assert seen.channel.decide(1, 1)
    job.set_credit(STEPS)
    job.wait(60)
    return used(job.logs())


def play_static(jobs: Jobs, directory: Path, table: DecisionTable) -> list[tuple[Any, ...]]:
    path = directory / "table"
    write_text(path, text_of([block_of(table)]))
    job, seen = jobs.run(program(), least_us=0.0, credit=STEPS, env={"DYNAMICCL_TABLE": str(path)})
    assert not seen, "there is no channel"
    return used(job.logs())


@pytest.fixture
def nvidias(nccl: RealNccl) -> Path:
    """NVIDIA's tuner, where it works: that of 2.28 takes the cost table for pointers, and any match is a crash."""
    source = next(nccl.tree.glob("*/tuner/example/plugin.c"), nccl.tree / "ext-tuner" / "example" / "plugin.c")
    if "(float (*)[NCCL_NUM_PROTOCOLS])collCostTable" not in source.read_text():
        pytest.skip(f"NVIDIA's example of {nccl.version} crashes on any match")
    return csv_tuner(nccl)


def test_it_decides_as_the_live_table(jobs: Jobs, tmp_path: Path) -> None:
    table = learned()
    static = play_static(jobs, tmp_path, table)
    assert static == play_live(jobs, table)
    own, _ = jobs.run(program(), least_us=0.0, credit=STEPS, plugin=Path("none"))
    assert static != used(own.logs())


def test_nvidias_csv_tuner_decides_as_our_csv_says(jobs: Jobs, nvidias: Path, tmp_path: Path) -> None:
    """In jobs: the same pairs and channels as with our table."""
    table = learned(csv=True)
    csv = tmp_path / "tuner.csv"
    csv.write_text(nccl_csv([block_of(table)]).text)
    job, _ = jobs.run(
        program(), least_us=0.0, credit=STEPS, plugin=nvidias,
        env={"NCCL_TUNER_CONFIG_FILE": str(csv), "NCCL_PROFILER_PLUGIN": "none"},
    )  # fmt: skip
    assert used(job.logs()) == play_static(jobs, tmp_path, table)


@pytest.mark.parametrize("seed", range(2))
def test_the_two_tuners_are_asked_the_same(
    nvidias: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """10,000 calls of any costs: with any table, of what CSV can say, and never anything that it was not told."""
    rng = np.random.default_rng(seed)
    entries = np.zeros(N_KEYS, ENTRY_DTYPE)
    for start in rng.integers(0, N_KEYS, 700):
        own = rng.random() < 0.1
        pair = (255, 255) if own else (rng.integers(7), rng.integers(3))
        entries[start : start + rng.integers(1, 12)] = (1, 0, *pair, rng.integers(CHANNELS + 1), 0, 0, 0)
    table = DecisionTable(1, entries, CHANNELS)
    path, csv = tmp_path / "table", tmp_path / "tuner.csv"
    write_text(path, text_of([block_of(table), block_of(table, ranks=2)]))
    csv.write_text(nccl_csv([block_of(table, ranks=2), block_of(table)]).text)
    for name, value in (("DYNAMICCL_TABLE", path), ("NCCL_TUNER_CONFIG_FILE", csv)):
        monkeypatch.setenv(name, str(value))
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.setenv(name, "")
    ours, theirs = Tuner(5, RANKS, NODES), Tuner(5, RANKS, NODES, library=nvidias)
    compared = {"single": 0, "group": 0, "nothing": 0}
    for _ in range(CSV_CALLS):
        func, ops = int(rng.integers(5)), int(rng.choice([1, 2, 9]))
        least = bin_bytes(int(rng.integers(N_BINS)))
        nbytes = least + int(rng.integers(1 + least // 9))
        cost = rng.random((7, 3)).astype(np.float32) + 1
        cost[rng.random((7, 3)) < 0.2] = -1.0
        ours_said, theirs_said = (of.ask(func, nbytes, ops, cost) for of in (ours, theirs))
        single = entries[key_of(func, nbytes, False)]
        entry = entries[key_of(func, nbytes, ops > 1)]
        if ours_said.cost != cost.tobytes() and (ops == 1 or (single["set"] and single["algo"] < 7)):
            assert (theirs_said.cost, theirs_said.channels) == (ours_said.cost, ours_said.channels)
            compared["single" if ops == 1 else "group"] += 1
        elif not entry["set"] or (entry["algo"] == 255 and ops == 1):
            assert theirs_said.cost == cost.tobytes()
            assert theirs_said.channels == 1, "which is NVIDIA's, and what export warns of"
            compared["nothing"] += 1
    ours.close()
    theirs.close()
    assert min(compared.values()) > 500, compared


def test_protocols_and_collectives_are_all_there() -> None:
    """Keeps the tests above honest."""
    entries = learned().entries[[key_of(*call, False) for call in CALLS]]
    assert set(entries["proto"][entries["set"] == 1]) == set(Protocol)
    assert {AR, AG, RS} == {collective for collective, _ in CALLS}
    assert min(nbytes for _, nbytes in CALLS) < 4 * KIB
    assert max(nbytes for _, nbytes in CALLS) > 8 * MIB
