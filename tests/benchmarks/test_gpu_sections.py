"""The other sections, end to end on the real plugin under a fake NCCL, and the report of all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_context import FACTS, FakeContext, fake_context

from benchmarks.gpu import check, communicators, graphs, measure, overhead, report
from benchmarks.gpu.cases import Case
from benchmarks.gpu.plan import action_from_json
from dynamiccl_ray.actions import Action
from dynamiccl_ray.knobs import Algorithm, Collective, Protocol, pair_index

LL, SIMPLE = (pair_index(Algorithm.RING, protocol) for protocol in (Protocol.LL, Protocol.SIMPLE))


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeContext:
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", str(tmp_path))
    return fake_context(monkeypatch, tmp_path, ranks=3)


def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ends on one channel of ring/ll."""

    def learn(context: Any, cases: Any, about: Any, most_channels: int) -> Any:
        assert (about["inter"], about["nvls"], most_channels) == ("tcp", False, 8)
        account = {"phase_at_the_end": "exploit", "collectives_run": 9, "switches": 1, "dropped_records": 0}
        return {case.key: Action(pair=LL, channels=1) for case in cases}, account

    monkeypatch.setattr(measure, "learn", learn)


def test_three_choices_are_measured_by_the_protocol(context: FakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch)
    result = measure.run(context)
    assert context.failures == []
    assert result["protocol"] == {"warmup": 10, "measured": 100, "runs": 2}
    assert len(result["keys"]) == 3 * len(context.time_sizes)
    for row in result["keys"]:
        for name in ("default", "tuned", "static"):
            for clock in ("gpu_us", "stream_us"):
                assert row[name][clock]["samples"] == 200
                # The fake has no noise; but its time is not the host's, so that ranks cannot be compared.
                noise = 0.02 if clock == "gpu_us" else 1e-6
                assert row[name][clock]["std"] < noise * row[name][clock]["mean"]
        others = min(row[name]["gpu_us"]["mean"] for name in ("default", "tuned"))
        assert row["static"]["gpu_us"]["mean"] <= 1.02 * others
        # At least what the fastest rank takes, at most what the slowest does, which is 2 % more; and the slowest with
        # five microseconds of launch.
        slowest_us = row["default"]["stream_us"]["mean"] - 5
        assert slowest_us / 1.02 - 0.01 <= row["default"]["gpu_us"]["mean"] <= slowest_us + 0.01
        assert row["default"]["action"] == {"pair": "nccl", "channels": 0, "chunk_bytes": 0}
        assert action_from_json(row["tuned"]["action"]) == Action(pair=LL, channels=1)
    small = min(result["keys"], key=lambda row: (row["bytes"], not row["case"].startswith("all_reduce")))
    assert small["static"]["action"]["channels"] == 8, "more channels are always better here"
    assert result["over_default"]["static"]["gpu_us"] < 1
    assert result["sweep"]["measured"] == result["sweep"]["configurations"]
    # The three take turns, in another order in each run.
    assert context.started[1].calls.count("time") == 3 * len(result["keys"])


def test_a_search_that_runs_out_of_time_says_so(context: FakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch)
    context.options = replace(context.options, sweep_s=0.0)
    result = measure.run(context)
    assert result["sweep"]["measured"] < result["sweep"]["configurations"]
    assert result["over_default"]["static"]["gpu_us"] > 0
    assert any("--sweep-s" in note for note in context.notes)


