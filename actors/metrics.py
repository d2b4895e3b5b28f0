"""What a run tells Prometheus, through Ray's metrics.

Ray puts ``ray_`` in front of every name, and ``_total`` behind counters. Where NVIDIA's Inspector (the profiler plugin
in NCCL's own sources, 2.30) exports the same quantity, name and labels are the Inspector's; docs/metrics.md says how a
scrape drops the prefix.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.overview import status_of
from dynamiccl_ray.actors.status import Epoch, Status
from dynamiccl_ray.keys import key_parts
from dynamiccl_ray.knobs import N_PROTOCOLS, OWN_PAIR, Algorithm, Collective, Protocol


@dataclass(frozen=True)
class Metric:
    """``labels`` beside those that Ray adds."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


_OF_COMM: Final = ("comm_name", "n_nodes", "nranks")
_OF_COLLECTIVE: Final = (*_OF_COMM, "collective", "message_size", "algo_proto")
METRICS: Final = (
    Metric("nccl_bus_bandwidth_gbs", "gauge", "Bus bandwidth of a size, lately: GB/s.", _OF_COLLECTIVE),
    Metric(
        "nccl_collective_exec_time_microseconds",
        "gauge",
        "Time of a size, without the wait for late ranks, lately: us.",
        _OF_COLLECTIVE,
    ),
    Metric("dynamiccl_collectives", "counter", "Collectives that all of their ranks have measured."),
    Metric("dynamiccl_switches", "counter", "Tables that came into force."),
    Metric("dynamiccl_digest_mismatches", "counter", "Tables that ranks computed differently; none was put in force."),
    Metric("dynamiccl_alarms", "counter", "Keys that learn anew because times have changed."),
    Metric("dynamiccl_checks", "counter", "Alarms after which the choice stood."),
    Metric("dynamiccl_dropped_records", "counter", "Records lost between NCCL and the runner."),
    Metric("dynamiccl_unused_records", "counter", "Collectives and records that taught nothing."),
    Metric("dynamiccl_hold_wait_seconds", "counter", "Time for which ranks have waited for a decision."),
    Metric("dynamiccl_calls", "counter", "Collectives by what became of them.", ("fate",)),
    Metric("dynamiccl_ranks", "gauge", "Ranks that are served."),
    Metric("dynamiccl_runners", "gauge", "Runners that serve, or may again."),
    Metric("dynamiccl_keys", "gauge", "Keys by phase.", ("phase",)),
    Metric("dynamiccl_communicators_off", "gauge", "Communicators that are not tuned."),
    Metric("dynamiccl_tuned", "gauge", "1 in mode active, 0 otherwise, or while it is rolled back."),
    Metric("dynamiccl_overhead_percent", "gauge", "Share of a process's time that the plugin takes, in percent."),
    Metric(
        "dynamiccl_speedup",
        "gauge",
        "NCCL's own time over the time that collectives took so far, exploration included.",
        _OF_COMM,
    ),
)
_EVERY_S: Final = 1.0
_MOST_SIZES: Final = 200
"""Sizes of which times are told: each is a time series, which Ray keeps for as long as this process lives."""
_MOST_COMMS: Final = 200
"""Communicators of which the speedup is told."""


