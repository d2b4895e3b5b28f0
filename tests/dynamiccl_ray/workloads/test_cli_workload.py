"""The commands print a table, or one JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiccl_ray.cli.workload import workload_app
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.workloads.trace import Call, write_trace

ROOT = Path(__file__).parents[3]
PRESET = str(ROOT / "experiments" / "workloads" / "llama3-8b-fsdp.yaml")


def _json(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(workload_app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_show() -> None:
    found = _json("show", PRESET)
    assert found["parallelism"] == "fsdp"
    assert isinstance(found["calls"], list)
    assert {row["operation"] for row in found["calls"]} == {"all_gather", "reduce_scatter"}
    shown = CliRunner().invoke(workload_app, ["show", PRESET]).stdout
    assert "436 MB" in shown


def test_show_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    # Clocks start anywhere; three quarters of the bytes are dp's.
    calls = [
        (5e6, "dp", "all_reduce", 2000),
        (5e6 + 1500, "tp", "all_gather", 1000),
        (5e6 + 2500, "dp", "all_reduce", 1000),
    ]
    write_trace(path, [Call(time_us=t, communicator=c, collective=o, bytes=n) for t, c, o, n in calls])
    found = _json("show", str(path))
    assert (found["name"], found["span_us"]) == ("job.jsonl", 2500)
    assert isinstance(found["calls"], list)
    named = ("communicator", "operation", "count", "effective_bytes", "share")
    assert [[row[name] for name in named] for row in found["calls"]] == [
        ["dp", "all_reduce", 2, 3000, 0.75],
        ["tp", "all_gather", 1, 1000, 0.25],
    ]
    shown = CliRunner().invoke(workload_app, ["show", str(path)]).stdout
    assert "job.jsonl: 3 calls in 2.5 ms" in shown
    assert "75.0%" in shown
    (tmp_path / "empty.jsonl").touch()
    assert _json("show", str(tmp_path / "empty.jsonl"))["calls"] == []


@pytest.mark.parametrize(
    ("line", "arguments", "says"),
    [("{", [], "line 1: not JSON"), ("", ["--rank", "1"], "of one rank"), ("", ["--step", "1"], "no steps")],
)
def test_a_trace_that_cannot_be_shown(tmp_path: Path, line: str, arguments: list[str], says: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(workload_app, ["show", str(tmp_path / "t.jsonl"), *arguments], catch_exceptions=False)


def test_reference() -> None:
    points = _json("reference")["points"]
    assert isinstance(points, list)
    assert len(points) >= 20
    assert "best schedule" in CliRunner().invoke(workload_app, ["reference"]).stdout


def test_reproduce() -> None:
    found = _json("reproduce", "--facts", str(ROOT / "dynamiccl_ray" / "data" / "training" / "shi2020.csv"))
    assert found["median_error"] == pytest.approx(0.023, abs=0.005)
    assert "order right in" in CliRunner().invoke(workload_app, ["reproduce"]).stdout


def test_unknown_networks_are_one_short_error(tmp_path: Path) -> None:
    """However many rows and networks there are."""

    def error(networks: int) -> str:
        rows = [
            f's,ResNet-50,2 nodes x 4 A; net {i % networks},8,"throughput BSP-PS, batch 64/GPU",9,x' for i in range(90)
        ]
        facts = tmp_path / "facts.csv"
        facts.write_text("\n".join(["source,model,hardware,gpus,quantity,value,unit", *rows]))
        with pytest.raises(ConfigError) as raised:
            CliRunner().invoke(workload_app, ["reproduce", "--facts", str(facts)], catch_exceptions=False)
        return str(raised.value).removeprefix(str(facts))

    assert error(2) == (
        ": no throughput to predict; left out: rows on unknown networks (90): 'net 0', 'net 1'; "
        "known are 10GbE, 100GbIB, 100GbE; describe yours with `--networks YAML`"
    )
    assert "'net 4' and 85 more; known are" in error(90)


def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="ranks 0 to 63"):
        CliRunner().invoke(workload_app, ["show", PRESET, "--rank", "64"], catch_exceptions=False)
