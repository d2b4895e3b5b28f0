"""How good is a method: times, speedups, the gap to the oracle, regret, and how fast it adapts to shifts.

All functions are pure functions of traces. Times of NCCL's own choice and of the oracle are those under the very noise
that the method met, so that differences are the method's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.run import Trace, run_together
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.simulation.scenario import Scenario

Float64 = NDArray[np.float64]

ADAPT_WINDOW: Final = 20
"""Steps over which times are averaged where adaptation is judged."""
_ADAPTED: Final = 0.9
# Where NCCL's own choice is as good as the best, there is no gap to close, and this share of the time will do.
_NEAR: Final = 0.01
_RESAMPLES: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Procedure:
    """How each method is measured. Counts are collectives of each key."""

    learn: int = 2000
    """Before anything is measured; 0 for a method that has learned elsewhere."""
    warmup: int = 10
    measured: int = 100
    runs: int = 5

    @property
    def steps(self) -> int:
        return self.learn + self.warmup + self.measured


def play(scenario: Scenario, factory: Factory, procedure: Procedure, seed: int = 0) -> list[Trace]:
    """The runs of one method, with seeds from ``seed`` on."""
    return run_together([scenario] * procedure.runs, factory, procedure.steps, range(seed, seed + procedure.runs))


def key_rows(traces: Sequence[Trace], procedure: Procedure) -> list[dict[str, Any]]:
    """Statistics of each key over the measured collectives of some runs on one scenario.

    Times in us. ``speedup`` is NCCL's mean time over the method's; its 95% interval ``low`` to ``high`` is bootstrapped
    over runs and, within each, over collectives (Davison, Hinkley 1997, section 3.8).
    """
    scenario = traces[0].scenario
    time, default, oracle = _measured(traces, procedure)
    low, high = _interval(time, default)
    pooled = time.reshape(-1, time.shape[-1])
    columns = {
        "bytes": scenario.nbytes,
        "mean_us": pooled.mean(0),
        "std_us": pooled.std(0),
        "p99_us": np.percentile(pooled, 99, axis=0),
        "default_us": default.mean((0, 1)),
        "oracle_us": oracle.mean((0, 1)),
        "speedup": default.mean((0, 1)) / pooled.mean(0),
        "low": low,
        "high": high,
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [
        {
            "cluster": scenario.cluster,
            "nodes": scenario.nodes,
            "tier": scenario.tier,
            "collective": Collective(int(collective)).name.lower(),
            **dict(zip(columns, row, strict=True)),
        }
        for collective, row in zip(scenario.collective, rows, strict=True)
    ]


def gap_closed(runs: Sequence[Sequence[Trace]], procedure: Procedure) -> float | None:
    """(T_default - T) / (T_default - T_oracle) over the measured collectives, weighted by calls.

    ``runs`` has the traces of each scenario. Times are in units of the scenario's T_default, so that every scenario
    counts alike; with one scenario that makes no difference. None where NCCL's own choice is the best throughout.
    """
    shares = np.array([_shares(traces, procedure) for traces in runs])
    closed, gap = (1 - shares).sum(0)
    return float(closed / gap) if gap > 0 else None


def job_regrets(runs: Sequence[Sequence[Trace]]) -> Float64:
    """(S,) weighted time above the oracle over whole runs of each scenario, sweeps included, as a share of the
    oracle's: mean over its traces."""
    return np.array([np.mean([t.cumulative_regret_us[-1] / _weighted_oracle(t).sum() for t in of]) for of in runs])


def relative_regret(runs: Sequence[Sequence[Trace]]) -> float:
    """Mean of ``job_regrets``."""
    return float(job_regrets(runs).mean())


def mean_interval(of_jobs: Float64) -> list[float]:
    """95% interval of the mean of what was found for each scenario (S,), bootstrapped over scenarios (Davison, Hinkley
    1997): what other scenarios of the same kind might have given. Of differences between two methods on the same
    scenarios it says whether one is better.
    """
    drawn = np.random.default_rng(0).integers(len(of_jobs), size=(_RESAMPLES, len(of_jobs)))
    return [float(x) for x in np.percentile(of_jobs[drawn].mean(1), [2.5, 97.5])]


def steps_to_adapt(trace: Trace) -> list[int | None]:
    """For each shift of the run: steps until 90% of the new gap is closed for good, until the next shift; else None.

    What is compared is the weighted time without noise, averaged over ``ADAPT_WINDOW`` steps from that one on, and at
    least 1% of the oracle's time is allowed for.
    """

    def allowed_us(default: float, oracle: float) -> float:
        return max((1 - _ADAPTED) * (default - oracle), _NEAR * oracle)

    return _for_good(trace, allowed_us)[1:]


def collectives_to_best(runs: Sequence[Sequence[Trace]]) -> dict[str, float | None]:
    """Collectives of each key until the job's time is within 1% of the oracle's for good, until the next shift.

    The ``median`` over all phases of all runs, from the first on, and its 95% interval ``low`` to ``high``,
    bootstrapped over scenarios; None for one that is never reached. ``reached`` is the share of phases in which it is.
    Times are those of ``steps_to_adapt``.
    """
    of = [[step for t in traces for step in _for_good(t, lambda _, oracle: _NEAR * oracle)] for traces in runs]
    steps = [np.array([np.inf if step is None else step for step in each]) for each in of]
    drawn = np.random.default_rng(0).integers(len(steps), size=(_RESAMPLES, len(steps)))
    # One that was reached: what lies between a number and infinity is neither.
    medians = [np.percentile(np.concatenate([steps[i] for i in row]), 50, method="lower") for row in drawn]
    pooled = np.concatenate(steps)
    median = np.percentile(pooled, 50, method="lower")
    low, high = np.percentile(medians, [2.5, 97.5], method="lower")
    said = {"median": median, "low": low, "high": high}
    return {
        **{name: float(value) if np.isfinite(value) else None for name, value in said.items()},
        "reached": float(np.isfinite(pooled).mean()),
    }


