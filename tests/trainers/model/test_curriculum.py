"""A curriculum promotes by what it measures, repeats exactly, and resumes as if it had not stopped."""

from __future__ import annotations

import csv
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError

from dynamiccl_ray.actors.episodes import Episodes
from dynamiccl_ray.agent import policy
from dynamiccl_ray.config.curriculum import Curriculum, load_curriculum
from dynamiccl_ray.errors import ConfigError, RunError
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.trainers.model.curriculum import CurriculumTrainable, run_curriculum
from dynamiccl_ray.trainers.model.sampling import LocalSampling
from dynamiccl_ray.trainers.model.stacking import estimate

ROOT = Path(__file__).parents[3]
STAGE = {"places": [{"cluster": "rtx4090-pcie", "nodes": [1, 2]}], "least_rounds": 1, "most_rounds": 4, "promote": 1.0}
TINY = {
    "name": "tiny",
    "stages": [{"name": "first", **STAGE}, {"name": "second", **STAGE, "most_phases": 2}],
    "held_out": [{"cluster": "l40s-pcie", "nodes": [1]}],
    "streams": {"pool": 6, "scenarios": 4, "keys": 4},
    "control": {"learning": {"draws": 8, "sequence": 4}},
    "validation": {"scenarios": 2, "collectives": 8, "every_rounds": 2},
    "ppo": {"hidden": 16, "experts": 2, "minibatches": 2, "epochs": 2, "rounds": 8},
}


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return policy.load(directory / "policy.pt").state_dict()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    run_curriculum(Curriculum.model_validate(TINY), directory)
    return directory


def test_stages_end_and_say_whether_they_were_promoted(tmp_path: Path) -> None:
    easy = {**TINY, "stages": [{**TINY["stages"][0], "promote": 0.0}, TINY["stages"][1]]}  # type: ignore[index]
    summary = run_curriculum(Curriculum.model_validate(easy), tmp_path)
    assert [(s["name"], s["promoted"], s["rounds"]) for s in summary["stages"]] == [
        ("first", True, 2),
        ("second", False, 4),
    ]
    assert summary["stage"] == "done"
    assert summary["steps"] == 6 * 4 * 4 * 4


def test_a_stage_ends_at_its_last_round_whenever_it_is_validated(tmp_path: Path) -> None:
    three = {**TINY, "validation": {"scenarios": 2, "collectives": 8, "every_rounds": 3}}
    summary = run_curriculum(Curriculum.model_validate(three), tmp_path)
    assert [stage["rounds"] for stage in summary["stages"]] == [4, 4]
    assert [entry["round"] for entry in summary["history"]] == [3, 4, 7, 8]
    results = [json.loads(line) for line in (tmp_path / "result.json").read_text().splitlines()]
    assert [result["training_iteration"] for result in results] == [1, 2, 3, 4]
    # A mean over the rounds that a step has.
    assert sum(results[1]["reward_terms"].values()) == pytest.approx(results[1]["reward"], abs=1e-5)


