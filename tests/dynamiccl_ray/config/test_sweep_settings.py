"""A sweep YAML says what is tried; whatever could not be run is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.config.sweep import Sweep, load_sweep
from dynamiccl_ray.config.sweep_target import Target, best_yaml, default_values, find_target, reports
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.shipped import folder

GOOD: dict[str, Any] = {"name": "x", "of": "p5en-warm", "space": {"ppo.lr": [1e-4, 1e-2]}, "metric": "regret"}
LESSONS: dict[str, Any] = {**GOOD, "of": "default", "metric": "held_out_regret"}


def _read(directory: Path, document: dict[str, Any]) -> tuple[Sweep, Target]:
    path = directory / "x.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    sweep = load_sweep(path)
    return sweep, find_target(sweep, path)


def test_a_grid_is_all_combinations_behind_the_target_as_it_is(tmp_path: Path) -> None:
    space = {"ppo.lr": ["1e-4", 1e-3], "control.learning.draws": {"grid": [16, 64]}}
    sweep, target = _read(tmp_path, {**GOOD, "space": space})
    default = default_values(sweep, target)
    assert default == {"ppo.lr": 1e-3, "control.learning.draws": 64}
    # The last of the four is the target's own, and is not run twice.
    assert [list(values.values()) for values in sweep.planned(default)] == [
        [1e-3, 64],
        [1e-4, 16],
        [1e-4, 64],
        [1e-3, 16],
    ]


def test_random_values_lie_in_their_ranges_and_are_the_same_for_a_seed(tmp_path: Path) -> None:
    space = {
        "ppo.lr": {"loguniform": [1e-4, 1e-2]},
        "ppo.clip": {"uniform": [0.1, 0.3]},
        "ppo.epochs": {"int": [1, 3]},
        "reward.sm": {"choice": [0, 0.5]},
    }
    given = {**GOOD, "space": space, "sampler": "random", "samples": 200}
    sweep, target = _read(tmp_path, given)
    default = default_values(sweep, target)
    drawn = sweep.planned(default)[1:]
    lr, clip, epochs, sm = ([values[key] for values in drawn] for key in space)
    assert all(1e-4 <= x <= 1e-2 for x in lr)
    assert 0.3 < sum(x < 1e-3 for x in lr) / len(lr) < 0.7
    assert all(0.1 <= x <= 0.3 for x in clip)
    assert {*epochs} == {1, 2, 3}
    assert {*sm} == {0, 0.5}
    assert sweep.planned(default)[1:] == drawn
    assert _read(tmp_path, {**given, "seed": 1})[0].planned(default)[1:] != drawn


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"space": {"ppo.lrr": [1]}}, r"x\.yaml: space: ppo\.lrr=1: unknown key 'ppo\.lrr'.*did you mean"),
        ({"space": {"ppo.lr": [0.1, -1]}}, r"space: ppo\.lr=-1: ppo\.lr = -1: Input should be greater than 0"),
        ({"space": {"ppo.lr": {"unifrm": [0, 1]}}}, r"unknown key 'space\.ppo\.lr\.unifrm'"),
        ({"space": {"ppo.lr": {"uniform": [0.1, 1], "choice": [1]}}}, "give exactly one of grid"),
        ({"space": {"ppo.lr": {"uniform": [1, 0.1]}}}, "the first must be less than the second"),
        ({"space": {"ppo.lr": {"uniform": [0.1, 1]}}}, "a range has no grid"),
        ({"space": {"ppo.lr": {"uniform": [-1, 1]}}, "sampler": "random", "samples": 2}, r"ppo\.lr=-1\.0: .*greater"),
        ({"space": {"ppo.entropy": [0.1, 1e-4]}}, "entropy_end is 0.001; it must be at most entropy, 0.0001"),
        # Each alone would do.
        ({"space": {"ppo.entropy": [0.1, 0.01], "ppo.entropy_end": [0.015, 0.005]}}, "entropy_end is 0.015"),
        ({"space": {"seed": [1, 2]}}, "'seed' cannot be set: give seeds"),
        ({"space": {"ray.runners_per_node": [1, 2]}}, "has no effect in a sweep"),
        ({"space": {"ppo": [{}], "ppo.lr": [1]}}, "'ppo' and 'ppo.lr' set the same"),
        ({"set": {"ppo.lr": 1}}, "set the same"),
        ({"set": {"ppo.lrr": 1}}, "set: ppo.lrr=1: unknown key"),
        ({"of": "p5en-wram"}, "did you mean 'p5en-warm'"),
        ({"of": "nccl"}, "is beside a real job"),
        ({"set": {"mode": "observe"}}, "trials need mode: active"),
        ({"metric": "regert"}, "did you mean 'regret'"),
        ({"metric": "gap_closed"}, "of an experiment it must be one of lost, regret, vs_oracle, gain"),
        ({"scheduler": "asha"}, "needs reports while a trial runs"),
        ({"scheduler": "ashb"}, "did you mean 'asha'"),
        ({"scheduler": {"kind": "none", "grace": 2}}, "unknown key 'scheduler.grace'"),
        ({"sampler": "random"}, "sampler random needs their number"),
        ({"samples": 3}, "a grid has as many as it has"),
        ({"seeds": [1, 1]}, "one is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _read(tmp_path, {**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scheduler": "asha", "metric": "gap_closed"}, "means another thing in each stage"),
        ({"scheduler": {"kind": "asha", "grace": 500}}, "needs 501 reports or more"),
        ({"scheduler": "pbt"}, "use sampler: random"),
        (
            {"scheduler": "pbt", "sampler": "random", "samples": 4, "space": {"ppo.hidden": [32, 64]}},
            r"space\.ppo\.hidden: pbt changes settings while a trial runs",
        ),
    ],
)
def test_a_scheduler_that_could_do_nothing_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _read(tmp_path, {**LESSONS, **change})


def test_a_trial_reports_at_every_validation(tmp_path: Path) -> None:
    _, target = _read(tmp_path, {**LESSONS, "set": {"validation.every_rounds": 50}})
    # 120, 160 and 480 rounds.
    assert reports(load_curriculum(target.path, target.fixed)) == 3 + 4 + 10


def test_the_best_loads_wherever_it_lies(tmp_path: Path) -> None:
    source = folder("experiment") / "emulated-dgx-h100.yaml"
    _, target = _read(tmp_path, {**GOOD, "of": str(source)})
    values = {"ppo.lr": 0.02, "control.learning.draws": 7}
    path = tmp_path / "elsewhere" / "best.yaml"
    path.parent.mkdir()
    path.write_text(best_yaml(target, values, ["a comment"]))
    assert path.read_text().startswith("# a comment\n")
    assert load(path) == target.load(values)
    _, target = _read(tmp_path, LESSONS)
    path.write_text(best_yaml(target, {"ppo.lr": 0.02}, []))
    assert load_curriculum(path) == target.load({"ppo.lr": 0.02})


@pytest.mark.parametrize("path", sorted(folder("sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_is_shipped_can_be_run(path: Path) -> None:
    sweep = load_sweep(path)
    target = find_target(sweep, path)
    assert default_values(sweep, target).keys() == sweep.space.keys()
