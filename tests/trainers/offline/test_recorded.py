"""What runs have recorded is read as it was, or refused in one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded import episodes, recorded

from dynamiccl_ray.actors.episodes import Experience
from dynamiccl_ray.agent.observation import SIZE, part
from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.trainers.offline import recorded as reading
from dynamiccl_ray.trainers.offline.recorded import read_recorded
from dynamiccl_ray.trainers.online.recorder import EPISODE_SCHEMA, LAYOUT


@pytest.fixture(scope="module")
def made() -> list[Experience]:
    return episodes(PolicyNetwork(8), lambda heads: (heads[:, 0] / 100).astype(np.float32), count=4, decisions=3)


def test_what_was_recorded_is_read_again(tmp_path: Path, made: list[Experience]) -> None:
    first, second = recorded(tmp_path / "a", made[:3]), recorded(tmp_path / "b", made[3:])
    (tmp_path / "c").symlink_to(first)
    of = read_recorded([first, second, first, tmp_path / "c", Path(os.path.relpath(second))])
    assert of.observations.shape == (4, 4, SIZE)
    assert of.valid.sum(1).tolist() == [3, 2, 3, 2]
    assert len(of) == 10
    for row, said in enumerate(made):
        n = len(said.rewards)
        np.testing.assert_array_equal(of.observations[row, : n + 1], said.observations)
        np.testing.assert_array_equal(of.actions[row, :n], said.heads)
        np.testing.assert_array_equal(of.log_probs[row, :n], said.log_probs)
        np.testing.assert_array_equal(of.rewards[row, :n], said.rewards)
        assert not of.observations[row, n + 1 :].any()


def _one_file(path: Path) -> None:
    """The table is no directory."""
    shutil.move(path, path.parent.parent / "one")
    path.parent.rmdir()
    shutil.move(path.parent.parent / "one", path.parent)


def _changed(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def _with(name: str, value: Any, at: int = 0) -> Callable[[Path], None]:
    """With another value in a list of the first episode."""

    def change(table: pa.Table) -> pa.Table:
        rows = table[name].to_pylist()
        rows[0][at] = value
        index = table.column_names.index(name)
        return table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))

    return _changed(change)


def _shorter(name: str) -> Callable[[Path], None]:
    def change(table: pa.Table) -> pa.Table:
        rows = [row[1:] for row in table[name].to_pylist()]
        index = table.column_names.index(name)
        return table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))

    return _changed(change)


def _of(layout: str | None) -> Callable[[Path], None]:
    return _changed(lambda table: table.replace_schema_metadata(layout and {"layout": layout}))


def _ruled_out(path: Path) -> None:
    """The pair of the first decision was not available."""
    table = pq.read_table(path)
    place = np.zeros(SIZE)
    part(place, "pairs")[table["pair"][0][0].as_py(), 0] = 1
    _with("observation", 0.0, int(np.flatnonzero(place)[0]))(path)


@pytest.mark.parametrize(
    ("said", "harm"),
    [
        ("no episodes.parquet in it; name the directory of a run", lambda path: shutil.rmtree(path.parent)),
        ("episodes.parquet is empty: that run has recorded nothing yet", Path.unlink),
        ("episodes.parquet: cannot be read: Not a directory", _one_file),
        ("damaged", lambda path: path.write_bytes(path.read_bytes()[:-20])),
        ("damaged", lambda path: path.write_bytes(b"PAR1")),
        ("another version of DynamICCL-Ray: its layout is '0: 9'", _of(LAYOUT.replace(LAYOUT, "0: 9"))),
        ("another version of DynamICCL-Ray: its layout is 'none'", _of(None)),
        ("its columns are others", _changed(lambda table: table.drop_columns(["reward"]))),
        ("observation is nan", _with("observation", np.nan, 5)),
        ("observation is 1e+09", _with("observation", 1e9, 5)),
        ("observation is not as long as there are decisions", _shorter("observation")),
        ("log_prob is not as long", _shorter("log_prob")),
        ("pair has gaps", _with("pair", None)),
        ("pair is 22, of 0 to 21", _with("pair", 22)),
        ("chunk is -1", _with("chunk", -1)),
        ("log_prob is -inf", _with("log_prob", -np.inf)),
        ("log_prob is 1, of -50", _with("log_prob", 1.0)),
        ("reward is inf", _with("reward", np.inf)),
        ("heat is -1, of at least 0", _with("observation", -1.0, SIZE - 1)),
        ("an action was drawn that was ruled out", _ruled_out),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(
    tmp_path: Path, made: list[Experience], said: str, harm: Callable[[Path], Any]
) -> None:
    run = recorded(tmp_path / "a", made)
    harm(run / "episodes.parquet" / "part-000000.parquet")
    with pytest.raises(ConfigError) as e:
        read_recorded([run])
    assert said in str(e.value)
    assert str(run) in str(e.value)
    assert "\n" not in str(e.value)


def test_a_run_that_learned_nothing_teaches_nothing(tmp_path: Path, made: list[Experience]) -> None:
    nothing = recorded(tmp_path / "a", [])
    with pytest.raises(ConfigError, match="no episode in it: the policy learned nothing there"):
        read_recorded([nothing])
    assert len(read_recorded([nothing, recorded(tmp_path / "b", made)])) == 10


def test_what_is_read_is_bounded(tmp_path: Path, made: list[Experience], monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "a", made[:2])
    later = pq.read_table(recorded(tmp_path / "b", made[2:3]) / "episodes.parquet")
    pq.write_table(later, run / "episodes.parquet" / "part-000001.parquet")
    assert len(read_recorded([run])) == 8
    monkeypatch.setattr(reading, "MOST_NUMBERS", 4 * SIZE)
    assert len(read_recorded([run])) == 3, "the last file is read"
    monkeypatch.setattr(reading, "MOST_NUMBERS", SIZE)
    with pytest.raises(ConfigError, match="values, more than a run writes to a file"):
        read_recorded([run])
    monkeypatch.undo()
    monkeypatch.setattr(reading, "MOST_PADDED", 9 * SIZE)
    says = r"3 episodes or more of up to 3 decisions are too many .* at most 2 of that length"
    with pytest.raises(ConfigError, match=says):
        read_recorded([run])


def test_the_layout_says_what_is_in_a_list() -> None:
    """Whoever changes what is observed changes what was recorded."""
    assert EPISODE_SCHEMA.metadata[b"layout"].decode() == LAYOUT
    assert str(SIZE) in LAYOUT
