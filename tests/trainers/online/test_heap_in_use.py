"""What driver, coordinator and runner together have in use, beside jobs that come and go."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest
from attached import training

from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING
from dynamiccl_ray.trainers.online.backends import SerialBackend

COMMS, STEPS = 4, 100
SETTLED, JOBS = 6, 26


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    )


def _in_use() -> float:
    """KiB that malloc has given to whoever asked and not got back: NumPy's and PyTorch's memory, not only Python's."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    now = mallinfo2()
    return float(now.used + now.hblkhd) / 1024


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_communicators_that_come_and_go_leave_nothing_in_use(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is kept on purpose, up to so much: 4,096 recurrent states of 1 KiB, 2,000 rounds of 0.7 KiB.
    monkeypatch.setattr("dynamiccl_ray.control.drawing._KEPT", 1)
    monkeypatch.setattr("dynamiccl_ray.actors.phases.HISTORY_ROUNDS", 4)
    settings = {
        "name": "heap", "job": job, "policy": "default", "fabric": {"kind": "nccl", "intra": "pcie", "inter": "tcp"},
        "control": {"learning": {"draws": 12, "compares": 2}}, "epochs": {"most_s": 1.0, "watch_s": 0.2},
    }  # fmt: skip
    backend, in_use, rounds = None, [], []
    # The next one is there before the last one goes, as for one runner that serves them all.
    with contextlib.ExitStack() as last:
        before = last.enter_context(contextlib.ExitStack())
        for number in range(JOBS):
            comms = range(COMMS * number, COMMS * (number + 1))
            with contextlib.ExitStack() as stack:
                running = stack.enter_context(training(job, tmp_path / str(number), nodes=1, comms=comms, rate_hz=600))
                running.set_credit(0)
                running.start()
                running.await_ranks()
                before.close()
                before = last.enter_context(stack.pop_all())
            backend = backend or SerialBackend(Plan(run=job, experiment=Online.model_validate(settings)))
            running.set_credit(FREE_RUNNING)
            rounds.append(0)
            loop = backend._core.loop
            # What has learned has nothing open.
            while running.progress().min() < STEPS or (loop.phase != Phase.EXPLOIT).any():
                backend.round()
                backend.observed()
                backend.learned()
                rounds[-1] += 1
            in_use.append(_in_use())
        assert backend is not None
        assert max(loop.shifts.shape) <= 3 * COMMS, "the ones that went are forgotten"
        backend.close()
    assert min(rounds) > 0
    slope = np.polyfit(COMMS * np.arange(JOBS - SETTLED), in_use[SETTLED:], 1)[0]
    assert slope < 16, f"{slope:.1f} KiB for a communicator: {in_use}"
