"""What a training script reports of its steps: real processes that load the real plugin, and read by another one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, play, wait_for, write_at

from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.plugin_bridge import plugin_path
from dynamiccl_ray.plugin_bridge.channel import Channel, JobReport
from dynamiccl_ray.plugin_bridge.job import Reporter, report_fault, report_step
from dynamiccl_ray.plugin_bridge.segments import segments

ROOT = Path(__file__).parents[2]

# A training script: makes communicators as NCCL would, through the plugin's own interface, and does what it is told.
SCRIPT = """
import ctypes, os, sys
from dynamiccl_ray.plugin_bridge import job

class Tuner(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("name", "init", "decide", "end")]

plugin = ctypes.CDLL(sys.argv[1])
tuner = Tuner.in_dll(plugin, "ncclTunerPlugin_v6")
init = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_void_p,
)(tuner.init)
end = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(tuner.end)
communicators = []

def communicator():
    context = ctypes.c_void_p()
    init(ctypes.byref(context), 77 + len(communicators), 2, 1, None, None, None)
    communicators.append(context)

print("ready", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class _Training:
    """The script, told line by line."""

    def __init__(self, job: str) -> None:
        env = {**os.environ, "DYNAMICCL_JOB_ID": job}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(plugin_path())],
            cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        return self._line()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def training(rig: Rig) -> Iterator[_Training]:
    script = _Training("steps")
    try:
        yield script
    finally:
        script.end()


def _said(channel: Channel) -> JobReport:
    said = channel.job
    assert said is not None
    return said


def test_a_step_is_read_in_another_process_on_every_communicator(training: _Training) -> None:
    training.say("communicator()")
    training.say("communicator()")
    channels = [Channel(path) for path in segments("steps")]
    assert len(channels) == 2
    assert all(_said(channel).reports == 0 for channel in channels)
    assert training.say("job.report_step(7, 0.25, 2.5)") == "True"
    assert all(
        _said(c) == JobReport(reports=1, step=7, iteration_s=0.25, loss=2.5, faults=0) for c in channels
    )  # fmt: skip
    assert training.say("job.report_step(8, 0.125)") == "True"
    assert math.isnan(_said(channels[0]).loss)
    assert (_said(channels[0]).step, _said(channels[0]).reports) == (8, 2)
    assert training.say("job.report_fault()") == "True"
    assert [_said(channel).faults for channel in channels] == [1, 1]
    assert training.say("job._reporter.lost") == "0"
    for channel in channels:
        channel.close()


def test_a_communicator_that_comes_later_is_found_and_one_that_goes_is_let_go(training: _Training) -> None:
    assert training.say("job.report_step(0, 1.0)") == "False"
    training.say("communicator()")
    (path,) = segments("steps")
    with Channel(path) as channel:
        wait_for(lambda: training.say("job.report_step(1, 1.0)") == "True", what="the next look")
        assert _said(channel).step == 1
        training.say("end(communicators[0])")
        assert not list(segments("steps"))
        wait_for(lambda: training.say("job.report_step(2, 1.0)") == "False", what="the next look")
    assert int(training.say("job._reporter.lost")) >= 2
    assert training.say("len(job._reporter._segments.open)") == "0"


def test_nothing_that_is_wrong_reaches_training(training: _Training) -> None:
    training.say("communicator()")
    (path,) = segments("steps")
    for report in ("-1, 1.0", "1, float('nan')", "1, -0.5", "1, 'x'", "1, 1.0, 'loss'", "None, 1.0"):
        assert training.say(f"job.report_step({report})") == "False"
    assert training.say("job._reporter.lost") == "6"
    with Channel(path) as channel:
        assert _said(channel).reports == 0, "a report is taken whole or not at all"
    assert training.say("job.report_step(3, 1.0, 1)") == "True"


def test_without_a_plugin_a_report_is_counted_as_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter("nobody")
    assert not reporter.step(1, 0.5)
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", "/nowhere")
    assert not Reporter("nobody").fault()
    assert reporter.lost == 1
    assert not report_step(1, 0.5)
    assert not report_fault()


def test_the_segments_of_other_processes_are_left_alone(rig: Rig) -> None:
    job = rig.start(play(places=(0, 1)))
    ((channel,), _) = rig.channels(job)
    assert not Reporter(rig.job_id).step(1, 0.5)
    # The same process id, as in another PID namespace: the segment says when its process started.
    ours = channel.path.with_name(f"dynamiccl-{rig.job_id}-{os.getpid()}-0")
    ours.write_bytes(channel.path.read_bytes())
    ours.chmod(0o600)
    write_at(ours, 56, os.getpid().to_bytes(4, "little"))
    with Channel(ours, claim=False) as copy:
        assert copy.identity.pid == os.getpid()
    assert not Reporter(rig.job_id).step(1, 0.5)
    assert _said(channel).reports == 0


def test_a_second_thread_does_not_wait_for_the_first() -> None:
    reporter = Reporter("steps")
    entered, leave = threading.Event(), threading.Event()

    def slow(_: Any) -> None:
        entered.set()
        assert leave.wait(20)

    reporter._segments.look = lambda: True  # type: ignore[method-assign]
    reporter._segments.open = {Path("x"): None}  # type: ignore[dict-item]
    thread = threading.Thread(target=reporter._tell, args=(slow,))
    thread.start()
    assert entered.wait(20)
    assert not reporter.step(1, 0.5)
    assert reporter.lost == 1
    leave.set()
    thread.join()
    assert reporter.lost == 1


def test_a_script_that_dies_inside_a_report_leaves_none_to_be_read(rig: Rig) -> None:
    job = rig.start(play())
    ((channel,),) = rig.channels(job)
    channel.report_step(1, 0.5, 1.0)
    with channel.path.open("r+b") as file:
        file.seek(1147072)
        file.write((3).to_bytes(8, "little"))
    assert channel.job is None
    # Whoever comes next makes it whole again.
    channel.report_step(2, 0.5, 1.0)
    assert _said(channel) == JobReport(reports=2, step=2, iteration_s=0.5, loss=1.0, faults=0)
    channel.close()
    with pytest.raises(ChannelError, match="closed"):
        _ = channel.job
