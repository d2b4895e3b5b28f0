"""The checking section, end to end on the real plugin under a fake NCCL: what it finds, and what it must find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_context import FakeContext, fake_context

from benchmarks.gpu import check
from benchmarks.gpu.plan import Step, action_from_json
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, Collective


def context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: Any) -> FakeContext:
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", str(tmp_path))
    return fake_context(monkeypatch, tmp_path, **changes)


def test_everything_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = context(monkeypatch, tmp_path)
    result = check.run(mine)
    assert mine.failures == []
    assert result["wrong"] == 0
    assert result["recorded"] == 2 * result["collectives"]
    assert result["unrecorded"] == result["not_offered_for_type"] == 0
    assert result["left_alone"] > 0
    assert (result["tuner_abi"], result["profiler_abi"]) == (6, 6)
    assert set(result["per_pair"]) == {f"{a}/{p}" for a in ("ring", "tree") for p in ("ll", "ll128", "simple")} | {
        "nccl"
    }
    assert set(result["channels"]) == {str(count) for count in CHANNEL_VALUES if count}
    assert max(result["channels"]["32"]) == 8, "no more than the communicator has"
    assert sum(result["dropped"].values()) == 0
    # Own choice with each channel count; six pairs with each, and each chunk size.
    plain = len(CHANNEL_VALUES) + 6 * (len(CHANNEL_VALUES) + len(CHUNK_VALUES) - 1)
    assert result["tables"] == plain + 18, "and what is not offered: tree but for all-reduce, and five algorithms"
    assert not list(tmp_path.glob("dynamiccl-*"))


def test_a_wrong_result_is_reported_with_what_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Any, call: Any) -> bool:
        return case.collective is Collective.ALL_GATHER and case.dtype == "int8" and call.channels == 2

    mine = context(monkeypatch, tmp_path, fakes={"wrong": wrong})
    result = check.run(mine)
    assert result["wrong"] > 0
    first = mine.failures[0]
    assert first["section"] == "check"
    assert "wrong result of all_gather" in first["what"]
    assert "on ranks [1]" in first["what"]
    assert first["differences"] == {1: {"wrong_elements": 1, "first": 7}}
    repeat = json.loads(first["repeat"])
    assert repeat["case"]["dtype"] == "int8"
    assert repeat["action"]["channels"] == 2

    again = context(monkeypatch, tmp_path, fakes={"wrong": wrong}, repeat=first["repeat"])
    assert check.run(again)["tables"] == 1
    assert [failure["repeat"] for failure in again.failures] == [first["repeat"]]
    repaired = context(monkeypatch, tmp_path, repeat=first["repeat"])
    assert check.run(repaired)["wrong"] == 0
    assert repaired.failures == []


def test_a_table_that_is_not_in_force_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = json.dumps(
        {
            "action": {"pair": "ring/ll", "channels": 2, "chunk_bytes": 0},
            "case": {"collective": "all_reduce", "count": 1 << 18},
        }
    )
    one_deaf = context(monkeypatch, tmp_path, repeat=repeat, fakes={"deaf": frozenset({1})})
    check.run(one_deaf)
    said = " ".join(failure["what"] for failure in one_deaf.failures)
    assert "rank 1" in said
    assert "asked for ring/ll 2ch and got ring/simple" in said
    assert "ranks 0 and 1 differ" in said
    all_deaf = context(monkeypatch, tmp_path, repeat=repeat, fakes={"deaf": frozenset({0, 1})})
    check.run(all_deaf)
    assert "and got ring/simple" in all_deaf.failures[0]["what"]


def test_collectives_without_events_are_counted_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = context(monkeypatch, tmp_path, fakes={"silent": frozenset({Collective.BROADCAST})})
    monkeypatch.setattr("benchmarks.gpu.staging.QUIET_S", 0.2)
    result = check.run(mine)
    assert mine.failures == []
    assert result["unrecorded"] > 0
    assert any("no events of broadcast" in note for note in mine.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "give an object with `action` and `case`"),
        ("{}", "give an object with `action` and `case`"),
        ('{"action": {"pair": "ring/fast"}, "case": {}}', "pair is 'ring/fast'; valid are"),
        ('{"action": {}, "case": {"collective": "all_reduce"}}', "is no case"),
        ('{"action": {}, "case": {"collective": "all_reduce", "count": 8, "dtype": "float8"}}', "dtype is 'float8'"),
    ],
)
def test_what_cannot_be_repeated(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check.repeated(text)


def test_a_repeat_is_the_step_it_was() -> None:
    action = {"pair": "tree/ll128", "channels": 4, "chunk_bytes": 65536}
    case = {"collective": "reduce", "count": 64, "dtype": "int8", "reduction": "max", "root": 1, "offset": 1, "seed": 9}
    step = check.repeated(json.dumps({"action": action, "case": case, "refused": True}))
    assert step == Step(action=action_from_json(action), cases=step.cases, refused=True)
    assert step.cases[0].to_json() == case
