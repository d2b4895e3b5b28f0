"""The plugin in NCCL on a GPU: what is asked for is done, what is computed is right, what is measured is true."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.one_gpu.ranks import Ranks
from dynamiccl_ray.actions import Action
from dynamiccl_ray.actors.ranks import collectives_of
from dynamiccl_ray.actors.reduction import Matching, by_the_node
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, Algorithm, Collective, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.clocks import Clock
from dynamiccl_ray.plugin_bridge.layout import APPLIED, GPU_TIMING

KIB, MIB = 1 << 10, 1 << 20
AR, AG, RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
BETWEEN_US = 15.0
"""Between two kernels of a stream, which events have in them."""
PAIRS = [(a, p) for a in (Algorithm.RING, Algorithm.TREE) for p in Protocol]


def asked(algorithm: Algorithm, protocol: Protocol, channels: int = 0, chunk: int = 0) -> Action:
    return Action(
        pair=pair_index(algorithm, protocol), channels=CHANNEL_VALUES.index(channels), chunk=CHUNK_VALUES.index(chunk)
    )


@pytest.mark.parametrize("collective", [AR, AG, RS])
@pytest.mark.parametrize("nbytes", [4 * KIB, MIB + 4096, 32 * MIB])
def test_what_is_asked_for_runs_and_computes_what_it_should(ranks: Ranks, collective: Collective, nbytes: int) -> None:
    pairs = PAIRS if collective is AR else [pair for pair in PAIRS if pair[0] is Algorithm.RING]
    for algorithm, protocol in pairs:
        for channels, chunk in ((0, 0), (1, 0), (2, 64 * KIB), (4, 256 * KIB)):
            print(algorithm.name, protocol.name, channels, chunk)  # Shown where ranks hang.
            ranks.use({(collective, nbytes): asked(algorithm, protocol, channels, chunk)})
            ranks.check(collective, nbytes)
            _, records = ranks.records(1)
            assert np.all(records["key"] == key_of(collective, nbytes, False))
            assert np.all(records["flags"] & APPLIED)
            assert np.all(records["algo"] == algorithm)
            assert np.all(records["proto"] == protocol)
            assert np.all(records["timing"] == GPU_TIMING)
            if channels:
                assert np.all(records["channels"] <= channels)


def by_the_node_us(records: np.ndarray[Any, Any]) -> float:
    """Median over (ranks, n) records."""
    n = len(records)
    done = Matching().take([collectives_of(mine, Clock()) for mine in records], n)
    return float(np.median(by_the_node(done, range(n), n, 1)["least_ns"])) / 1e3


@pytest.mark.parametrize("nbytes", [16 * MIB, 128 * MIB])
def test_times_are_those_of_cudas_events(ranks: Ranks, nbytes: int) -> None:
    """Two clocks: the kernels' own, which the plugin reads, and events that CUDA records between them."""
    for algorithm, protocol in PAIRS:
        ranks.use({(AR, nbytes): asked(algorithm, protocol)})
        events, records = ranks.measured(AR, nbytes, 20)
        of_events = np.median(events.min(0)[5:]) - BETWEEN_US
        off = 0.1 if algorithm is Algorithm.RING else 0.3
        assert by_the_node_us(records[:, 5:]) == pytest.approx(of_events, rel=off), (algorithm, protocol)


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.TREE])
@pytest.mark.parametrize("late", [0.5, 2.0])
def test_what_a_collective_takes_is_free_of_a_late_rank(ranks: Ranks, algorithm: Algorithm, late: float) -> None:
    nbytes = 128 * MIB
    ranks.use({(AR, nbytes): asked(algorithm, Protocol.SIMPLE)})
    ranks.measured(AR, nbytes, 5)

    def one(late_s: float) -> tuple[float, float]:
        alone = [ranks.measured(AR, nbytes, 1, late_s={1: late_s})[1] for _ in range(15)]
        slowest = [float(records["exec_ns"].max()) / 1e3 for records in alone]
        return float(np.median([by_the_node_us(records) for records in alone])), float(np.median(slowest))

    took, most = one(0.0)
    late_us = late * took
    took_late, most_late = one(late_us / 1e6)
    assert most_late > most + 0.7 * late_us
    assert took_late == pytest.approx(took, rel=0.15)


def test_no_rank_differs_while_tables_change(ranks: Ranks) -> None:
    """Data is what proves it: ranks that differ hang, or compute something else."""
    sizes = (64 * KIB, MIB, 8 * MIB)
    rng = np.random.default_rng(0)
    for _ in range(30):
        actions = {(AR, nbytes): asked(*PAIRS[rng.integers(len(PAIRS))], int(rng.choice([0, 1, 2, 4, 8])))
                   for nbytes in sizes}  # fmt: skip
        ranks.use(actions)
        for nbytes in sizes:
            ranks.check(AR, nbytes)
