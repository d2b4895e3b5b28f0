"""The coordinator: agreement between ranks, reduction over ranks, the Trigger Agent and the state of the run.

A plain object: nothing in it waits, so that the serial mode and most tests need no Ray; ``coordinator_actor.py`` puts
an asyncio front on it. Whatever must survive a restart goes to the store before anyone hears of it.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.messages import CommContext, Context, Member, Phase, RankEpoch
from actors.rewards import Rewards
from dynamiccl_ray import observation
from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, Action
from dynamiccl_ray.agreement import Agreement, Answer, Decision, Store, decision_key
from dynamiccl_ray.book import Alarm, KeyBook, Samples
from dynamiccl_ray.experiment import Online
from dynamiccl_ray.gates import hands_off
from dynamiccl_ray.keys import key_name
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS
from dynamiccl_ray.observation import Topology
from dynamiccl_ray.reward import total
from dynamiccl_ray.table import DecisionTable

log = logging.getLogger("dynamiccl.coordinator")

# Rounds that status and checkpoints look back on.
HISTORY_ROUNDS = 2000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the coordinator is told at the start, over and above the experiment."""

    run: str
    experiment: Online
    topology: dict[str, Any]
    """Fields of ``Topology`` that no rank can know: links, tiers, NVLS."""
    played: frozenset[int] | None = None
    """Ranks that processes stand for, if not all of them."""
    sms: int | None = None
    """Streaming multiprocessors of a GPU; None where nobody says."""
    valid: dict[int, Any] | None = None
    """Key -> (N_PAIRS, N_CHANNELS) actions that the fabric has data for; None leaves it to NCCL."""


@dataclass
class _Comm:
    """One communicator."""

    book: KeyBook
    agreement: Agreement
    rewards: Rewards
    members: dict[int, Member] = field(default_factory=dict)
    actions: dict[int, Action] = field(default_factory=dict)
    """In force, by key; keys that are missing are NCCL's own."""
    version: int = 0
    """In force."""
    next_version: int = 1
    proposed: dict[int, dict[int, Action]] = field(default_factory=dict)
    """Version -> actions, until decided."""
    max_channels: int = 1
    fingerprints: dict[int, dict[int, int]] = field(default_factory=dict)
    """Window -> rank -> hash."""
    off: str = ""
    """Why tuning is off; empty while it is on."""
    adopt: bytes | None = None
    switches: int = 0
    reward: Any = None
    """(K,) of the last epoch; None without one."""
    unmatched: int = 0


