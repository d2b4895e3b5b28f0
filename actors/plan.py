"""What the coordinator is told at the start, and what it knows of a communicator from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.actors.communicator import Communicator
from dynamiccl_ray.actors.messages import Member
from dynamiccl_ray.agent import observation
from dynamiccl_ray.agent.earlier import Earlier
from dynamiccl_ray.agent.gates import hands_off
from dynamiccl_ray.agent.observation import Topology
from dynamiccl_ray.arrays import Bool, Float32, Int64
from dynamiccl_ray.config.communicators import Actions, CommunicatorRule
from dynamiccl_ray.config.experiment import Online
from dynamiccl_ray.control.columns import nothing_expected
from dynamiccl_ray.control.loop import Keys, salt_of
from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.describe import described, topology_of
from dynamiccl_ray.fabric.pricing import expected
from dynamiccl_ray.fabric.recognise import Recognised
from dynamiccl_ray.keys import key_parts
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES, N_PAIRS, OWN_PAIR


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The experiment, and what it does not say."""

    run: str
    experiment: Online
    cluster: Cluster | None = None
    """That a played job runs on."""
    topology: Mapping[str, Any] = field(default_factory=dict)
    """Of another job, the fields of ``Topology`` that no rank can know: links, tiers, NVLS."""
    played: Mapping[str, frozenset[int]] | None = None
    """Ranks that processes stand for, if not all of them, by the communicator's name."""
    sms: int | None = None
    """Streaming multiprocessors of a GPU; None where nobody says."""
    model: Cluster | None = None
    """Whose physical model says what to expect before anything is measured; None where nobody described the cluster."""
    recognises: bool = False
    """Whether NCCL's own costs are to tell which cluster each communicator is on, and whether ``model`` is of it."""
    earlier: Earlier = field(default_factory=Earlier)
    """What earlier runs measured."""
    valid: dict[int, Bool] | None = None
    """Key -> (N_PAIRS, N_CHANNELS) actions that the fabric has data for; None leaves it to NCCL."""

    def rule_of(self, member: Member) -> CommunicatorRule | None:
        """What the experiment says of a rank's communicator only."""
        rules = self.experiment.communicators
        return next((rule for rule in rules if rule.matches(member.name, member.ranks, member.nodes)), None)

    def hands_off(self, member: Member) -> str:
        """Why a communicator is not to be tuned; empty where it is."""
        rule = self.rule_of(member)
        if rule is not None and not rule.tune:
            return "the experiment does not tune it"
        return hands_off(self.about(member)) or ""

    def topology_of(self, member: Member, like: Recognised | None = None) -> Topology:
        """Of a rank's communicator, that was recognised as one on a cluster ``like`` this."""
        if self.cluster is not None:
            return topology_of(like.cluster if like is not None else self.cluster, member.nodes, member.ranks)
        said = described(self.topology, member.nodes, member.ranks)
        return like.topology(said) if like is not None else said

    def about(self, member: Member, like: Recognised | None = None) -> observation.Context:
        """What is known of a communicator before anything is measured."""
        told, rule = self.experiment, self.rule_of(member)
        said = {name: getattr(rule, name, None) or getattr(told, name) for name in ("workload", "scheduler", "llm")}
        return observation.Context(topology=self.topology_of(member, like), **said)

    def ranks_of(self, member: Member) -> frozenset[int]:
        """Those of a rank's communicator that must agree: all, or in a played job those that processes stand for."""
        if self.played is None:
            return frozenset(range(member.ranks))
        # Before profiler v4 NCCL tells no names: what no process stands for cannot be left out then.
        return self.played.get(member.name, frozenset().union(*self.played.values()))

    def keys(self, comm: Communicator, keys: list[int]) -> Keys:
        """Keys of a communicator for the control loop, before NCCL's own costs are known."""
        collective, pipelined, nbytes = zip(*(key_parts(key) for key in keys), strict=True)
        n, member = len(keys), comm.example
        rule = self.rule_of(member)
        actions = (rule and rule.actions) or self.experiment.actions
        chunks = np.zeros((n, N_PAIRS, N_CHUNKS), np.bool_)
        chunks[:, 1:, [CHUNK_VALUES.index(c) for c in actions.chunk_bytes]] = True
        chunks[:, OWN_PAIR, 0] = True
        return Keys(
            group=np.full(n, comm.number),
            identity=np.array(keys, np.uint64) + np.uint64(comm.number << 16),
            salt=salt_of(keys, member.ranks, member.nodes),
            collective=np.array(collective, np.int64),
            nbytes=np.array(nbytes, np.int64),
            pipelined=np.array(pipelined, np.bool_),
            cost=np.zeros((n, N_PAIRS), np.float32),
            channels=np.stack([self._valid(key, actions) for key in keys]),
            chunks=chunks,
            context=np.tile(observation.encode_context(self.about(member, comm.like)), (n, 1)),
            prior=self.expected(comm, np.array(collective), np.array(nbytes)),
            earlier=self.earlier.expected(member.ranks, member.nodes, member.name, keys),
            lead=self.earlier.lead(member.ranks, member.nodes, member.name, keys),
            noise=self.earlier.noise(member.ranks, member.nodes, member.name, keys),
        )

    def expected(self, comm: Communicator, collective: Int64, nbytes: Int64) -> Float32:
        """``Keys.prior`` of keys (K,), where the cluster can have such a communicator: as many ranks on each node."""
        member = comm.example
        if comm.like is not None:
            return expected(comm.like.cluster, member.nodes, collective, nbytes)
        per_node, left = divmod(member.ranks, member.nodes)
        unlike = self.model is None or left or per_node > self.model.gpus_per_node
        if self.model is None or unlike or (member.nodes > 1 and self.model.inter is None):
            return nothing_expected(len(nbytes))
        return expected(self.model.part(per_node), member.nodes, collective, nbytes)

    def _valid(self, key: int, actions: Actions) -> Bool:
        """(N_PAIRS, N_CHANNELS) that the experiment allows for a key. Leaving NCCL alone is always possible."""
        valid = np.zeros((N_PAIRS, N_CHANNELS), np.bool_)
        if self.valid is None:
            valid[:, [CHANNEL_VALUES.index(c) for c in actions.channels]] = True
        elif key in self.valid:
            valid |= self.valid[key]
        valid[OWN_PAIR, 0] = True
        return valid