def test_a_loop_that_fails_is_a_failure_and_the_rest_is_measured(
    context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn(*_: Any) -> Any:
        raise measure.RunError("it ended with 2")

    monkeypatch.setattr(measure, "learn", learn)
    result = measure.run(context)
    assert "tuned" not in result["keys"][0]
    assert [failure["section"] for failure in context.failures] == ["measure"]
    assert "tuned" not in result["over_default"]
    assert "| collective | default | static |" in report.markdown(_document(context, {"measure": result}))


def test_graphs_are_decided_at_capture(context: FakeContext) -> None:
    result = graphs.run(context)
    assert context.failures == []
    assert context.notes == []
    first, second, again = result["rounds"]
    for turn in (first, second):
        assert turn["asked_at_capture"] == 2 * result["collectives"]
        # The warm-up and the first replay have decisions.
        assert (turn["decided"], turn["undecided"]) == (8, 36)
    assert "asked_at_capture" not in again
    assert (again["decided"], again["undecided"], again["records"]) == (0, 40, 40)


def test_a_wrong_replay_is_a_failure(context: FakeContext) -> None:
    context.fakes = {"wrong": lambda case, call: case.collective is Collective.ALL_GATHER and call.proto == Protocol.LL}
    graphs.run(context)
    assert len(context.failures) == 2
    assert "in a replay" in context.failures[0]["what"]
    assert json.loads(context.failures[0]["repeat"])["action"]["pair"] == "ring/ll"


def test_two_communicators_keep_their_own_tables(context: FakeContext) -> None:
    result = communicators.interleaved(context)
    assert context.failures == []
    assert result["sizes"] == {"world": 3, "part": 2}


def test_two_ranks_make_two_communicators_of_one_size(context: FakeContext) -> None:
    context.ranks = 2
    assert communicators.interleaved(context)["sizes"] == {"world": 2, "part": 2}
    assert context.failures == []


def test_a_deaf_rank_is_noticed_among_several_communicators(context: FakeContext) -> None:
    context.fakes = {"deaf": frozenset({1})}
    communicators.interleaved(context)
    assert any("and got ring/simple" in failure["what"] for failure in context.failures)


def test_communicators_that_come_and_go(context: FakeContext) -> None:
    result = communicators.cycles(context)
    assert context.failures == []
    assert result["growth_per_cycle"]["both"]["anonymous_bytes"] == 1.0


def test_growth_beyond_that_without_the_plugin_is_too_much() -> None:
    flat = {"anonymous_bytes": 0.0, "gpu_bytes": 0.0, "threads": 0.0, "files": 0.0}
    leaking = {**flat, "anonymous_bytes": 190.0 * 1024}
    assert communicators.too_much(flat, flat) == []
    (problem,) = communicators.too_much(flat, leaking)
    assert "anonymous_bytes grow by 194560" in problem
    assert communicators.too_much(leaking, leaking) == [], "NCCL's own"
    shrinking = {**flat, "anonymous_bytes": -1e9}
    assert communicators.too_much(shrinking, flat) == []
    one_thread = {**flat, "threads": 1.0}
    assert len(communicators.too_much(flat, one_thread)) == 1
    step = [{**flat, "anonymous_bytes": float(x)} for x in [9e6] * 5 + [0] * 10 + [4e6] * 10]
    assert communicators.growth_of([step])["anonymous_bytes"] < 128 * 1024 * 5


def test_configurations_of_the_overhead_take_turns(context: FakeContext) -> None:
    result = overhead.run(context)
    assert result["runs"] == 2
    for row in result["cases"]:
        assert list(row["configurations"]) == list(overhead.ORDER)
        for of in row["configurations"].values():
            assert of["host_us"] == {"median": 24.5, "low": 24.5, "high": 24.5, "runs": 2}
            assert of["gpu_us"]["median"] == 32.0, "the slowest rank's"
            assert of["host_us_over_none"] == 0.0
    switched = [ranks for ranks in context.started if "mask" in ranks.calls]
    assert len(switched) == 2


def test_without_a_compiler_less_is_measured(context: FakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "build", lambda directory: None)
    result = overhead.run(context)
    assert list(result["cases"][0]["configurations"]) == [overhead.NONE, overhead.TUNER, overhead.BOTH]
    assert any("compiler" in note for note in context.notes)


def _document(context: FakeContext, sections: dict[str, Any]) -> dict[str, Any]:
    return report.document(
        date="2026-01-31 10:00:00 +0000",
        command="python benchmarks/gpu/run.py",
        commit="abc",
        ranks=context.ranks,
        facts=FACTS,
        environment={"NCCL_DEBUG": "WARN"},
        sections=sections,
        failures=context.failures,
        notes=context.notes,
    )


def test_a_report_of_everything(context: FakeContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuned(monkeypatch)
    modules = {
        "check": check,
        "measure": measure,
        "overhead": overhead,
        "graphs": graphs,
        "communicators": communicators,
    }
    found = _document(context, {name: module.run(context) for name, module in modules.items()})
    name = report.name_of(found)
    assert name == "2026-01-31-nvidia-fake-100-3ranks"
    as_json, as_markdown = report.write(found, tmp_path / "out", name)
    assert json.loads(as_json.read_text())["ok"] is True
    text = as_markdown.read_text()
    for part in (
        "NVIDIA Fake 100",
        "580.1",
        "2.30.7",
        "2.13.0+cu130",
        "abc",
        "No failure.",
        "not a cluster",
        "NCCL_DEBUG=WARN",
    ):
        assert part in text
    for section in modules:
        assert f"## {section}" in text
    assert "None" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 60
    assert report.free_name(tmp_path / "out", name) == f"{name}-2"
    assert report.free_name(tmp_path / "nowhere", name) == name


def test_a_report_of_failures(context: FakeContext) -> None:
    context.fail("check", "wrong result of this\nand more", repeat='{"case": 1}')
    text = report.markdown(_document(context, {"graphs": {"error": "rank 1 hangs\nstack"}}))
    assert "**1 failures.**" in text
    assert "--ranks 3 --repeat '{\"case\": 1}'" in text
    assert "Failed: rank 1 hangs" in text
    assert "stack" not in text


@pytest.mark.slow
def test_the_loop_beside_ranks_of_this_process(context: FakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dynamiccl online` attaches to the fake ranks' segments, learns, ends, and leaves a table in force."""
    context.options = replace(context.options, per_key=200, serial=True)
    result = measure.run(context)
    assert context.failures == []
    assert result["loop"]["switches"] > 0
    assert result["loop"]["phase_at_the_end"] == "exploit"
    assert any(action_from_json(row["tuned"]["action"]) != Action() for row in result["keys"])
    assert result["over_default"]["tuned"]["gpu_us"] < 1.05


def test_cases_of_graphs_have_keys_of_their_own() -> None:
    for ranks in range(2, 9):
        cases = graphs.cases_of(ranks)
        assert len({case.key for case in cases}) == len(cases)
        assert all(isinstance(case, Case) and case.count % ranks == 0 for case in cases)


@pytest.fixture
def script(context: FakeContext, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run.py, whose context is the fake one."""
    from benchmarks.gpu import run

    def made(**given: Any) -> FakeContext:
        given.pop("say")
        return replace(context, **given, failures=[], notes=[])

    monkeypatch.setattr("benchmarks.gpu.context.Context", made)
    monkeypatch.setattr(run, "say", lambda text: None)
    return run


def test_a_whole_run_ends_with_0(script: Any, context: FakeContext, capsys: pytest.CaptureFixture[str]) -> None:
    options = replace(context.options, sections=("check", "graphs"), as_json=True)
    assert script.run(options, FACTS, 2) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert list(said["sections"]) == ["check", "graphs"]
    (written,) = options.out.glob("*.json")
    assert json.loads(written.read_text()) == said
    assert written.with_suffix(".md").exists()
    assert len(list(options.out.iterdir())) == 2


def test_a_section_that_breaks_ends_with_1_and_the_others_run(
    script: Any, context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(_: Any) -> Any:
        raise measure.RunError("ranks [0] of 2 did not answer within 180 s, they hang\nstack")

    monkeypatch.setattr(check, "run", hangs)
    options = replace(context.options, sections=("check", "graphs"))
    assert script.run(options, FACTS, 2) == 1
    (written,) = options.out.glob("*.json")
    found = json.loads(written.read_text())
    assert found["ok"] is False
    assert "they hang" in found["sections"]["check"]["error"]
    assert found["sections"]["graphs"]["collectives"] == 4
    assert (options.out / f"{written.stem}-logs").is_dir()


def test_one_case_is_repeated_alone(script: Any, context: FakeContext) -> None:
    context.fakes = {"wrong": lambda case, call: True}
    case = Case(collective=Collective.ALL_REDUCE, count=4096)
    repeat = json.dumps({"action": {"pair": "ring/ll"}, "case": case.to_json()})
    assert script.run(replace(context.options, repeat=repeat), FACTS, 2) == 1
    context.fakes = {}
    assert script.run(replace(context.options, repeat=repeat), FACTS, 2) == 0
    assert [ranks.calls for ranks in context.started] == [["check", "check"]] * 2
