"""Two jobs on one Ray cluster, submitted to it: nodes go and come back, and both reports are fetched at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import pytest
from attached import training
from ray_nodes import RayNodes

from dynamiccl_ray.plugin_bridge.nccl_job import NcclJob, agreement_violations

MONITORING = Path(__file__).parents[3] / "dynamiccl_ray" / "data" / "monitoring"
EXPERIMENT = """
name: {job}
job: {job}
fabric: {{kind: nccl, intra: pcie, inter: tcp}}
stop: {{rounds: 100000}}
"""


class Story:
    """Jobs ``one`` and ``two``, of so many ranks on each node, beside a run each. ``saw`` is for who runs it with
    ``-s``: what the documentation says of it."""

    def __init__(self, directory: Path, cluster: RayNodes, per_node: dict[str, int], rate_hz: float) -> None:
        self.directory, self.cluster, self.per_node, self.rate_hz = directory, cluster, per_node, rate_hz
        self.ranks = {job: n * len(cluster.names) for job, n in per_node.items()}
        self.saw: list[tuple[str, Any]] = []
        self.differed: dict[str, int] = {}

    def play(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """``meanwhile`` is called once both jobs learn, and once again after a node went and came."""
        cluster = self.cluster
        sources = self.directory / "sources"
        sources.mkdir()
        self.until("head and raylets are up", self._start_all)
        with contextlib.ExitStack() as stack:
            trainings = {job: stack.enter_context(self._training(job)) for job in self.ranks}
            for job, running in trainings.items():
                running.start()
                (sources / f"{job}.yaml").write_text(EXPERIMENT.format(job=job))
            for job, running in trainings.items():
                running.await_ranks()
                cluster.submit(job, sources, "online", f"{job}.yaml")
            self.until("both jobs are served", self._all_served)
            self.until("both learn", lambda: all(self._status(job)["switches"] > 2 for job in self.ranks))
            said = cluster.dynamiccl("status", "--job", "one", "--json")
            assert json.loads(said.stdout)["ranks"] == self.ranks["one"], said.stderr
            assert self._coordinators() == ["head", "head"], "the loss of a node that trains would take one along"
            runners = self._list("actors", "--filter=class_name=RankRunner")
            assert len(runners) == len(self.ranks) * len(cluster.names)
            assert {os.getpriority(os.PRIO_PROCESS, int(of["pid"])) for of in runners} == {0}, "ranks may wait for them"
            meanwhile()

            before = {job: self._status(job)["collectives"] for job in self.ranks}
            steps = {job: running.progress().min() for job, running in trainings.items()}
            cluster.kill(1)
            self.until(
                "a raylet is killed, and its ranks are missed",
                lambda: all(0 < self._status(job)["ranks"] < n for job, n in self.ranks.items()),
            )
            for job, running in trainings.items():
                self.until(f"{job} trains on", lambda job=job, of=running: of.progress().min() > steps[job])
            cluster.start(1)
            self.until("it is back, and both jobs are served", self._all_served)
            self.until(
                "both measure",
                lambda: all(self._status(job)["collectives"] > before[job] + 100 for job in self.ranks),
            )
            meanwhile()
            for job, running in trainings.items():
                running.stop()
                self.differed[job] = agreement_violations(running.logs())
        for job in self.ranks:
            self.until(f"{job} is over", lambda job=job: "SUCCEEDED" in self._follow(job))
            self._reported(job)
        self.saw.append(("collectives on which two ranks differed", self.differed))
        print(*(f"| {what} | {said} |" for what, said in self.saw), sep="\n")
        assert self.differed == dict.fromkeys(self.ranks, 0)

    def _start_all(self) -> bool:
        self.cluster.start_head()
        for node in range(len(self.cluster.names)):
            self.cluster.start(node)
        return True

    def _training(self, job: str) -> NcclJob:
        return training(
            job,
            self.directory / job,
            nodes=len(self.cluster.names),
            ranks_per_node=self.per_node[job],
            comms=([*self.ranks].index(job),),
            rate_hz=self.rate_hz,
            env_of=self.cluster.env_of,
            within=self.cluster.within,
        )

    def _status(self, job: str) -> dict[str, Any]:
        return self.cluster.ask(job) or {"ranks": 0, "switches": 0, "collectives": 0}

    def _all_served(self) -> bool:
        return all(self._status(job)["ranks"] == n for job, n in self.ranks.items())

    def _coordinators(self) -> list[str]:
        """Names of their nodes."""
        names = {of["node_id"]: of["node_name"] for of in self._list("nodes")}
        return [names[of["node_id"]] for of in self._list("actors", "--filter=class_name=CoordinatorActor")]

    def _list(self, *what: str) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = json.loads(self.cluster.ray("list", *what, "--format=json").stdout)
        return said

    def until(self, what: str, done: Callable[[], Any]) -> None:
        self.saw.append((what, f"{self.cluster.until(what, done, 300.0):.0f} s"))
        print(*self.saw[-1], flush=True)

    def _follow(self, job: str) -> str:
        """How a submitted job ended."""
        self.cluster.ray("job", "logs", "--follow", job, timeout=300.0)
        return self.cluster.state(job)

    def _reported(self, job: str) -> None:
        logs = self.cluster.logs(job)
        assert "Deprecat" not in logs
        assert f"dynamiccl report {job}" in logs
        fetched = self.cluster.dynamiccl("report", job, "--out", str(self.directory / f"fetched-{job}"))
        assert fetched.returncode == 0, fetched.stderr
        assert (self.directory / f"fetched-{job}" / "report.html").exists()
        summary = json.loads((self.directory / f"fetched-{job}" / "summary.json").read_text())
        assert summary["switches"] > 2
        self.saw.append((f"{job}: table switches, collectives measured", (summary["switches"], summary["collectives"])))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_jobs_on_a_cluster_whose_nodes_go_and_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where a submitted job writes
    with RayNodes(tmp_path / "cluster", 2) as cluster:
        Story(tmp_path, cluster, {"one": 2, "two": 1}, 100).play()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(hosts.why_not() is not None, reason=f"no machines in namespaces: {hosts.why_not()}")
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
def test_four_machines_of_32_ranks_under_a_real_prometheus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node has a network address and a /dev/shm of its own; Prometheus reads the list of nodes that Ray writes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with RayNodes(tmp_path / "cluster", 4, apart=True) as cluster, contextlib.ExitStack() as stack:
        story = Story(tmp_path, cluster, {"one": 6, "two": 2}, 10)
        started: list[Prometheus] = []

        def both_are_scraped() -> None:
            if not started:
                started.append(stack.enter_context(Prometheus(tmp_path, cluster)))
            for name in ("ray_dynamiccl_ranks", "nccl_bus_bandwidth_gbs"):
                story.until(f"{name} in Prometheus", lambda name=name: started[0].jobs(name) == {"one", "two"})
            story.until("all ranks in Prometheus", lambda: started[0].ranks() == story.ranks)

        story.play(both_are_scraped)


class Prometheus:
    """On the head, with the configuration that the package ships, but for how nodes are found and how often it asks."""

    def __init__(self, directory: Path, cluster: RayNodes) -> None:
        assert cluster.hosts is not None
        self._directory, self._cluster, self._hosts = directory, cluster, cluster.hosts
        found = cluster.temp / "head" / "prom_metrics_service_discovery.json"
        config = (MONITORING / "prometheus.yaml").read_text()
        told = "static_configs:\n      - targets: [HEAD:8080]"
        assert told in config
        config = config.replace(told, f"file_sd_configs: [{{files: [{found}]}}]").replace("15s", "2s")
        (directory / "prometheus.yaml").write_text(config)
        shutil.copy(MONITORING / "alerts.yaml", directory)

    def __enter__(self) -> Prometheus:
        options = [f"--config.file={self._directory}/prometheus.yaml", f"--storage.tsdb.path={self._directory}/tsdb"]
        with (self._directory / "prometheus.log").open("wb") as log:
            command = [*self._hosts.within("head"), "prometheus", *options, "--web.listen-address=127.0.0.1:9090"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def ask(self, query: str) -> list[dict[str, Any]]:
        asked = ("promtool", "query", "instant", "--format=json", "http://127.0.0.1:9090", query)
        try:
            said: list[dict[str, Any]] = json.loads(self._hosts.run("head", *asked))
        except subprocess.CalledProcessError:
            return []  # not up yet
        return said

    def jobs(self, name: str) -> set[str]:
        return {row["metric"]["job_id"] for row in self.ask(name)}

    def ranks(self) -> dict[str, int]:
        return {row["metric"]["job_id"]: int(row["value"][1]) for row in self.ask("ray_dynamiccl_ranks")}
