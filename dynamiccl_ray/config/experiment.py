"""The experiment YAML of an online run: every setting, its default, its unit and why one would change it.

Unknown keys are errors. Settings that contradict each other are found here, before any process starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dynamiccl_ray.agent.observation import (
    Llm,
    Scheduler,
    WorkloadContext,
)
from dynamiccl_ray.agent.reward import Reward
from dynamiccl_ray.config.canary import Canary
from dynamiccl_ray.config.communicators import Actions, CommunicatorRule
from dynamiccl_ray.config.control import Control
from dynamiccl_ray.config.fabrics import EmulatedFabric, MeasuredFabric, NcclFabric, PlayedJob, RealNcclFabric
from dynamiccl_ray.config.overhead import Overhead
from dynamiccl_ray.errors import DAMAGED, ConfigError, reason
from dynamiccl_ray.settings import (
    MOST,
    MOST_ACTORS,
    Count,
    Name,
    NotNegative,
    Positive,
    Ppo,
    Rate,
    Section,
    existing,
    exists,
    is_file,
    read_yaml,
)

DEFAULT_POLICY: Final = Path(__file__).parents[1] / "data" / "policy.pt"
"""What ``dynamiccl train experiments/curricula/default.yaml`` wrote."""


_Policy = Annotated[
    Path,
    existing("is no file; name a policy that `dynamiccl train` wrote", is_file),
    BeforeValidator(lambda given: DEFAULT_POLICY if given == "default" else given),
]
_EarlierRun = Annotated[Path, existing("does not exist; name the directory of an earlier run of `dynamiccl online`")]


class Epochs(Section):
    """How often decisions are taken beside a job. How many collectives each takes is ``control``'s."""

    most_s: Positive = 20.0
    """An epoch ends after this long, whatever is still to be measured."""
    watch_s: Positive = 1.0
    """Length of an epoch in which no key is learning, and how long one may wait for what does not come."""
    per_round: Annotated[int, Field(ge=2, le=MOST)] = 32
    """Epochs between two updates of the policy. An epoch in which no key is learning is a round of its own."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.watch_s > self.most_s:
            raise ValueError(f"watch_s is {self.watch_s:g}; it must be at most most_s, {self.most_s:g}")
        return self


class OnlinePpo(Ppo):
    """PPO beside a job."""

    lr: Rate = 1e-3
    epochs: Count = 6
    entropy: NotNegative = 0.02
    """At the start of a learning phase; falls linearly to ``entropy_end`` ..."""
    entropy_rounds: Count = 40
    """... over this many rounds of the phase."""
    learners: Annotated[int, Field(ge=0, le=MOST_ACTORS)] = 0
    """Ray actors that update, with a core each; 0: the process that runs the experiment, as always with --serial."""


class Ray(Section):
    """How the control plane is spread out."""

    runners_per_node: Annotated[int, Field(ge=1, le=MOST_ACTORS)] = 1
    """That share the training processes of a node: of every node with slots (Ray resource ``dynamiccl``) that holds
    ranks of the job, or, where no node has any, of the node where a run is started."""


class Stop(Section):
    """When a run ends. Whatever comes first."""

    rounds: Annotated[int, Field(ge=1)] | None = None
    exploit_rounds_after_last_event: Annotated[int, Field(ge=1)] | None = None
    """Rounds of exploitation after the last event of the fabric (or after learning, without events)."""
    keep: bool = False
    """Beside a job that goes on: what is exploited stays in force. By default ranks go back to NCCL's own choice."""


class Online(Section):
    """One online run."""

    name: Name
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    mode: Literal["off", "observe", "shadow", "active"] = "active"
    """``observe`` measures only, ``shadow`` decides and records but applies nothing, ``off`` does neither. What a run
    begins with: ``dynamiccl mode`` changes it."""
    job: Annotated[str, Field(min_length=1)] = "default"
    """DYNAMICCL_JOB_ID of the training processes."""
    fabric: Annotated[MeasuredFabric | EmulatedFabric | RealNcclFabric | NcclFabric, Field(discriminator="kind")]
    workload: WorkloadContext = WorkloadContext()
    """What the job does around its collectives, as far as it is known."""
    computation_s: Positive | None = None
    """What a step takes without any communication; a run on one GPU says it. Where steps take longer with the best that
    was found, a run says so: ``lossless_saturated``."""
    scheduler: Scheduler = Scheduler()
    llm: Llm = Llm()
    policy: _Policy | None = None
    """A trained policy to start from: ``default`` for the one that is shipped, or a file relative to this one. Absent:
    one that has seen nothing."""
    warm: tuple[_EarlierRun, ...] = ()
    """Directories of earlier runs on the same cluster, relative to this file. What they measured of communicators of
    the same shape says what to expect, and is believed as far as it turns out to be right. --warm adds to them."""
    actions: Actions = Actions()
    communicators: tuple[CommunicatorRule, ...] = ()
    """What is different for some communicators. The first rule that matches one holds for it."""
    control: Control = Control()
    epochs: Epochs = Epochs()
    canary: Canary = Canary()
    overhead: Overhead = Overhead()
    reward: Reward = Reward()
    ppo: OnlinePpo = OnlinePpo()
    ray: Ray = Ray()
    stop: Stop = Stop()

    @model_validator(mode="after")
    def _ends(self) -> Self:
        endless = self.stop.rounds is None and self.stop.exploit_rounds_after_last_event is None
        if isinstance(self.fabric, PlayedJob) and endless:
            raise ValueError("stop: a played job runs for ever; give rounds or exploit_rounds_after_last_event")
        return self

    def warmed(self, directories: Sequence[Path]) -> Self:
        """By these earlier runs, too. Raises ConfigError for one that does not exist."""
        for path in directories:
            if not exists(path):
                raise ConfigError(f"--warm {path} does not exist; name the directory of an earlier run")
        return self.model_copy(update={"warm": (*self.warm, *(path.absolute() for path in directories))})

    def on_nccl(self, source: Path) -> Self:
        """With these sources of NCCL. Raises ConfigError where none are needed, or where they are not there."""
        if not isinstance(self.fabric, RealNcclFabric):
            raise ConfigError(f"--nccl is for experiments of the kind real_nccl; {self.name!r} is {self.fabric.kind}")
        if not source.exists():
            raise ConfigError(f"--nccl {source} does not exist; git clone https://github.com/NVIDIA/nccl")
        return self.model_copy(update={"fabric": self.fabric.model_copy(update={"nccl": source.absolute()})})


def recorded(path: Path) -> Online:
    """The experiment of a run, as the run wrote it down. Files that only a run needs may be gone by now, and are left
    out. Raises ConfigError for something else."""
    try:
        raw = json.loads(path.read_bytes())
        raw["policy"], raw["warm"] = None, ()
        for name in raw["fabric"].keys() & {"files", "nccl"}:
            del raw["fabric"][name]
        return Online.model_validate(raw)
    except (*DAMAGED, ValueError) as e:
        raise ConfigError(f"{path}: not the experiment of a run: {reason(e)}") from None


def load(path: Path, overrides: Sequence[str] = ()) -> Online:
    """Reads an online experiment, with ``overrides`` as in ``read_yaml``. Raises ConfigError."""
    return read_yaml(path, Online, "experiment", overrides)
