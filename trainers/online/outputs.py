"""Where on a Ray cluster the outputs of a run are, and how they are fetched from there, also after its end."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from dynamiccl_ray.actors.remote import KvStore
from dynamiccl_ray.errors import RunError, short
from dynamiccl_ray.trainers.common.cluster import start_ray
from dynamiccl_ray.trainers.online.placing import on_node

FETCH_S: Final = 300.0


def register(job: str, directory: Path) -> None:
    """Remembers for the cluster's life that this process, on this node, writes the outputs of ``job``'s newest run to
    ``directory``."""
    node = ray.get_runtime_context().get_node_id()
    names = {of["NodeID"]: of["NodeName"] for of in ray.nodes()}
    place = {"node": node, "name": names.get(node, node), "path": str(directory.resolve())}
    KvStore().put(_outputs_of(job), json.dumps(place).encode())


def fetch(job: str, out: Path) -> dict[str, Any]:
    """Copies what the newest run of ``job`` has written so far into ``out``, through the Ray cluster that
    ``RAY_ADDRESS`` names. Returns the node's ``name``, the ``path`` there and whether the run is ``over``. Raises
    RunError where there is nothing, or nobody to ask for it."""
    if not ray.is_initialized():
        start_ray(log_to_driver=False)
    known = KvStore().get(_outputs_of(job))
    if known is None:
        raise RunError(
            f"no run of job {job!r} has written to this Ray cluster's nodes since it was started; name its "
            "DYNAMICCL_JOB_ID, and in RAY_ADDRESS the cluster that it was submitted to"
        )
    place: dict[str, str] = json.loads(known)
    where = f"{place['path']} on node {place['name']}"
    if not any(node["NodeID"] == place["node"] and node["Alive"] for node in ray.nodes()):
        raise RunError(f"job {job!r}: its outputs are in {where}, which has left the cluster; copy them from there")
    try:
        packed = ray.get(ray.remote(_pack).options(**on_node(place["node"])).remote(place["path"]), timeout=FETCH_S)
    except (RayError, GetTimeoutError) as e:
        raise RunError(f"job {job!r}: its outputs cannot be fetched from {where}: {short(str(e))}") from None
    if packed is None:
        raise RunError(f"job {job!r}: its outputs are not there any more: {where}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(out, filter="data")
    return {"name": place["name"], "path": place["path"], "over": (out / "summary.json").exists()}


def _pack(path: str) -> bytes | None:
    """A directory as a tar archive; None where there is none."""
    if not Path(path).is_dir():
        return None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as files:
        files.add(path, arcname=".")
    return packed.getvalue()


def _outputs_of(job: str) -> str:
    return f"outputs-of-job/{job}"
