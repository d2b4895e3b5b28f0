"""How much of the gap to the oracle a policy closes, quickly: greedy, on the model, without noise in the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynamiccl_ray import policy
from dynamiccl_ray.curriculum import Streams
from dynamiccl_ray.scenario import Scenario
from dynamiccl_ray.simulation import Simulation

# The noise that the policy meets while it is judged.
_SEED = 5


@dataclass(frozen=True, kw_only=True)
class Gap:
    """What greedy decisions reached in the last epoch of an episode."""

    closed: float
    """Share of the gap, times summed over keys by calls; each scenario counts in units of its default's time."""
    geomean: float
    """Time over the oracle's, geometric mean over keys."""
    default: float
    """The same of NCCL's own choice."""
    p99: float
    """99th percentile over keys of time over NCCL's own."""

    def summary(self) -> dict[str, float]:
        """As JSON has it."""
        return {
            "gap_closed": self.closed,
            "geomean_vs_oracle": self.geomean,
            "default_vs_oracle": self.default,
            "p99_key_vs_default": self.p99,
        }


def gap_closed(net: policy.PolicyNetwork, scenarios: Sequence[Scenario], streams: Streams) -> Gap:
    """Plays one episode on every key."""
    simulation = Simulation(scenarios, epochs=streams.epochs, collectives=streams.collectives, seed=_SEED)
    obs = simulation.reset()
    state = {k: v.unsqueeze(0).expand(len(simulation), *v.shape) for k, v in net.initial_state().items()}
    with torch.no_grad():
        for epoch in range(streams.epochs):
            x = torch.from_numpy(obs).unsqueeze(1)
            features, state = net.features(x, state)
            actions = policy.greedy(net.logits(x, features)[:, 0]).numpy()
            if epoch < streams.epochs - 1:
                obs, _ = simulation.step(actions)
    ours, default, best = simulation.clean_us(actions)
    weight = np.concatenate([s.weight for s in scenarios])
    scenario = np.repeat(np.arange(len(scenarios)), [len(s.nbytes) for s in scenarios])
    whole = np.bincount(scenario, weight * default)[scenario]
    share = weight / whole
    gap = float((share * (default - best)).sum())
    return Gap(
        closed=float((share * (default - ours)).sum()) / gap if gap > 0 else 1.0,
        geomean=float(np.exp(np.log(ours / best).mean())),
        default=float(np.exp(np.log(default / best).mean())),
        p99=float(np.quantile(ours / default, 0.99)),
    )
