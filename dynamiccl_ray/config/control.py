"""Settings of the control loop, the same in training, in evaluation and beside a job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dynamiccl_ray.settings import Count, NotNegative, Positive, Section


class Learning(Section):
    """How a key learns: first its actions are drawn from the policy, then what may be the best is compared.

    Counts of samples are collectives of the key; a decision ends when it has as many.
    """

    baseline_samples: Count = 4
    """That measure NCCL's own choice before anything is tried."""
    draws: Count = 64
    """Decisions that are drawn. The policy's certainty comes from a model, so what it holds likely is measured."""
    adapt_share: Annotated[float, Field(gt=0, le=1)] = 0.67
    """Of them, that are drawn after a trigger: what was known is a hint then."""
    earlier_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Of them, that are drawn where an earlier run says something of a key; three times as many once it turns out
    wrong."""
    draw_samples: Count = 1
    compares: Count = 24
    """Decisions after that, in each of which that action is measured of which it is worth most to know more."""
    compare_samples: Count = 8
    """Also of every decision from then on, in which the best is kept."""
    sequence: Count = 32
    """Decisions after which the policy's recurrent state begins anew; the length of a training sequence."""
    heat: NotNegative = 0.5
    """Logits are divided by 1 + heat where actions are drawn."""


class Trigger(Section):
    """When to learn again."""

    arl0: Positive = 1_000_000.0
    """Collectives of a key to one false alarm."""


class Guardrail(Section):
    """An action that is worse than NCCL's own choice with confidence is not tried again until the next trigger."""

    margin: NotNegative = 0.02
    """Log time over the baseline."""
    samples: Count = 8
    """Collectives before an action can be ruled out."""


class Explore(Section):
    """What exploring may cost a communicator: where it has cost as much, its keys keep what is best for now."""

    max_regret: Annotated[float, Field(gt=0, le=1)] = 0.03
    """Share of communication time, over a sliding window; 1 is no limit."""
    window: Count = 2000
    """Collectives of each key; what a whole window may cost can be spent at its beginning."""


class Control(Section):
    """All of it."""

    learning: Learning = Learning()
    explore: Explore = Explore()
    trigger: Trigger = Trigger()
    guardrail: Guardrail = Guardrail()
