from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rig import Rig, play, wait_for

from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.plugin_bridge.channel import Channel, segments
from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob


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
