"""What earlier runs left is read, or refused in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import small_experiment
from typer.testing import CliRunner

from dynamiccl_ray.actions import N_CHANNELS, OWN_ACTION, flat_action
from dynamiccl_ray.actors.status import DECISION_DTYPE, SAMPLE_DTYPE, Epoch
from dynamiccl_ray.agent.reward import PRIMARY
from dynamiccl_ray.cli.app import app
from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.trainers.online import warm
from dynamiccl_ray.trainers.online.recorder import Recorder
from dynamiccl_ray.trainers.online.run import run_online
from dynamiccl_ray.trainers.online.warm import read_earlier, unlike

KEY = key_of(Collective.ALL_REDUCE, 1 << 20, False)
PAIR = 5


def _epoch(*decided: tuple[int, float, float, Phase]) -> Epoch:
    """One decision of a key for each flat action, time, NCCL's own time, and phase."""
    decisions = np.zeros(len(decided), DECISION_DTYPE)
    for name, column in zip(("action", "got_us", "own_us", "phase"), zip(*decided, strict=True), strict=True):
        decisions[name] = column
    decisions["key"], decisions["samples"] = KEY, 50
    return Epoch(
        number=0,
        comm=7,
        ranks=16,
        nodes=2,
        name="dp",
        version=1,
        phase=Phase.LEARN,
        samples=np.zeros(0, SAMPLE_DTYPE),
        took_s=0.1,
        judged=np.zeros(1, np.int64),
        terms={PRIMARY: np.array([np.nan])},
        decisions=decisions,
    )


def _run(directory: Path, ratio: float = 0.8, *more: tuple[int, float, float, Phase]) -> Path:
    """A run in which a pair takes so much of NCCL's own time."""
    directory.mkdir()
    flat = int(flat_action(PAIR, 0, 0))
    first = ((OWN_ACTION, 100.0, np.nan, Phase.BASELINE), (flat, 100 * ratio, 100.0, Phase.LEARN))
    with Recorder(directory, "run", 0) as recorder:
        recorder.add(_epoch(*first, *more))
    return directory


def _said(*directories: Path) -> float:
    return float(read_earlier(directories).expected(16, 2, "dp", [KEY])[0, PAIR, N_CHANNELS])


def test_what_a_run_decided_is_expected_of_the_next(tmp_path: Path) -> None:
    assert _said(_run(tmp_path / "a")) == pytest.approx(np.log(0.8), abs=1e-6)


def test_after_it_began_to_learn_anew_only_that_counts(tmp_path: Path) -> None:
    flat = int(flat_action(PAIR, 0, 0))
    anew = ((OWN_ACTION, 200.0, 200.0, Phase.ADAPT), (flat, 220.0, 200.0, Phase.ADAPT))
    assert _said(_run(tmp_path / "a", 0.8, *anew)) == pytest.approx(np.log(1.1), abs=1e-6)


def test_the_newest_run_comes_first_in_whatever_order_they_are_named(tmp_path: Path) -> None:
    old, new = _run(tmp_path / "old", 0.5), _run(tmp_path / "new", 0.8)
    assert _said(old, new) == _said(new, old) > np.log(0.8 * 0.5) / 2


def test_a_run_counts_once_whatever_it_is_called(tmp_path: Path) -> None:
    old, new = _run(tmp_path / "old", 0.5), _run(tmp_path / "new", 0.8)
    (tmp_path / "link").symlink_to(old)
    assert _said(new, old, tmp_path / "link", tmp_path / "new" / ".." / "old") == _said(new, old)


def test_a_run_that_decided_nothing_says_nothing(tmp_path: Path) -> None:
    with Recorder(tmp_path, "run", 0):
        pass
    assert np.isnan(_said(tmp_path))


def test_a_run_that_earlier_ones_say_nothing_of_is_told_so(tmp_path: Path) -> None:
    earlier = read_earlier([_run(tmp_path / "a")])
    assert unlike(earlier, {(16, 2, "tp"), (16, 2, "")}) is None
    said = unlike(earlier, {(16, 2, "t\x1b[2Jp"), (4, 2, "")})
    assert said is not None
    assert "(4 ranks on 2 nodes; 16 ranks on 2 nodes, t?[2Jp) is like one" in said
    assert "earlier runs' 1 communicator (16 ranks on 2 nodes, dp)" in said
    with Recorder(tmp_path, "run", 0):
        pass
    assert "nothing but NCCL's own choice" in str(unlike(read_earlier([tmp_path]), {(4, 2, "")}))


def test_what_was_decided_and_never_tried_says_nothing(tmp_path: Path) -> None:
    pair = int(flat_action(PAIR, 0, 0))
    with Recorder(tmp_path, "run", 0) as recorder:
        recorder.add(_epoch((OWN_ACTION, 100.0, np.nan, Phase.BASELINE), (pair, np.nan, 100.0, Phase.LEARN)))
    assert pq.read_table(tmp_path / "decisions.parquet")["got_us"].to_pylist() == [100.0, None]
    earlier = read_earlier([tmp_path])
    assert np.isnan(earlier.expected(16, 2, "dp", [KEY])).all()
    assert "nothing but NCCL's own choice" in str(unlike(earlier, {(16, 2, "dp")}))


