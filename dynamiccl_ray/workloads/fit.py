"""Fits the stack's constants to published rows, and asks how they do on rows that they have not seen.

``python -m dynamiccl_ray.workloads.fit`` prints the shipped constants again and the cross-validation of
docs/workloads.md; it takes about two minutes on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from dynamiccl_ray.workloads.reproduce import Fact, Reproduction, reproduce
from dynamiccl_ray.workloads.schedule import DEFAULT_STACK
from dynamiccl_ray.workloads.stack import FITTED, Stack

_SOFT_TIE = 0.007
"""Relative difference at which a pair in the wrong order costs about as much as one in the right order saves."""


def loss(facts: Sequence[Fact], stack: Stack) -> float:
    """Mean absolute log error, plus the share of pairs in the wrong order with a logistic step instead of a jump."""
    ordered = sorted(facts, key=lambda f: f.group)
    predicted = np.log([f.predicted(stack) for f in ordered])
    measured = np.log([f.samples_per_s for f in ordered])
    wrong, pairs, start = 0.0, 0, 0
    for _, members in groupby(ordered, key=lambda f: f.group):
        stop = start + len(list(members))
        i, j = np.triu_indices(stop - start, 1)
        p, m = predicted[start:stop], measured[start:stop]
        agreement = (p[i] - p[j]) * np.sign(m[i] - m[j])
        wrong += float((1 / (1 + np.exp(np.clip(agreement / _SOFT_TIE, -50, 50)))).sum())
        pairs += len(i)
        start = stop
    return float(np.abs(predicted - measured).mean()) + wrong / max(pairs, 1)


def fit(facts: Sequence[Fact], start: Stack = DEFAULT_STACK, *, rounds: int = 14, step: float = 0.4) -> Stack:
    """Coordinate search in the logarithms: each constant is tried up and down, with a step that shrinks on failure."""
    best, best_loss = start, loss(facts, start)
    steps = dict.fromkeys(FITTED, step)
    for _ in range(rounds):
        for name in FITTED:
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                value = getattr(best, name) * factor
                if name in ("overlapped_rate", "ring_leaving"):
                    value = min(value, 1.0)
                trial = replace(best, **{name: value})
                trial_loss = loss(facts, trial)
                if trial_loss < best_loss - 1e-6:
                    best, best_loss = trial, trial_loss
                    break
            else:
                steps[name] *= 0.6
    return best


def leave_one_out(facts: Sequence[Fact], fold: Callable[[Fact], object], start: Stack) -> dict[str, Reproduction]:
    """Per fold: the constants are fitted to all other folds, from ``start``, and this one is predicted."""
    folds = sorted({str(fold(f)) for f in facts})
    result = {}
    for name in folds:
        held = tuple(f for f in facts if str(fold(f)) == name)
        stack = fit([f for f in facts if str(fold(f)) != name], start)
        result[name] = Reproduction(facts=held, predicted=tuple(f.predicted(stack) for f in held), skipped=())
    return result


# What one would guess without the rows: no fold starts from constants that have seen it.
UNFITTED = Stack(
    overlapped_rate=0.5,
    push_pull=2.0,
    server_message_us=50.0,
    negotiation_us=10.0,
    fused_server_us=10000.0,
    hook_us=500.0,
    reorder_us=20.0,
    copy_us=20.0,
    ring_leaving=1.0,
)


def main() -> None:
    """Prints constants and cross-validation."""
    facts = reproduce().facts
    best = fit(facts, UNFITTED)
    print({name: round(getattr(best, name), 4) for name in FITTED})
    _show("all rows", Reproduction(facts=facts, predicted=tuple(f.predicted(best) for f in facts), skipped=()))
    by: dict[str, Callable[[Fact], object]] = {
        "network": lambda f: f.network.name,
        "scale": lambda f: f.gpus,
        "model": lambda f: f.model,
    }
    for what, fold in by.items():
        for name, held in leave_one_out(facts, fold, UNFITTED).items():
            _show(f"without {what} {name}", held)


def _show(name: str, result: Reproduction) -> None:
    found = result.order
    print(
        f"{name}: {len(result.facts)} rows, median error {result.median_error:.1%}, "
        f"order {found.right}/{found.pairs} = {found.right / found.pairs:.1%}, "
        f"without ties {found.untied_right}/{found.untied} = {found.untied_right / found.untied:.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
