"""Two jobs on one Ray cluster, submitted to it: nodes go and come back, and both reports are fetched at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attached import training
from ray_nodes import RayNodes

from dynamiccl_ray.plugin_bridge.nccl_job import agreement_violations

NODES = 2
EXPERIMENT = """
name: {job}
job: {job}
fabric: {{kind: nccl, intra: pcie, inter: tcp}}
stop: {{rounds: 100000}}
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_jobs_on_a_cluster_whose_nodes_go_and_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where a submitted job writes
    sources = tmp_path / "sources"
    sources.mkdir()
    ranks = {"one": 2 * NODES, "two": NODES}
    for job in ranks:
        (sources / f"{job}.yaml").write_text(EXPERIMENT.format(job=job))

    with RayNodes(tmp_path / "cluster", NODES) as cluster:
        cluster.start_head()
        for node in range(NODES):
            cluster.start(node)

        def status(job: str) -> dict[str, Any]:
            said = cluster.dynamiccl("status", "--job", job, "--json")
            return json.loads(said.stdout) if said.returncode == 0 else {"ranks": 0, "switches": 0}

        def all_served() -> bool:
            return all(status(job)["ranks"] == n for job, n in ranks.items())

        with (
            training("one", tmp_path / "one", ranks_per_node=2, comms=(0,), rate_hz=100, env_of=cluster.env_of) as one,
            training("two", tmp_path / "two", ranks_per_node=1, comms=(1,), rate_hz=100, env_of=cluster.env_of) as two,
        ):
            for running in (one, two):
                running.start()
            for running in (one, two):
                running.await_ranks()
            for job in ranks:
                cluster.submit(job, sources, "online", f"{job}.yaml")
            cluster.until("both jobs are served", all_served, 240.0)
            cluster.until("both learn", lambda: all(status(job)["switches"] > 2 for job in ranks), 120.0)

            before = one.progress().min()
            cluster.kill(1)
            cluster.until("its ranks are missed", lambda: 0 < status("one")["ranks"] < ranks["one"])
            assert one.progress().min() > before, "training stood still"
            cluster.start(1)
            cluster.until("both jobs are served again", all_served, 240.0)

            for running in (one, two):
                running.stop()
                assert agreement_violations(running.logs()) == 0

        for job in ranks:
            cluster.until(f"{job} has ended", lambda job=job: "SUCCEEDED" in _state(cluster, job), 120.0)
            logs = cluster.logs(job)
            assert "Deprecat" not in logs
            assert f"dynamiccl report {job}" in logs
            fetched = cluster.dynamiccl("report", job, "--out", str(tmp_path / f"fetched-{job}"))
            assert fetched.returncode == 0, fetched.stderr
            assert (tmp_path / f"fetched-{job}" / "report.html").exists()
            summary = json.loads((tmp_path / f"fetched-{job}" / "summary.json").read_text())
            assert summary["switches"] > 2


def _state(cluster: RayNodes, job: str) -> str:
    said = cluster.ray("job", "status", job)
    return (said.stdout + said.stderr).upper()
