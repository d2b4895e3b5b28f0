"""A run that is asked and told things while it goes on, beside ranks that train."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attached import training
from small import small_experiment
from typer.testing import CliRunner

from dynamiccl_ray.cli.app import app
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online import desk
from dynamiccl_ray.trainers.online.desk import Desk, ask
from dynamiccl_ray.trainers.online.recorder import read_decisions
from dynamiccl_ray.trainers.online.run import run_online

RANKS, COMMS = 4, 2


@pytest.fixture
def job_running(tmp_path: Path, job: str) -> Iterator[NcclJob]:
    with training(job, tmp_path / "job") as running:
        running.start()
        running.await_ranks()
        yield running
        running.stop()
        assert agreement_violations(running.logs()) == 0


@pytest.fixture(params=["serial", pytest.param("ray", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, job_running: NcclJob, tmp_path: Path, job: str) -> Iterator[Path]:
    """Beside the job, in a thread of its own, until the job has gone."""
    experiment = small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "pcie", "inter": "tcp", "processes": None, "rate_hz": None},
        control={"learning": {"baseline_samples": 4, "draws": 4, "draw_samples": 1, "compares": 2}},
        stop={"rounds": 100_000},
        epochs={"watch_s": 5.0},
    )
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run_online(experiment, tmp_path / "run", serial=request.param == "serial")
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    _until(lambda: _answers(job))
    yield tmp_path / "run"
    job_running.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert not failed


def _answers(job: str) -> bool:
    try:
        return bool(ask(job, {})["ranks"] == RANKS * COMMS)
    except RunError:
        return False


def _until(done: Callable[[], bool], limit_s: float = 150.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _tuned(job: str) -> list[int]:
    """Of each segment, keys of which the table in force says something."""
    out = []
    for path in segments(job):
        with Channel(path, claim=False) as channel:
            table = channel.table
            out.append(0 if table is None else int((table.flat() != 0).sum()))
    return out


def _command(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_off_is_in_force_on_every_rank_when_the_command_returns(run: Path, job: str) -> None:
    _until(lambda: any(_tuned(job)))
    done = _command("off", "--job", job)
    assert done["followed"]
    assert done["seconds"] < 5, "an epoch of watching takes as long"
    _until(lambda: not any(_tuned(job)), 5.0)  # the call of the switch
    time.sleep(0.5)
    assert _tuned(job) == [0] * RANKS * COMMS
    status = _command("status", "--job", job)
    assert (status["mode"], status["ranks"]) == ("off", RANKS * COMMS)
    assert {comm["name"] for comm in status["communicators"]} == {"comm0", "comm1"}
    _command("mode", "active", "--job", job)
    _until(lambda: any(_tuned(job)))
    _command("canary", "--communicator", "comm1", "--job", job)
    _until(lambda: sorted(bool(n) for n in _tuned(job)) == [False] * RANKS + [True] * RANKS)
    assert ask(job, {})["canary"]["communicators"] == ["comm1"]
    _command("rollback", "--job", job)
    assert [order["order"] for order in ask(job, {})["orders"]] == ["mode", "mode", "canary", "rollback"]
    page = CliRunner().invoke(app, ["status", "--keys", "--job", job])
    assert "rolled back" in page.output
    refused = CliRunner().invoke(app, ["mode", "fast", "--job", job])
    assert "there are off, observe, shadow, active" in str(refused.exception)


def test_every_decision_leaves_a_row(run: Path, job: str, job_running: NcclJob) -> None:
    _until(lambda: any(key["phase"] == "exploit" for comm in ask(job, {})["communicators"] for key in comm["keys"]))
    job_running.stop()
    _until(lambda: (run / "summary.json").exists())
    rows = read_decisions(run)
    assert set(rows["why"]) >= {"own choice", "drawn", "compared"}
    tried = rows["why"] == "drawn"
    assert np.isfinite(rows["got_us"]).all()
    assert np.isfinite(rows["own_us"][tried]).all()
    assert (np.diff(rows["unix_s"]) >= 0).all()
    assert abs(rows["unix_s"][-1] - time.time()) < 600


def test_without_a_run_there_is_nobody_to_ask(job: str) -> None:
    with pytest.raises(RunError, match=f"no run of job '{job}' on this machine; name its DYNAMICCL_JOB_ID"):
        ask(job, {})


@pytest.fixture
def answering(job: str) -> Iterator[list[Any]]:
    asked: list[Any] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return {"n": len(asked)}

    with Desk(job, answer):
        yield asked


def test_who_asks_is_written_down_and_nonsense_is_refused(answering: list[Any], job: str) -> None:
    assert ask(job, {"x": 1}) == {"n": 1}
    assert answering[0]["by"].startswith(f"uid {os.getuid()} on ")
    for sent in (b"[1]\n", b"{]\n", b"\xff\n", b"7\n"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(desk._address(job))
            raw.sendall(sent)
            assert b"error" in raw.recv(4096)
    assert ask(job, {}) == {"n": 2}


def test_a_silent_client_is_let_go(answering: list[Any], job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "_LINE_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(desk._address(job))
        silent.sendall(b"{")
        assert ask(job, {}) == {"n": 1}


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
def test_another_user_is_not_heard(answering: list[Any], job: str) -> None:
    address = desk._address(job)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address)
            try:
                stranger.sendall(b"{}\n")
                said = stranger.recv(100)
            except OSError:
                said = b""
        os._exit(len(said))
    assert os.waitpid(child, 0)[1] == 0
    assert answering == []


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
def test_another_user_that_answers_in_its_place_is_not_believed(job: str) -> None:
    address = desk._address(job)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with socket.socket(socket.AF_UNIX) as server:
            os.setuid(65534)
            server.bind(address)
            server.listen()
            os.write(tell, b"x")
            server.accept()[0].recv(100)
        os._exit(0)
    os.read(ready, 1)
    # The kernel tells of a socket who called listen().
    with pytest.raises(RunError, match="another user of this machine answers"):
        ask(job, {})
    os.waitpid(child, 0)
