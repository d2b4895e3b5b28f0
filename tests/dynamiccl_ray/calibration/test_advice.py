"""What is said of a machine from its measurements: where settings were forced, and where only NCCL's own choice was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from rigged import write
from typer.testing import CliRunner

from dynamiccl_ray.calibration.advice import Row, advise
from dynamiccl_ray.calibration.cells import cells, joined, own_rows
from dynamiccl_ray.calibration.gains import INTERVAL, MODEL, SESSION, Quantiles, Scored, evidence, others
from dynamiccl_ray.calibration.samples import Machine, read_library
from dynamiccl_ray.calibration.verdict import verdict
from dynamiccl_ray.cli.app import app

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "dynamiccl_ray" / "data" / "measured"
LOGS = ROOT / "tests" / "data" / "p5en_logs"
MANY = Path(os.environ.get("DYNAMICCL_DATA", ROOT.parent / "shared" / "data")) / "measured"
JUDGED = json.loads((ROOT / "benchmarks" / "2026-11-22-gain-interval.json").read_text())


def own(times: dict[int, float], **also: object) -> list[dict[str, object]]:
    """Rows of NCCL's own choice."""
    return [{"bytes": size, "time_us": time, **also} for size, time in times.items()]


def even(count: int, first: float = 20.0) -> dict[int, float]:
    """Times that grow evenly over powers of two."""
    return {1024 << i: first * 1.2**i for i in range(count)}


def machine(path: Path, rows: list[dict[str, object]]) -> Machine:
    write(path / "mine.csv", rows)
    (only,) = joined(read_library(path).machines)
    return only


def test_what_was_measured_is_taken_as_it_is(tmp_path: Path) -> None:
    rows = own({1024: 30.0, 2048: 30.0})
    rows += [{"algo": "Ring", "proto": "LL", "time_us": t} for t in (19.0, 20.0, 40.0)]
    rows += [{"algo": "Tree", "proto": "LL", "bytes": 2048, "time_us": 31.0}]
    small, large = advise(machine(tmp_path, rows))
    assert (small.default_us, small.best, small.best_us, small.gain, small.basis) == (
        30,
        "ring/ll",
        20,
        1.5,
        "measured",
    )
    assert (small.low, small.high) == (1.5, 1.5)
    assert (large.best, large.best_us, large.gain) == ("nccl", 30.0, 1.0)
    said = verdict([small, large], "logs")
    assert (said.worth, said.next) == ("yes", "dynamiccl evaluate --measured logs")
    assert said.why == "all_reduce on 2x8 GPUs at 1KiB gains 5% or more, 1.50x at the best of them."


def test_where_a_larger_message_is_faster_the_gain_is_there(tmp_path: Path) -> None:
    times = even(10)
    times[4096] = 90.0
    rows = {row.bytes: row for row in advise(machine(tmp_path, own(times)))}
    bump, plain = rows[4096], rows[65536]
    assert bump.basis == plain.basis == "own times"
    least = 90.0 / times[8192] / np.exp(SESSION)
    assert bump.low == pytest.approx(least)
    assert bump.high is not None
    assert bump.high > bump.low
    assert bump.sure
    assert plain.low == 1.0
    assert plain.open, "whether there is anything to gain, these times do not say"
    said = verdict(list(rows.values()), "logs")
    assert said.worth == "yes"
    assert "Not known for" in said.why
    assert "NCCL_ALGO=Ring NCCL_PROTO=LL mpirun ... all_reduce_perf" in said.next
    assert "-b 1024 -e 524288" in said.next


def test_the_interval_is_wider_where_times_jump() -> None:
    smooth, jumping = even(10), {size: t * (1.4 if i % 2 else 1) for i, (size, t) in enumerate(even(10).items())}
    assert evidence(smooth).spread == pytest.approx(SESSION)
    assert evidence(jumping).spread > 4 * SESSION


def test_where_nothing_can_be_said_that_is_said(tmp_path: Path) -> None:
    few = evidence(even(4))
    slow = evidence(even(10, first=4000.0))
    assert "4 sizes were measured" in few.silent
    assert "4000 us, which no network does" in slow.silent
    (row, *_) = advise(machine(tmp_path, own(even(4))))
    assert (row.basis, row.gain, row.low, row.high) == ("silent", None, None, None)
    assert row.open
    assert verdict([row], "logs").worth == "unknown"


def test_without_nccls_own_choice_no_gain_is_made_up(tmp_path: Path) -> None:
    rows = [{"algo": "Ring", "proto": "LL"}, {"algo": "Tree", "proto": "LL", "time_us": 9.0}]
    (row,) = advise(machine(tmp_path, rows))
    assert (row.best, row.gain, row.basis, row.default_us) == ("tree/ll", None, "own unknown", None)
    said = verdict([row], "logs")
    assert said.worth == "unknown"
    assert "default.log" in said.next


