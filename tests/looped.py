"""A control loop without a job: keys, and a network of which every time is known."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, OWN_ACTION, flat_action
from dynamiccl_ray.agent.observation import Context, Topology, encode_context, part
from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.control.loop import Drift, Due, Keys, Loop, Measured, Phase
from dynamiccl_ray.knobs import CHUNK_VALUES, N_PAIRS, OWN_PAIR

MIB = 1 << 20
CONTEXT = encode_context(Context(topology=Topology(ranks=16, nodes=2, intra="nvlink", inter="ib")))


def some_keys(n: int, *, group: int = 0, first: int = 0, small_chunk: bool = False) -> Keys:
    """Of one communicator, from 1 MiB on; all is allowed, but NCCL's own pair is only to be left alone, and the
    ``small_chunk`` that is tried where nobody knows the cluster is not. NCCL believes in no other pair. So what is
    drawn is what is asked for.
    """
    channels, chunks = np.ones((n, N_PAIRS, N_CHANNELS), np.bool_), np.ones((n, N_PAIRS, N_CHUNKS), np.bool_)
    channels[:, OWN_PAIR, 1:] = chunks[:, OWN_PAIR, 1:] = False
    chunks[..., CHUNK_VALUES.index(32 << 10)] &= small_chunk
    identity = np.arange(first, first + n, dtype=np.uint64) + np.uint64(group << 32)
    return Keys(
        group=np.full(n, group),
        identity=identity,
        salt=identity,
        collective=np.full(n, 4),
        nbytes=MIB << np.arange(n),
        pipelined=np.zeros(n, np.bool_),
        cost=np.full((n, N_PAIRS), 4.0, np.float32),
        channels=channels,
        chunks=chunks,
        context=np.tile(CONTEXT, (n, 1)),
        prior=nothing_expected(n),
        earlier=nothing_expected(n),
        lead=np.zeros(n, np.float32),
        noise=np.full(n, np.nan, np.float32),
    )


def own_channels(n: int, *, small_chunk: bool = False) -> Keys:
    """``some_keys`` of which only NCCL's own channels may be chosen: nothing is left to try beside what was drawn."""
    keys = some_keys(n, small_chunk=small_chunk)
    keys.channels[..., 1:] = False
    return keys


def loop_of(
    *parts: Keys,
    trigger: float = 1e6,
    guardrail: dict[str, Any] | None = None,
    explore: dict[str, Any] | None = None,
    **learning: int,
) -> Loop:
    """A loop over these keys; 4 samples of the baseline, 3 draws of 2 samples, 2 comparisons of 4. Exploring has no
    limit unless ``explore`` sets one."""
    of = {"baseline_samples": 4, "draws": 3, "draw_samples": 2, "compares": 2, "compare_samples": 4} | learning
    control = {
        "learning": of,
        "trigger": {"arl0": trigger},
        "guardrail": guardrail or {},
        "explore": explore or {"max_regret": 1},
    }
    loop = Loop(Control.model_validate(control))
    for keys in parts:
        loop.grow(keys)
    return loop


def pair(index: int) -> int:
    """The flat action of a pair with NCCL's own channels and chunk."""
    return int(flat_action(index, 0, 0))


def observed(loop: Loop, row: ArrayLike, log_us: ArrayLike, action: ArrayLike | None = None) -> list[Drift]:
    """Collectives of these rows in this order, under what is wanted unless an action is given."""
    rows, times = (np.array(x) for x in np.broadcast_arrays(np.atleast_1d(row), log_us))
    actions = loop.wanted[rows] if action is None else np.broadcast_to(action, rows.shape)
    return loop.observe(
        Measured(row=rows.astype(np.int64), action=actions, log_us=times.astype(float), skew=np.zeros(len(rows)))
    )


def decided(loop: Loop, *actions: int) -> Due:
    """What was due, now decided: drawn flat actions for all of it, or for each; else NCCL's own choice."""
    due = loop.due()
    drawn = np.broadcast_to(np.array(actions or [OWN_ACTION]), due.draw.sum())
    loop.decide(due.row, due.actions(drawn))
    return due


def random_choices(observation: Float32, rng: np.random.Generator) -> Int64:
    """(R, 3) indices into the heads that the masks of observations (R, SIZE) leave."""
    channels, chunks = (part(observation, f"valid_{name}") > 0 for name in ("channels", "chunks"))
    rows = np.arange(len(observation))
    # A random number for each valid choice; the largest wins.
    pair = (rng.random((len(rows), N_PAIRS)) * channels.any(-1)).argmax(-1)
    of_pair = [(rng.random((len(rows), mask.shape[-1])) * mask[rows, pair]).argmax(-1) for mask in (channels, chunks)]
    return np.stack([pair, *of_pair], -1)


Times = Callable[[int, int], float]
"""Mean log time of a row under a flat action."""


def play(
    loop: Loop,
    rounds: int,
    times: Times,
    *,
    sigma: float = 0.0,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    drawn: Callable[[Due], Int64] | None = None,
) -> list[Drift]:
    """So many rounds: each row is measured as often as it needs, then all that is due is decided."""
    rng, alarms = np.random.default_rng(seed), []
    for _ in range(rounds):
        chosen = np.arange(len(loop)) if rows is None else np.array(rows)
        row = np.repeat(chosen, loop.need[chosen])
        mean = np.array([times(int(r), int(loop.wanted[r])) for r in row])
        alarms += observed(loop, row, mean + sigma * rng.standard_normal(len(row)))
        due = loop.due()
        loop.decide(due.row, due.actions(np.zeros(due.draw.sum(), np.int64) if drawn is None else drawn(due)))
    return alarms


# Decisions of ``loop_of`` until a key exploits: those that are drawn, and those that compare.
DRAWS, COMPARES = 3, 2
UNTIL_EXPLOIT = 1 + DRAWS + COMPARES


def due_rows(loop: Loop) -> list[int]:
    return loop.due().row.tolist()


def exploiting(*parts: Keys, rows: list[int] | None = None, **settings: Any) -> Loop:
    """All keys, or some rows, exploit pair 1, which takes exp(2.9) us to NCCL's own exp(3)."""
    loop = loop_of(*parts, **settings)
    play(loop, UNTIL_EXPLOIT + 6, network(), sigma=0.01, rows=rows, drawn=lambda due: np.full(due.draw.sum(), pair(1)))
    assert (loop.phase[rows or slice(None)] == Phase.EXPLOIT).all()
    assert (loop.wanted[rows or slice(None)] == pair(1)).all()
    return loop


def network(*slow: int) -> Any:
    """What each action takes: half as long again on some rows."""
    return lambda row, action: (2.9 if action == pair(1) else 3.0) + 0.4 * (row in slow)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return dict(np.load(file, allow_pickle=False))