def _for_good(trace: Trace, allowed_us: Callable[[float, float], float]) -> list[int | None]:
    """For each phase of the run: steps until it takes no more than is allowed above the oracle's time, which depends on
    the weighted times of NCCL's own choice and of the oracle."""
    scenario, steps = trace.scenario, len(trace.actions)
    starts = [int(start) for start in scenario.starts if start < steps]
    found: list[int | None] = []
    for phase, (start, end) in enumerate(pairwise([*starts, steps])):
        default, oracle = (float(us[phase] @ scenario.weight) for us in (scenario.default_us, scenario.oracle_us))
        total = np.cumsum(np.concatenate([[0.0], trace.regret_us[start:end]]))
        window = min(ADAPT_WINDOW, end - start)
        mean = (total[window:] - total[:-window]) / window
        late = np.flatnonzero(mean > allowed_us(default, oracle))
        at = int(late[-1]) + 1 if late.size else 0
        found.append(at if at < len(mean) else None)
    return found


def evaluate(
    splits: Mapping[str, Sequence[Scenario]],
    methods: Mapping[str, Factory],
    subject: str,
    procedure: Procedure,
    seed: int = 0,
) -> dict[str, Any]:
    """Measures ``subject``, one of ``methods``, on sets of scenarios, and the regret of all methods beside it.

    For each split what ``judged`` returns. Raises ValueError for a subject that is not among the methods or a split
    without scenarios.
    """
    if subject not in methods:
        raise ValueError(f"subject is {subject!r}; it must be one of the methods: {', '.join(methods)}")
    rows = []
    for name, scenarios in splits.items():
        if not scenarios:
            raise ValueError(f"split {name!r} has no scenarios; give each at least one")
        runs = {m: [play(s, factory, procedure, seed) for s in scenarios] for m, factory in methods.items()}
        rows.append(judged(name, runs[subject], {m: relative_regret(of) for m, of in runs.items()}, procedure))
    return {"splits": rows, "seeds": list(range(seed, seed + procedure.runs))}


def judged(
    name: str, runs: Sequence[Sequence[Trace]], regret: Mapping[str, float], procedure: Procedure
) -> dict[str, Any]:
    """The row of one split; ``runs`` has the subject's traces of each scenario, ``regret`` each method's.

    ``gap_closed``; ``geomean_vs_oracle`` of the keys' time ratios, and ``default_vs_oracle`` for NCCL's own choice;
    ``worst_key_vs_default`` and ``p99_key_vs_default``, the largest and the 99th percentile of the keys' times over
    NCCL's own choice; ``regret`` by method (``relative_regret``); ``adapted``, the share of shifts after which 90% of
    the gap was closed, and ``steps_to_adapt``, the median over those.
    """
    return {"name": name, **_split(runs, procedure), "regret": dict(regret)}


def _split(runs: Sequence[Sequence[Trace]], procedure: Procedure) -> dict[str, Any]:
    means = [[us.mean((0, 1)) for us in _measured(traces, procedure)] for traces in runs]
    time, default, oracle = (np.concatenate(column) for column in zip(*means, strict=True))
    adapted = [steps for traces in runs for trace in traces for steps in steps_to_adapt(trace)]
    known = [steps for steps in adapted if steps is not None]
    return {
        "gap_closed": gap_closed(runs, procedure),
        "geomean_vs_oracle": float(np.exp(np.log(time / oracle).mean())),
        "default_vs_oracle": float(np.exp(np.log(default / oracle).mean())),
        "worst_key_vs_default": float((time / default).max()),
        "p99_key_vs_default": float(np.percentile(time / default, 99)),
        "adapted": len(known) / len(adapted) if adapted else None,
        "steps_to_adapt": float(np.median(known)) if known else None,
    }


def _measured(traces: Sequence[Trace], procedure: Procedure) -> tuple[Float64, Float64, Float64]:
    """(runs, measured, K) times in us of the method, NCCL's own choice and the oracle."""
    last = slice(procedure.learn + procedure.warmup, procedure.steps)
    time, default, oracle = zip(
        *((t.time_us[last], t.default_us[last], t.oracle_us[last]) for t in traces), strict=True
    )
    return np.stack(time), np.stack(default), np.stack(oracle)


def _shares(traces: Sequence[Trace], procedure: Procedure) -> tuple[float, float]:
    """Weighted time of the method and of the oracle over that of NCCL's own choice."""
    time, default, oracle = (float((us @ traces[0].scenario.weight).sum()) for us in _measured(traces, procedure))
    return time / default, oracle / default


def _weighted_oracle(trace: Trace) -> Float64:
    """(S,) without noise, as the regret is."""
    return np.asarray(trace.scenario.oracle_us[trace.phases] @ trace.scenario.weight, np.float64)


def _interval(time: Float64, default: Float64) -> tuple[Float64, Float64]:
    """(K,) ends of the 95% interval of mean default over mean time, for times of shape (runs, measured, K)."""
    rng = np.random.default_rng(0)
    runs, measured, keys = time.shape
    drawn = rng.multinomial(runs, np.full(runs, 1 / runs), _RESAMPLES)
    # How often each collective of each run is in each resample.
    counts = rng.multinomial(drawn * measured, np.full(measured, 1 / measured)).reshape(_RESAMPLES, -1)
    ratio = (counts @ default.reshape(-1, keys)) / (counts @ time.reshape(-1, keys))
    low, high = np.percentile(ratio, [2.5, 97.5], axis=0)
    return low, high
