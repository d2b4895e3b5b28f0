"""A coordinator without Ray, two runners with a rank each, and a network of which every time is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small import small_experiment
from test_reduction import collectives

from dynamiccl_ray.actions import Action
from dynamiccl_ray.actors.coordinator import Coordinator
from dynamiccl_ray.actors.messages import CommContext, CommReport, EpochContext, Member, RankNews
from dynamiccl_ray.actors.plan import Plan
from dynamiccl_ray.actors.status import Epoch
from dynamiccl_ray.control.agreement import Answer, Decision, MemoryStore
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.control.table import DecisionTable
from dynamiccl_ray.keys import key_of
from dynamiccl_ray.knobs import Algorithm, Protocol, pair_index

COMM = 0xABC
TERM = 9
KEY, OTHER = (key_of(4, 1 << k, False) for k in (20, 24))
RING = Action(pair=pair_index(Algorithm.RING, Protocol.LL))
TREE = Action(pair=pair_index(Algorithm.TREE, Protocol.LL))
REAL = {"kind": "nccl", "processes": None, "rate_hz": None}
# NCCL believes in one pair, so that nothing else is tried of itself.
COST = np.full((7, 3), 1000.0, np.float32)
COST[Algorithm.RING, Protocol.LL] = 10.0
LEARNING = {"baseline_samples": 4, "draws": 4, "draw_samples": 2, "compares": 2, "compare_samples": 4, "sequence": 2}


def member_of(rank: int, **changes: Any) -> Member:
    fields: dict[str, Any] = {
        "comm": COMM, "rank": rank, "term": TERM, "ranks": 2, "nodes": 2, "tuner_abi": 6, "profiler_abi": 6,
        "user_env": False,
    }  # fmt: skip
    return Member(**(fields | changes))


def experiment_of(**changes: Any) -> Any:
    return small_experiment("unit", **{"control": {"learning": LEARNING}, "epochs": {"per_round": 4}, **changes})


@pytest.fixture
def one_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every coordinator has the same, as if its ranks had been shown to it already."""
    monkeypatch.setattr("dynamiccl_ray.actors.coordinator.new_term", lambda above=0: above + TERM)


class Run:
    """A coordinator, two runners with a rank each, and a network on which each action takes what ``us`` says."""

    def __init__(self, store: MemoryStore | None = None, comm: int = COMM, **changes: Any) -> None:
        self.epochs: list[Epoch] = []
        self.store = store or MemoryStore()
        plan = Plan(run="r", experiment=experiment_of(**changes))
        self.core = Coordinator(plan, self.store, self.epochs.append)
        self.comm, self.dseq = comm, 0
        self.us = {KEY: dict.fromkeys(range(100_000), 100.0)}
        self.rng = np.random.default_rng(0)

    def join(self, **changes: Any) -> Run:
        for rank, runner in enumerate("ab"):
            self.core.join(runner, [member_of(rank, comm=self.comm, **changes)])
        self.core.close_epoch()  # the next context has them
        return self

    @property
    def context(self) -> EpochContext:
        return self.core.context

    @property
    def its(self) -> CommContext:
        return next(comm for comm in self.context.comms if comm.comm == self.comm)

    def news(self, **changes: Any) -> RankNews:
        return RankNews(**({"fingerprints": {}, "dropped": 0, "unused": 0} | changes))

    def report(self, rank: int, measured: Any, **changes: Any) -> CommReport:
        news = changes.pop("news", self.news())
        fields: dict[str, Any] = {
            "comm": self.comm, "collectives": measured, "unmatched": 0, "decided": np.zeros(0, np.int64), "refused": {},
            "costs": dict.fromkeys(self.us, COST), "max_channels": 8, "ranks": {rank: news},
        }  # fmt: skip
        return CommReport(**(fields | changes))

    def hand_in(self, *reports: CommReport) -> EpochContext:
        epoch = self.core.phases.epoch
        assert self.core.report("a", epoch, [reports[0]], 1.0) is None
        context = self.core.report("b", epoch, [reports[1]], 1.0)
        assert context is not None
        return context

    def commit(self, actions: dict[int, Action]) -> None:
        version = self.context.version
        table = DecisionTable.of(version, actions, max_channels=8)
        for rank, runner in enumerate("ab"):
            answer = Answer(rank=rank, digest=table.digest, hold_at=self.dseq + 1)
            raw = table.to_bytes() if rank == 0 else None
            decision = self.core.promise(runner, self.comm, version, [answer], raw, self.core.term)
        assert decision == Decision(version=version, switch_at=self.dseq + 1)

    def epoch(
        self, wants: Action = RING, n: int = 4, only: tuple[int, ...] | None = None, news: RankNews | None = None
    ) -> EpochContext:
        """What is to be drawn is ``wants``; ``n`` collectives of each key, at what their actions take."""
        its = self.its
        decided = its.due.actions(np.full(np.count_nonzero(its.due.draw), wants.flat))
        actions = its.wanted.copy()
        actions[its.due.row] = decided
        in_force = dict(zip(its.keys.tolist(), actions.tolist(), strict=True))
        if {k: a for k, a in in_force.items() if a} != its.in_force:
            self.commit({key: action_of(flat) for key, flat in in_force.items() if flat})
        version = self.core.comms[self.comm].version
        parts = []
        for key in only or tuple(self.us):
            mean = self.us[key][in_force.get(key, 0)] * 1e3
            times = (mean * np.exp(self.rng.normal(0, 0.01, n))).astype(int).tolist()
            dseq = list(range(self.dseq + 1, self.dseq + 1 + n))
            parts.append(collectives(dseq, times, key=key, version=version, pair=RING.pair, channels=8))
            self.dseq += n
        measured = np.concatenate(parts)
        told = news or self.news()
        return self.hand_in(*(self.report(r, measured, decided=decided, news=told) for r in range(2)))

    def until(self, phase: Phase, **how: Any) -> int:
        """Epochs until the run is in a phase."""
        for epochs in range(200):
            if self.core.phases.phase is phase:
                return epochs
            self.epoch(**how)
        raise AssertionError(f"{self.core.phases.phase.name} for ever")


def action_of(flat: int) -> Action:
    return next(a for a in (RING, TREE, Action()) if a.flat == flat)
