"""What a trial is worth: the numbers of one run of an experiment, or of a policy in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.errors import RunError
from dynamiccl_ray.evaluation.measures import Procedure, judged, play, relative_regret
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.simulation.scenario import Scenario
from dynamiccl_ray.simulation.splits import held_out_stages, stage_scenarios
from dynamiccl_ray.trainers.online.recorder import read_samples

_POINTS: Final = 60
_HELD_OUT: Final = 0x5EED
"""A stream of its own: no training, validation or evaluation has these jobs."""


def score_run(summary: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Of one run of an experiment.

    ``vs_oracle``: time of what was in force over the best's, without noise, a geometric mean over keys and the
    stretches between events. ``gain``: NCCL's own time over it, less 1. ``regret``: the mean over all measured
    collectives of time over the best's, less 1, so that exploring counts. ``lost``: their sum over the number of keys,
    which a longer run does not make smaller. ``curve``: [collective, regret so far] pairs, where the regret is divided
    by all collectives; its end is ``regret``. Raises RunError where a stretch was over before anything was used.
    """
    stretches = [summary, *summary["after"]]
    ratios = [stretch["geomean_vs_oracle"] for stretch in stretches]
    for number, ratio in enumerate(ratios):
        if ratio is None or "learned_table" not in ratio:
            after = f"after {summary['events'][number - 1]['name']!r}" if number else "before any event"
            raise RunError(f"{after} the run ended while it still learned, so there is nothing to score; raise stop")
    learned_us, default = (np.log([ratio[name] for ratio in ratios]) for name in ("learned_table", "default"))
    lost = regrets(summary, read_samples(directory))
    so_far = np.cumsum(lost) / len(lost)
    at = np.unique(np.linspace(0, len(lost) - 1, _POINTS).astype(int))
    keys = len({(row["comm"], row["key"]) for row in summary["keys"] if row["oracle_us"] is not None})
    return {
        "lost": float(lost.sum() / keys),
        "regret": float(lost.mean()),
        "vs_oracle": float(np.exp(learned_us.mean())),
        "gain": float(np.exp((default - learned_us).mean()) - 1),
        "detection_delay": summary["detection_delay"],
        "alarms": len(summary["alarms"]),
        "collectives": summary["collectives"],
        "curve": [[int(i) + 1, float(so_far[i])] for i in at],
    }


def regrets(summary: Mapping[str, Any], samples: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """(N,) of each measured collective, in order: its time over the best's in its stretch of the run, less 1."""
    stretch = np.zeros(len(samples["time_us"]), int)
    for event in summary["events"]:
        stretch += samples["dseq"] >= event["at"] if event["by_call"] else samples["epoch"] > event["epoch"]
    best = np.full(len(stretch), np.nan)
    for number, of in enumerate([summary, *summary["after"]]):
        oracle = {(row["comm"], row["key"]): row["oracle_us"] for row in of["keys"] if row["oracle_us"] is not None}
        for comm in np.unique(samples["comm"]):
            for key in np.unique(samples["key"]):
                here = (stretch == number) & (samples["comm"] == comm) & (samples["key"] == key)
                best[here] = oracle.get((f"{int(comm):x}", key_name(int(key))), np.nan)
    lost = samples["time_us"] / best - 1
    return np.asarray(lost[np.isfinite(lost)], np.float64)


def held_out_scenarios(curriculum: Curriculum) -> list[Scenario]:
    """Jobs on the clusters that no stage has, about as many as a validation has. The same for all trials."""
    stages = held_out_stages(curriculum)
    each = -(-curriculum.validation.scenarios // len(stages))
    horizon = max(8, curriculum.validation.collectives // 4)
    return [
        scenario
        for number, stage in enumerate(stages.values())
        for scenario in stage_scenarios(stage, curriculum, (_HELD_OUT, number), each, horizon)
    ]


def score_policy(
    net: PolicyNetwork, scenarios: Sequence[Scenario], curriculum: Curriculum, validated: Mapping[str, Any]
) -> dict[str, Any]:
    """Of a policy in training. ``gap_closed`` and ``vs_oracle`` are those of ``validated``, the last validation of its
    stage; ``held_out_vs_oracle`` and ``held_out_regret`` are of the held-out clusters: time in the end, and time lost
    over whole jobs, over the best's.
    """
    procedure = Procedure(learn=curriculum.validation.collectives, runs=1)
    played = [play(scenario, learned(net, curriculum.control), procedure) for scenario in scenarios]
    return {
        "gap_closed": validated["gap_closed"],
        "vs_oracle": validated["geomean_vs_oracle"],
        "held_out_vs_oracle": judged("held out", played, {}, procedure)["geomean_vs_oracle"],
        "held_out_regret": relative_regret(played),
    }


def mean_of(scores: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Over seeds, of every number; None where a seed has none."""
    names = [name for name, value in scores[0].items() if not isinstance(value, list)]
    return {
        name: None if any(s[name] is None for s in scores) else float(np.mean([s[name] for s in scores]))
        for name in names
    }
