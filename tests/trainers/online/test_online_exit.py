"""What a control plane leaves behind in a job that goes on: nothing, or what it was told to keep."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attached import goes_on, training
from small import small_experiment

from dynamiccl_ray.actions import Action
from dynamiccl_ray.actors.status import Status
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import Prepared
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob, agreement_violations
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online import run as online
from dynamiccl_ray.trainers.online.backends import SerialBackend
from dynamiccl_ray.trainers.online.recorder import read_samples
from dynamiccl_ray.trainers.online.run import run_online

RANKS = 4
COMMS = 2
LEARNED = {"rounds": None, "exploit_rounds_after_last_event": 1}
"""Stop when all is learned: how much a round sees of a job is the machine's affair."""


def _attached(job: str, **stop: Any) -> Any:
    learning = {"baseline_samples": 4, "draws": 4, "draw_samples": 1, "compares": 2, "compare_samples": 2}
    return small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "pcie", "inter": "tcp", "processes": None, "rate_hz": None},
        control={"learning": learning},
        stop=stop,
        ray={"runners_per_node": 1},
    )


@pytest.fixture
def running(tmp_path: Path, job: str) -> Iterator[NcclJob]:
    with training(job, tmp_path / "job") as running:
        running.start()
        running.await_ranks()
        yield running


def _tables(job: str) -> list[int]:
    """Per rank and communicator, keys of which the table in force says something."""
    out = []
    for path in segments(job):
        with Channel(path, claim=False) as channel:
            channel_table = channel.table
            out.append(0 if channel_table is None else int((channel_table.flat() != 0).sum()))
    return out


def _ends_well(running: NcclJob) -> None:
    goes_on(running)
    running.stop()
    assert running.returncodes() == [0] * RANKS
    assert agreement_violations(running.logs()) == 0


def test_the_ranks_go_back_to_nccls_choice(running: NcclJob, tmp_path: Path, job: str) -> None:
    said: list[str] = []
    summary = run_online(_attached(job, **LEARNED), tmp_path / "run", serial=True, say=said.append)
    assert summary["switches"] > 2
    assert _tables(job) == [0] * RANKS * COMMS
    assert said[-1] == "in force: NCCL's own choice"
    _ends_well(running)


def test_a_run_beside_ranks_that_hold_a_table_of_another_goes_on_from_it(
    running: NcclJob, tmp_path: Path, job: str
) -> None:
    """Nothing but the segments says what is in force: no state, no store and no name of the run before."""
    comms: dict[int, list[Channel]] = {}
    for path in segments(job):
        channel = Channel(path)
        comms.setdefault(channel.identity.comm_id, []).append(channel)
    action = Action(pair=pair_index(Algorithm.RING, Protocol.LL), channels=1)
    table = DecisionTable.of(41, {key_of(4, 1 << 14, False): action}, max_channels=4)
    for channels in comms.values():
        prepared = [channel.prepare(table, 100) for channel in channels]
        assert {outcome for outcome, _, _ in prepared} == {Prepared.PREPARED}
        assert all(channel.decide(41, max(hold_at for _, hold_at, _ in prepared)) for channel in channels)
    for channels in comms.values():
        for channel in channels:
            channel.close()
    said: list[str] = []
    summary = run_online(_attached(job, **LEARNED), tmp_path / "run", serial=True, say=said.append)
    assert summary["collectives"] > 50, "beside ranks that hold a table nothing was measured"
    assert summary["history"][0]["version"] >= 41, "it was not adopted"
    assert summary["switches"] > 0
    assert said[-1] == "in force: NCCL's own choice"
    assert _tables(job) == [0] * RANKS * COMMS
    _ends_well(running)


def test_a_second_control_plane_is_refused_by_name(
    running: NcclJob, tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "HANDOVER_S", 0.5)
    held = [Channel(path) for path in segments(job)]
    with pytest.raises(RunError, match=rf"served by another control plane here \(process {os.getpid()}\)"):
        run_online(_attached(job, rounds=2), tmp_path / "run", serial=True)
    for channel in held:
        channel.close()
    _ends_well(running)


def test_a_run_that_finds_no_rank_ends_and_names_the_jobs_that_are_there(
    running: NcclJob, tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "FOUND_S", 0.5)
    with pytest.raises(RunError, match=rf"no ranks of job 'mistaken' were found in 0 s: there are jobs .*{job}"):
        run_online(_attached("mistaken"), tmp_path / "run", serial=True)
    _ends_well(running)


def test_a_run_that_fails_gives_its_ranks_back_first(
    running: NcclJob, tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SerialBackend.round

    def fails(backend: SerialBackend) -> Status:
        status = done(backend)
        if any(_tables(job)):
            raise ZeroDivisionError("a fault of ours")
        return status

    monkeypatch.setattr(SerialBackend, "round", fails)
    said: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run_online(_attached(job, rounds=100_000), tmp_path / "run", serial=True, say=said.append)
    assert said[-1] == "in force: NCCL's own choice"
    assert _tables(job) == [0] * RANKS * COMMS
    _ends_well(running)


def _command(experiment: Any, directory: Path, *options: str) -> subprocess.Popen[bytes]:
    directory.mkdir()
    path = directory / "experiment.yaml"
    path.write_text(experiment.model_dump_json())  # JSON is YAML
    run = ["online", str(path), "--out", str(directory / "run")]
    command = [sys.executable, "-m", "dynamiccl_ray.cli", *run, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _until_something_is_in_force(job: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 150
    while not any(_tables(job)):
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("told", "how"),
    [
        pytest.param(signal.SIGINT, ("--serial",), id="Ctrl-C, serial"),
        pytest.param(signal.SIGTERM, (), id="SIGTERM, Ray"),
        pytest.param(signal.SIGINT, (), id="Ctrl-C, Ray", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ("--serial",), id="SIGTERM, serial", marks=pytest.mark.slow),
    ],
)
def test_told_to_end_while_it_learns(
    running: NcclJob, tmp_path: Path, job: str, told: signal.Signals, how: tuple[str, ...]
) -> None:
    process = _command(_attached(job, rounds=100_000), tmp_path / "online", *how)
    _until_something_is_in_force(job, process)
    process.send_signal(told)
    output = process.communicate(timeout=150)[0].decode()
    assert process.returncode == 0, output
    assert "in force: NCCL's own choice" in output
    assert _tables(job) == [0] * RANKS * COMMS
    summary = json.loads((tmp_path / "online" / "run" / "summary.json").read_text())
    assert summary["switches"] > 0
    assert (tmp_path / "online" / "run" / "checkpoint.pt").is_file()
    assert len(read_samples(tmp_path / "online" / "run")["dseq"]) >= summary["collectives"] > 0
    _ends_well(running)


def test_everything_killed_again_and_again_and_the_last_one_cleans_up(
    running: NcclJob, tmp_path: Path, job: str
) -> None:
    chance = random.Random(0)
    for number in range(3):
        process = _command(_attached(job, rounds=100_000), tmp_path / f"killed{number}", "--serial")
        if number == 0:
            _until_something_is_in_force(job, process)
        else:
            time.sleep(3 + chance.random())
        process.kill()
        process.wait()
    said: list[str] = []
    run_online(_attached(job, rounds=3), tmp_path / "last", serial=True, say=said.append)
    assert said[-1] == "in force: NCCL's own choice"
    assert _tables(job) == [0] * RANKS * COMMS
    _ends_well(running)
