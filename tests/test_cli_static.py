"""The commands about static tables, in this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiccl_ray.cli.app import main
from dynamiccl_ray.plugin_bridge.doctor import diagnose
from dynamiccl_ray.static.blocks import read_blocks

GOOD = "dynamiccl-table 1\ncommunicator ranks=8 nodes=2 max_channels=8 name=dp\n"
GOOD += "all_reduce 1024 1151 any ring simple 4 -\nend\n"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, stdout and stderr of a command."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dynamiccl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return command


def test_tables_are_merged_checked_and_written_for_others(tmp_path: Path, run: Run) -> None:
    table, other, out = (str(tmp_path / name) for name in ("table", "other", "out"))
    Path(table).write_text(GOOD)
    Path(other).write_text(GOOD.replace(" 4 -", " 2 -").replace("=dp", "=tp"))
    code, said, _ = run("merge", table, other, "--out", out, "--json")
    assert code == 0
    assert [of["name"] for of in json.loads(said)["communicators"]] == ["dp", "tp"]
    digests = [block.digest for block in read_blocks(Path(out))]
    code, said, _ = run("table", "check", out)
    assert code == 0
    assert said.splitlines() == [
        f"{out}: 8 ranks on 2 nodes, name {name}: 2 keys, digest {digest}"
        for name, digest in zip(("dp", "tp"), digests, strict=True)
    ]
    code, _, warned = run("merge", table, "--format", "nccl-csv", "--out", out)
    assert code == 0
    assert "warning: dp: names cannot be said" in warned
    assert Path(out).read_text().endswith("allreduce,1024,1151,ring,simple,4,2,8,-1,-1\n")
    assert run("merge", table, "--format", "ncclx-json", "--out", out)[0] == 0
    assert json.loads(Path(out).read_text())["rules"][0]["filter"]["bytesPerRank"] == "[128,143]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("export none --out t", "none/checkpoint.pt: not a run to resume from"),
        ("export none --out t --format yaml", "'yaml' is not one of"),
        ("export none", "Missing option '--out'"),
        ("merge bad --out t", "bad:2: expected 8 fields"),
        ("merge none --out t", "none: No such file or directory"),
        ("merge good --out none/t", "none/t: cannot be written: No such file or directory; name another with --out"),
        (
            "merge good other --out t",
            "they differ on all_reduce/1KiB (and 1 more): ring/simple 4ch and ring/simple 2ch",
        ),
        ("table check good bad", "bad:2: expected 8 fields"),
        ("table check open", "others than its owner may write to it: chmod go-w"),
        ("plugin env --table open", "open: others than its owner may write to it: chmod go-w"),
    ],
)
def test_what_is_wrong_with_static_tables_is_one_line(tmp_path: Path, run: Run, arguments: str, says: str) -> None:
    for name, text, mode in (
        ("good", GOOD, 0o644),
        ("other", GOOD.replace(" 4 -", " 2 -"), 0o600),
        ("bad", GOOD.replace("communicator ranks", "x"), 0o644),
        ("open", GOOD, 0o666),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    command = [str(tmp_path / word) if word in ("good", "other", "bad", "open", "none", "t", "none/t") else word
               for word in arguments.split()]  # fmt: skip
    code, _, said = run(*command)
    assert code == 2
    assert says in said.replace(f"{tmp_path}/", "")
    assert not (tmp_path / "t").exists()


def test_every_table_is_checked_whatever_another_is_like(tmp_path: Path, run: Run) -> None:
    bad, good, none = (str(tmp_path / name) for name in ("bad", "good", "none"))
    Path(bad).write_text("nonsense\n")
    Path(good).write_text(GOOD)
    Path(good).chmod(0o644)
    code, said, _ = run("table", "check", bad, good, none, "--json")
    assert code == 2
    assert [of["table"] for of in json.loads(said)] == [bad, good, none]
    refused = [of["refused"] for of in json.loads(said)]
    assert "a table begins with" in refused[0]
    assert refused[1:] == [None, "No such file or directory"]
    code, said, errors = run("table", "check", bad, good)
    assert code == 2
    assert "2 keys" in said
    assert f"{bad}:1: a table begins" in errors


def test_a_link_is_replaced_and_what_is_no_file_stays_what_it_is(tmp_path: Path, run: Run) -> None:
    good, link, there, pipe = (tmp_path / name for name in ("good", "link", "there", "pipe"))
    good.write_text(GOOD)
    there.write_text("")
    link.symlink_to(there)
    os.mkfifo(pipe)
    planted = tmp_path / f".link.{os.getpid()}"
    planted.symlink_to(there)
    assert run("merge", str(good), "--out", str(link))[0] == 0
    assert not link.is_symlink(), "others may have put it there"
    assert "name=dp" in link.read_text()
    assert there.read_text() == ""
    code, _, said = run("merge", str(good), "--out", str(pipe))
    assert code == 2
    assert "is no regular file; name another with --out" in said
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == [planted.name, "good", "link", "pipe", "there"]


def test_a_static_table_has_variables_of_its_own_and_is_looked_at_by_doctor(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table"
    path.write_text(GOOD)
    path.chmod(0o644)
    variables = json.loads(run("plugin", "env", "--table", str(path), "--json")[1])
    assert variables["DYNAMICCL_TABLE"] == str(path)
    assert "DYNAMICCL_JOB_ID" not in variables

    def found() -> str:
        (check,) = (of for of in diagnose() if of.name == "static table")
        return f"{check.status}: {check.found}"

    assert not any(of.name == "static table" for of in diagnose())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert found() == f"ok: {path} decides: 8 ranks on 2 nodes, name dp, digest {read_blocks(path)[0].digest}"
    path.chmod(0o646)
    assert found().endswith("others than its owner may write to it: chmod go-w")
    path.write_text("dynamiccl-table 2\n")
    assert found().startswith(f"fail: {path}:1: a table begins with")
