"""Plays many scenarios in several processes; each run is the same in whichever process it is."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from dynamiccl_ray.baselines.method import Factory
from dynamiccl_ray.baselines.run import Trace, run
from dynamiccl_ray.cores import one_core
from dynamiccl_ray.evaluation.measures import Procedure
from dynamiccl_ray.simulation.scenario import Scenario

Play = Callable[[Sequence[Scenario], Factory, Procedure], list[list[Trace]]]
"""The traces of one method on each scenario, as ``measures.play`` has them."""


@contextlib.contextmanager
def players(processes: int) -> Iterator[Play]:
    """In so many processes; 1 for this one. Factories must be picklable."""
    with contextlib.ExitStack() as stack:
        spread: Callable[..., Any] = map
        if processes > 1:
            # Started from nothing: a process with threads, such as one that shows its progress, must not be copied.
            started = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(processes, started, initializer=one_core)
            spread = stack.enter_context(pool).map

        def play_all(scenarios: Sequence[Scenario], factory: Factory, procedure: Procedure) -> list[list[Trace]]:
            seeds = range(procedure.runs)
            of, n = [s for s in scenarios for _ in seeds], len(scenarios)
            traces = spread(run, of, [factory] * len(of), [procedure.steps] * len(of), [*seeds] * n)
            # What comes back from another process brings a scenario of its own.
            shared = [replace(trace, scenario=s) for trace, s in zip(traces, of, strict=True)]
            return [shared[i * procedure.runs : (i + 1) * procedure.runs] for i in range(n)]

        yield play_all
