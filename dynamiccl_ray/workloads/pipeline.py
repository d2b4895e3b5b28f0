"""Pipeline schedules: the order of passes on each worker, and what an iteration takes when they are played.

GPipe: Huang et al. 2019 (arXiv:1811.06965). 1F1B: Narayanan et al. 2019 (PipeDream), 2021 (arXiv:2104.04473), also for
the interleaved order. Chimera, two pipelines in opposite directions: Li, Hoefler 2021 (arXiv:2107.06925).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynamiccl_ray.errors import ConfigError

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "chimera"]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward or backward of one micro-batch through one stage of the model."""

    backward: bool
    micro_batch: int
    stage: int


Order = tuple[tuple[Pass, ...], ...]
"""Per worker, what it does one after the other."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """An iteration."""

    makespan_us: float
    bubble_fraction: float
    """Share of the workers' time in which they wait."""
    peak_in_flight: tuple[int, ...]
    """Per worker, the most micro-batch activations that it holds at once, in units of one stage of the model."""
    sends: tuple[int, ...]
    """Per worker, activations and their gradients sent to other workers."""


def order(schedule: PipelineSchedule, workers: int, micro_batches: int, *, chunks: int = 1) -> Order:
    """The passes of every worker. ``chunks`` stages per worker are for ``interleaved`` only.

    Raises ConfigError where the schedule does not exist for these numbers.
    """
    if workers < 1 or micro_batches < 1:
        raise ConfigError(f"workers = {workers}, micro_batches = {micro_batches}: both must be at least 1")
    if schedule != "interleaved" and chunks != 1:
        raise ConfigError(f"chunks = {chunks}: only the interleaved schedule has several stages per worker")
    if schedule == "gpipe":
        return tuple(_gpipe(s, micro_batches) for s in range(workers))
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(s, workers, micro_batches) for s in range(workers))
    if schedule == "interleaved":
        if chunks < 2 or micro_batches % workers:
            raise ConfigError(
                f"chunks = {chunks}, micro_batches = {micro_batches}, workers = {workers}: the interleaved schedule "
                "needs 2 chunks or more, and micro-batches that are a multiple of the workers"
            )
        return tuple(_interleaved(s, workers, micro_batches, chunks) for s in range(workers))
    if workers % 2 or micro_batches % workers:
        raise ConfigError(
            f"workers = {workers}, micro_batches = {micro_batches}: Chimera needs an even number of workers, and "
            "micro-batches that are a multiple of them"
        )
    return _chimera(workers, micro_batches)


def play(orders: Order, n_stages: int, *, forward_us: float, backward_us: float, send_us: float = 0.0) -> Played:
    """Plays an order: a pass starts when its worker is free and its input is there, ``send_us`` after it was made on
    another worker. Times are per stage of the model."""
    ends: dict[Pass, tuple[float, int]] = {}
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    left = sum(len(passes) for passes in orders)
    while left:
        before = left
        for worker, passes in enumerate(orders):
            while position[worker] < len(passes):
                this = passes[position[worker]]
                inputs = _inputs(this, n_stages)
                if any(i not in ends for i in inputs):
                    break
                ready = max((t + (send_us if w != worker else 0.0) for t, w in (ends[i] for i in inputs)), default=0.0)
                free[worker] = max(free[worker], ready) + (backward_us if this.backward else forward_us)
                ends[this] = free[worker], worker
                position[worker] += 1
                left -= 1
        assert left < before, "the order deadlocks"
    makespan = max(free)
    busy = sum(backward_us if p.backward else forward_us for passes in orders for p in passes)
    owners = {this: worker for this, (_, worker) in ends.items()}
    sends = [0] * len(orders)
    for this in ends:
        for source in _inputs(this, n_stages):
            if owners[source] != owners[this]:
                sends[owners[source]] += 1
    return Played(
        makespan_us=makespan,
        bubble_fraction=1 - busy / (makespan * len(orders)),
        peak_in_flight=tuple(_peak(passes) for passes in orders),
        sends=tuple(sends),
    )


def _inputs(this: Pass, n_stages: int) -> list[Pass]:
    found = []
    if this.backward:
        found.append(Pass(backward=False, micro_batch=this.micro_batch, stage=this.stage))
    neighbour = this.stage + (1 if this.backward else -1)
    if 0 <= neighbour < n_stages:
        found.append(Pass(backward=this.backward, micro_batch=this.micro_batch, stage=neighbour))
    return found


def _peak(passes: tuple[Pass, ...]) -> int:
    held = peak = 0
    for p in passes:
        held += -1 if p.backward else 1
        peak = max(peak, held)
    return peak


def _gpipe(stage: int, micro_batches: int) -> tuple[Pass, ...]:
    return tuple(Pass(backward=b, micro_batch=m, stage=stage) for b in (False, True) for m in range(micro_batches))


def _one_forward_one_backward(stage: int, workers: int, micro_batches: int) -> tuple[Pass, ...]:
    warm = min(workers - stage - 1, micro_batches)
    forward = [Pass(backward=False, micro_batch=m, stage=stage) for m in range(micro_batches)]
    backward = [Pass(backward=True, micro_batch=m, stage=stage) for m in range(micro_batches)]
    return _alternate(forward, backward, warm)


def _interleaved(worker: int, workers: int, micro_batches: int, chunks: int) -> tuple[Pass, ...]:
    # Groups of ``workers`` micro-batches go through one chunk after the other; backward through the last chunk first.
    slots = [
        (group + m, chunk)
        for group in range(0, micro_batches, workers)
        for chunk in range(chunks)
        for m in range(workers)
    ]
    forward = [Pass(backward=False, micro_batch=m, stage=c * workers + worker) for m, c in slots]
    backward = [Pass(backward=True, micro_batch=m, stage=(chunks - 1 - c) * workers + worker) for m, c in slots]
    warm = min(2 * (workers - worker - 1) + (chunks - 1) * workers, len(slots))
    return _alternate(forward, backward, warm)


def _alternate(forward: list[Pass], backward: list[Pass], warm: int) -> tuple[Pass, ...]:
    steady = [p for pair in zip(forward[warm:], backward, strict=False) for p in pair]
    return (*forward[:warm], *steady, *backward[len(forward) - warm :])


def _chimera(workers: int, micro_batches: int) -> Order:
    """Even micro-batches enter at worker 0, odd ones at the last worker: each holds two stages of the model.

    The order is that of equal unit passes played greedily, backward before forward, one block of ``workers``
    micro-batches before the next. It reaches the paper's 2m + p - 2 slots.
    """
    done: dict[Pass, int] = {}
    orders: list[list[Pass]] = [[] for _ in range(workers)]
    pending: list[list[Pass]] = [[] for _ in range(workers)]
    for m in range(micro_batches):
        for stage in range(workers):
            worker = stage if m % 2 == 0 else workers - 1 - stage
            pending[worker] += [Pass(backward=b, micro_batch=m, stage=stage) for b in (False, True)]
    slot = 0
    while any(pending):
        made = []
        for worker, todo in enumerate(pending):
            ready = [p for p in todo if all(done.get(i, slot) < slot for i in _inputs(p, workers))]
            if ready:
                chosen = min(ready, key=lambda p: (not p.backward, p.micro_batch, -p.stage))
                todo.remove(chosen)
                orders[worker].append(chosen)
                made.append(chosen)
        done.update(dict.fromkeys(made, slot))
        slot += 1
    return tuple(tuple(passes) for passes in orders)
