"""The plugin under each sanitizer, in NCCL's threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from real_jobs import AG, AR, BC, KIB, MIB, RS, Jobs, wait_for

from dynamiccl_ray.control.table import Action, DecisionTable
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import CHANNEL_VALUES, Algorithm, Protocol, pair_index
from dynamiccl_ray.plugin_bridge.program import Program

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "address,undefined": {
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:log_path={log}",
        "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
    },
    # NCCL itself is not built with it: what it shares between its threads looks unguarded.
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:log_path={log}"},
}
LIBRARIES = {"address,undefined": "libasan.so libubsan.so", "thread": "libtsan.so"}


def library(name: str) -> str:
    """Where the compiler has it."""
    asked = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


@pytest.fixture(scope="module", params=list(OPTIONS), ids=["address-and-undefined", "thread"])
def sanitizer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sanitized(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sanitized")
    plugin = directory / "libnccl-tuner-dynamiccl.so"
    flags = f"SANITIZE=-fsanitize={sanitizer} -fno-omit-frame-pointer"
    subprocess.run(["make", "-s", "-C", ROOT, f"LIB={directory}", flags, plugin], check=True, capture_output=True)
    return plugin


def everything(steps: int) -> Program:
    program = Program(nodes=2, ranks_per_node=2, steps=steps)
    world = program.comm("world")
    for rank in program.ranks:
        rank.setup.init(world)
        rank.setup.collective(world, BC, MIB)
    halves = program.split(world, {"left": (0, 1), "right": (2, 3)})
    for rank in program.ranks:
        half, step = halves[rank.node], rank.step
        with step.group():
            for nbytes in (4 * KIB, 8 * KIB, MIB, 16 * MIB):
                step.collective(world, AR, nbytes)
            step.collective(world, AG, MIB)
        for _ in range(20):
            step.collective(half, AR, MIB, stream=1)
            step.collective(world, RS, MIB)
        with step.group():
            step.send(world, rank.rank ^ 1, 64 * KIB)
            step.recv(world, rank.rank ^ 1, 64 * KIB)
        step.sync()
        rank.end.abort(half) if rank.node else rank.end.destroy(half)
        rank.end.destroy(world)
    return program


def test_no_report(jobs: Jobs, sanitized: Path, sanitizer: str, tmp_path: Path) -> None:
    reports = tmp_path / "report"
    env = {name: text.format(log=reports) for name, text in OPTIONS[sanitizer].items()}
    env["LD_PRELOAD"] = " ".join([*map(library, LIBRARIES[sanitizer].split()), str(jobs.preloaded)])
    job, reader = jobs.start(everything(10), plugin=sanitized, env=env, ranks_per_process=2, least_us=0.0, credit=4)
    wait_for(lambda: set(job.states()) == {"waiting"}, timeout=120, what="the first steps")
    action = Action(pair=pair_index(Algorithm.TREE, Protocol.SIMPLE), channels=CHANNEL_VALUES.index(2))
    with reader.lock:
        for seen in reader.seen.values():
            _, switch_at, _ = seen.channel.prepare(
                DecisionTable.of(1, {key_of(AR, MIB, False): action}, max_channels=16), 0
            )
            assert seen.channel.decide(1, switch_at)
    job.set_credit(10)
    job.wait(120)
    all_seen = reader.finish()
    assert len(all_seen) == 8
    assert all(seen.status.applied > 0 for seen in all_seen)
    assert all(len(seen.records) > 100 for seen in all_seen if seen.name == "world")
    told = [path.read_text() for path in tmp_path.glob("report*")]
    assert not told, told[0][:4000]
