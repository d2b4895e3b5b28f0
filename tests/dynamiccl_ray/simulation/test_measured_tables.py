"""Anybody's measurements as scenarios."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dynamiccl_ray.actions import OWN_ACTION, flat_action
from dynamiccl_ray.calibration.samples import COLUMNS, read_library
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.simulation.tables import Table, tables

RING_LL8 = int(flat_action(pair_index(Algorithm.RING, Protocol.LL), CHANNEL_VALUES.index(8), 0))


def _rows(path: Path, *rows: tuple[str, str, str, int, float], source: str = "a", nodes: int = 2) -> None:
    """(algorithm, protocol, channels, bytes, us)"""
    lines = [
        f"{source},all_reduce,{nodes},{nodes * 8},8,H100,NVLink,IB,{a},{p},{c},{n},{us}" for a, p, c, n, us in rows
    ]
    old = path.read_text() if path.exists() else ",".join(COLUMNS) + "\n"
    path.write_text(old + "\n".join(lines) + "\n")


FOUR = (
    ("default", "default", "", 30.0),
    ("Ring", "LL", "8", 20.0),
    ("Tree", "LL", "", 25.0),
    ("Tree", "Simple", "", 40.0),
)


def _four(nbytes: int, factor: float = 1.0) -> list[tuple[str, str, str, int, float]]:
    return [(a, p, c, nbytes, us * factor) for a, p, c, us in FOUR]


def _found(directory: Path) -> tuple[list[Table], dict[str, int]]:
    return tables(read_library(directory).machines, horizon=100)


def test_sizes_with_enough_options_are_keys_and_the_rest_is_counted(tmp_path: Path) -> None:
    odd = [("default", "LL", "", 1024, 1.0), ("Ring", "LL", "3", 1024, 1.0), ("CollNet", "Simple", "", 1024, 1.0)]
    few = [("default", "default", "", 4096, 9.0), ("Ring", "LL", "", 4096, 9.0)]
    again = [("Ring", "LL", "8", 1024, 22.0)]
    _rows(tmp_path / "mine.csv", *_four(1024), *_four(2048, 2.0), *odd, *few, *again)
    (table,), left_out = _found(tmp_path)
    scenario = table.scenario
    assert table.name == "mine, all-reduce, 2x8 GPUs"
    assert table.default_known
    assert scenario.nbytes.tolist() == [1024, 2048]
    assert scenario.default_us.tolist() == [[30.0, 60.0]]
    assert scenario.flat_us[0, :, RING_LL8].tolist() == [21.0, 40.0], "the median"
    assert scenario.oracle.tolist() == [[RING_LL8, RING_LL8]]
    assert scenario.valid.sum(1).tolist() == [4, 4]
    assert (scenario.context.topology.ranks, scenario.context.topology.intra) == (16, "nvlink")
    assert sum(left_out.values()) == 4


def test_each_shape_is_a_table_of_its_own(tmp_path: Path) -> None:
    _rows(tmp_path / "mine.csv", *_four(1024))
    _rows(tmp_path / "mine.csv", *_four(1024), nodes=4)
    assert [t.scenario.nodes for t in _found(tmp_path)[0]] == [2, 4]


def test_another_session_comes_in_the_middle(tmp_path: Path) -> None:
    _rows(tmp_path / "mine.csv", *_four(1024), *_four(2048))
    _rows(tmp_path / "mine.csv", *_four(1024, 1.5), source="b")
    (table,), _ = _found(tmp_path)
    assert table.sessions == 2
    assert table.scenario.starts.tolist() == [0, 50]
    assert table.scenario.nbytes.tolist() == [1024], "what both have measured"
    assert table.scenario.default_us.tolist() == [[30.0], [45.0]]


def test_a_session_that_repeats_little_or_lacks_the_best_is_no_second_one(tmp_path: Path) -> None:
    _rows(tmp_path / "little.csv", *(row for n in (1024, 2048, 4096, 8192) for row in _four(n)))
    _rows(tmp_path / "little.csv", *_four(1024), source="b")
    best = ("NVLS", "Simple", "", 1024, 10.0)
    _rows(tmp_path / "best.csv", *_four(1024), best)
    _rows(tmp_path / "best.csv", *_four(1024), source="b")
    (of_best, of_little), _ = _found(tmp_path)
    assert (of_little.sessions, len(of_little.scenario.nbytes)) == (1, 4)
    assert (of_best.sessions, of_best.scenario.oracle_us.item()) == (1, 10.0)


def test_what_a_second_session_lacks_is_counted(tmp_path: Path) -> None:
    _rows(tmp_path / "mine.csv", *_four(1024), ("NVLS", "Simple", "", 1024, 50.0))
    _rows(tmp_path / "mine.csv", *_four(1024), source="b")
    (table,), left_out = _found(tmp_path)
    assert (table.sessions, left_out) == (2, {"options that a second session lacks": 1})


def test_what_is_known_of_nccls_own_choice_goes_before_a_second_session(tmp_path: Path) -> None:
    forced = [*_four(1024)[1:], ("Ring", "Simple", "", 1024, 35.0)]
    _rows(tmp_path / "lost.csv", _four(1024)[0], *forced)
    _rows(tmp_path / "lost.csv", *forced, source="b")
    for source in ("a", "b"):
        without = [(a, p, c, 2048, us) for a, p, c, _, us in forced]
        _rows(tmp_path / "some.csv", *_four(1024), *without, source=source)
    (lost, some), left_out = _found(tmp_path)
    assert (lost.sessions, lost.default_known) == (1, True)
    assert (some.sessions, some.default_known, some.scenario.nbytes.tolist()) == (2, True, [1024])
    assert sum(left_out.values()) == 1


def test_options_of_sources_that_do_not_agree_are_not_taken_together(tmp_path: Path) -> None:
    _rows(tmp_path / "mine.csv", *_four(1024)[:3])
    _rows(tmp_path / "mine.csv", *_four(1024, 2.0)[2:], source="b")
    found, left_out = _found(tmp_path)
    assert not found
    assert left_out["sizes with 4 options only if sources that do not agree are taken together"] == 1


def test_logs_of_two_sessions_are_not_mixed(tmp_path: Path) -> None:
    """Each is a source with one setting."""
    for session, factor in (("x", 1.0), ("y", 1.5)):
        for row in _four(1024, factor):
            _rows(tmp_path / "mine.csv", row, source=f"{row[0]}-{row[1]}-{session}")
    x, y = _found(tmp_path)[0]
    assert np.array_equal(x.scenario.flat_us * 1.5, y.scenario.flat_us, equal_nan=True)
    assert x.scenario.valid.sum() == len(FOUR)


def test_a_source_is_compared_with_all_that_agree_so_far(tmp_path: Path) -> None:
    """The first measured other sizes."""
    _rows(tmp_path / "mine.csv", *_four(1024))
    _rows(tmp_path / "mine.csv", *_four(4096, 2.0), source="b")
    _rows(tmp_path / "mine.csv", ("default", "default", "", 4096, 600.0), source="c")
    (table,), _ = _found(tmp_path)
    assert table.scenario.default_us.tolist() == [[30.0, 60.0]]


def test_sources_that_do_not_agree_are_tables_of_their_own(tmp_path: Path) -> None:
    _rows(tmp_path / "mine.csv", *_four(1024))
    _rows(tmp_path / "mine.csv", ("default", "default", "", 1024, 240.0), source="without-p2p")
    (table,), left_out = _found(tmp_path)
    assert table.name == "mine, all-reduce, 2x8 GPUs, a"
    assert table.scenario.default_us.item() == 30.0
    assert sum(left_out.values()) == 1


def test_where_nccls_own_choice_was_not_measured_nothing_is_said_of_it(tmp_path: Path) -> None:
    _rows(tmp_path / "mine.csv", *_four(1024)[1:], ("Ring", "Simple", "", 1024, 35.0))
    (table,), _ = _found(tmp_path)
    assert not table.default_known
    assert table.scenario.default_us.item() == pytest.approx(np.median([20, 25, 35, 40]))
    assert table.scenario.valid[0, OWN_ACTION]