class Coordinator:
    """Not thread-safe; every method returns at once. ``report`` and ``promise`` return None while others are missing.

    ``observer`` hears of every closed epoch with the samples that were reduced.
    """

    def __init__(self, plan: Plan, store: Store, observer: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.plan = plan
        self._store = store
        self._observer = observer
        self.experiment = plan.experiment
        self.comms: dict[int, _Comm] = {}
        self._runners: dict[str, set[tuple[int, int]]] = {}
        self._reports: dict[str, list[RankEpoch]] = {}
        self._entropy: list[float] = []
        self.epoch = 0
        self.round = 0
        self.phase = Phase.BASELINE
        self.phase_rounds = 0
        self.heat = 0.0
        self._after_baseline = Phase.LEARN
        self._round_entropy: list[float] = []
        self.unused = 0
        self.alarms: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.collectives = 0
        self.dropped: dict[tuple[int, int], int] = {}
        self.stopping = False
        saved = store.get(f"{plan.run}/state")
        if saved is not None:
            self._restore(pickle.loads(saved))
        self.context = self._context(round_end=False)

    # -- runners --

    def join(self, runner: str, members: list[Member]) -> Context:
        """A runner serves these ranks from now on, and no others."""
        for comm_id, rank in self._runners.get(runner, set()) - {(m.comm, m.rank) for m in members}:
            self.comms[comm_id].members.pop(rank, None)
        self._runners[runner] = {(m.comm, m.rank) for m in members}
        for other, ranks in self._runners.items():
            if other != runner:
                ranks -= self._runners[runner]
        for member in members:
            comm = self._comm(member)
            comm.members[member.rank] = member
            comm.next_version = max(comm.next_version, member.version + 1)
        for comm_id, comm in self.comms.items():
            self._check_members(comm_id, comm)
        return self.context

    def leave(self, runner: str) -> None:
        """A runner is gone; its ranks wait for another one."""
        for comm_id, rank in self._runners.pop(runner, set()):
            self.comms[comm_id].members.pop(rank, None)
        self._reports.pop(runner, None)

    def missing_reports(self) -> set[str]:
        """Runners that the current epoch still waits for."""
        return {r for r, ranks in self._runners.items() if ranks} - self._reports.keys()

    def _comm(self, member: Member) -> _Comm:
        if member.comm not in self.comms:
            expected = self.plan.played if self.plan.played is not None else range(member.ranks)
            settings = self.experiment
            valid: Any = self.plan.valid
            if valid is None:
                valid = np.zeros((N_PAIRS, N_CHANNELS), np.bool_)
                valid[:, [CHANNEL_VALUES.index(c) for c in settings.actions.channels]] = True
            chunks = np.zeros((N_PAIRS, N_CHUNKS), np.bool_)
            chunks[:, [CHUNK_VALUES.index(c) for c in settings.actions.chunk_bytes]] = True
            self.comms[member.comm] = _Comm(
                book=KeyBook(
                    arl0=settings.trigger.arl0,
                    guardrail_margin=settings.guardrail.margin,
                    guardrail_samples=settings.guardrail.samples,
                    valid=valid,
                    valid_chunks=chunks,
                ),
                agreement=Agreement(self._store, self.plan.run, member.comm, expected),
                rewards=Rewards(
                    settings.reward, sms=self.plan.sms, tier=self._topology(member).tier_max, nodes=member.nodes
                ),
            )
        return self.comms[member.comm]

    def _check_members(self, comm_id: int, comm: _Comm) -> None:
        """Ranks that disagree on what is loaded must not be tuned: a table would not mean the same to all."""
        if comm.off or not self._complete(comm):
            return
        for what in ("tuner_abi", "profiler_abi", "user_env", "ranks", "nodes"):
            values = {getattr(m, what) for m in comm.members.values()}
            if len(values) > 1:
                self._turn_off(comm_id, comm, f"ranks differ in {what}: {sorted(values)}")
                return
        member = comm.members[comm.agreement.leader]
        if member.tuner_abi == 0 or member.profiler_abi == 0:
            self._turn_off(comm_id, comm, "tuner and profiler are not both loaded; see `dynamiccl plugin env`")
        elif member.user_env:
            self._turn_off(comm_id, comm, "NCCL_ALGO or NCCL_PROTO is set and wins")
        elif why := hands_off(self._about(member)):
            self._turn_off(comm_id, comm, why)

    def _turn_off(self, comm_id: int, comm: _Comm, why: str) -> None:
        comm.off = why
        log.warning("communicator %016x: tuning is off: %s", comm_id, why)

    def _complete(self, comm: _Comm) -> bool:
        return comm.members.keys() >= comm.agreement.ranks

    # -- one epoch --

    def report(
        self,
        runner: str,
        epoch: int,
        ranks: list[RankEpoch],
        entropy: float | None,
    ) -> Context | None:
        """Takes one runner's epoch. Returns the next context once it is there."""
        if runner not in self._runners:
            # Given up on, or from before a restart of the coordinator: it has to join again.
            return dataclasses.replace(self.context, round_end=True)
        if epoch < self.epoch:
            return self.context  # asked again: that epoch is closed
        self._reports[runner] = ranks
        if entropy is not None:
            self._entropy.append(entropy)
        if not self.missing_reports():
            return self.close_epoch()
        return None

    def close_epoch(self, *, cut: bool = False) -> Context:
        """Reduces what was reported, moves the run on, and makes the next context. ``cut`` ends the round as well, so
        that whoever drives the runners can bring back the ones that are missing."""
        per_comm: dict[int, list[RankEpoch]] = {}
        for ranks in self._reports.values():
            for rank in ranks:
                per_comm.setdefault(rank.comm, []).append(rank)
                self.dropped[rank.comm, rank.rank] = rank.dropped
                self.unused += rank.unused
        alarms: list[tuple[int, Alarm]] = []
        for comm_id, comm in self.comms.items():
            comm.reward = None
            reports = per_comm.get(comm_id, [])
            self._compare_fingerprints(comm_id, comm, reports)
            samples = self._reduce(comm, reports)
            if samples is None:
                continue
            self.collectives += len(samples.key)
            watch = self.phase is Phase.EXPLOIT
            found = comm.book.add(samples, comm.actions, watch=watch)
            parts = comm.rewards.terms(samples, comm.book, comm.actions, max_channels=comm.max_channels)
            comm.reward = total(parts)
            alarms += [(comm_id, alarm) for alarm in found]
            if self._observer is not None:
                self._observer(
                    {
                        "comm": comm_id,
                        "epoch": self.epoch,
                        "phase": self.phase.value,
                        "version": comm.version,
                        "samples": samples,
                        "actions": dict(comm.actions),
                        "terms": parts,
                    }
                )
        if self._entropy:
            self._round_entropy.append(float(np.mean(self._entropy)))
        self._reports, self._entropy = {}, []
        self.epoch += 1
        round_end = self.epoch % self.experiment.epochs.per_round == 0
        if alarms:
            self._alarm(alarms)
        if round_end:
            self._end_round()
        self.context = self._context(round_end=round_end or cut)
        self._save()
        return self.context

    def _reduce(self, comm: _Comm, reports: list[RankEpoch]) -> Samples | None:
        """Only collectives that every rank reports count, at the time of the slowest rank."""
        if {r.rank for r in reports} != comm.agreement.ranks:
            return None
        for report in reports:
            for key, cost in report.costs.items():
                comm.book.offer(key, cost)
            for key in report.refused:
                comm.book.refuse(key, comm.actions.get(key, Action()).pair)
            comm.max_channels = max(comm.max_channels, report.max_channels)
        comm.rewards.hear(reports, baseline=self.phase is Phase.BASELINE)
        reports = [r for r in reports if r.version == comm.version]
        if {r.rank for r in reports} != comm.agreement.ranks:
            return None
        common = reports[0].dseq
        for report in reports[1:]:
            common = np.intersect1d(common, report.dseq)
        if not len(common):
            return None
        times = np.empty((len(reports), len(common)))
        pair, channels = np.zeros(len(common), np.int64), np.zeros(len(common), np.int64)
        for row, report in zip(times, reports, strict=True):
            _, _, at = np.intersect1d(common, report.dseq, return_indices=True)
            row[:] = report.exec_ns[at] / 1e3
            pair, channels = np.maximum(pair, report.pair[at]), np.maximum(channels, report.channels[at])
            comm.unmatched += len(report.dseq) - len(common)
        _, _, at = np.intersect1d(common, reports[-1].dseq, return_indices=True)
        slowest = times.max(0)
        return Samples(
            key=reports[-1].key[at].astype(np.int64),
            nbytes=reports[-1].nbytes[at].astype(np.int64),
            dseq=common.astype(np.int64),
            time_us=slowest,
            skew=np.log(slowest / np.median(times, 0)),
            pair=pair,
            channels=channels,
        )

    def _compare_fingerprints(self, comm_id: int, comm: _Comm, reports: list[RankEpoch]) -> None:
        """Ranks that ran different programs cannot share decisions."""
        for report in reports:
            for window, value in report.fingerprints.items():
                comm.fingerprints.setdefault(window, {})[report.rank] = value
        for window in sorted(comm.fingerprints)[:-64]:
            del comm.fingerprints[window]
        for window, values in comm.fingerprints.items():
            if len(set(values.values())) > 1 and not comm.off:
                self._turn_off(comm_id, comm, f"ranks called different collectives in window {window}")

    # -- phases --

    def _alarm(self, alarms: list[tuple[int, Alarm]]) -> None:
        comm_id, first = min(alarms, key=lambda a: a[1].dseq)
        self.alarms.append({"comm": comm_id, "key": first.key, "dseq": first.dseq, "epoch": self.epoch})
        log.info("drift on %s at call %d: adapting", key_name(first.key), first.dseq)
        for comm in self.comms.values():
            comm.book.shift()
            comm.rewards.shift()
        self._enter(Phase.BASELINE)
        self._after_baseline = Phase.ADAPT

    def _enter(self, phase: Phase) -> None:
        self.phase, self.phase_rounds = phase, 0
        if phase is Phase.ADAPT:
            self.heat = self.experiment.learning.heat
        if phase is Phase.EXPLOIT:
            self.heat = 0.0
            for comm in self.comms.values():
                comm.book.cusum.reset()

    def _end_round(self) -> None:
        entropy = float(np.mean(self._round_entropy)) if self._round_entropy else None
        self._round_entropy = []
        self.history.append(
            {
                "round": self.round,
                "epoch": self.epoch,
                "phase": self.phase.value,
                "entropy": entropy,
                "collectives": self.collectives,
                "versions": {f"{c:x}": comm.version for c, comm in self.comms.items()},
            }
        )
        del self.history[:-HISTORY_ROUNDS]
        self.round += 1
        self.phase_rounds += 1
        learning = self.experiment.learning
        if self.phase is Phase.BASELINE:
            if self.experiment.mode != "observe" and self._baseline_known():
                for comm in self.comms.values():
                    comm.book.settle()
                self._enter(self._after_baseline)
        elif self.phase in (Phase.LEARN, Phase.ADAPT):
            self.heat = self.heat * learning.heat_decay if self.heat > 0.05 else 0.0
            settled = (
                entropy is not None and entropy < learning.settled_entropy and self.phase_rounds >= learning.min_rounds
            )
            if (settled and self.heat == 0.0) or self.phase_rounds >= learning.max_rounds:
                self._enter(Phase.EXPLOIT)
        limit = self.experiment.stop.rounds
        if limit is not None and self.round >= limit:
            self.stopping = True

    def _baseline_known(self) -> bool:
        need = self.experiment.epochs.baseline_samples
        known = [comm.book.baseline_n for comm in self.comms.values() if not comm.off and self._complete(comm)]
        return bool(known) and all(len(n) > 0 and (n >= need).all() for n in known)

    # -- agreement --

    def promise(
        self, runner: str, comm_id: int, version: int, answers: list[Answer], table: bytes | None
    ) -> Decision | None:
        """Takes the answers of one runner's ranks; None while other ranks have not answered."""
        comm = self.comms.get(comm_id)
        if comm is None:  # from before a restart, and nothing of it was saved: it cannot be open
            abort = Decision(version=version, switch_at=None)
            key = decision_key(self.plan.run, comm_id, version)
            return Decision.parse(self._store.put_if_absent(key, abort.encode()))
        decision: Decision | None = None
        for answer in answers:
            if answer.rank == comm.agreement.leader and table is not None:
                comm.proposed[version] = DecisionTable.from_bytes(table).actions()
                # Before the decision can be recorded: a successor must know what was decided.
                self._store.put(self._proposal_key(comm_id), pickle.dumps((version, comm.proposed[version])))
                comm.adopt = table
            decision = comm.agreement.answer(version, answer)
        if decision is not None:
            self._decided(comm, decision)
        return decision

    def open_version(self, comm_id: int) -> int | None:
        """The version whose answers are being gathered."""
        return self.comms[comm_id].agreement.open_version

    def decision(self, comm_id: int, version: int) -> Decision | None:
        """What has been recorded about a version."""
        return self.comms[comm_id].agreement.recorded(version)

    def abort(self, comm_id: int, version: int) -> Decision:
        """Time is up for a version; returns what holds."""
        comm = self.comms[comm_id]
        decision = comm.agreement.abort(version)
        self._decided(comm, decision)
        return decision

    def _decided(self, comm: _Comm, decision: Decision) -> None:
        if decision.switch_at is not None and comm.version < decision.version:
            comm.version = decision.version
            comm.switches += 1
            if decision.version in comm.proposed:
                comm.actions = comm.proposed[decision.version]
        if not decision.adopt_leader:
            comm.adopt = None
        comm.proposed = {v: a for v, a in comm.proposed.items() if v > decision.version}

    def _proposal_key(self, comm_id: int) -> str:
        return f"{self.plan.run}/{comm_id:x}/proposal"

    def _adopt_decided(self, comm_id: int, comm: _Comm) -> None:
        """A version may have been committed after the state was last saved."""
        raw = self._store.get(self._proposal_key(comm_id))
        if raw is None:
            return
        version, actions = pickle.loads(raw)
        decision = comm.agreement.recorded(version)
        if decision is not None and decision.switch_at is not None and version > comm.version:
            comm.version, comm.actions = version, actions

    # -- context --

    def _context(self, *, round_end: bool) -> Context:
        comms = []
        for comm_id, comm in self.comms.items():
            if not self._complete(comm):
                continue
            view = comm.book.view(comm.actions, self.heat)
            member = comm.members[comm.agreement.leader]
            reward = comm.reward
            if reward is None or len(reward) != len(comm.book.keys):
                reward = np.full(len(comm.book.keys), np.nan)
            comm.agreement.open(comm.next_version)
            comms.append(
                CommContext(
                    comm=comm_id,
                    context=self._about(member),
                    keys=comm.book.keys.copy(),
                    view=view,
                    reward=reward,
                    in_force=dict(comm.actions),
                    version_in_force=comm.version,
                    version=comm.next_version,
                    max_channels=comm.max_channels,
                    off=bool(comm.off),
                )
            )
            comm.next_version += 1
        return Context(
            epoch=self.epoch,
            phase=self.phase,
            greedy=self.phase is Phase.EXPLOIT,
            keep=self.phase is Phase.EXPLOIT and self.phase_rounds > 0,
            apply=self.experiment.mode == "active",
            seed=self.experiment.seed,
            round_end=round_end,
            comms=tuple(comms),
            adopt={c: comm.adopt for c, comm in self.comms.items() if comm.adopt is not None},
            stop=self.stopping,
        )

    def _about(self, member: Member) -> observation.Context:
        """What is known of a communicator before anything is measured."""
        told = self.plan.experiment
        return observation.Context(
            topology=self._topology(member), workload=told.workload, scheduler=told.scheduler, llm=told.llm
        )

    def _topology(self, member: Member) -> Topology:
        return Topology(ranks=member.ranks, nodes=member.nodes, **self.plan.topology)

    def status(self) -> dict[str, Any]:
        """Where the run stands; safe to ask at any time."""
        return {
            "epoch": self.epoch,
            "round": self.round,
            "phase": self.phase.value,
            "phase_rounds": self.phase_rounds,
            "collectives": self.collectives,
            "switches": sum(c.switches for c in self.comms.values()),
            "digest_mismatches": sum(c.agreement.digest_mismatches for c in self.comms.values()),
            "unmatched": sum(c.unmatched for c in self.comms.values()),
            "unused": self.unused,
            "dropped": sum(self.dropped.values()),
            "alarms": list(self.alarms),
            "history": list(self.history),
            "off": {f"{c:x}": comm.off for c, comm in self.comms.items() if comm.off},
            "ranks": sum(len(c.members) for c in self.comms.values()),
            "runners": sorted(self._runners),
        }

    def book(self, comm_id: int) -> KeyBook:
        return self.comms[comm_id].book

    # -- durability --

    _DURABLE = (
        "epoch", "round", "phase", "phase_rounds", "heat", "_after_baseline", "alarms", "history", "collectives",
    )  # fmt: skip

    def _save(self) -> None:
        state = {name: getattr(self, name) for name in self._DURABLE}
        state["comms"] = {
            c: {
                "book": comm.book.state(),
                "rewards": comm.rewards.state(),
                "members": comm.members,
                "actions": comm.actions,
                "version": comm.version,
                "next_version": comm.next_version,
                "max_channels": comm.max_channels,
                "off": comm.off,
                "switches": comm.switches,
            }
            for c, comm in self.comms.items()
        }
        self._store.put(f"{self.plan.run}/state", pickle.dumps(state))

    def _restore(self, state: dict[str, Any]) -> None:
        for name in self._DURABLE:
            setattr(self, name, state[name])
        for comm_id, saved in state["comms"].items():
            comm = self._comm(next(iter(saved["members"].values())))
            comm.book.restore(saved["book"])
            comm.rewards.restore(saved["rewards"])
            for name in ("members", "actions", "version", "max_channels", "off", "switches"):
                setattr(comm, name, saved[name])
            self._adopt_decided(comm_id, comm)
            # Versions that were handed out after the last save may be open somewhere: never use them again.
            comm.next_version = saved["next_version"] + 1000
