from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from dummy_job import MakeJob
from rig import Play, Rig, play, wait_for

from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.plugin_bridge.channel import Channel
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob
from dynamiccl_ray.plugin_bridge.segments import segments


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with TemporaryDirectory(prefix="dynamiccl-tests-", dir="/dev/shm") as shm:
        monkeypatch.setenv("DYNAMICCL_SHM_DIR", shm)
        rig = Rig(tmp_path, Path(shm))
        try:
            yield rig
        finally:
            rig.close()


@pytest.fixture
def segment(rig: Rig) -> tuple[NcclJob, Path]:
    """One rank that waits before its first collective, and its unclaimed segment."""
    job = rig.start(play())
    (path,) = wait_for(lambda: list(segments(rig.job_id)), what="the segment")

    def readable() -> bool:
        try:
            Channel(path, claim=False).close()
        except ChannelError:
            return False
        return True

    wait_for(readable, what="the segment's header")
    return job, path


@pytest.fixture(scope="module")
def dummy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plugin that only checks what it is told."""
    source = Path(__file__).parent / "native" / "dummy_plugin.c"
    path = tmp_path_factory.mktemp("dummy") / "dummy.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, "-o", path, source, "-lpthread"], check=True)
    return path


@pytest.fixture
def job(rig: Rig, dummy: Path) -> MakeJob:
    """Makes jobs whose plugin leaves a summary."""

    def make(what: Play, *, env: dict[str, str] | None = None, **options: Any) -> NcclJob:
        all_env = {"DUMMY_SUMMARY": str(rig.directory / "summary"), **(env or {})}
        return rig.job(what, plugin=options.pop("plugin", dummy), env=all_env, **options)

    return make
