"""Attached to a job that it did not start: found by its job id, tuned, and left in peace when it ends."""

from __future__ import annotations

import dataclasses
import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from small import small_experiment

from dynamiccl_ray.errors import RunError
from plugin_bridge import plugin_path
from plugin_bridge.emulation import EmulatedJob, agreement_violations
from plugin_bridge.played import play
from trainers.online import run_online


def test_a_running_job_is_found_tuned_and_outlived(tmp_path: Path, job: str) -> None:
    small = small_experiment(job)
    # A communicator of four ranks, all of them here, as far as anybody can tell.
    program = dataclasses.replace(
        play(small.fabric, seed=0, channels=(0,)).program,  # type: ignore[arg-type]
        n_ranks=4,
        n_nodes=2,
        rate_hz=3000.0,
    )
    attached = small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "nvlink", "inter": "efa", "processes": None, "rate_hz": None},
        epochs={"collectives": 70},
        stop={"rounds": None},
    )
    training = EmulatedJob(
        program, ranks=range(4), job_id=job, plugin=plugin_path(), directory=tmp_path / "job", communicators=2
    )
    with training:
        training.start()
        ender = threading.Thread(target=lambda: (time.sleep(12), training.stop()))
        ender.start()
        summary = run_online(attached, tmp_path / "run", serial=True)
        ender.join()
        assert training.returncodes() == [0] * 4
        for communicator in range(2):
            used = [training.used(rank, communicator) for rank in range(4)]
            assert agreement_violations(used) == 0
            assert (used[0]["untouched"] == 0).any(), "never tuned"
            assert len({len(u) for u in used}) == 1
    assert summary["switches"] > 10
    assert summary["agreement_violations"] is None, "nobody logged what the ranks used"
    assert summary["collectives"] > 1000
    assert np.isfinite([row["default_us"] for row in summary["keys"]]).all()


def test_without_a_job_the_run_says_what_is_missing(tmp_path: Path, job: str) -> None:
    nothing = small_experiment(job, fabric={"kind": "nccl", "processes": None, "rate_hz": None})
    with pytest.raises(RunError, match=r"no segments of job.*plugin env"):
        run_online(nothing, tmp_path, serial=False)


def test_a_plugin_of_another_build_is_named_once_and_left_alone(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", str(tmp_path))
    foreign = bytearray(2 << 20)
    struct.pack_into("<QI", foreign, 0, 0x4C43434D414E5944, 99)
    struct.pack_into("<I", foreign, 32, 1)
    path = tmp_path / f"dynamiccl-{job}-{os.getpid()}-0"
    path.write_bytes(foreign)
    attached = small_experiment(job, fabric={"kind": "nccl", "processes": None, "rate_hz": None}, stop={"rounds": 2})
    run_online(attached, tmp_path / "run", serial=True)
    said = [r.getMessage() for r in caplog.records if "channel ABI 99" in r.getMessage()]
    assert len(said) == 1
    assert str(path) in said[0]
    assert path.read_bytes() == bytes(foreign)
    path.unlink()
