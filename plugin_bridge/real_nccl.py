"""NCCL's own host code on machines without a GPU: built once per NCCL tree, on the fake CUDA of ``fake_cuda``.

build = build_nccl(Path("nccl"))          # a checkout, or a release's tarball
NcclJob(program, library=build.library, env=build.env(cluster), env_of=build.env_of(nodes), ...)
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl_ray.errors import ConfigError, RunError, short
from dynamiccl_ray.fabric.cluster_config import Cluster

OURS: Final = Path(__file__).resolve().parent
_SOURCES: Final = ("fake_cuda", "gpu")
# Ports of network devices are sold in these steps, Mb/s; NCCL's search depends on what a port says of itself.
_PORT_MBPS: Final = (1_000, 10_000, 25_000, 40_000, 50_000, 100_000, 200_000, 400_000, 800_000)
_NVLINKS: Final = {70: 6, 80: 12, 90: 18, 100: 18, 103: 18, 120: 0}
_CPU: Final = {
    "intel": 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"',
    "amd": 'arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49"',
    "arm": 'arch="arm64" vendor="" familyid="0" modelid="0"',
}


@dataclass(frozen=True, kw_only=True)
class RealNccl:
    """One build."""

    version: str
    source: Path
    """What was built."""
    tree: Path
    """The same, unpacked."""
    directory: Path

    @property
    def library(self) -> Path:
        return self.directory / "libnccl.so.2"

    @property
    def headers(self) -> Path:
        """Where its nccl.h is."""
        return self.directory / "nccl" / "include"

    def env(self, cluster: Cluster, topology: Path, *, wires: bool = False) -> dict[str, str]:
        """What a job's processes need in their environment for nodes of a cluster; the topology is written to a file.

        Without ``wires`` the network is the fake one, with the cluster's devices; with, NCCL's sockets over loopback.
        """
        topology.write_text(topology_xml(cluster, wires=wires))
        env = {
            "NCCL_TOPO_FILE": str(topology),
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_RAS_ENABLE": "0",
            # By their names the host of jobs finds proxy threads that have more to do.
            "NCCL_SET_THREAD_NAME": "1",
            "GPU_DEVICES": str(cluster.gpus_per_node),
            "GPU_COMPUTE_CAPABILITY": str(cluster.belief.compute_capability),
        }
        if cluster.inter is not None and not wires:
            env |= {
                "NCCL_NET_PLUGIN": str(self.directory / "libnccl-net-fake.so"),
                "GPU_NICS": str(cluster.inter.nics),
                "GPU_NIC_MBPS": str(_port_mbps(cluster)),
                "GPU_NIC_LATENCY_US": str(cluster.belief.nic_latency_us),
            }
        if cluster.nvls is None:
            env["NCCL_NVLS_ENABLE"] = "0"
        return env

    def env_of(self, nodes: int) -> list[dict[str, str]]:
        """What makes the processes of each node look like those of a machine of their own."""
        return [{"NCCL_HOSTID": f"node{node}"} for node in range(nodes)]


def _port_mbps(cluster: Cluster) -> int:
    assert cluster.inter is not None
    needed = cluster.inter.nic_gb_per_s * 8000
    return next((port for port in _PORT_MBPS if port >= needed), _PORT_MBPS[-1])


def topology_xml(cluster: Cluster, *, wires: bool = False) -> str:
    """One node of a cluster as NCCL reads topologies (NCCL_TOPO_FILE): a PCIe switch per GPU, network devices beside
    the GPUs that they are nearest to, and an NVSwitch where GPUs have NVLinks.
    """
    believed = cluster.belief
    gpus = cluster.gpus_per_node
    nics = 0 if cluster.inter is None else 1 if wires else cluster.inter.nics
    links = _NVLINKS.get(believed.compute_capability // 10 * 10, 12) if cluster.intra.kind != "pcie" else 0
    nvlink = f'<nvlink target="0000:ff:00.0" count="{links}" tclass="0x068000"/>' if links else ""
    of_switch: dict[int, list[str]] = {}
    for nic in range(nics):
        name = "lo" if wires else f"fake{nic}"
        speed = _port_mbps(cluster)
        of_switch.setdefault(nic * gpus // nics, []).append(
            f'<pci busid="0000:{_bus(nic * gpus // nics) + 1 + nic % 8:02x}:00.0" class="0x020700" vendor="0x15b3" '
            f'device="0x1021" subsystem_vendor="0x15b3" subsystem_device="0x0041" {_PCIE}><nic><net name="{name}" '
            f'dev="{nic}" latency="{believed.nic_latency_us}" speed="{speed}" port="1" guid="0x{nic + 1:x}" '
            f'maxconn="65536" gdr="{0 if wires else 1}"/></nic></pci>'
        )
    cpu = _CPU.get(believed.cpu_vendor, _CPU["intel"])
    lines = ['<system version="1">', f'<cpu host_hash="0x0" numaid="0" affinity="ffffffff" {cpu}>']
    for gpu in range(gpus):
        lines += [
            f'<pci busid="0000:{_bus(gpu) - 1:02x}:00.0" class="0x060400" vendor="0x1000" device="0xc030" '
            f'subsystem_vendor="0x1000" subsystem_device="0x100b" {_PCIE}>',
            f'<pci busid="0000:{_bus(gpu):02x}:00.0" class="0x030200" vendor="0x10de" device="0x2330" '
            f'subsystem_vendor="0x10de" subsystem_device="0x16c1" {_PCIE}>'
            f'<gpu dev="{gpu}" sm="{believed.compute_capability}" rank="{gpu}" gdr="1">{nvlink}</gpu></pci>',
            *of_switch.get(gpu, []),
            "</pci>",
        ]
    return "\n".join([*lines, "</cpu>", "</system>", ""])


_PCIE: Final = 'link_speed="32.0 GT/s PCIe" link_width="16"'


def _bus(gpu: int) -> int:
    """As the fake CUDA numbers them (fake_cuda/driver.cc)."""
    return 0x10 * (gpu + 1)


# ---- building ----


def cache_dir() -> Path:
    """``DYNAMICCL_CACHE``, by default ~/.cache/dynamiccl: where builds of NCCL are kept."""
    named = os.environ.get("DYNAMICCL_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "dynamiccl"


def build_nccl(
    source: Path, *, say: Callable[[str], None] = lambda _: None, sanitize: str = "", jobs: int | None = None
) -> RealNccl:
    """The build of an NCCL tree, a directory or a tarball of one: from the cache, or made now, which takes minutes.

    ``say`` hears what is done. ``sanitize`` is a flag for the compiler of the fake CUDA: -fsanitize=address. Raises
    ConfigError where ``source`` is no NCCL and RunError where it does not build.
    """
    if not source.exists():
        raise ConfigError(
            f"{source} does not exist; name an NCCL source tree (git clone https://github.com/NVIDIA/nccl) or a "
            "tarball of one"
        )
    headers, cuda_version = cuda_headers()
    cache = cache_dir() / "nccl"
    cache.mkdir(parents=True, exist_ok=True)
    digest = _digest(source)
    with _locked(cache / f"{digest}.lock"):
        tree = _unpacked(source, cache / digest)
        version = _version(tree)
        out = cache / f"{version}-{digest}-cuda{cuda_version}{'-' + sanitize.split('=')[-1] if sanitize else ''}"
        stamp = out / "ours"
        ours = _ours() + sanitize
        if not ((out / "ready").exists() and stamp.exists() and stamp.read_text() == ours):
            say(f"building the host code of NCCL {version} without a GPU, once: about two minutes on two cores")
            _make(tree, out, headers, cuda_version, sanitize, jobs or os.cpu_count() or 1)
            stamp.write_text(ours)
    return RealNccl(version=version, source=source, tree=tree, directory=out)


@functools.cache
def cuda_headers() -> tuple[Path, str]:
    """CUDA's headers and their version: of CUDA_HOME, /usr/local/cuda, or the wheel nvidia-cuda-runtime.

    Raises RunError where there are none.
    """
    named = os.environ.get("CUDA_HOME")
    candidates = [Path(named) / "include"] if named else []
    candidates.append(Path("/usr/local/cuda/include"))
    for entry in map(Path, sys.path):
        candidates += [*sorted((entry / "nvidia").glob("cu*/include")), entry / "nvidia" / "cuda_runtime" / "include"]
    for include in candidates:
        header = include / "cuda.h"
        if header.is_file() and (include / "cuda_runtime.h").is_file():
            match = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace"))
            if match:
                return include, f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    raise RunError(
        "CUDA's headers are not here, and NCCL does not compile without: set CUDA_HOME, or pip install "
        "nvidia-cuda-runtime nvidia-cuda-crt"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two builds of one tree do not get in each other's way."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(source: Path) -> str:
    """Of a tarball its bytes; of a tree the names, sizes and times of its files."""
    sha = hashlib.sha256()
    if source.is_file():
        sha.update(source.read_bytes())
    else:
        for path in sorted((source / "src").rglob("*")):
            if path.is_file():
                stat = path.stat()
                sha.update(f"{path.relative_to(source)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        sha.update(str(source.resolve()).encode())
    return sha.hexdigest()[:12]


def _unpacked(source: Path, into: Path) -> Path:
    if source.is_dir():
        tree = source.resolve()
    else:
        if not (into / "unpacked").exists():
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir(parents=True)
            try:
                with tarfile.open(source) as tar:
                    tar.extractall(into, filter="data")
            except (tarfile.TarError, OSError) as e:
                raise ConfigError(f"{source}: cannot be unpacked: {short(str(e))}") from None
            (into / "unpacked").touch()
        makefile = next(into.glob("*/src/Makefile"), None) or next(into.glob("src/Makefile"), None)
        tree = makefile.parents[1] if makefile else into
    if not (tree / "src" / "Makefile").is_file() or not (tree / "makefiles" / "version.mk").is_file():
        raise ConfigError(f"{source} is no NCCL source tree: src/Makefile and makefiles/version.mk are missing")
    return tree


def _version(tree: Path) -> str:
    text = (tree / "makefiles" / "version.mk").read_text()
    parts = [re.search(rf"NCCL_{name}\s*:=\s*(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        raise ConfigError(f"{tree}/makefiles/version.mk does not say which version it is")
    return ".".join(match[1] for match in parts if match)


def _ours() -> str:
    sha = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((OURS / folder).iterdir()):
            sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()


def _make(tree: Path, out: Path, headers: Path, cuda_version: str, sanitize: str, jobs: int) -> None:
    for tool in ("make", "g++", "gcc"):
        if shutil.which(tool) is None:
            raise RunError(f"building NCCL needs {tool} (Debian: apt-get install g++ make)")
    command = ["make", "-s", f"-j{jobs}", "-C", str(tree / "src"), "-f", str(OURS / "fake_cuda" / "build.mk")]
    variables: Mapping[str, object] = {
        "OURS": OURS,
        "OUT": out,
        "CUDA_INC": headers,
        "CUDA_VERSION": cuda_version,
        "PYTHON": sys.executable,
        "SANITIZE": sanitize,
    }
    command += [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RunError(f"NCCL of {tree} does not build:\n{tail}")
