"""How much of the gap to the oracle a policy closes while it is in training, as an evaluation would measure it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynamiccl_ray.agent.policy import PolicyNetwork
from dynamiccl_ray.baselines.learned import learned
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.curriculum import Validation
from dynamiccl_ray.evaluation.measures import Procedure, judged
from dynamiccl_ray.evaluation.players import Play
from dynamiccl_ray.simulation.scenario import Scenario

_SAID: Final = ("gap_closed", "geomean_vs_oracle", "default_vs_oracle", "p99_key_vs_default")


def validate(
    net: PolicyNetwork, scenarios: Sequence[Scenario], settings: Validation, control: Control, play_all: Play
) -> dict[str, float]:
    """``gap_closed`` (1 where there is no gap), ``geomean_vs_oracle``, ``default_vs_oracle`` and
    ``p99_key_vs_default``, as ``evaluation.judged`` has them: one run of each scenario.
    """
    procedure = Procedure(learn=settings.collectives, runs=1)
    runs = play_all(scenarios, {"policy": learned(net, control)}, procedure)["policy"]
    row = judged("validation", runs, {}, procedure)
    return {name: 1.0 if row[name] is None else float(row[name]) for name in _SAID}