class Metrics:
    """``hear`` every epoch, and ``tell`` as often as you like."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Gauge

        kinds = {"gauge": Gauge, "counter": Counter}
        self._of: Final = {
            m.name: kinds[m.kind](m.name, description=m.help, tag_keys=(*m.labels, "job_id")) for m in METRICS
        }
        self._counted: dict[tuple[str, str], float] = {}
        self._sizes: set[tuple[int, int]] = set()
        self._comms: set[int] = set()
        self._told = -np.inf

    def hear(self, epoch: Epoch, comm: Communicator, job: str) -> None:
        """Times of the sizes that ran."""
        for key in np.unique(epoch.samples["key"]).tolist():
            if len(self._sizes) >= _MOST_SIZES and (epoch.comm, key) not in self._sizes:
                continue
            self._sizes.add((epoch.comm, key))
            of = epoch.samples[epoch.samples["key"] == key]
            collective = Collective(key_parts(key)[0])
            us, nbytes = float(np.exp(np.log(of["time_us"]).mean())), float(of["bytes"].mean())
            labels = _labels(comm, job) | {
                "collective": _NAMES[collective],
                "message_size": size_range(int(nbytes)),
                "algo_proto": _algo_proto(int(of["pair"][-1])),
            }
            self._of["nccl_collective_exec_time_microseconds"].set(us, labels)
            self._of["nccl_bus_bandwidth_gbs"].set(
                bus_factor(collective, comm.example.ranks) * nbytes / us / 1e3, labels
            )

    def tell(self, coordinator: Coordinator) -> None:
        """Where the run stands, at most once a second."""
        if time.monotonic() - self._told < _EVERY_S:
            return
        self._told = time.monotonic()
        job, status = coordinator.experiment.job, status_of(coordinator)
        for name, value in _counts(status).items():
            self._count(name, value, {"job_id": job})
        for fate, value in status.coverage.as_dict().items():
            if isinstance(value, int):
                self._count("dynamiccl_calls", value, {"job_id": job, "fate": fate})
        for name, value in _levels(status).items():
            self._of[name].set(value, {"job_id": job})
        for phase, keys in status.keys.items():
            self._of["dynamiccl_keys"].set(keys, {"job_id": job, "phase": phase})
        for comm_id, comm in coordinator.comms.items():
            if comm.took_us > 0 and (comm_id in self._comms or len(self._comms) < _MOST_COMMS):
                self._comms.add(comm_id)
                self._of["dynamiccl_speedup"].set(comm.own_us / comm.took_us, _labels(comm, job))

    def _count(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Ray's counters only go up; a count that begins anew with a successor does for Prometheus, too."""
        at = name, labels.get("fate", "")
        more = value - self._counted.get(at, 0.0)
        if more > 0:
            self._of[name].inc(more, labels)
            self._counted[at] = value


def _counts(status: Status) -> dict[str, float]:
    return {
        "dynamiccl_collectives": status.collectives,
        "dynamiccl_switches": status.switches,
        "dynamiccl_digest_mismatches": status.digest_mismatches,
        "dynamiccl_alarms": sum(alarm.anew for alarm in status.alarms),
        "dynamiccl_checks": sum(not alarm.anew for alarm in status.alarms),
        "dynamiccl_dropped_records": status.dropped,
        "dynamiccl_unused_records": status.unused,
        "dynamiccl_hold_wait_seconds": status.hold_wait_s,
    }


def _levels(status: Status) -> dict[str, float]:
    return {
        "dynamiccl_ranks": status.ranks,
        "dynamiccl_runners": len(status.runners),
        "dynamiccl_communicators_off": len(status.off),
        "dynamiccl_tuned": float(status.mode == "active" and not status.rolled_back),
        "dynamiccl_overhead_percent": status.overhead.get("percent") or 0.0,
    }


def _labels(comm: Communicator, job: str) -> dict[str, str]:
    example = comm.example
    name = example.name or f"{example.comm:016x}"
    return {"job_id": job, "comm_name": name, "n_nodes": str(example.nodes), "nranks": str(example.ranks)}


_NAMES: Final = {
    Collective.BROADCAST: "Broadcast",
    Collective.REDUCE: "Reduce",
    Collective.ALL_GATHER: "AllGather",
    Collective.REDUCE_SCATTER: "ReduceScatter",
    Collective.ALL_REDUCE: "AllReduce",
}


def _algo_proto(pair: int) -> str:
    if pair == OWN_PAIR:
        return "unknown"
    algorithm, protocol = divmod(pair - 1, N_PROTOCOLS)
    return f"{Algorithm(algorithm).name}_{Protocol(protocol).name}"


def size_range(nbytes: int) -> str:
    """As the Inspector names it: ``1-2MB`` from 1 MiB to below 2 MiB, ``300-301KB``."""
    value, units = float(nbytes), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    least = max(int(value), 1)
    return f"{least}-{least + 1}{units[0]}"


def bus_factor(collective: Collective, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md there)."""
    if collective is Collective.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        return (ranks - 1) / ranks
    return 1.0


def series() -> list[dict[str, Any]]:
    """Every metric as it is scraped, for docs and dashboards."""
    return [
        {"name": f"ray_{m.name}{'_total' if m.kind == 'counter' else ''}", "kind": m.kind, "help": m.help}
        | {"labels": [*m.labels, "job_id"]}
        for m in METRICS
    ]
