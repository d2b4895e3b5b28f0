"""Several processes play what one plays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tiny_scenario import tcp

from dynamiccl_ray.agent import policy
from dynamiccl_ray.arrays import Int64
from dynamiccl_ray.baselines.bandit import Bandit
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.experiment import DEFAULT_POLICY
from dynamiccl_ray.evaluation.measures import Procedure, play
from dynamiccl_ray.evaluation.players import players
from dynamiccl_ray.fabric.load import Load


class _ForEver(Bandit):
    """Says which process plays it, and goes on."""

    def choose(self, step: int) -> Int64:
        print(os.getpid(), flush=True)
        time.sleep(60)
        return super().choose(step)


def test_whoever_plays_for_one_that_is_killed_ends_too() -> None:
    code = """
from tiny_scenario import tcp
from test_players import _ForEver
from dynamiccl_ray.evaluation.measures import Procedure
from dynamiccl_ray.evaluation.players import players
if __name__ == "__main__":
    with players(2) as play_all:
        play_all([tcp(), tcp()], {"ever": _ForEver}, Procedure(learn=1, warmup=1, measured=1, runs=1))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    playing = {int(driver.stdout.readline()) for _ in range(2)}
    assert driver.pid not in playing
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in playing):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.1)


def test_several_processes_play_what_one_plays() -> None:
    scenarios = [tcp(), tcp(Load(inter_bandwidth=0.5), every=20), tcp(Load(inter_latency=3.0), every=20)]
    procedure = Procedure(learn=30, warmup=2, measured=8, runs=2)
    methods = {"bandit": Bandit, "policy": learned(policy.load(DEFAULT_POLICY), Control())}
    expected = {name: [play(scenario, of, procedure) for scenario in scenarios] for name, of in methods.items()}
    with players(2) as together, players(1) as alone:
        for play_all in (together, alone):
            waited: list[str] = []
            found = play_all(scenarios, methods, procedure, waited.append)
            assert waited == list(found) == list(methods)
            for name, of_each in found.items():
                for of, traces, want in zip(scenarios, of_each, expected[name], strict=True):
                    assert [trace.seed for trace in traces] == [0, 1]
                    for trace, one in zip(traces, want, strict=True):
                        assert trace.scenario is of
                        assert np.array_equal(trace.actions, one.actions)
                        assert np.array_equal(trace.time_us, one.time_us)