def test_the_model_fills_sizes_that_were_not_forced(tmp_path: Path) -> None:
    sizes = [1 << k for k in range(12, 26)]
    rows = [{"bytes": n, "time_us": 40 + n / 5e3} for n in sizes]
    rows += [{"algo": "Ring", "proto": "Simple", "bytes": n, "time_us": 20 + n / 1e4} for n in sizes if n != 1 << 18]
    found = {row.bytes: row for row in advise(machine(tmp_path, rows))}
    row = found[1 << 18]
    assert (row.basis, row.best) == ("model", "ring/simple")
    assert row.low is not None
    assert row.high is not None
    assert row.low <= (40 + (1 << 18) / 5e3) / (20 + (1 << 18) / 1e4) <= row.high
    assert {r.basis for r in found.values()} == {"model", "measured"}


def test_tables_of_one_machine_are_joined_where_they_belong_together() -> None:
    machines = joined(read_library(SHIPPED).machines)
    assert len(machines) == 2
    (all_of,) = [m for m in machines if " + " in m.name]
    assert any(cell.gain is not None for cell in cells(all_of))


def hits(rows: list[Row], true: dict[object, float]) -> list[bool]:
    return [
        (row.low or 0) <= true[row.nodes, row.bytes] <= (row.high or 0)
        for row in rows
        if (row.nodes, row.bytes) in true
    ]


def test_the_interval_holds_on_shipped_tables_whose_forced_rows_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the quantiles of all other machines: what is judged had no part in them."""
    (p5en,) = [m for m in joined(read_library(SHIPPED).machines) if " + " in m.name]
    true: dict[object, float] = {(c.shape[2], c.nbytes): c.gain for c in cells(p5en) if c.gain is not None}
    (row,) = [r for r in JUDGED["own_times"]["machines"] if r["machine"] == p5en.name]
    monkeypatch.setattr("dynamiccl_ray.calibration.advice.INTERVAL", Quantiles(**row["quantiles_of_others"]))
    rows = advise(own_rows(p5en))
    assert len(hits(rows, true)) == 72
    assert np.mean(hits(rows, true)) >= 0.9
    assert np.median([(r.high or 0) / (r.low or 1) for r in rows]) < 1.5
    assert sum(r.sure for r in rows) >= 6, "what is gained at 16 to 64 KiB shows in NCCL's own times"


def test_the_interval_holds_on_logs_of_nccls_own_choice_alone(tmp_path: Path) -> None:
    (whole,) = read_library(LOGS).machines
    true: dict[object, float] = {(c.shape[2], c.nbytes): c.gain for c in cells(whole) if c.gain is not None}
    assert np.mean(hits(advise(own_rows(whole)), true)) >= 0.9


def test_what_is_kept_is_what_was_calibrated() -> None:
    for kept, of in ((INTERVAL, "own_times"), (MODEL, "model")):
        for name, value in vars(kept).items():
            assert value == pytest.approx(JUDGED[of]["interval"][name], abs=5e-4)


@pytest.mark.skipif(not MANY.is_dir(), reason="no measurements of many machines; set DYNAMICCL_DATA")
def test_the_interval_holds_on_many_machines() -> None:
    """Each with the quantiles of the others; but for cells of which nothing is said."""
    scored = [s for m in joined(read_library(MANY).machines) if len((s := Scored.of(m)).gain)]
    assert len(scored) >= 16
    held, width = [], []
    for one in scored:
        of = one.forecasts(others(one, scored))
        held += [f.low <= gain <= f.high for f, gain in zip(of, one.gain.tolist(), strict=True)]
        width += [f.high / f.low for f in of]
    assert len(held) >= 250
    assert np.mean(held) >= 0.9
    assert np.median(width) < 1.5


def test_the_command_says_it_in_json_in_words_and_in_a_picture(tmp_path: Path) -> None:
    document = CliRunner().invoke(app, ["advise", str(LOGS), "--json"])
    assert document.exit_code == 0, document.output
    said = json.loads(document.stdout)
    assert len(said["rows"]) == 20
    assert said["verdict"]["worth"] == "yes"
    assert max(row["gain"] for row in said["rows"]) == pytest.approx(2.42, abs=0.005)
    picture = tmp_path / "gains.png"
    page = CliRunner().invoke(app, ["advise", str(LOGS), "--plot", str(picture), "--name", "mine"])
    assert page.exit_code == 0, page.output
    assert "mine: all_reduce on 8x8 GPUs" in page.stdout
    assert page.stdout.count("Worth it: ") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    missing = CliRunner().invoke(app, ["advise", str(tmp_path / "none")])
    assert "is not a directory" in str(missing.exception)
