"""Attached to a job that it did not start: found by its job id, tuned, and left in peace when it ends."""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from attached import training
from small import small_experiment

from dynamiccl_ray.errors import RunError
from dynamiccl_ray.plugin_bridge.nccl_job import agreement_violations
from dynamiccl_ray.report.data import read_run
from dynamiccl_ray.trainers.online.recorder import read_samples
from dynamiccl_ray.trainers.online.run import run_online


def test_a_running_job_is_found_tuned_and_outlived(tmp_path: Path, job: str) -> None:
    attached = small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "pcie", "inter": "tcp", "processes": None, "rate_hz": None},
        stop={"rounds": None},
    )
    with training(job, tmp_path / "job") as running:
        running.start()
        running.await_ranks()
        ender = threading.Thread(target=lambda: (time.sleep(12), running.stop()))
        ender.start()
        summary = run_online(attached, tmp_path / "run", serial=True)
        ender.join()
        assert running.returncodes() == [0] * 4
        log = running.logs()
    assert agreement_violations(log) == 0
    for communicator in np.unique(log["comm"]):
        own = log[log["comm"] == communicator]["own"]
        assert (own == 0).any(), "never tuned"
    assert len(np.unique(log["comm"])) == 2
    assert summary["switches"] > 4
    assert summary["agreement_violations"] is None, "nobody logged what the ranks used"
    assert summary["collectives"] > 500
    assert np.isfinite([row["default_us"] for row in summary["keys"]]).all()


def test_a_run_that_goes_on_in_its_directory_keeps_what_it_had_recorded(tmp_path: Path, job: str) -> None:
    attached = small_experiment(job, fabric={"kind": "nccl", "processes": None, "rate_hz": None}, stop={"rounds": 3})
    longer = attached.model_copy(update={"stop": attached.stop.model_copy(update={"rounds": 6})})
    with training(job, tmp_path / "job") as running:
        running.start()
        running.await_ranks()
        first = run_online(attached, tmp_path / "run", serial=True)
        before = read_samples(tmp_path / "run")
        second = run_online(longer, tmp_path / "run", serial=True, resume=tmp_path / "run")
        running.stop()
    assert (first["rounds"], second["rounds"]) == (3, 6)
    after = read_samples(tmp_path / "run")
    assert len(before["dseq"]) > 0
    assert after["dseq"][: len(before["dseq"])].tolist() == before["dseq"].tolist()
    assert list(dict.fromkeys(after["run"].tolist())) == [first["run"], second["run"]]
    assert read_run(tmp_path / "run").samples.epoch.max() > before["epoch"].max()


def test_without_a_job_the_run_says_what_is_missing(tmp_path: Path, job: str) -> None:
    nothing = small_experiment(job, fabric={"kind": "nccl", "processes": None, "rate_hz": None})
    with pytest.raises(RunError, match=r"no ranks of job.*on this node \(there are .*plugin env"):
        run_online(nothing, tmp_path, serial=False)
    assert not ray.is_initialized(), "what was started is stopped"


def test_a_plugin_of_another_build_is_named_once_and_left_alone(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", str(tmp_path))
    foreign = bytearray(2 << 20)
    struct.pack_into("<QI", foreign, 0, 0x4C43434D414E5944, 99)
    struct.pack_into("<I", foreign, 32, 1)
    path = tmp_path / f"dynamiccl-{job}-{os.getpid()}-0"
    path.write_bytes(foreign)
    real, short = {"kind": "nccl", "processes": None, "rate_hz": None}, {"per_round": 2}
    run_online(small_experiment(job, fabric=real, epochs=short, stop={"rounds": 2}), tmp_path / "run", serial=True)
    said = [r.getMessage() for r in caplog.records if "channel ABI 99" in r.getMessage()]
    assert len(said) == 1
    assert str(path) in said[0]
    assert path.read_bytes() == bytes(foreign)
    path.unlink()
