"""The files of a run with any damage: the report is made, or an error says what is wrong with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fuzzing import JSON_JUNK, cuts, damaged, edited, edits, ends_well, often, overwritten, search
from hypothesis import strategies as st
from test_page import EXPERIMENT, WITH_EVENT, _write

from dynamiccl_ray.report.data import read_run

ROWS = 60


@often(150, 10_000)
def test_damaged_files(tmp_path: Path, examples: int) -> None:
    _write(tmp_path, WITH_EVENT, n=ROWS)
    contents = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}

    def holds(given: tuple[Path, bool, list[tuple[float, int, bytes]]]) -> None:
        path, longer, done = given
        path.write_bytes((damaged if longer else overwritten)(contents[path], done))
        ends_well(lambda: read_run(tmp_path))
        path.write_bytes(contents[path])

    search(examples, st.tuples(st.sampled_from(list(contents)), st.booleans(), cuts()), holds)


@often(150, 10_000)
def test_values_of_another_kind(tmp_path: Path, examples: int) -> None:
    _write(tmp_path, WITH_EVENT, n=ROWS)

    def holds(given: tuple[bool, list[tuple[int, str, Any]]]) -> None:
        of_summary, done = given
        summary, experiment = (edited(WITH_EVENT, done), EXPERIMENT) if of_summary else (WITH_EVENT, None)
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        (tmp_path / "experiment.json").write_text(json.dumps(experiment or edited(EXPERIMENT, done)))
        ends_well(lambda: read_run(tmp_path))

    search(examples, st.tuples(st.booleans(), edits(JSON_JUNK)), holds)


@often(80, 5_000)
def test_columns_of_another_kind(tmp_path: Path, examples: int) -> None:
    _write(tmp_path, WITH_EVENT, n=ROWS)
    table = pq.read_table(tmp_path / "samples.parquet")
    kinds = [pa.array([value] * ROWS) for value in (None, "x", -1, 1 << 62, 1.5, float("nan"), True, b"x", [1])]
    changes = st.tuples(st.sampled_from(table.column_names), st.sampled_from(kinds), st.integers(0, ROWS))

    def holds(done: list[tuple[str, Any, int]]) -> None:
        changed = table
        for name, column, _ in done:
            at = changed.column_names.index(name)
            changed = changed.set_column(at, name, column)
        file = io.BytesIO()
        pq.write_table(changed.slice(0, done[0][2]), file)
        (tmp_path / "samples.parquet").write_bytes(file.getvalue())
        ends_well(lambda: read_run(tmp_path))

    search(examples, st.lists(changes, min_size=1, max_size=2), holds)