def test_every_validation_is_in_tunes_logs(trained: Path) -> None:
    with (trained / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    results = [json.loads(line) for line in (trained / "result.json").read_text().splitlines()]
    history = json.loads((trained / "summary.json").read_text())["history"]
    assert [int(row["rounds"]) for row in rows] == [2, 4, 6, 8]
    for row, result, entry in zip(rows, results, history, strict=True):
        of, other = ("first", "second") if entry["stage"] == "first" else ("second", "first")
        assert float(row[f"stages/{of}/gap_closed"]) == result["stages"][of]["gap_closed"] == entry["gap_closed"]
        assert row[f"stages/{other}/gap_closed"] == ""
        assert result["timesteps_total"] == entry["steps"]
    (events,) = trained.glob("events*")
    for stage in ("first", "second"):
        assert f"ray/tune/stages/{stage}/gap_closed".encode() in events.read_bytes()


def test_tune_restores_a_trainable_where_it_was_and_replaces_settings(trained: Path, tmp_path: Path) -> None:
    run = CurriculumTrainable({"curriculum": TINY, "out": str(tmp_path)})
    run.train()
    saved = run.save(str(tmp_path / "saved"))
    for _ in range(3):
        result = run.train()
    assert result["done"]
    # Into the same object, whose learner has seen more updates than the checkpoint's.
    run.restore(saved)
    assert run.status()["round"] == 2
    while not run.train()["done"]:
        pass
    ours, theirs = run.net.state_dict(), _weights(trained)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    run.stop()
    replaced = CurriculumTrainable({"curriculum": TINY, "ppo": {"hidden": 8}, "out": str(tmp_path)})
    assert replaced.net.hidden == 8
    replaced.stop()


def test_elsewhere_a_round_is_sampled_while_the_last_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, int]] = []

    class Elsewhere(LocalSampling):
        overlaps = True

        def begin(self, state: dict[str, Any]) -> None:
            happened.append(("sample", state["rounds"]))
            super().begin(state)
            self._sampled = super().finish()

        def finish(self) -> list[Episodes]:
            return self._sampled

    monkeypatch.setattr("dynamiccl_ray.trainers.model.curriculum.LocalSampling", Elsewhere)
    stages = [{"name": "only", **STAGE, "most_rounds": 6}]
    three = {**TINY, "stages": stages, "validation": {"scenarios": 2, "collectives": 8, "every_rounds": 3}}
    run = CurriculumTrainable({"curriculum": three, "out": str(tmp_path)})
    update = run._group.update
    run._group.update = lambda **given: (happened.append(("learn", run.status()["round"])), update(**given))
    run.train()
    run.train()
    run.stop()
    # Never across a validation: there the stage may end, and there a run is resumed.
    expected = [("sample", 0), ("sample", 1), ("learn", 0), ("sample", 2), ("learn", 1), ("learn", 2)]
    assert happened == expected + [(what, number + 3) for what, number in expected]


def test_every_minibatch_has_a_sequence_or_is_refused(tmp_path: Path) -> None:
    # 49 times 1/49 is less than 1 in floating point.
    all_single = {
        **TINY,
        "stages": [{"name": "only", **STAGE, "most_rounds": 1}],
        "streams": {"pool": 7, "scenarios": 7, "keys": 7},
        "ppo": {**TINY["ppo"], "minibatches": 49},  # type: ignore[dict-item]
    }
    curriculum = Curriculum.model_validate(all_single)
    assert run_curriculum(curriculum, tmp_path)["stage"] == "done"
    with pytest.raises(ConfigError, match="7 learners cannot share 49 sequences a round"):
        run_curriculum(curriculum, tmp_path, learners=7)
    with pytest.raises(ValueError, match="minibatches is 49; it must be at most 48, the sequences of a round"):
        Curriculum.model_validate({**all_single, "streams": {"scenarios": 6, "keys": 8}})


def test_a_round_that_cannot_be_shared_evenly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 runners and 0 learners cannot share 4 scenarios"):
        run_curriculum(Curriculum.model_validate(TINY), tmp_path, runners=3)


def test_the_same_seed_gives_the_same_weights_in_however_many_processes(trained: Path, tmp_path: Path) -> None:
    summary = run_curriculum(Curriculum.model_validate(TINY), tmp_path, processes=2)
    assert summary["history"] == json.loads((trained / "summary.json").read_text())["history"]
    ours, theirs = _weights(trained), _weights(tmp_path)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    run_curriculum(Curriculum.model_validate({**TINY, "seed": 1}), tmp_path)
    assert not all(torch.equal(ours[name], value) for name, value in _weights(tmp_path).items())


@pytest.mark.parametrize("rounds", [2, 6])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(trained: Path, tmp_path: Path, rounds: int) -> None:
    class Stopped(Exception):
        pass

    def stop(status: dict[str, object]) -> None:
        if status["round"] == rounds:
            raise Stopped

    with pytest.raises(Stopped):
        run_curriculum(Curriculum.model_validate(TINY), tmp_path / "stopped", progress=stop)
    resumed = run_curriculum(Curriculum.model_validate(TINY), tmp_path / "resumed", resume=tmp_path / "stopped")
    assert resumed["round"] == 8
    ours, theirs = _weights(trained), _weights(tmp_path / "resumed")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_process_that_dies_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    def kill(_: dict[str, object]) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(RunError, match=f"a process that validates died: .*; --resume {tmp_path} goes on"):
        run_curriculum(Curriculum.model_validate(TINY), tmp_path, processes=2, progress=kill)
    assert (tmp_path / "policy.pt").exists()


