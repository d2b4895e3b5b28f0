"""What a run tells Prometheus: by the Inspector's names, and as a real Prometheus reads it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from attached import training
from driven import Run
from small import small_experiment

from dynamiccl_ray.actors import metrics
from dynamiccl_ray.actors.metrics import METRICS, bus_factor, series, size_range
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.trainers.online.run import run_online

DATA = Path(__file__).parents[2] / "dynamiccl_ray" / "data" / "monitoring"


@pytest.mark.parametrize(
    ("nbytes", "says"),
    [
        (1, "1-2B"),
        (1023, "1023-1024B"),
        (1024, "1-2KB"),
        (307_400, "300-301KB"),
        (1 << 20, "1-2MB"),
        (3 << 40, "3-4TB"),
    ],
)
def test_sizes_are_named_as_the_inspector_does(nbytes: int, says: str) -> None:
    assert size_range(nbytes) == says


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_factor(Collective.ALL_REDUCE, 8) == 1.75
    assert bus_factor(Collective.ALL_GATHER, 8) == 0.875
    assert bus_factor(Collective.BROADCAST, 8) == 1


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_dashboard_and_alerts_name_what_is_exported(file: str) -> None:
    known = {m["name"] for m in series()} | {m.name for m in METRICS if m.name.startswith("nccl_")}
    named = set(re.findall(r"\b(?:ray|nccl)_\w+", (DATA / file).read_text()))
    assert named <= known, "nothing exports it"
    assert len(named) >= 5


def test_the_docs_have_every_series() -> None:
    said = (DATA.parents[2] / "docs" / "metrics.md").read_text()
    assert [m["name"] for m in series() if f"| `{m['name']}` |" not in said or m["help"] not in said] == []


def test_so_many_communicators_are_told_of_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps every series for as long as the coordinator lives."""
    told: list[tuple[str, str]] = []

    class Instrument:
        def __init__(self, name: str, **_: Any) -> None:
            self._name = name

        def set(self, value: float, labels: dict[str, str]) -> None:
            told.append((self._name, labels.get("comm_name", "")))

        inc = set

    for kind in ("Gauge", "Counter"):
        monkeypatch.setattr(f"ray.util.metrics.{kind}", Instrument)
    monkeypatch.setattr(metrics, "_MOST_COMMS", 3)
    monkeypatch.setattr(metrics, "_EVERY_S", 0.0)
    telling, run = metrics.Metrics(), Run()
    for number in range(6):
        run.comm = 0x1000 + number
        run.join()
        run.core.comms[run.comm].took_us = 1.0
        telling.tell(run.core)
        for rank, runner in enumerate("ab"):
            run.core.join(runner, [], frozenset({(run.comm, rank)}))
        run.core.close_epoch()
    names = {comm for name, comm in told if name == "dynamiccl_speedup"}
    assert names == {f"{0x1000 + number:016x}" for number in range(3)}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_prometheus_takes_our_files(tmp_path: Path) -> None:
    for file in ("alerts.yaml", "prometheus.yaml"):
        shutil.copy(DATA / file, tmp_path)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yaml"], check=True)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
def test_a_real_prometheus_scrapes_a_run(tmp_path: Path, job: str) -> None:
    import ray

    experiment = small_experiment(
        job,
        fabric={"kind": "nccl", "intra": "pcie", "inter": "tcp", "processes": None, "rate_hz": None},
        control={"learning": {"baseline_samples": 4, "draws": 4, "compares": 2, "compare_samples": 1}},
        stop={"rounds": 100_000},
        ray={"runners_per_node": 1},
    )
    found: dict[str, Any] = {}
    servers: list[subprocess.Popen[bytes]] = []

    def progress(status: dict[str, Any]) -> None:
        """Once Ray is there Prometheus is started; once it knows what we look for the job ends."""
        if not servers:
            targets = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes()]
            servers.append(_prometheus(tmp_path, targets, port))
        for name in ("ray_dynamiccl_keys", "nccl_bus_bandwidth_gbs", "ray_dynamiccl_collectives_total"):
            if name not in found and (rows := _ask(port, name)):
                found[name] = rows
        if len(found) == 3:
            running.stop()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        with training(job, tmp_path / "job", rate_hz=50) as running:
            running.start()
            running.await_ranks()
            run_online(experiment, tmp_path / "run", progress=progress)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait(20)
    assert {row["metric"]["phase"] for row in found["ray_dynamiccl_keys"]} >= {"baseline", "learn", "exploit"}
    assert all(row["metric"]["job_id"] == job for row in found["ray_dynamiccl_keys"])
    rates = {row["metric"]["comm_name"]: row["metric"] for row in found["nccl_bus_bandwidth_gbs"]}
    assert set(rates) == {"comm0", "comm1"}
    assert rates["comm0"]["collective"] == "AllReduce"
    assert rates["comm0"]["nranks"] == "4"
    assert float(found["ray_dynamiccl_collectives_total"][0]["value"][1]) > 0


def _prometheus(directory: Path, targets: list[str], port: int) -> subprocess.Popen[bytes]:
    """With the configuration that the package ships, but for where to look and how often."""
    config = (DATA / "prometheus.yaml").read_text()
    config = config.replace("[HEAD:8080]", json.dumps(targets)).replace("15s", "1s")
    (directory / "prometheus.yaml").write_text(config)
    shutil.copy(DATA / "alerts.yaml", directory / "alerts.yaml")
    options = [f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/tsdb"]
    with (directory / "prometheus.log").open("wb") as log:
        return subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )


def _ask(port: int, name: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={name}", timeout=2) as answer:
            return json.load(answer)["data"]["result"]
    except OSError:
        time.sleep(0.2)
        return None