def test_it_is_said_once(tmp_path: Path, job: str) -> None:
    experiment = small_experiment(job, warm=[str(_run(tmp_path / "a"))])
    said: list[str] = []
    run_online(experiment, tmp_path / "b", serial=True, say=said.append)
    assert [line[:5] for line in said] == ["warm:"]
    said.clear()
    run_online(experiment.model_copy(update={"warm": (tmp_path / "b",)}), tmp_path / "c", serial=True, say=said.append)
    assert said == []


def _one_file(path: Path) -> None:
    """The table is no directory."""
    shutil.move(path, path.parent.parent / "one")
    path.parent.rmdir()
    shutil.move(path.parent.parent / "one", path.parent)


def _changed(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def _with(name: str, value: Any) -> Callable[[Path], None]:
    def change(table: pa.Table) -> pa.Table:
        at = table.column_names.index(name)
        column = pa.array([value] * len(table), table.schema.field(name).type)
        return table.set_column(at, table.schema.field(at), column)

    return _changed(change)


def _reshaped(table: pa.Table) -> pa.Table:
    """The last decision is of fewer ranks."""
    ranks = pa.array([16] * (len(table) - 1) + [8], pa.int32())
    return table.set_column(table.column_names.index("ranks"), "ranks", ranks)


def _without_numbers(table: pa.Table) -> pa.Table:
    return table.drop_columns(["key"]).append_column("key", pa.array(["x"] * len(table)))


@pytest.mark.parametrize(
    ("said", "harm"),
    [
        ("no decisions.parquet in it; name the directory of a run", lambda path: shutil.rmtree(path.parent)),
        ("decisions.parquet is empty: that run has recorded nothing yet", Path.unlink),
        ("decisions.parquet: damaged: [Errno 20] Not a directory", _one_file),
        ("damaged", lambda path: path.write_bytes(path.read_bytes()[:-20])),
        ("damaged", lambda path: path.write_bytes(b"PAR1")),
        ("another version", _changed(lambda table: table.drop_columns(["ranks"]))),
        (
            "another version",
            _changed(_without_numbers),
        ),
        ("ranks is 0", _with("ranks", 0)),
        ("key is -1", _with("key", -1)),
        ("key is nan", _with("key", None)),
        ("comm is nan", _with("comm", None)),
        ("communicator 7 has several shapes", _changed(_reshaped)),
        ("got_us is inf", _with("got_us", np.inf)),
        ("samples is -1", _with("samples", -1)),
        ("'__import__' is unknown", _with("action", "__import__")),
        ("no action", _with("action", None)),
        ("no name", _with("name", None)),
        ("name has 300 characters, of at most 256", _with("name", "x" * 300)),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, said: str, harm: Callable[[Path], Any]) -> None:
    run = _run(tmp_path / "a")
    harm(run / "decisions.parquet" / "part-000000.parquet")
    with pytest.raises(ConfigError) as e:
        read_earlier([run])
    assert said in str(e.value)
    assert str(run) in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["name", "action"])
def test_a_long_text_in_every_row_is_read_once(tmp_path: Path, name: str) -> None:
    path = _run(tmp_path / "a") / "decisions.parquet" / "part-000000.parquet"
    table = pq.read_table(path).take([0] * 200)
    pq.write_table(table.set_column(table.column_names.index(name), name, [["x" * 200_000] * 200]), path)
    assert path.stat().st_size < 1 << 20
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(ConfigError, match="damaged"):
            read_earlier([tmp_path / "a"])
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 8 << 20


def test_more_than_a_run_writes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "a")
    monkeypatch.setattr(warm, "MOST_ROWS", 1)
    with pytest.raises(ConfigError, match="2 rows"):
        read_earlier([run])
    monkeypatch.undo()
    monkeypatch.setattr(warm, "MOST_KEYS", 0)
    with pytest.raises(ConfigError, match="1 keys, more than the 0 that are read"):
        read_earlier([run])


def test_each_communicator_has_a_record_of_its_own_whatever_comes_between_its_decisions(tmp_path: Path) -> None:
    epochs = [replace(_epoch((int(flat_action(PAIR, 0, 0)), got, 100.0, Phase.LEARN)), comm=comm, name=f"dp{comm}")
              for got in (80.0, 80.2) for comm in (9, 2**64 - 1, 7)]  # fmt: skip
    with Recorder(tmp_path, "run", 0) as recorder:
        for number, epoch in enumerate(epochs):
            recorder.add(replace(epoch, number=number))
    earlier = read_earlier([tmp_path])
    assert earlier.recorded == [(16, 2, name) for name in ("dp7", "dp9", f"dp{2**64 - 1}")]
    assert earlier.expected(16, 2, "dp9", [KEY])[0, PAIR, N_CHANNELS] == pytest.approx(np.log(0.801), abs=1e-5)


def test_paths_are_relative_to_the_yaml_and_have_to_be_there(tmp_path: Path) -> None:
    _run(tmp_path / "a")
    text = "{name: x, fabric: {kind: measured}, stop: {rounds: 1}, warm: [%s]}"
    (tmp_path / "x.yaml").write_text(text % "a")
    assert load(tmp_path / "x.yaml").warm == (tmp_path / "a",)
    (tmp_path / "x.yaml").write_text(text % "b")
    with pytest.raises(ConfigError, match="does not exist; name the directory of an earlier run"):
        load(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_text(text % "")
    for given, said in ((tmp_path / "b", "does not exist"), (tmp_path, "no decisions.parquet in it")):
        args = ["online", str(tmp_path / "x.yaml"), "--serial", "--warm", str(given), "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, args)
        assert result.exit_code != 0
        assert said in " ".join(f"{result.output} {result.exception}".split())