def test_a_run_that_ends_before_its_first_validation_goes_on_as_well(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_: CurriculumTrainable) -> float:
        raise RayActorError

    with monkeypatch.context() as patched:
        patched.setattr(CurriculumTrainable, "_round", dies)
        with pytest.raises(RunError, match=f"a runner or learner died: .*; --resume {tmp_path} goes on"):
            run_curriculum(Curriculum.model_validate(TINY), tmp_path)
    run_curriculum(Curriculum.model_validate(TINY), tmp_path, resume=tmp_path)
    ours, theirs = _weights(trained), _weights(tmp_path)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_another_curriculum_is_refused(trained: Path, tmp_path: Path) -> None:
    other = Curriculum.model_validate({**TINY, "seed": 7})
    with pytest.raises(ConfigError, match="of another curriculum"):
        run_curriculum(other, tmp_path, resume=trained)
    with pytest.raises(ConfigError, match="does not exist"):
        run_curriculum(other, tmp_path, resume=tmp_path)


def test_a_held_out_cluster_must_not_be_learned_from() -> None:
    with pytest.raises(ValueError, match="rtx4090-pcie is learned from, too"):
        Curriculum.model_validate({**TINY, "held_out": [{"cluster": "rtx4090-pcie", "nodes": [4]}]})


def test_the_widest_bounds_can_be_trained_with(tmp_path: Path) -> None:
    stages = [{"name": "wild", **STAGE, "most_rounds": 2, "most_phases": 2, "spread": 2, "surprise": 2}]
    ppo = {**TINY["ppo"], "lr": 1, "lr_end": 1}  # type: ignore[dict-item]
    summary = run_curriculum(Curriculum.model_validate({**TINY, "stages": stages, "ppo": ppo}), tmp_path)
    assert summary["stage"] == "done"
    assert np.isfinite(summary["history"][-1]["geomean_vs_oracle"])


@pytest.mark.parametrize(
    ("change", "said"), [({"gpus_per_node": 1}, "1 node of cluster .* has one GPU"), ({"inter": None}, "no network")]
)
def test_a_place_where_no_job_can_run_is_refused(change: dict[str, Any], said: str) -> None:
    cluster = find_cluster("rtx4090-pcie").model_copy(update=change)
    for where in ("stages", "held_out"):
        place = {"cluster": cluster.model_dump(), "nodes": [2, 1]}
        wrong = [{"name": "first", "places": [place]}] if where == "stages" else [place]
        with pytest.raises(ValueError, match=said):
            Curriculum.model_validate({**TINY, where: wrong})


def test_the_shipped_curriculum_loads() -> None:
    curriculum = load_curriculum(ROOT / "experiments" / "curricula" / "default.yaml")
    tiers = [{p.cluster.tier(n) for p in stage.places for n in p.nodes} for stage in curriculum.stages]
    assert tiers[0] == {1}
    assert tiers[1] == {1, 2}
    assert {3, 4} <= tiers[2]


def test_advantages_are_the_sums_that_they_stand_for() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(3, 6)).astype(np.float32)
    gamma, lambda_ = 0.9, 0.7
    found = estimate(rewards, values, gamma, lambda_)
    delta = rewards + gamma * values[:, 1:] - values[:, :-1]
    for t in range(5):
        expected = sum((gamma * lambda_) ** (s - t) * delta[:, s] for s in range(t, 5))
        np.testing.assert_allclose(found[:, t], expected, rtol=1e-5)


def test_every_term_of_the_reward_is_logged_and_one_that_is_off_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: dict[str, list[float]] = {}
    monkeypatch.setattr(
        "tensorboardX.SummaryWriter.add_scalar",
        lambda _, name, value, global_step: logged.setdefault(name, []).append(value),
    )
    settings = {
        **TINY,
        "stages": [{**STAGE, "name": "only", "most_rounds": 2}],
        "reward": {"switch": 0.01, "probe": 0.0},
    }
    summary = run_curriculum(Curriculum.model_validate(settings), tmp_path)
    where = "ray/tune/reward_terms/"
    names = {name.removeprefix(where) for name in logged if name.startswith(where)}
    assert names == {"primary", "iteration", "switch", "congestion", "found", "sm", "tier"}
    assert np.sum([logged[where + name] for name in names], 0) == pytest.approx(logged["ray/tune/reward"], abs=1e-5)
    assert summary["reward"]["off"] == ["probe"]
    assert summary["reward"]["terms"]["sm"] == pytest.approx(logged[f"{where}sm"][-1], rel=0.5)
    assert logged[f"{where}switch"][0] < 0
