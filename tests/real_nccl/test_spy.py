"""The emulated NCCL against real NCCL, call by call: what a tuner and a profiler are told, and what the GPUs play.

Where real NCCL's proxy threads had no time to look at every kernel, a job runs again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import spy_programs as programs
from spying import Run, Stage, belief_of, ids_of
from stories import differences, estimates, was_starved

from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS
from dynamiccl_ray.plugin_bridge.program import Program
from dynamiccl_ray.plugin_bridge.real_nccl import RealNccl

NATIVE = Path(__file__).parent / "native"
# Of both releases together, from the oldest to the newest interface.
ATTEMPTS = 3
PAIRS_ASKED = "4.2.0;1.2.24;;0.2.5;1.1.3;6.2.0;5.2.7;1.0.2;0.0.0;0.1.0;;"


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Builds the spy with interfaces up to a version of the tuner's and one of the profiler's."""
    directory = tmp_path_factory.mktemp("spy")

    def spy_of(tuner: int, profiler: int) -> Path:
        path = directory / f"libspy-{tuner}-{profiler}.so"
        if not path.exists():
            flags = ["-std=c11", "-O1", "-Wall", "-Wno-unused", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
            versions = [f"-DSPY_TUNER={tuner}", f"-DSPY_PROFILER={profiler}"]
            subprocess.run(["cc", *flags, *versions, "-o", path, *sorted(NATIVE.glob("spy*.c"))], check=True)
        return path

    return spy_of


@dataclass(frozen=True, kw_only=True)
class Case:
    program: Callable[[], Program]
    tuner: int = 6
    profiler: int = 6
    ranks_per_process: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.program.__name__]
        if (self.tuner, self.profiler) != (6, 6):
            words.append(f"v{self.tuner}-v{self.profiler}")
        if self.ranks_per_process > 1:
            words.append(f"{self.ranks_per_process}-together")
        return "-".join([*words, *("asked" for _ in self.env)][:3])


ASKED = {"SPY_ASK": PAIRS_ASKED, "SPY_CHUNK": "2"}
CASES = [
    Case(program=programs.data_parallel),
    Case(program=programs.tensor_and_data, ranks_per_process=2),
    Case(program=programs.fully_sharded),
    Case(program=programs.pipeline),
    Case(program=programs.grouped),
    Case(program=programs.grouped, env=ASKED),
    Case(program=programs.broadcasts),
    Case(program=programs.sizes_of_node, ranks_per_process=4),
    Case(program=programs.sizes_of_nodes, ranks_per_process=2),
    Case(program=programs.sizes_of_nodes, env=ASKED),
    Case(program=programs.comings_and_goings),
    Case(program=programs.goings, ranks_per_process=2),
    Case(program=programs.captured),
    Case(program=programs.registered),
    Case(program=programs.registered, env={"SPY_ASK": "4.2.0;1.2.24;0.2.24"}),
    Case(program=programs.non_blocking),
    Case(program=programs.simulated),
    Case(program=programs.groups_in_groups),
    *(
        Case(program=program, tuner=tuner, profiler=profiler)
        for tuner, profiler in ((2, 1), (3, 2), (4, 3), (5, 4), (5, 5))
        for program in (programs.grouped, programs.pipeline)
    ),
]


@dataclass(frozen=True)
class Both:
    real: Run
    emulated: Run
    differences: list[str]


def _run_both(case: Case, nccl: RealNccl, spy: Path, quick_poll: Path, directory: Path) -> Both:
    stage = Stage(
        directory=directory, spy=spy, preloaded=quick_poll, env=case.env, ranks_per_process=case.ranks_per_process
    )
    real, found = stage.real(nccl, case.program())
    emulated = stage.emulated(nccl.version, case.program(), found, ids_of(real))
    return Both(real, emulated, differences(real, emulated))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plugins_and_gpus_see_the_same(
    case: Case, nccl: RealNccl, spy: Callable[[int, int], Path], quick_poll: Path, tmp_path: Path
) -> None:
    for attempt in range(ATTEMPTS):
        both = _run_both(case, nccl, spy(case.tuner, case.profiler), quick_poll, tmp_path / str(attempt))
        if not both.differences or not was_starved(both.real):
            break
    assert sum(map(len, both.real.calls)) > 50
    assert not both.differences
    assert estimates(both.real) == estimates(both.emulated)


@pytest.mark.parametrize("program", [programs.sizes_of_node, programs.sizes_of_nodes], ids=["one node", "two nodes"])
def test_beliefs_are_what_nccl_tells_a_tuner(
    program: Callable[[], Program], nccl: RealNccl, spy: Callable[[int, int], Path], quick_poll: Path, tmp_path: Path
) -> None:
    """Every cell of every cost table, to the last bit."""
    stage = Stage(directory=tmp_path, spy=spy(6, 6), preloaded=quick_poll)
    real, found = stage.real(nccl, program())
    (world,) = program().comms
    belief = belief_of(world, found["world"])
    asked = [call for call in real.calls[0] if call["call"] == "getCollInfo"]
    assert len(asked) > 50
    for call in asked:
        table = belief.cost_table_us(call["func"], call["bytes"], call["pipe_ops"])
        told = np.array(call["cost"], np.float32).reshape(N_ALGORITHMS, N_PROTOCOLS)
        np.testing.assert_array_equal(table, told, f"function {call['func']}, {call['bytes']} bytes")
