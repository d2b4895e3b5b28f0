"""The experiment YAML of an online run: every setting, its default, its unit and why one would change it.

Unknown keys are errors. Settings that contradict each other are found here, before any process starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import CHANNEL_VALUES, CHUNK_VALUES
from dynamiccl_ray.observation import INTER_LINKS, INTRA_LINKS

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Unknown keys are refused; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Event(Section):
    """A change of the fabric in the middle of a run."""

    at_collective: Annotated[int, Field(ge=0)] | None = None
    """Collective at which every rank sees the change."""
    exploit_rounds: Annotated[int, Field(ge=1)] | None = None
    """Instead: this many rounds after the policy has been exploited for the first time since the last event."""
    link_bandwidth: Positive | None = None
    """Bandwidth that is left, as a share of 1."""
    latency: Positive = 1.0
    """Factor on the part of the time that does not grow with bytes."""
    swap_nodes: Count | None = None
    """Instead: times of the same machine at another node count."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if (self.at_collective is None) == (self.exploit_rounds is None):
            raise ValueError("give exactly one of at_collective and exploit_rounds")
        if (self.link_bandwidth is None) == (self.swap_nodes is None):
            raise ValueError("give exactly one of link_bandwidth and swap_nodes")
        return self


class Processes(Section):
    """Which ranks of the communicator are played by processes of their own."""

    nodes: Count = 2
    ranks_per_node: Count = 4


