"""Plays many scenarios in several processes; each run is the same in whichever process it is."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Final, Protocol

from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.run import Trace, run_together
from dynamiccl_ray.cores import one_core
from dynamiccl_ray.evaluation.measures import Procedure
from dynamiccl_ray.simulation.scenario import Scenario

_Traces = list[list[Trace]]
Progress = Callable[[str], None]
"""Told in words where something is that takes long."""

# Runs that are played together at most: more take no less time each.
_TOGETHER: Final = 8


class Play(Protocol):
    """Plays methods on scenarios."""

    def __call__(
        self,
        scenarios: Sequence[Scenario],
        methods: Mapping[str, Factory],
        procedure: Procedure,
        progress: Progress = ...,
    ) -> dict[str, _Traces]:
        """By method its traces on each scenario, as ``measures.play`` has them. ``progress`` is called with the name of
        each method that is waited for."""


@contextlib.contextmanager
def players(processes: int) -> Iterator[Play]:
    """In so many processes; 1 for this one. Factories must be picklable."""
    with contextlib.ExitStack() as stack:
        spread: Callable[..., Any] = map
        if processes > 1:
            # Started from nothing: a process with threads, such as one that shows its progress, must not be copied.
            started = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(processes, started, initializer=_begin)
            spread = stack.enter_context(pool).map

        def play_all(
            scenarios: Sequence[Scenario],
            methods: Mapping[str, Factory],
            procedure: Procedure,
            progress: Progress = lambda _: None,
        ) -> dict[str, _Traces]:
            runs = [(scenario, seed) for scenario in scenarios for seed in range(procedure.runs)]
            # Of each method: together, but so that all processes have something to do.
            parts = max(math.ceil(len(runs) / _TOGETHER), math.ceil(processes / len(methods)))
            size = math.ceil(len(runs) / parts)
            of = [runs[i : i + size] for i in range(0, len(runs), size)]
            tasks = [(factory, part) for factory in methods.values() for part in of]
            played = iter(spread(functools.partial(_play, procedure.steps), *zip(*tasks, strict=True)))
            found = {}
            for name in methods:
                progress(name)
                traces = [trace for _ in of for trace in next(played)]
                # What comes back from another process brings a scenario of its own.
                shared = [replace(trace, scenario=s) for trace, (s, _) in zip(traces, runs, strict=True)]
                found[name] = [shared[i : i + procedure.runs] for i in range(0, len(runs), procedure.runs)]
            return found

        yield play_all


def _begin() -> None:
    """In a process that plays. One that is killed tells nobody, so whoever works for it looks."""
    one_core()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _play(steps: int, factory: Factory, runs: Sequence[tuple[Scenario, int]]) -> list[Trace]:
    scenarios, seeds = zip(*runs, strict=True)
    return run_together(scenarios, factory, steps, seeds)


def under(progress: Progress, name: str) -> Progress:
    """Puts a name before what it is told."""
    return lambda said: progress(f"{name}: {said}")
