"""The report on small runs made here: the numbers it shows, and every way in which a run can be incomplete."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from dynamiccl_ray.agent.reward import TERMS
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.figures import pair_colour
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.report.data import detections, mean_speedup, read_run
from dynamiccl_ray.report.page import write_report
from dynamiccl_ray.report.terminal import terminal_table

KEYS = {"all_reduce/64KiB": key_of(4, 64 << 10, False), "all_reduce/1MiB": key_of(4, 1 << 20, False),
        "all_reduce/16MiB": key_of(4, 16 << 20, False)}  # fmt: skip
EVENT_AT = 3001
PHASES = [("baseline", 0, 600), ("learn", 600, 2000), ("exploit", 2000, 3300), ("baseline", 3300, 3500),
          ("adapt", 3500, 5000), ("exploit", 5000, 6000)]  # fmt: skip


def _rows(scale: float, *, oracle: bool = True, vendor: bool = True, learned: bool = True) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(KEYS):
        best = scale * 100.0 * 4**i
        row: dict[str, Any] = {
            "comm": "1",
            "communicator": "world",
            "key": name,
            "default_us": best * (2.0 if i == 0 else 1.25),
            "oracle_us": best if oracle else None,
            "vendor_us": best * 1.1 if vendor else None,
            "learned_us": best * (1.01 + 0.01 * i) if learned else None,
            "action": "tree/ll" if i < 2 else "ring/ll128 8ch",
        }
        if oracle:
            row |= {"bytes": 64 << 10 << (4 * i), "oracle_action": "tree/ll", "learned_table_us": best * (1 + 0.01 * i)}
        rows.append(row)
    return rows


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    known = rows and all(r["oracle_us"] is not None and r["learned_us"] is not None for r in rows)
    means = {
        role: float(np.exp(np.mean([np.log(r[f"{role}_us"] / r["oracle_us"]) for r in rows])))
        for role in ("default", "learned", "vendor")
        if known and all(r[f"{role}_us"] is not None for r in rows)
    }
    return {"keys": rows, "geomean_vs_oracle": means or None, "gap_closed": 0.876 if known else None}


WHOLE = {
    "took_s": 12.0, "own_s": 15.0, "explored_s": 0.3, "speedup": 1.25, "own_step_s": 0.2, "tuned_step_s": 0.19,
    "lossless_saturated": None,
    "worst": {"key": "all_reduce/8MiB", "action": "ring/simple", "vs_nccl": 7.424, "samples": 1},
}  # fmt: skip


def _summary(**changes: Any) -> dict[str, Any]:
    return {
        "run": "tiny-0-x", "name": "tiny", "seed": 0, "mode": "active", "epochs": 60, "rounds": 6,
        "collectives": 6000, "switches": 41, "digest_mismatches": 0, "agreement_violations": 0,
        "dropped_records": 12345, "unused_records": 67890, "alarms": [], "checks": [], "off": {}, "events": [],
        "false_alarms": {"checks": 0, "anew": 0, "cost_percent": 0.0},
        "history": [{"round": i, "epoch": 10 * (i + 1), "phase": PHASES[i][0], "entropy": 2.0 / (i + 1),
                     "collectives": 1000 * (i + 1), "version": 0} for i in range(6)],
        "detection_delay": None, "detection_delay_key_samples": None, "after": [], "seconds": 3.0,
        "coverage": {"calls": 80_000, "tuned": 52_000, "measured": 10_000, "lost": 40, "not_profiled": 69_900,
                     "unheard": 60, "bypassed": {"no_table": 8_000, "no_entry": 20_000}},
        "whole_run": WHOLE,
        "overhead": {"percent": 0.31, "max_percent": 0.5, "profiled_one_in": {"1": 8}},
        "stands_for": "8 processes stand for ranks 0-3 of nodes 0-1 among 64 ranks on 8 nodes",
        **_result(_rows(1.0)), **changes,
    }  # fmt: skip


EXPERIMENT = {
    "name": "tiny",
    "fabric": {"kind": "measured", "machine": "p5en", "files": [], "processes": {"nodes": 2, "ranks_per_node": 4}},
    "epochs": {"per_round": 10},
    "trigger": {"arl0": 1e6},
}
WITH_EVENT = _summary(
    events=[{"phase": 1, "at": EVENT_AT, "round": 3, "epoch": 30, "by_call": True, "name": "links at 25%"}],
    alarms=[{"comm": 1, "key": KEYS["all_reduce/16MiB"], "dseq": EVENT_AT + 77, "epoch": 33}],
    detection_delay=77,
    detection_delay_key_samples=26,
    after=[{"event": "links at 25%", **_result(_rows(3.0, vendor=False))}],
)
REAL = _summary(agreement_violations=None, **_result(_rows(1.0, oracle=False, vendor=False)))
del REAL["stands_for"]


def _write(directory: Path, summary: dict[str, Any], experiment: Any = EXPERIMENT, n: int = 6000) -> Path:
    rng = np.random.default_rng(0)
    number = np.arange(n)
    phase = np.full(n, "exploit", object)
    for name, start, end in PHASES:
        phase[start:end] = name
    keys = np.array(list(KEYS.values()))[number % 3]
    usual = np.array([r["default_us"] for r in _rows(1.0)])[number % 3]
    table = pa.table(
        {
            "run": ["tiny"] * n, "seed": np.zeros(n, np.int32), "comm": np.ones(n, np.uint64),
            "epoch": (number // 100).astype(np.int32), "phase": pa.array(phase.astype(str)).dictionary_encode(),
            "version": np.zeros(n, np.int32), "key": keys.astype(np.int16), "bytes": np.zeros(n, np.int64),
            "dseq": number + 1, "time_us": usual * np.exp(rng.normal(0, 0.01, n)) * np.where(number < 3000, 1, 3),
            "skew": np.zeros(n, np.float32), "pair": np.zeros(n, np.int8), "channels": np.zeros(n, np.int8),
            "chunk": np.zeros(n, np.int8),
        }
    )  # fmt: skip
    pq.write_table(table, directory / "samples.parquet")
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "experiment.json").write_text(json.dumps(experiment))
    return directory


class _Page(HTMLParser):
    """Text outside of style, and what the page loads or embeds."""

    VOID = ("meta", "img", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.embedded, self.open = "", [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.embedded += [v for k, v in attrs if k in ("src", "href", "srcset", "data") and v]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.text += " "
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def _page(directory: Path) -> _Page:
    return _Page(write_report(directory).read_text(encoding="utf-8"))


def test_numbers_are_the_summarys(tmp_path: Path) -> None:
    page = _page(_write(tmp_path, WITH_EVENT))
    for result in (WITH_EVENT, WITH_EVENT["after"][0]):
        for value in result["geomean_vs_oracle"].values():
            assert f"{value:.3f}" in page.text
    for expected in (
        "88% of the gap", "detected 77 collectives later", "measured 26 times by then", "12,345", "67,890",
        "41 table switches", "0 agreement violations in 6,000 or more calls, each compared on 8 ranks",
        "6,000 collectives were measured", "8 processes stand for ranks 0-3", "Alarms: 1 in all. None of them false",
        "dynamiccl online experiment.json", "1.98\u00d7", "ring/ll128 8ch",
    ):  # fmt: skip
        assert expected in page.text
    assert page.tags.count("img") == 5


def test_the_first_numbers_are_the_jobs(tmp_path: Path) -> None:
    text = _page(_write(tmp_path, WITH_EVENT)).text
    for said in (
        "A step of the job took 200 ms with NCCL's own choices and 190 ms tuned (medians), 0.950\u00d7",
        "communication took 12 s where NCCL's own choices would have taken 15 s: 1.25\u00d7 as fast",
        "as fast. Exploring was 2.5 % of it.",
        "took 7.42\u00d7 the time of NCCL's own choice, for 1 collective (all_reduce/8MiB, ring/simple)",
        "1 key learned anew after an alarm.",
    ):
        assert said in text
        assert text.index(said) < text.index("were measured in")
    assert "Send less" not in text
    limited = _summary(whole_run={**WHOLE, "lossless_saturated": True})
    text = _page(_write(tmp_path, limited, {**EXPERIMENT, "computation_s": 0.12})).text
    assert "Without communication it would take 120 ms" in text
    assert "Send less" in text
    silent = {**WHOLE, "own_step_s": None, "tuned_step_s": None, "worst": None}
    text = _page(_write(tmp_path, _summary(whole_run=silent))).text
    assert "A step of the job" not in text
    assert "No key learned anew" in text
    nothing = _page(_write(tmp_path, _summary(whole_run={**silent, "speedup": None}))).text
    assert "Over the whole run" not in nothing


def test_coverage_is_a_table(tmp_path: Path) -> None:
    page = _page(_write(tmp_path, _summary()))
    for row in ("tuned 52,000 65.0%", "bypassed: no_table 8,000 10.0%", "bypassed: no_entry 20,000 25.0%",
                "measured 10,000 12.5%", "not profiled 69,900 87.4%", "lost 40 0.1%", "took 0.31%"):  # fmt: skip
        assert row in page.text
    earlier = _summary()
    del earlier["coverage"], earlier["overhead"]
    assert "Coverage" not in _page(_write(tmp_path, earlier)).text


def test_says_how_much_the_smallest_sizes_weigh(tmp_path: Path) -> None:
    page = _page(_write(tmp_path, _summary()))
    large = [np.log(r["learned_us"] / r["oracle_us"]) for r in _rows(1.0) if r["key"] != "all_reduce/64KiB"]
    mean = np.exp(np.mean(large))
    assert f"Without sizes below 128KiB (keys: 1), where NCCL's times are doubtful, it is {mean:.3f}\u00d7" in page.text
    assert f"(1 fewer) 1.250 1.100 {mean:.3f}" in page.text
    assert "there the vendor's tuner is ahead" not in page.text


def test_admits_when_the_vendor_is_ahead(tmp_path: Path) -> None:
    rows = [{**r, "vendor_us": r["oracle_us"]} for r in _rows(1.0)]
    assert "there the vendor's tuner is ahead" in _page(_write(tmp_path, _summary(**_result(rows)))).text


@pytest.mark.parametrize("summary", [WITH_EVENT, _summary(), REAL], ids=["event", "quiet", "real"])
def test_one_file_is_all_there_is(tmp_path: Path, summary: dict[str, Any]) -> None:
    page = write_report(_write(tmp_path, summary))
    assert page == tmp_path / "report.html"
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(|<script|<link|<iframe", html)
    embedded = _Page(html).embedded
    assert all(e.startswith(("data:image/png;base64,", "#")) for e in embedded)
    images = [base64.b64decode(e.partition(",")[2], validate=True) for e in embedded if e.startswith("data:")]
    assert len(images) == 5
    assert all(i.startswith(b"\x89PNG") and b"matplotlib" not in i for i in images)
    assert (tmp_path / "summary.png").read_bytes() == images[0]


def test_without_event(tmp_path: Path) -> None:
    page = _page(_write(tmp_path, _summary()))
    assert "Nothing was done to the network in this run" in page.text
    assert "None of them false, that is raised although nothing changed" in page.text


def test_false_and_missed_alarms(tmp_path: Path) -> None:
    early = {"comm": 1, "key": KEYS["all_reduce/1MiB"], "dseq": 2500, "epoch": 25}
    false = {"checks": 2, "anew": 1, "cost_percent": 0.346}
    page = _page(_write(tmp_path, {**WITH_EVENT, "alarms": [early], "false_alarms": false, "detection_delay": None}))
    assert "2 of which were checked and dismissed, cost 0.35 % of communication until then" in page.text
    assert "1 of them false, that is raised before anything had changed" in page.text
    assert "The change was not detected" in page.text
    assert "no alarm followed" in page.text


def test_each_event_has_its_own_alarm() -> None:
    key = KEYS["all_reduce/1MiB"]
    summary = {
        "events": [{"at": at, "name": name, "by_call": True} for at, name in ((100, "a"), (200, "b"), (300, "c"))],
        "alarms": [{"dseq": d, "key": key, "epoch": 0} for d in (90, 110, 150, 230)],
        "detection_delay_key_samples": 4,
    }
    assert [(d["name"], d["delay"], d["own"], d["further"]) for d in detections(summary)] == [
        ("a", 10, 4, 1), ("b", 30, None, 0), ("c", None, None, 0),
    ]  # fmt: skip


def test_a_job_of_several_communicators_has_no_call_that_all_share(tmp_path: Path) -> None:
    """Their calls are numbered apart, so that an event is known by the epoch in which it came."""
    rows = [
        {**row, "comm": f"{comm:x}", "communicator": name, "default_us": row["default_us"] * scale}
        for comm, name, scale in ((2, "data", 1.0), (1 << 63, "tensor", 10.0))
        for row in _rows(1.0, vendor=False)
    ]
    event = {"phase": 1, "at": 7, "round": 3, "epoch": 30, "by_call": False, "name": "links at 25%"}
    summary = _summary(
        events=[event],
        alarms=[{"comm": 2, "key": KEYS["all_reduce/16MiB"], "dseq": 3, "epoch": 33}],
        detection_delay_key_samples=26,
        after=[{"event": "links at 25%", **_result(rows)}],
        **_result(rows),
    )
    # A key whose members share one time has no best choice; the others keep theirs.
    del rows[1]["oracle_action"]
    rows[1]["oracle_us"] = None
    cluster = {"name": "dgx-a100-hdr"}
    fabric = {"kind": "real_nccl", "cluster": cluster, "noise_sigma": 0.02, "processes": None}
    _write(tmp_path, summary, {**EXPERIMENT, "fabric": fabric})
    samples = pq.read_table(tmp_path / "samples.parquet")
    comm = np.where(np.arange(len(samples)) % 2, 2, 1 << 63).astype(np.uint64)
    pq.write_table(
        samples.set_column(samples.schema.get_field_index("comm"), "comm", [comm]), tmp_path / "samples.parquet"
    )
    page = _page(tmp_path)
    assert "as a physical model prices them on dgx-a100-hdr, played to real ranks without GPUs" in page.text
    assert "the alarm was raised by all_reduce/16MiB, which had been measured 26 times by then" in page.text
    assert "tensor all_reduce/64KiB" in page.text
    assert "data all_reduce/64KiB" in page.text
    assert any(line.split()[:2] == ["tensor", "64KiB"] for line in _text(summary))
    run = read_run(tmp_path)
    assert np.flatnonzero(run.samples.stage)[0] == 3000
    usual = {(r["comm"], r["key"]): r["default_us"] for r in rows}
    expected = [usual[f"{c:x}", list(KEYS)[i % 3]] for i, c in enumerate(comm.tolist())]
    assert run.samples.default_us.tolist() == pytest.approx(expected)
    assert run.alarms_since(event) == [399]
    assert run.reference_name == "best static choice"
    alone = run.samples.series == next(r["series"] for r in run.stages[0].rows if r["oracle_us"] is None)
    assert alone.any()
    assert (np.isnan(run.samples.reference_us) == alone).all()


def test_real_network_has_no_oracle(tmp_path: Path) -> None:
    page = _page(_write(tmp_path, REAL, {**EXPERIMENT, "fabric": {"kind": "nccl"}}))
    rows = REAL["keys"]
    assert f"Learned choices are {mean_speedup(rows):.2f}\u00d7 as fast as NCCL's own" in page.text
    assert "There is no oracle for a real network" in page.text
    assert "not checked call by call in a real job" in page.text
    assert "p5en" not in page.text.partition("All settings")[0]


@pytest.mark.parametrize("mode", ["active", "observe", "shadow"])
def test_nothing_exploited_yet(tmp_path: Path, mode: str) -> None:
    summary = _summary(mode=mode, **_result(_rows(1.0, learned=False)))
    page = _page(_write(tmp_path, summary, n=700))
    assert "No key has been exploited yet" in page.text
    assert "No key was exploited in this stage" in page.text
    assert ("nothing that was decided has been applied" in page.text) == (mode != "active")


def test_stopped_between_event_and_adaptation(tmp_path: Path) -> None:
    summary = {**WITH_EVENT, "after": [{"event": "links at 25%", **_result([])}]}
    page = _page(_write(tmp_path, summary, n=3200))
    assert "learning had not ended when the run did" in page.text
    assert "No collective of this stage was measured" in page.text


@pytest.mark.parametrize("kind", ["measured", "nccl"])
def test_no_samples_at_all(tmp_path: Path, kind: str) -> None:
    summary = _summary(collectives=0, history=[], **_result([]))
    page = _page(_write(tmp_path, summary, {**EXPERIMENT, "fabric": {**EXPERIMENT["fabric"], "kind": kind}}, n=0))
    assert "This run measured no collective" in page.text
    assert "img" not in page.tags
    assert not (tmp_path / "summary.png").exists()


def test_keys_without_baseline_and_tuning_off(tmp_path: Path) -> None:
    rows = _rows(1.0, oracle=False, vendor=False)
    rows[1]["default_us"] = None
    summary = {**REAL, **_result(rows), "off": {"1": "ranks differ in <nodes>: [1, 2]"}}
    page = _page(_write(tmp_path, summary, {**EXPERIMENT, "fabric": {"kind": "nccl"}}))
    assert "Tuning is off for communicator 1: ranks differ in <nodes>: [1, 2]." in page.text


def test_several_collectives(tmp_path: Path) -> None:
    rows = _rows(1.0, oracle=False, vendor=False)
    rows[0]["key"] = "all_gather/64KiB/pipelined"
    run = read_run(_write(tmp_path, {**REAL, **_result(rows)}, {**EXPERIMENT, "fabric": {"kind": "nccl"}}))
    assert {r["group"] for r in run.stages[0].rows} == {"all-gather (pipelined)", "all-reduce"}
    assert [r["bytes"] for r in run.stages[0].rows] == [64 << 10, 1 << 20, 16 << 20]
    write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", None, "not the directory of a finished run"),
        ("experiment.json", None, "not the directory of a finished run"),
        ("samples.parquet", None, "samples.parquet"),
        ("summary.json", "{", "damaged"),
        ("summary.json", "[]", "expected a JSON object, found list"),
        ("summary.json", "{}", "'events' is missing"),
        ("experiment.json", "{}", "not an online experiment"),
        ("samples.parquet", "not parquet", "samples.parquet"),
    ],
)
def test_not_a_run(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    _write(tmp_path, _summary(), n=10)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        write_report(tmp_path)


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    rows = _rows(1.0)
    rows[0]["key"] = "all_reduce/big"
    with pytest.raises(ConfigError, match="unknown key 'all_reduce/big'"):
        read_run(_write(tmp_path, _summary(**_result(rows)), n=10))


def _text(summary: dict[str, Any]) -> list[str]:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(summary))
    return console.export_text().splitlines()


def test_terminal_table() -> None:
    lines = _text(WITH_EVENT)
    assert any("all_reduce" in line for line in lines[:3])
    row = next(line for line in lines if line.strip().startswith("64KiB"))
    assert row.split() == ["64KiB", "200us", "110us", "101us", "100us", "1.98x", "tree/ll"]
    last = next(line for line in lines if "over best" in line)
    assert "over best" in last
    for mean in WITH_EVENT["geomean_vs_oracle"].values():
        assert f"{mean:.3f}x" in last
    assert "vendor" not in "".join(_text(WITH_EVENT["after"][0]))
    assert "after links at 25%" in _text(WITH_EVENT["after"][0])[0]


def test_terminal_table_without_oracle_or_keys() -> None:
    assert any(f"{mean_speedup(REAL['keys']):.2f}x" in line for line in _text(REAL) if "over best" in line)
    assert any("over best" in line for line in _text(_summary(**_result([]))))


def test_configurations_look_different() -> None:
    swept = [f"{algo}/{proto}" for algo in ("ring", "tree", "nvls_tree") for proto in ("ll", "ll128", "simple")]
    colours = np.array([pair_colour(pair) for pair in ["nccl", "nvls/simple", *swept]])
    apart = np.abs(colours[:, None] - colours).sum(-1)
    assert apart[np.triu_indices(len(colours), 1)].min() > 0.2


def test_the_terms_of_the_reward_are_drawn_and_tabled_where_a_run_has_them(tmp_path: Path) -> None:
    without = write_report(_write(tmp_path, WITH_EVENT)).read_text()
    assert "This run recorded no terms of its reward." in without
    nothing = pa.nulls(4, pa.float64())
    columns = dict.fromkeys(TERMS, nothing) | {
        "epoch": pa.array([0, 0, 1, 2], pa.int32()), "phase": pa.array(["baseline"] * 2 + ["learn"] * 2),
        "keys": pa.array([1, 3, 4, 4], pa.int32()), "reward": pa.array([0.1, 0.5, 0.2, 0.3]),
        "primary": pa.array([0.1, 0.5, 0.25, 0.3]), "sm": pa.array([None, None, -0.05, None], pa.float64()),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "rewards.parquet")
    reward = {"weights": {"sm": 0.02}, "off": ["tier"], "terms": {"learn": {"primary": 0.275, "sm": -0.05}}}
    (tmp_path / "summary.json").write_text(json.dumps({**WITH_EVENT, "reward": reward}))
    rewards = read_run(tmp_path).rewards
    assert rewards.epoch.tolist() == [0, 1, 2]
    assert rewards.phase.tolist() == ["baseline", "learn", "learn"]
    assert rewards.terms.keys() == {"reward", "primary", "sm"}
    assert rewards.terms["reward"] == pytest.approx([0.4, 0.2, 0.3]), "two communicators count by their keys"
    assert rewards.terms["sm"] == pytest.approx([np.nan, -0.05, np.nan], nan_ok=True)
    page = write_report(tmp_path).read_text()
    assert "The reward and its terms by decision epoch" in page
    assert re.search(r"<td>sm</td><td>0\.02</td>\s*<td>-0\.0500</td>", page)
    assert re.search(r"<td>primary</td><td>1</td>\s*<td>0\.2750</td>", page)
    assert "the term was off (tier)" in page
    (tmp_path / "rewards.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"rewards\.parquet: not the rewards of a run"):
        read_run(tmp_path)
