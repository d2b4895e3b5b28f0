"""A curriculum's run: PPO on the fabric model, stage after stage, each promoted by what it measurably closed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, TIMESTEPS_TOTAL, TRAINING_ITERATION

from dynamiccl_ray.actors.episodes import mean_terms
from dynamiccl_ray.actors.runner import SPACES
from dynamiccl_ray.agent import policy
from dynamiccl_ray.config.curriculum import Curriculum
from dynamiccl_ray.errors import ConfigError, RunError
from dynamiccl_ray.evaluation.players import players
from dynamiccl_ray.trainers.common import checkpoint
from dynamiccl_ray.trainers.model.learning import curriculum_config
from dynamiccl_ray.trainers.model.rounds import Rounds
from dynamiccl_ray.trainers.model.sampling import LocalSampling, RemoteSampling, RoundSampling
from dynamiccl_ray.trainers.model.tune_loggers import TuneLoggers
from dynamiccl_ray.trainers.model.validation import validate

CHECKPOINT: Final = "checkpoint.pt"
POLICY: Final = "policy.pt"

Progress = Callable[[dict[str, Any]], None]


def run_curriculum(
    curriculum: Curriculum,
    out: Path,
    *,
    resume: Path | None = None,
    runners: int = 0,
    learners: int = 0,
    processes: int = 1,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Trains to the end of the last stage; returns the summary that ``out``/summary.json holds.

    ``out`` gets curriculum.json, a checkpoint and the policy after every validation, and what Tune's loggers write:
    progress.csv, result.json, TensorBoard events. ``resume`` is the directory of an earlier run: it goes on from
    its checkpoint as if it had never stopped. ``runners`` sample and ``learners`` update in Ray actors of their
    own, as RLlib's num_env_runners and num_learners; Ray is started where it is needed and not running. Validations
    are played in so many ``processes``, which changes nothing but the time. Raises ConfigError for a checkpoint of
    another curriculum, and for numbers that do not divide a round evenly; RunError where Ray does not start, or an
    actor or a process dies.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "curriculum.json").write_text(curriculum.model_dump_json(indent=1))
    started = time.monotonic()
    settings = {"runners": runners, "learners": learners, "processes": processes, "out": str(out)}
    run = CurriculumTrainable({"curriculum": curriculum, **settings})
    run.progress = lambda status: progress({**status, "seconds": time.monotonic() - started})
    try:
        if resume is not None:
            run.restore_from(resume)
        # Whatever ends the run from here on, there is something to go on from.
        run.save_checkpoint(str(out))
        with TuneLoggers(out) as loggers:
            while not run.done:
                result = run.train()
                run.save_checkpoint(str(out))
                loggers.write(result)
                run.progress(run.status())
    except RayActorError as e:
        raise RunError(f"a runner or learner died: {e}; --resume {out} goes on from its checkpoint") from e
    except BrokenProcessPool as e:
        raise RunError(f"a process that validates died: {e}; --resume {out} goes on from its checkpoint") from e
    finally:
        run.stop()
    summary = {**run.status(), "seconds": time.monotonic() - started, "policy": str(out / POLICY)}
    (out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
    return summary


class CurriculumTrainable(Trainable):  # type: ignore[misc]
    """A run as Tune knows it: a step is as many rounds as lie between two validations. A stage is validated every few
    rounds, and at its last.

    Config: ``curriculum``, a Curriculum or its settings; ``ppo``, settings of its section to replace, for sweeps;
    ``runners`` and ``learners``, 0 by default, which is this process; ``processes``, as ``run_curriculum`` has them;
    ``out``, where the results go when nobody but the caller runs it.
    """

    progress: Progress = staticmethod(lambda _: None)
    """Called with the status after every round but the one that is validated, which ends the step."""

    def setup(self, config: dict[str, Any]) -> None:
        curriculum = Curriculum.model_validate(config["curriculum"])
        if replaced := config.get("ppo"):
            ppo = type(curriculum.ppo).model_validate({**curriculum.ppo.model_dump(), **replaced})
            curriculum = curriculum.model_copy(update={"ppo": ppo})
        self._curriculum = curriculum
        self._stage, self._stage_rounds, self._rounds, self._steps = 0, 0, 0, 0
        self._stages: list[dict[str, Any]] = []
        self._history: list[dict[str, Any]] = []
        runners, self._learners = config.get("runners", 0), config.get("learners", 0)
        ppo = curriculum_config(curriculum, Rounds(curriculum), runners=runners, learners=self._learners)
        self._held = ExitStack()
        self._play_all = self._held.enter_context(players(config.get("processes", 1)))
        self._started_ray = _ray_for(runners + self._learners)
        self._sampling: RoundSampling = RemoteSampling(ppo) if runners else LocalSampling(ppo)
        self._group = ppo.build_learner_group(spaces=SPACES)
        self._scenarios = Rounds(curriculum)
        self._module = ppo.rl_module_spec.build().eval()
        self._begun = False
        # Means of the last round.
        self._terms: dict[str, float] = {}

    def _setup_logdir(self) -> None:
        # Tune's own for a run without it is a new directory under the home directory.
        if self._storage is None and "out" in self.config:
            self._logdir = self.config["out"]
        else:
            super()._setup_logdir()

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        return PlacementGroupFactory([{"CPU": 1}] * (1 + config.get("runners", 0) + config.get("learners", 0)))

    @property
    def net(self) -> policy.PolicyNetwork:
        """The policy as it is now."""
        self._module.set_state(self._weights()[DEFAULT_MODULE_ID])
        net: policy.PolicyNetwork = self._module.net
        return net

    @property
    def done(self) -> bool:
        return self._stage >= len(self._curriculum.stages)

    def _weights(self) -> dict[str, Any]:
        component = f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}"
        state = self._group.get_state(components=component, inference_only=True)
        weights: dict[str, Any] = state[COMPONENT_LEARNER][COMPONENT_RL_MODULE]
        return weights

    def step(self) -> dict[str, Any]:
        """Samples, updates, and then validates and promotes."""
        began, steps, rewards = time.monotonic(), self._steps, []
        terms: dict[str, float] = {}
        rounds = self._validated_at() - self._stage_rounds
        for number in range(1, rounds + 1):
            rewards.append(self._round())
            for name, mean in self._terms.items():
                terms[name] = terms.get(name, 0.0) + mean / rounds
            if number < rounds:
                self.progress(self.status())
        rate = (self._steps - steps) / (time.monotonic() - began)
        entry = self._validate(rewards[-1])
        measured = dict.fromkeys(entry)
        return {
            TRAINING_ITERATION: len(self._history),
            TIMESTEPS_TOTAL: self._steps,
            DONE: self.done,
            "rounds": self._rounds,
            "reward": sum(rewards) / len(rewards),
            "reward_terms": terms,
            "steps_per_s": rate,
            "gap_closed": entry["gap_closed"],
            # All stages from the beginning: the columns of a CSV file are those of its first row.
            "stages": {s.name: entry if s.name == entry["stage"] else measured for s in self._curriculum.stages},
        }

    def _validated_at(self) -> int:
        """The round of the stage after which it is validated next."""
        every, most = self._curriculum.validation.every_rounds, self._curriculum.stages[self._stage].most_rounds
        # A checkpoint of other settings may be past its last.
        return max(self._stage_rounds + 1, min(self._stage_rounds // every * every + every, most))

    def _begin(self, number: int) -> None:
        self._sampling.begin({COMPONENT_RL_MODULE: self._weights(), "rounds": number, "stage": self._stage})
        self._begun = True

    def _round(self) -> float:
        """Samples and updates; returns the mean reward.

        The next round is sampled meanwhile, or as if it were, with the weights from before the update: PPO's ratio
        knows under which policy an action was drawn. Not across a validation, where the stage may end and a run may
        be resumed.
        """
        ppo = self._curriculum.ppo
        if not self._begun:
            self._begin(self._rounds)
        episodes = self._sampling.finish()
        self._begun = False
        if self._stage_rounds + 1 < self._validated_at():
            self._begin(self._rounds + 1)
        steps, sequences = sum(len(e) for e in episodes), sum(len(e.rewards) for e in episodes)
        whole = sequences // max(1, self._learners) // ppo.minibatches
        self._group.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: self._rounds},
            num_epochs=ppo.epochs,
            # In steps. RLlib makes sequences of them in floating point, rounded down: half a one more is no other.
            minibatch_size=(whole + 0.5) * steps / sequences,
            shuffle_batch_per_epoch=False,
        )
        self._rounds, self._stage_rounds, self._steps = self._rounds + 1, self._stage_rounds + 1, self._steps + steps
        self._terms = mean_terms(episodes)
        return sum(float(e.rewards.sum()) for e in episodes) / steps

    def _validate(self, reward: float) -> dict[str, Any]:
        stage = self._curriculum.stages[self._stage]
        scenarios, settings = self._scenarios.validation(self._stage), self._curriculum.validation
        reached = validate(self.net, scenarios, settings, self._curriculum.control, self._play_all)
        entry = {"round": self._rounds, "stage": stage.name, "steps": self._steps, "reward": reward, **reached}
        self._history.append(entry)
        promoted = reached["gap_closed"] >= stage.promote and self._stage_rounds >= stage.least_rounds
        if promoted or self._stage_rounds >= stage.most_rounds:
            self._stages.append({"name": stage.name, "promoted": promoted, "rounds": self._stage_rounds, **reached})
            self._stage, self._stage_rounds = self._stage + 1, 0
        return entry

    def status(self) -> dict[str, Any]:
        """Where the run is: JSON."""
        stages = self._curriculum.stages
        return {
            "name": self._curriculum.name,
            "round": self._rounds,
            "stage": stages[self._stage].name if not self.done else "done",
            "steps": self._steps,
            "stages": self._stages,
            "history": self._history,
            "reward": {"off": self._curriculum.reward.off, "terms": self._terms},
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {
            "curriculum": self._curriculum.model_dump(mode="json"),
            COMPONENT_LEARNER: self._group.get_state()[COMPONENT_LEARNER],
            **{name: getattr(self, f"_{name}") for name in _COUNTERS},
        }
        checkpoint.write(Path(checkpoint_dir) / CHECKPOINT, state)
        policy.save(self.net, Path(checkpoint_dir) / POLICY)

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.restore_from(Path(checkpoint))

    def restore_from(self, directory: Path, *, same_settings: bool = True) -> None:
        """Goes on from a checkpoint; without ``same_settings``, whatever its settings were. Raises
        ConfigError where it is missing or of another curriculum."""
        path = directory / CHECKPOINT
        if not path.exists():
            raise ConfigError(f"{path} does not exist; --resume takes the directory of a run of `dynamiccl train`")
        state = checkpoint.read(path)
        if same_settings and state["curriculum"] != self._curriculum.model_dump(mode="json"):
            raise ConfigError(
                f"{path} is of another curriculum, or of other settings; resume with the one it began with"
            )
        self._group.set_state({COMPONENT_LEARNER: state[COMPONENT_LEARNER]})
        for name in _COUNTERS:
            setattr(self, f"_{name}", state[name])
        self._begun = False

    def cleanup(self) -> None:
        self._sampling.close()
        self._group.shutdown()
        self._held.close()
        if self._started_ray:
            import ray

            ray.shutdown()


_COUNTERS: Final = ("stage", "stage_rounds", "rounds", "steps", "stages", "history")


def _ray_for(actors: int) -> bool:
    """Makes sure of a cluster with room for so many; whether it was started here."""
    if actors == 0:
        return False
    import ray

    from dynamiccl_ray.trainers.common.cluster import require_room, start_ray

    started = not ray.is_initialized()
    if started:
        start_ray(actors)
    require_room(actors)
    return started