class MeasuredFabric(Section):
    """Tables of real measurements, played by emulated ranks that load the real plugin."""

    kind: Literal["measured"]
    machine: Literal["p5en"] = "p5en"
    """Whose NCCL cost model and tables; p5en is AWS p5en.48xlarge, 8 H200 a node, all-reduce."""
    files: tuple[Path, ...] = ()
    """Measurements to play instead of the ones that are shipped, in the same columns."""
    nodes: Count = 8
    processes: Processes = Processes()
    rate_hz: Annotated[float, Field(ge=0)] = 2000.0
    """Collectives per second and rank; 0 for as fast as possible."""
    events: tuple[Event, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.processes.nodes > self.nodes or self.processes.ranks_per_node > 8:
            raise ValueError(
                f"processes: {self.processes.nodes} nodes x {self.processes.ranks_per_node} ranks do not fit "
                f"into {self.nodes} nodes x 8 GPUs"
            )
        return self


class NcclFabric(Section):
    """A real job: its processes load the plugin, and are found by their job id on every node."""

    kind: Literal["nccl"]
    intra: Literal[INTRA_LINKS] = "none"  # type: ignore[valid-type]
    inter: Literal[INTER_LINKS] = "none"  # type: ignore[valid-type]
    nvls: bool = False


class Actions(Section):
    """Which values of the heads may be tried at all."""

    channels: tuple[int, ...] = (0,)
    """From 0 (NCCL's own), 1, 2, 4, 8, 12, 16, 24, 32."""
    chunk_bytes: tuple[int, ...] = (0,)
    """From 0 (NCCL's own) and the powers of two from 16 KiB to 4 MiB; NCCL 2.30.3 and later."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name, given, known in (
            ("channels", self.channels, CHANNEL_VALUES),
            ("chunk_bytes", self.chunk_bytes, CHUNK_VALUES),
        ):
            bad = [x for x in given if x not in known]
            if bad:
                raise ValueError(f"{name}: {bad} not among {list(known)}")
            if 0 not in given:
                raise ValueError(f"{name}: 0 (NCCL's own) must stay possible")
        return self


class Epochs(Section):
    """How often decisions are taken."""

    collectives: Count = 140
    """Collectives per communicator and decision epoch."""
    timeout_s: Positive = 20.0
    """An epoch ends after this long however few collectives there were."""
    per_round: Annotated[int, Field(ge=2)] = 8
    """Epochs between two updates of the policy; also the length of a training sequence."""
    baseline_samples: Count = 8
    """Collectives per key that measure NCCL's own choice before anything is tried."""


class Learning(Section):
    """When learning ends."""

    max_rounds: Count = 150
    min_rounds: Count = 10
    settled_entropy: Positive = 0.10
    """Mean entropy of the policy, nats per key, below which it is exploited."""
    heat: Annotated[float, Field(ge=0)] = 4.0
    """After a trigger, logits are divided by 1 + heat ..."""
    heat_decay: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """... and heat shrinks by this factor every round."""


class Reward(Section):
    """Weights of the reward's terms; times are log ratios, so 0.01 is worth one per cent of time."""

    switch: Annotated[float, Field(ge=0)] = 0.0
    """Cost of changing a key's action."""
    limit: Positive = 2.0
    """The primary term is clipped to plus and minus this."""


class Trigger(Section):
    """When to learn again."""

    arl0: Positive = 1_000_000.0
    """Collectives of a key to one false alarm."""


class Guardrail(Section):
    """An action that is worse than NCCL's own choice with confidence is not tried again until the next trigger."""

    margin: Annotated[float, Field(ge=0)] = 0.02
    """Log time over the baseline."""
    samples: Count = 8
    """Collectives before an action can be ruled out."""


class Ppo(Section):
    """Hyperparameters of RLlib's PPO."""

    lr: Positive = 1e-3
    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.3
    lambda_: Annotated[float, Field(ge=0, le=1)] = 0.9
    epochs: Count = 6
    clip: Positive = 0.2
    grad_clip: Positive = 0.5
    entropy: Annotated[float, Field(ge=0)] = 0.02
    """At the start of a learning phase; falls linearly to ``entropy_end`` ..."""
    entropy_end: Annotated[float, Field(ge=0)] = 0.001
    entropy_rounds: Count = 40
    """... over this many rounds of the phase."""
    hidden: Count = 64


class Ray(Section):
    """How the control plane is spread out."""

    ranks_per_actor: Count = 4


class Stop(Section):
    """When a run ends. Whatever comes first."""

    rounds: Count | None = None
    exploit_rounds_after_last_event: Count | None = None
    """Rounds of exploitation after the last event of the fabric (or after learning, without events)."""


class Online(Section):
    """One online run."""

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    mode: Literal["observe", "shadow", "active"] = "active"
    """``observe`` measures only, ``shadow`` decides and records but applies nothing."""
    job: str = "default"
    """DYNAMICCL_JOB_ID of the training processes."""
    fabric: Annotated[MeasuredFabric | NcclFabric, Field(discriminator="kind")]
    actions: Actions = Actions()
    epochs: Epochs = Epochs()
    learning: Learning = Learning()
    reward: Reward = Reward()
    trigger: Trigger = Trigger()
    guardrail: Guardrail = Guardrail()
    ppo: Ppo = Ppo()
    ray: Ray = Ray()
    stop: Stop = Stop()

    @model_validator(mode="after")
    def _ends(self) -> Self:
        endless = self.stop.rounds is None and self.stop.exploit_rounds_after_last_event is None
        if isinstance(self.fabric, MeasuredFabric) and endless:
            raise ValueError("stop: an emulated job runs for ever; give rounds or exploit_rounds_after_last_event")
        return self


def load(path: Path) -> Online:
    """Reads an online experiment. Raises ConfigError naming the file, the field, the value and what is valid."""
    try:
        text = path.read_text()
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the experiment: {e.strerror}") from None
    try:
        raw: Any = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not YAML: {e}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(raw).__name__}")
    try:
        return Online.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(f"{path}: " + "; ".join(_explain(error) for error in e.errors())) from None


def _explain(error: Any) -> str:
    where = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r} (value {error['input']!r}); remove it or check its spelling"
    if error["type"] == "missing":
        return f"{where!r} is required"
    return f"{where or 'experiment'} = {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"
