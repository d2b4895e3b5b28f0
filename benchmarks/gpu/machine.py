"""What this machine has, and in one line why the script skips it.

Run as a module it prints the facts as JSON. The script asks in a process of its own, so that it never holds a CUDA
context itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
OLDEST_NCCL: Final = (2, 27)
"""The first whose profiler passes the GPU's timers on."""

Facts = dict[str, Any]


def loaded_nccl(maps: str) -> tuple[str, tuple[int, int, int]] | None:
    """Path and version of the NCCL that a process has mapped; ``maps`` is its /proc/self/maps."""
    found = re.search(r"\S*/libnccl\.so\S*", maps)
    if found is None:
        return None
    number = ctypes.c_int()
    if ctypes.CDLL(found[0]).ncclGetVersion(ctypes.byref(number)):
        return None
    return found[0], version_of(number.value)


def version_of(code: int) -> tuple[int, int, int]:
    """NCCL's version code as a triple: 22907 is 2.29.7; up to 2.8 the code had one digit less."""
    major = 10_000 if code >= 10_000 else 1_000
    return code // major, code % major // 100, code % 100


def probe() -> Facts:
    """Facts of this process's PyTorch, its NCCL and the GPUs."""
    facts: Facts = {"torch": None, "nccl_backend": False, "cuda": None, "gpus": [], "nccl": None, "nccl_path": None}
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as e:
        return {**facts, "error": str(e)}
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    facts["nccl_backend"] = dist.is_available() and dist.is_nccl_available()
    if not facts["nccl_backend"]:
        return facts
    try:
        facts["gpus"] = [
            {"name": p.name, "memory": p.total_memory, "sms": p.multi_processor_count, "capability": [p.major, p.minor]}
            for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    except (RuntimeError, AssertionError) as e:
        # A driver that is too old, or none: torch.cuda says so when it is first used.
        return {**facts, "error": str(e).splitlines()[0]}
    # The one that is loaded may be another than the one that PyTorch was compiled with.
    found = loaded_nccl(Path("/proc/self/maps").read_text())
    if found:
        facts["nccl_path"], facts["nccl"] = found[0], list(found[1])
    else:
        compiled: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["nccl"] = list(compiled[:3])
    return facts


def ask() -> Facts:
    """``probe`` in another process, and what needs no PyTorch: driver, compute mode, topology, host."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.machine"], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    facts: Facts = json.loads(lines[-1]) if done.returncode == 0 and lines else {"torch": None, "gpus": []}
    if done.returncode:
        complaint = done.stderr.strip().splitlines()
        facts["error"] = complaint[-1] if complaint else f"the probe ended with {done.returncode}"
    driver, mode = gpu_settings(_said("nvidia-smi", "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"))
    return {
        **facts,
        "driver": driver,
        "compute_mode": mode,
        "links": gpu_links(_said("nvidia-smi", "topo", "-m")),
        "mps": bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY")),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def gpu_settings(csv: str) -> tuple[str | None, str | None]:
    """(driver, compute mode) of the first GPU, from nvidia-smi's CSV."""
    first = [field.strip() for field in csv.splitlines()[0].split(",")] if csv.strip() else []
    return (first[0], first[1]) if len(first) == 2 else (None, None)


def gpu_links(topology: str) -> str:
    """``nvlink``, ``pcie`` or ``none``: how the GPUs of ``nvidia-smi topo -m`` reach each other."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    if len(rows) < 2:
        return "none"
    between = {cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"}
    return "nvlink" if between and all(re.fullmatch(r"NV\d+", cell) for cell in between) else "pcie"


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def why_not(facts: Facts) -> str | None:
    """In one line why nothing can be measured here; None if it can."""
    said = f" ({facts['error']})" if facts.get("error") else ""
    if not facts.get("torch"):
        return f"PyTorch cannot be imported here{said}: install a CUDA build of it"
    if not facts["nccl_backend"]:
        return f"PyTorch {facts['torch']} was built without NCCL: install a CUDA build of it for Linux"
    if not facts["gpus"]:
        return f"no CUDA GPU: PyTorch {facts['torch']} sees none{said}"
    if facts["nccl"] is None or tuple(facts["nccl"]) < OLDEST_NCCL:
        version = "of an unknown version" if facts["nccl"] is None else ".".join(map(str, facts["nccl"]))
        return f"NCCL {version} has no GPU timers: {'.'.join(map(str, OLDEST_NCCL))} or later is needed"
    if len(facts["gpus"]) == 1 and str(facts.get("compute_mode", "")).startswith("Exclusive") and not facts.get("mps"):
        return f"the only GPU's compute mode is {facts['compute_mode']}: several ranks cannot share it without MPS"
    return None


def commit(root: Path = ROOT) -> str | None:
    """The commit that this file is of, with ``+`` where the tree differs from it; None outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


if __name__ == "__main__":
    print(json.dumps(probe()))
