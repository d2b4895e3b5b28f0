"""The whole evaluation of one policy: every split against all baselines, and two sweeps of the policy alone.

The sweeps ask what averages hide: does one policy choose differently where networks differ, and does it hold from two
GPUs to a thousand?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import OWN_ACTION, action_of, flat_action
from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.registry import beside
from dynamiccl_ray.baselines.run import Trace
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.evaluation.measures import (
    Procedure,
    collectives_to_best,
    job_regrets,
    judged,
    key_rows,
    mean_interval,
    relative_regret,
)
from dynamiccl_ray.evaluation.players import Play, Progress, players, under
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.clusters import p5en_all_reduce
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.simulation.scenario import Scenario, modelled
from dynamiccl_ray.simulation.splits import HELD_OUT, MEASURED_NODES, evaluation_splits

SUBJECT: Final = "policy"
TIER_PLACES: Final[Mapping[int, tuple[str, int]]] = {
    1: ("gb200-nvl72", 16),
    2: ("dgx-h100-ndr", 16),
    3: ("p5en-h200-efa", 16),
    4: ("wan-two-datacentres", 16),
}
"""A cluster and a number of nodes whose farthest link is of each tier."""
TIER_BYTES: Final = tuple(1 << k for k in range(10, 31, 2))
SCALE_CLUSTER: Final = "dgx-h100-ndr"
SCALE_GPUS: Final = tuple(1 << k for k in range(1, 11))
"""One GPU alone has no collective to tune."""
SCALE_BYTES: Final = tuple(1 << k for k in range(10, 31))
_COMPARED: Final = ("static pair", "csv table", "bandit", "oracle")
# Shifts come while there is time to adapt to them.
_SHIFTING: Final = 0.75


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What the report is made from."""

    summary: dict[str, Any]
    """``splits`` as ``evaluation.judged`` has them, measured ones with ``vendor_vs_oracle``, and last one for all
    held-out clusters together; each has ``policies``, what is said of every policy, and by method ``regret_of_jobs``,
    ``regret_interval`` and ``regret_behind``, the policy's regret less the method's, of the same jobs, with its
    interval. All but that last one have ``collectives_to_best`` by method. ``least_regret``, by held-out cluster the
    method other than the oracle that had it; ``tiers`` and ``scale``, the rows of the sweeps; ``seeds``;
    ``procedure``."""
    examples: Mapping[str, Mapping[str, Sequence[Trace]]]
    """Of each split the traces of all methods on the scenario with the most shifts."""
    tier_rows: Mapping[str, Sequence[Mapping[str, Any]]]
    """``key_rows`` of the cross-tier sweep by method."""
    scale: Sequence[Trace]
    """A trace of each whole number of nodes."""


def assess(
    curriculum: Curriculum,
    nets: Sequence[PolicyNetwork],
    *,
    scenarios: int,
    procedure: Procedure,
    processes: int = 1,
    measured_nodes: Sequence[int] = MEASURED_NODES,
    progress: Progress = lambda _: None,
    played: Callable[[str, Mapping[str, Sequence[Sequence[Trace]]]], None] = lambda *_: None,
) -> Assessment:
    """Measures the first of ``nets`` and all baselines; ``played`` is called with each split's name and traces, which
    then go. Further nets, trained with other seeds, are measured on the splits alone. The splits are played in so many
    ``processes``.
    """
    methods: dict[str, Factory] = {**beside(curriculum.control), SUBJECT: learned(nets[0], curriculum.control)}
    splits = evaluation_splits(curriculum, scenarios, horizon_of(procedure), measured_nodes)
    vendors = dict(zip(list(splits)[len(splits) - len(measured_nodes) :], measured_nodes, strict=True))
    rows, examples, held = [], {}, []
    with players(processes) as play_all:
        for name, of in splits.items():
            runs = play_all(of, methods, procedure, under(progress, name))
            of_jobs = {m: job_regrets(each) for m, each in runs.items()}
            row = judged(name, runs[SUBJECT], {m: float(each.mean()) for m, each in of_jobs.items()}, procedure)
            row |= _intervals(of_jobs)
            row["collectives_to_best"] = {m: collectives_to_best(each) for m, each in runs.items()}
            row["policies"] = [_brief(row)]
            for i, net in enumerate(nets[1:], 2):
                progress(f"{name}: policy {i} of {len(nets)}")
                further = play_all(of, {SUBJECT: learned(net, curriculum.control)}, procedure)[SUBJECT]
                row["policies"].append(_brief(judged(name, further, {SUBJECT: relative_regret(further)}, procedure)))
            if name.startswith(HELD_OUT):
                held.append((row, runs[SUBJECT]))
            if name in vendors:
                row["vendor_vs_oracle"] = _vendor(of[0], vendors[name])
            rows.append(row)
            most = int(np.argmax([len(s.starts) for s in of]))
            examples[name] = {method: traces[most] for method, traces in runs.items()}
            played(name, runs)
        progress("cross-tier sweep")
        tier_rows, tiers = _tiers(play_all, methods, procedure)
        progress("scale sweep")
        subject = {SUBJECT: methods[SUBJECT]}
        traces = dict(zip(SCALE_GPUS, play_all(_scales(), subject, procedure)[SUBJECT], strict=True))
    # As many scenarios of each, so that the mean over clusters is that over scenarios.
    of_all = {m: np.concatenate([row["regret_of_jobs"][m] for row, _ in held]) for m in methods}
    regret = {m: float(each.mean()) for m, each in of_all.items()}
    together = judged(HELD_OUT, [traces for _, of in held for traces in of], regret, procedure) | _intervals(of_all)
    rows.append({**together, "policies": _mean_policies([row["policies"] for row, _ in held])})
    summary = {
        "policy": SUBJECT,
        "splits": rows,
        "least_regret": _least(held),
        "tiers": tiers,
        "scale": [_scale_row(gpus, of, procedure) for gpus, of in traces.items()],
        "seeds": list(range(procedure.runs)),
        "procedure": {"scenarios": scenarios, "shifting": _SHIFTING, **vars(procedure)},
    }
    whole = find_cluster(SCALE_CLUSTER).gpus_per_node
    scale = [of[0] for gpus, of in traces.items() if gpus >= whole]
    return Assessment(summary=summary, examples=examples, tier_rows=tier_rows, scale=scale)


