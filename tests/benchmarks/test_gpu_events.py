"""events.c between NCCL and the real profiler: the mask goes off and on, events go on or are swallowed."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
from fake_nccl import COLL, KERNEL_CH, Profiler

from benchmarks.gpu import overhead
from dynamiccl_ray.plugin_bridge import plugin_path


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("DYNAMICCL_SHM_DIR", str(tmp_path))
    monkeypatch.setenv("DYNAMICCL_JOB_ID", "events")
    monkeypatch.setenv("GPU_BENCH_PROFILER", str(plugin_path()))
    library = overhead.build(tmp_path)
    assert library is not None
    return library


@pytest.mark.parametrize("swallow", [False, True])
def test_events_go_off_and_on(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swallow: bool) -> None:
    monkeypatch.setenv("GPU_BENCH_SWALLOW", "1" if swallow else "0")
    library = ctypes.CDLL(str(built))
    assert library.gpu_bench_mask(1) == -1, "there is no communicator yet"
    profiler, behind = (
        Profiler.in_dll(library, "ncclProfiler_v6"),
        Profiler.in_dll(ctypes.CDLL(str(plugin_path())), "ncclProfiler_v6"),
    )
    mask, context = ctypes.c_int(0), ctypes.c_void_p()
    assert profiler.init(ctypes.byref(context), 0xE, ctypes.byref(mask), b"", 1, 2, 0, None) == 0
    assert len(list(tmp_path.glob("dynamiccl-events-*"))) == 1, "the profiler behind has made its segment"
    assert mask.value == COLL | KERNEL_CH
    assert library.gpu_bench_mask(0) == mask.value == 0
    assert library.gpu_bench_mask(1) == mask.value == COLL | KERNEL_CH
    addresses = [ctypes.cast(of.start, ctypes.c_void_p).value for of in (profiler, behind)]
    assert (addresses[0] == addresses[1]) == (not swallow)
    if swallow:
        handle = ctypes.c_void_p()
        assert profiler.start(context, ctypes.byref(handle), None) == 0
        assert handle.value
        assert profiler.state(handle, 22, None) == profiler.stop(handle) == 0
    assert profiler.finalize(context) == 0
    assert not list(tmp_path.glob("dynamiccl-events-*"))


def test_without_a_profiler_behind_it_fails_and_nccl_goes_on(
    built: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_BENCH_PROFILER", "/nowhere.so")
    profiler = Profiler.in_dll(ctypes.CDLL(str(built)), "ncclProfiler_v6")
    mask, context = ctypes.c_int(0), ctypes.c_void_p()
    assert profiler.init(ctypes.byref(context), 0xE, ctypes.byref(mask), b"", 1, 2, 0, None) != 0
    assert mask.value == 0
    assert "GPU_BENCH_PROFILER=/nowhere.so cannot be loaded" in capfd.readouterr().err


def test_variables_put_it_in_between(tmp_path: Path) -> None:
    for loaded, quiet in (("switched", "0"), ("swallowed", "1")):
        env = overhead.extra(tmp_path / "libevents.so", "job", loaded)  # type: ignore[arg-type]
        assert env["NCCL_PROFILER_PLUGIN"] == str(tmp_path / "libevents.so")
        assert env["GPU_BENCH_PROFILER"] == str(plugin_path())
        assert env["GPU_BENCH_SWALLOW"] == quiet
    assert overhead.extra(None, "job", "both") == overhead.extra(None, "job", "none") == {}
