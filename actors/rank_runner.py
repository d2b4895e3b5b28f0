"""The rank-local actor: drains its ranks' records, infers the next table beside them, and takes part in agreement.

An RLlib EnvRunner: ``sample`` runs one round of decision epochs on the live job and returns one episode per key
stream. Every runner computes the same decisions from (weights, context, seed); each returns the streams of its own
share of the keys, so that nothing is learned twice.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from actors.messages import CommContext, Context, Coordination, Member, Phase, RankEpoch
from actors.runner import PolicyRunner
from actors.streams import Decided, Streams
from dynamiccl_ray import observation, policy
from dynamiccl_ray.actions import Action
from dynamiccl_ray.agreement import Answer
from dynamiccl_ray.errors import ChannelError
from dynamiccl_ray.knobs import N_ALGORITHMS, N_PROTOCOLS, OWN_PAIR
from dynamiccl_ray.table import DecisionTable
from plugin_bridge.channel import AGGREGATE, APPLIED, DECIDED, RECORD_DTYPE, Channel, Prepared, segments
from plugin_bridge.timers import TimerCheck

log = logging.getLogger("dynamiccl.runner")

# The hold lies this many times the usual way to the coordinator and back ahead. Too near costs a wait at the hold,
# too far only delays the switch.
HOLD_FACTOR = 2.0
FIRST_PROMISE_S = 0.02
PROMISE_SMOOTHING = 0.1
LEAST_MARGIN = 8
POLL_S = 0.001
EXPLOIT_POLL_S = 0.02
LOOK_AFTER_S = 0.25
IDLE_S = 0.05


@dataclass(eq=False)
class _Rank:
    """One claimed segment."""

    channel: Channel
    comm: int
    rank: int
    timers: TimerCheck = field(default_factory=TimerCheck)
    records: list[npt.NDArray[Any]] = field(default_factory=list)
    cost_rows: int = 0
    max_channels: int = 1
    unused: int = 0
    last_dseq: int = 0
    last_seen: float = 0.0
    rate_hz: float = 0.0
    reports: int = 0
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    faults: int = 0

    def drain(self, buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """New records whose timers can be believed."""
        rejected = self.timers.rejected
        records = self.timers.take(self.channel.drain(buffer))
        self.unused += self.timers.rejected - rejected
        return records

    def listen(self) -> None:
        """Keeps what the training script has reported since the last look."""
        said = self.channel.job
        if said is None:
            return
        self.faults = said.faults
        if said.reports != self.reports:
            self.reports = said.reports
            self.steps[said.step] = (said.iteration_s, said.loss)


class RankRunner(PolicyRunner):
    """``config.env_config``: ``coordination`` (called to reach the coordinator), ``job`` and ``experiment``.

    ``advance``, if there, lets an emulated job run that many more collectives and then stand still: epochs then
    begin and end at the same call in every run, and a run can be repeated exactly.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        env = config.env_config
        self._coordination: Coordination = env["coordination"]()
        self._job: str = env["job"]
        self._experiment = env["experiment"]
        self._name = f"{os.uname().nodename}:{self.worker_index or 0}"
        self._ranks: dict[str, _Rank] = {}
        self._advance: Callable[[int], int] | None = env.get("advance")
        self._version: dict[int, int] = {}
        self._promise_s = FIRST_PROMISE_S
        self._told: set[str] = set()
        self._alive, self._looked_at = True, 0.0
        self._buffer = np.empty(1 << 16, RECORD_DTYPE)

        # A restarted runner: its ranks may be waiting.
        self._claim()
        self._settle_orphans()
        for rank in self._ranks.values():
            self._settle(rank.channel, rank.comm, rank.rank)

    # -- RLlib's interface --

    def stop(self) -> None:
        for rank in self._ranks.values():
            rank.channel.close()
        self._ranks = {}

    def sample(self, **_: Any) -> list[SingleAgentEpisode]:
        """One round: decision epochs until the coordinator ends it. One episode per key of this runner's share."""
        self._claim()
        if not self._ranks:
            time.sleep(0.2)
        context = self._coordination.join(self._name, [self._member(r) for r in self._ranks.values()])
        index, share = self.share
        streams = Streams(lambda key: key % share == index)
        lstm: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        while not context.stop:
            decided = {c.comm: self._decide(c, context, lstm.setdefault(c.comm, {})) for c in context.comms}
            for comm in context.comms:
                if decided[comm.comm].learn:
                    streams.open(comm.comm, decided[comm.comm])
                self._switch(comm, context, decided[comm.comm])
            self._collect({c.comm for c in context.comms}, EXPLOIT_POLL_S if context.keep else POLL_S)
            entropies = [d.entropy for d in decided.values() if d.entropy is not None]
            report = [self._epoch(rank) for rank in self._ranks.values()]
            context = self._coordination.report(
                self._name, context.epoch, report, float(np.mean(entropies)) if entropies else None
            )
            for comm in context.comms:
                if comm.comm in decided and decided[comm.comm].learn:
                    for key in streams.close_step(comm, decided[comm.comm]):
                        lstm[comm.comm].pop(key, None)
            if context.round_end:
                break
        return streams.episodes()

    def activate(self, state: dict[str, Any]) -> float:
        """Takes weights, decides with them and waits until the new table is in force on this runner's ranks. Returns
        the machine's monotonic time then. For ``dynamiccl bench activation``."""
        self.set_state(state)
        self._claim()
        context = self._coordination.join(self._name, [self._member(r) for r in self._ranks.values()])
        for comm in context.comms:
            self._switch(comm, context, self._decide(comm, context, {}))
        while not all(r.channel.fold() for r in self._ranks.values()):
            time.sleep(0.0002)
        at = time.monotonic()
        for rank in self._ranks.values():
            rank.channel.drain(self._buffer)
        self._coordination.report(self._name, context.epoch, [], None)
        return at

    # -- segments --

    def _claim(self) -> None:
        """Takes every unclaimed segment of the job on this node, up to its share of ranks, and drops dead ones."""
        for name, rank in list(self._ranks.items()):
            if not rank.channel.alive:
                rank.channel.close()
                del self._ranks[name]
        room = self._experiment.ray.ranks_per_actor
        for path in sorted(segments(self._job)):
            if len({(r.comm, r.rank) for r in self._ranks.values()}) >= room or path.name in self._ranks:
                continue
            try:
                channel = Channel(path)
            except ChannelError as e:
                # Another runner's, or still starting: looked at again next round. Of another build: said once.
                if str(e) not in self._told:
                    self._told.add(str(e))
                    log.info("not served: %s", e) if "claimed" in str(e) else log.warning("not served: %s", e)
                continue
            identity = channel.identity
            if identity.rank is None or identity.ranks < 2 or not channel.alive:
                channel.close()
                continue
            self._ranks[path.name] = _Rank(channel, identity.comm_id, identity.rank, last_seen=time.monotonic())

    def _member(self, rank: _Rank) -> Member:
        identity, status = rank.channel.identity, rank.channel.status
        return Member(
            comm=rank.comm,
            rank=rank.rank,
            ranks=identity.ranks,
            nodes=identity.nodes,
            tuner_abi=identity.tuner_abi,
            profiler_abi=identity.profiler_abi,
            user_env=identity.user_env,
            dseq=status.dseq,
            version=max(status.base_version, status.pending_version),
        )

    # -- decisions --

    def _decide(self, comm: CommContext, context: Context, lstm: dict[int, dict[str, torch.Tensor]]) -> Decided:
        """The same on every rank: nothing here was measured by this rank alone."""
        n = len(comm.keys)
        if n == 0 or (context.keep and not context.round_end):
            # Nothing to decide. While decisions are kept, the policy is asked about new keys once a round.
            return Decided(
                keys=comm.keys,
                obs=np.zeros((n, observation.SIZE), np.float32),
                actions=_in_force(comm),
                log_probs=np.zeros(n, np.float32),
                states={},
                entropy=None,
                learn=False,
            )
        obs = observation.encode(comm.context, comm.view)
        net: policy.PolicyNetwork = self.module.net
        initial = net.initial_state()
        state = {
            k: torch.stack([lstm[int(key)][k] if int(key) in lstm else initial[k] for key in comm.keys])
            for k in initial
        }
        with torch.no_grad():
            x = torch.from_numpy(obs).unsqueeze(1)
            features, after = net.features(x, state)
            noise = None
            if not context.greedy:
                noise = torch.from_numpy(policy.gumbel(context.seed, context.epoch, comm.keys)).unsqueeze(1)
            actions, log_probs, entropies = (y[:, 0] for y in policy.decide(net, x, features, noise))
        if context.phase is Phase.BASELINE or comm.off:
            actions = torch.zeros_like(actions)
        elif context.keep:
            kept = _in_force(comm)
            known = torch.from_numpy(np.isin(comm.keys, list(comm.in_force)))
            valid = torch.from_numpy(comm.view.valid_channels[np.arange(n), kept[:, 0], kept[:, 1]])
            actions = torch.where((known & valid)[:, None], torch.from_numpy(kept), actions)
        for i, key in enumerate(comm.keys):
            lstm[int(key)] = {k: after[k][i] for k in after}
        return Decided(
            keys=comm.keys,
            obs=obs,
            actions=actions.numpy(),
            log_probs=log_probs.numpy(),
            states={k: v.numpy() for k, v in after.items()},
            entropy=float(entropies.mean()),
            learn=context.phase in (Phase.LEARN, Phase.ADAPT) and not comm.off,
        )

    def _switch(self, comm: CommContext, context: Context, decided: Decided) -> None:
        """Puts the decisions in force on all ranks, or none; skipped when nothing changes."""
        wanted = {
            int(key): Action(pair=int(a[0]), channels=int(a[1]), chunk=int(a[2]))
            for key, a in zip(decided.keys, decided.actions, strict=True)
            if a.any()
        }
        mine = [r for r in self._ranks.values() if r.comm == comm.comm]
        for rank in mine:
            self._settle(rank.channel, rank.comm, rank.rank)
        self._version[comm.comm] = comm.version_in_force
        if comm.comm not in context.adopt and wanted == comm.in_force:
            decided.in_force = True
            return
        if comm.comm in context.adopt:
            table = DecisionTable.from_bytes(context.adopt[comm.comm]).with_version(comm.version)
        else:
            table = DecisionTable.of(comm.version, wanted, max_channels=comm.max_channels, apply=context.apply)
        answers = []
        for rank in mine:
            margin = LEAST_MARGIN
            if self._advance is None:
                margin += int(rank.rate_hz * HOLD_FACTOR * self._promise_s)
            outcome, hold_at, digest = rank.channel.prepare(table, margin)
            answers.append(
                Answer(
                    rank=rank.rank,
                    digest=digest if outcome is Prepared.PREPARED else table.digest,
                    hold_at=hold_at if outcome is Prepared.PREPARED else None,
                )
            )
        asked = time.monotonic()
        decision = self._coordination.promise(self._name, comm.comm, comm.version, answers, table.to_bytes())
        self._promise_s += PROMISE_SMOOTHING * (time.monotonic() - asked - self._promise_s)
        for rank in mine:
            rank.channel.decide(comm.version, decision.switch_at)
        if decision.switch_at is not None:
            self._version[comm.comm] = comm.version
            decided.in_force = comm.comm not in context.adopt

    def _settle(self, channel: Channel, comm: int, rank: int) -> None:
        """Folds what has been decided; asks about a version that a runner promised to and then died."""
        status = channel.status
        if status.open_version and not channel.fold() and status.decision == 0:
            answer = Answer(rank=rank, digest=0, hold_at=None)
            decision = self._coordination.promise(self._name, comm, status.open_version, [answer], None)
            channel.decide(status.open_version, decision.switch_at)

    def _settle_orphans(self) -> None:
        """A rank whose runner died waits at its hold until somebody tells it the decision. Whoever is on its node can,
        long before its own runner is back."""
        for path in segments(self._job):
            if path.name in self._ranks:
                continue
            try:
                channel = Channel(path)
            except ChannelError:
                continue  # its runner is alive
            with channel:
                identity = channel.identity
                if identity.rank is not None:
                    self._settle(channel, identity.comm_id, identity.rank)

    # -- measuring --

    def _collect(self, comms: set[int], poll_s: float) -> None:
        """Waits until this epoch's share of collectives of these communicators has been measured on every rank here,
        or time is up. Without any, the coordinator only has to hear that the runner is there."""
        settings = self._experiment.epochs
        stop_at = self._advance(settings.collectives + LEAST_MARGIN) if self._advance is not None else None
        deadline = time.monotonic() + settings.timeout_s
        need = settings.collectives
        counts = {name: 0 for name, rank in self._ranks.items() if rank.comm in comms}
        while True:
            for name, rank in self._ranks.items():
                records = rank.drain(self._buffer)
                if len(records):
                    version = self._version.get(rank.comm, 0)
                    mine = records[
                        (records["version"] == version)
                        & (records["flags"] & DECIDED != 0)
                        & (records["flags"] & AGGREGATE == 0)
                    ].copy()
                    rank.records.append(mine)
                    rank.unused += len(records) - len(mine)
                    if name in counts:
                        counts[name] += len(mine)
                rank.channel.fold()
                rank.listen()
            if stop_at is not None:
                done = all(_standing_still(rank.channel, stop_at) for rank in self._ranks.values())
            else:
                done = min(counts.values(), default=-1) >= need
            if done or time.monotonic() > deadline or not self._look_after_ranks():
                break
            if not counts:
                time.sleep(IDLE_S)
                break
            time.sleep(poll_s)
        now = time.monotonic()
        for rank in self._ranks.values():
            rank.channel.beat()
            dseq = rank.channel.status.dseq
            if now > rank.last_seen:
                rank.rate_hz = (dseq - rank.last_dseq) / (now - rank.last_seen)
            rank.last_dseq, rank.last_seen = dseq, now

    def _look_after_ranks(self) -> bool:
        """A few times a second: whether all training processes are there, and no orphan waits on this node."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_AFTER_S:
            self._looked_at = now
            self._alive = all(rank.channel.alive for rank in self._ranks.values())
            self._settle_orphans()
        return self._alive

    def _epoch(self, rank: _Rank) -> RankEpoch:
        """This epoch's records of one rank, and what is new in its segment."""
        records = np.concatenate(rank.records) if rank.records else self._buffer[:0]
        rank.records = []
        unused, rank.unused = rank.unused, 0
        steps, rank.steps = rank.steps, {}
        order = np.argsort(records["dseq"], kind="stable")
        records = records[order]
        costs = rank.channel.cost_rows(rank.cost_rows)
        rank.cost_rows += len(costs)
        if len(records):
            rank.max_channels = max(rank.max_channels, int(records["channels"].max()))
        asked = records["asked_algo"] != 255
        refused = asked & (records["flags"] & APPLIED == 0) if self._experiment.mode == "active" else asked & False
        status = rank.channel.status
        return RankEpoch(
            comm=rank.comm,
            rank=rank.rank,
            version=self._version.get(rank.comm, 0),
            dseq=records["dseq"],
            key=records["key"],
            nbytes=records["bytes"],
            exec_ns=records["exec_ns"],
            pair=_pairs(records),
            channels=records["channels"],
            refused=frozenset(int(k) for k in np.unique(records["key"][refused])),
            costs={int(row["key"]): row["cost_us"].copy() for row in costs},
            fingerprints=rank.channel.fingerprints(),
            max_channels=rank.max_channels,
            unused=unused,
            dropped=sum(status.dropped.values()),
            steps=steps,
            faults=rank.faults,
        )


def _in_force(comm: CommContext) -> npt.NDArray[np.int64]:
    """(K, 3) the actions in force; keys without one are NCCL's own."""
    now = [comm.in_force.get(int(key), Action()) for key in comm.keys]
    return np.array([(a.pair, a.channels, a.chunk) for a in now], np.int64).reshape(-1, 3)


def _pairs(records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """(N,) the pair that NCCL says it used."""
    algo, proto = records["algo"].astype(np.int64), records["proto"].astype(np.int64)
    known = (algo < N_ALGORITHMS) & (proto < N_PROTOCOLS)
    return np.where(known, 1 + N_PROTOCOLS * algo + proto, OWN_PAIR)


def _standing_still(channel: Channel, dseq: int) -> bool:
    """Every call up to ``dseq`` has been made, and every one of them has been measured, drained or counted as lost."""
    status = channel.status
    return status.dseq >= dseq and status.backlog == 0 and status.records + sum(status.dropped.values()) >= dseq