def _intervals(of_jobs: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """By method what each job lost (S,), the interval of its mean, and by how much the policy is behind."""
    behind = {m: of_jobs[SUBJECT] - each for m, each in of_jobs.items() if m != SUBJECT}
    return {
        "regret_of_jobs": {m: each.tolist() for m, each in of_jobs.items()},
        "regret_interval": {m: mean_interval(each) for m, each in of_jobs.items()},
        "regret_behind": {m: [float(each.mean()), *mean_interval(each)] for m, each in behind.items()},
    }


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of every policy."""
    said = ("gap_closed", "geomean_vs_oracle", "p99_key_vs_default", "adapted")
    return {**{name: row[name] for name in said}, "regret": row["regret"][SUBJECT]}


def _mean_policies(clusters: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Of each policy the mean over clusters, where every cluster has a value."""
    out = []
    for of in zip(*clusters, strict=True):
        values = {name: [each[name] for each in of] for name in of[0]}
        out.append({name: None if None in v else float(np.mean(v)) for name, v in values.items()})
    return out


def _least(held: Sequence[tuple[Mapping[str, Any], Any]]) -> dict[str, str]:
    found = {}
    for row, _ in held:
        rivals = {method: regret for method, regret in row["regret"].items() if method != "oracle"}
        found[row["name"].removeprefix(f"{HELD_OUT}: ")] = min(rivals, key=lambda m: rivals[m])
    return found


def horizon_of(procedure: Procedure) -> int:
    """The step before which all shifts of an evaluation's scenarios come; at least 8, for 7 shifts."""
    return max(8, int(_SHIFTING * procedure.learn))


def _vendor(scenario: Scenario, nodes: int) -> float | None:
    """Geometric mean of the vendor's tuner's times over the best static ones, where it was measured."""
    ratio = p5en_all_reduce(nodes).vendor_us(scenario.nbytes) / scenario.oracle_us[0]
    known = ratio[np.isfinite(ratio)]
    return float(np.exp(np.log(known).mean())) if known.size else None


def _all_reduce(cluster: Cluster, nodes: int, sizes: Sequence[int]) -> Scenario:
    return modelled(cluster, nodes, collective=int(Collective.ALL_REDUCE), nbytes=sizes)


def _tiers(
    play_all: Play, methods: Mapping[str, Factory], procedure: Procedure
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    scenarios = [_all_reduce(find_cluster(cluster), nodes, TIER_BYTES) for cluster, nodes in TIER_PLACES.values()]
    runs = play_all(scenarios, {name: methods[name] for name in (*_COMPARED, SUBJECT)}, procedure)
    statistics = {name: [row for traces in of for row in key_rows(traces, procedure)] for name, of in runs.items()}
    decisions = []
    for tier, scenario, traces in zip(TIER_PLACES, scenarios, runs[SUBJECT], strict=True):
        chosen = most_chosen(traces[0], procedure.measured)
        for k, nbytes in enumerate(TIER_BYTES):
            best = scenario.oracle_us[0, k]
            decisions.append(
                {
                    "tier": tier,
                    "cluster": scenario.cluster,
                    "nodes": scenario.nodes,
                    "bytes": nbytes,
                    "policy": action_of(int(chosen[k])).name,
                    "oracle": action_of(int(scenario.oracle[0, k])).name,
                    "nccl": action_of(int(flat_action(scenario.own_pair[k], 0, 0))).name,
                    "policy_vs_oracle": float(scenario.flat_us[0, k, chosen[k]] / best),
                    "nccl_vs_oracle": float(scenario.flat_us[0, k, OWN_ACTION] / best),
                }
            )
    return statistics, decisions


def most_chosen(trace: Trace, last: int) -> NDArray[np.int64]:
    """(K,) the flat action that was chosen most often in the last steps."""
    return np.array([np.bincount(column).argmax() for column in trace.actions[-last:].T], np.int64)


def _scales() -> list[Scenario]:
    """Of ``SCALE_GPUS``."""
    cluster = find_cluster(SCALE_CLUSTER)
    local = [min(gpus, cluster.gpus_per_node) for gpus in SCALE_GPUS]
    return [
        _all_reduce(cluster.model_copy(update={"gpus_per_node": of_node}), gpus // of_node, SCALE_BYTES)
        for gpus, of_node in zip(SCALE_GPUS, local, strict=True)
    ]


def _scale_row(gpus: int, traces: Sequence[Trace], procedure: Procedure) -> dict[str, Any]:
    rows = key_rows(traces, procedure)
    policy, default, oracle = (np.array([row[f"{of}_us"] for row in rows]) for of in ("mean", "default", "oracle"))
    return {
        "gpus": gpus,
        "nodes": traces[0].scenario.nodes,
        "policy_vs_oracle": float(np.exp(np.log(policy / oracle).mean())),
        "nccl_vs_oracle": float(np.exp(np.log(default / oracle).mean())),
        "worst_key_vs_default": float((policy / default).max()),
    }
