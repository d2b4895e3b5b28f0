"""Where on a Ray cluster the outputs of a run or a sweep are, and how they are fetched, also after its end."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from dynamiccl_ray.actors.registry import KvStore
from dynamiccl_ray.errors import RunError, reason
from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.online.placing import on_node

FETCH_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What writes outputs. Those of each kind have names of their own."""

    said: str
    """Of a name, as a user knows it."""
    key: str
    hint: str
    last: str
    """The file that is written last."""
    kept: frozenset[str] = frozenset()
    """Names in its directory that stay where they are."""


JOB: Final = Kind(
    said="run of job",
    key="outputs-of-job",
    hint="name its DYNAMICCL_JOB_ID, and in RAY_ADDRESS the cluster that it was submitted to",
    last="summary.json",
)
SWEEP: Final = Kind(
    said="sweep",
    key="outputs-of-sweep",
    hint="give the name that its YAML has, and in RAY_ADDRESS the cluster that it was submitted to",
    last="report.html",
    # Tune's own state runs code when it is read, and every run of a trial is there in full.
    kept=frozenset({"tune", "trials"}),
)


def register(name: str, directory: Path, kind: Kind = JOB) -> None:
    """Remembers for the cluster's life that this process, on this node, writes the outputs of ``name``'s newest run to
    ``directory``."""
    node = ray.get_runtime_context().get_node_id()
    names = {of["NodeID"]: of["NodeName"] for of in ray.nodes()}
    place = {"node": node, "name": names.get(node, node), "path": str(directory.resolve())}
    KvStore().put(f"{kind.key}/{name}", json.dumps(place).encode())


def fetch(name: str, out: Path, kind: Kind = JOB) -> dict[str, Any]:
    """Copies what the newest run of ``name`` has written so far into ``out``, through the Ray cluster that
    ``RAY_ADDRESS`` names. Returns the node's ``name``, the ``path`` there and whether the run is ``over``. Raises
    RunError where there is nothing, or nobody to ask for it."""
    if not ray.is_initialized():
        start_ray(log_to_driver=False)
    what = f"{kind.said} {name!r}"
    known = KvStore().get(f"{kind.key}/{name}")
    if known is None:
        raise RunError(f"no {what} has written to this Ray cluster's nodes since it was started; {kind.hint}")
    place: dict[str, str] = json.loads(known)
    where = f"{place['path']} on node {place['name']}"
    if not any(node["NodeID"] == place["node"] and node["Alive"] for node in ray.nodes()):
        raise RunError(f"{what}: its outputs are in {where}, which has left the cluster; copy them from there")
    pack = ray.remote(_pack).options(**on_node(place["node"]))
    try:
        packed = ray.get(pack.remote(place["path"], kind.kept), timeout=FETCH_S)
    except (RayError, GetTimeoutError) as e:
        raise RunError(f"{what}: its outputs cannot be fetched from {where}: {reason(e)}") from None
    if packed is None:
        raise RunError(f"{what}: its outputs are not there any more: {where}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(out, filter="data")
    return {"name": place["name"], "path": place["path"], "over": (out / kind.last).exists()}


def _pack(path: str, kept: frozenset[str]) -> bytes | None:
    """A directory as a tar archive, less what is kept; None where there is none."""
    if not Path(path).is_dir():
        return None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as files:
        for entry in sorted(Path(path).iterdir()):
            if entry.name not in kept:
                files.add(entry, arcname=entry.name)
    return packed.getvalue()
