"""The curriculum YAML: stages of scenarios to learn on, and what a policy is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from dynamiccl_ray.agent.observation import Compression, Parallelism, SyncMode
from dynamiccl_ray.agent.reward import Reward
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.fabric.dynamics import Dynamics
from dynamiccl_ray.fabric.presets import NamedCluster
from dynamiccl_ray.settings import (
    MOST_EXPERTS,
    Count,
    Deviation,
    Name,
    Nodes,
    NotNegative,
    Positive,
    Ppo,
    Rate,
    Section,
    Share,
    read_yaml,
)


class Place(Section):
    """Where jobs run."""

    cluster: NamedCluster
    """A preset's name, the path of a cluster YAML, relative to this file, or its settings, in place."""
    nodes: Annotated[tuple[Nodes, ...], Field(min_length=1)]
    """Each is a place of its own."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for nodes in self.nodes:
            self.cluster.check(nodes)
        return self


class Stage(Section):
    """One stage: ends when the policy closes enough of the gap on fresh scenarios of its own kind."""

    name: str
    places: Annotated[tuple[Place, ...], Field(min_length=1)]
    sync: tuple[SyncMode, ...] = ("bsp",)
    compression: tuple[tuple[Compression, Positive], ...] = (("none", 1.0),)
    """Methods and their rates, bytes after over bytes before: messages shrink by it."""
    parallelism: tuple[Parallelism, ...] = ("dp",)
    least_phases: Count = 1
    most_phases: Count = 1
    """Of a scenario: above 1, load comes and goes while it is played."""
    dynamics: Dynamics = Dynamics()
    """What load comes from, in collectives of a key over a scenario's 3,000; still: at random."""
    spread: Deviation = 0.15
    """Standard deviation of the logs of the factors on a cluster's rates and latencies."""
    surprise: Deviation = 0.2
    """Standard deviation of the logs of factors on the times of each pair, anew in every round: what a model does not
    know of a machine must be measured there. What is validated and evaluated has none."""
    undescribed: Share = 0.5
    """Share of the jobs that do not say which cluster they run on, so that no model says what to expect ..."""
    mistaken: Share = 0.1
    """... and of those whose model is of another of the stage's places. Neither is validated."""
    promote: Share = 0.9
    """Share of the gap to the oracle that must be closed on the stage's validation scenarios."""
    least_rounds: Count = 40
    most_rounds: Count = 400
    """The stage ends here even where ``promote`` was not reached; the run says so."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.least_phases > self.most_phases:
            raise ValueError(f"least_phases is {self.least_phases}; it must be at most most_phases, {self.most_phases}")
        if self.least_rounds > self.most_rounds:
            raise ValueError(f"least_rounds is {self.least_rounds}; it must be at most most_rounds, {self.most_rounds}")
        return self


class CurriculumPpo(Ppo):
    """PPO and its teacher. Schedules run from the first round of the curriculum over ``rounds``, then stay."""

    lr: Rate = 3e-3
    lr_end: Rate = 2e-4
    epochs: Count = 2
    minibatches: Count = 6
    entropy: NotNegative = 0.01
    teacher: NotNegative = 1.0
    """Weight of the cross entropy to what a policy that knew every time would choose, at first,"""
    teacher_end: NotNegative = 0.0
    """and from two thirds of the rounds on: PPO alone, by what it found itself."""
    rounds: Count = 600
    experts: Annotated[int, Field(ge=1, le=MOST_EXPERTS)] = 4

    @model_validator(mode="after")
    def _teacher_fades(self) -> Self:
        if self.teacher_end > self.teacher:
            raise ValueError(f"teacher_end is {self.teacher_end:g}; it must be at most teacher, {self.teacher:g}")
        return self


class StreamSettings(Section):
    """What is sampled in each round."""

    pool: Count = 256
    """Scenarios that a stage draws from."""
    scenarios: Count = 10
    """Of these, in one round."""
    keys: Count = 16
    """Of a scenario."""
    shifted: Share = 0.4
    """Share of the scenarios whose episode follows a shift of the network, where there can be one."""
    rooted: Share = 0.05
    """Share of the keys that are broadcasts and reductions to a root: rare in training, and far from the best there."""


class Validation(Section):
    """What is measured between rounds and at the end: the policy as an evaluation plays it, on fresh scenarios."""

    scenarios: Count = 16
    collectives: Count = 600
    """Of each key, in which it measures, decides and adapts, before any counts."""
    every_rounds: Count = 40
    """Of a stage, which is also validated at its ``most_rounds``."""


class Curriculum(Section):
    """A policy's education."""

    name: Name
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    held_out: Annotated[tuple[Place, ...], Field(min_length=1)]
    """Places that no stage has: never learned from."""
    ppo: CurriculumPpo = CurriculumPpo()
    reward: Reward = Reward()
    control: Control = Control()
    """The loop that the policy is trained for, as beside a job."""
    streams: StreamSettings = StreamSettings()
    validation: Validation = Validation()

    @model_validator(mode="after")
    def _apart(self) -> Self:
        learned = {place.cluster.name for stage in self.stages for place in stage.places}
        if both := sorted(learned & {place.cluster.name for place in self.held_out}):
            raise ValueError(f"held_out: {', '.join(both)} is learned from, too; a held-out cluster must not be")
        return self

    @model_validator(mode="after")
    def _fills_minibatches(self) -> Self:
        if self.ppo.minibatches > self.sequences:
            raise ValueError(
                f"ppo.minibatches is {self.ppo.minibatches}; it must be at most {self.sequences}, the sequences of a "
                "round: streams.scenarios times streams.keys"
            )
        return self

    @property
    def sequences(self) -> int:
        """Of decisions, in one round: one of each key."""
        return self.streams.scenarios * self.streams.keys


def load_curriculum(path: Path, overrides: Sequence[str] = ()) -> Curriculum:
    """Reads a curriculum YAML, with ``overrides`` as in ``read_yaml``. Raises ConfigError."""
    return read_yaml(path, Curriculum, "curriculum", overrides)
