"""What the plugin takes of a job on the emulated NCCL, by the share of windows that is profiled.

    python benchmarks/profiled_windows.py

By what the plugin has timed of itself, with everything profiled and with one window in 2, 8 and 64.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from pathlib import Path

from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.plugin_bridge.bench import hardware
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.layout import TIMED_ONE_IN, StatusWords, library
from dynamiccl_ray.plugin_bridge.nccl_job import FREE_RUNNING
from dynamiccl_ray.plugin_bridge.segments import segments
from dynamiccl_ray.trainers.online.run import _job, _played

SECONDS = 8.0
RATE_HZ = 4000.0


def status(channel: Channel) -> StatusWords:
    words = StatusWords()
    library().dcc_status(channel.mapped, ctypes.byref(words))
    return words


def measured(duty: int) -> tuple[float, float, float, float]:
    """Share that was profiled, nanoseconds per collective in getCollInfo and in the profiler, share of wall time."""
    job = f"profiled_windows_{os.getpid()}_{duty}"
    experiment = Online.model_validate(
        {
            "name": "profiled-windows",
            "job": job,
            "fabric": {"kind": "measured", "processes": {"nodes": 1, "ranks_per_node": 1}, "rate_hz": RATE_HZ},
            "stop": {"rounds": 1},
        }
    )
    fabric = _played(experiment, lambda _: None)
    assert fabric is not None
    with tempfile.TemporaryDirectory() as directory, _job(experiment, fabric, Path(directory)) as played:
        (path,) = segments(job)
        with Channel(path) as channel:
            channel.govern(duty)
            played.set_credit(FREE_RUNNING)
            begin: StatusWords | None = None
            began = time.monotonic()
            # The first window is always profiled.
            while time.monotonic() - began < SECONDS:
                channel.drain()
                time.sleep(0.01)
                if begin is None and status(channel).dseq >= 512:
                    begin, began = status(channel), time.monotonic()
            end, span_s = status(channel), time.monotonic() - began
    assert begin is not None
    calls = end.dseq - begin.dseq
    decide_ns = TIMED_ONE_IN * (end.overhead_ns - begin.overhead_ns)
    profile_ns = TIMED_ONE_IN * (end.profile_ns - begin.profile_ns)
    profiled = 1 - (end.unprofiled - begin.unprofiled) / calls
    return profiled, decide_ns / calls, profile_ns / calls, (decide_ns + profile_ns) / 1e9 / span_s


def main() -> None:
    print(hardware())
    for duty in (0, 1, 3, 6):
        profiled, decide_ns, profile_ns, share = measured(duty)
        print(
            f"1 in {1 << duty:3}: {profiled:6.1%} profiled, getCollInfo {decide_ns:5.0f} ns, "
            f"profiler {profile_ns:5.0f} ns a collective, {share:.3%} of a process's time"
        )


if __name__ == "__main__":
    main()
