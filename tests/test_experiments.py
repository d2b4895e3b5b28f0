"""Every YAML that is shipped loads, and every job that it would play can be laid out."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from dynamiccl_ray.agent import policy
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import DEFAULT_POLICY, load, recorded
from dynamiccl_ray.config.sweep import load_sweep
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.plugin_bridge.nccl_job import read_log
from dynamiccl_ray.plugin_bridge.played import play
from dynamiccl_ray.trainers.online.run import plan_of, run_online

ROOT = Path(__file__).parents[1]
SHIPPED = [*(ROOT / "experiments" / "online").glob("*.yaml"), ROOT / "dynamiccl_ray" / "data" / "demo.yaml"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_experiments_load_and_can_be_played(path: Path) -> None:
    experiment = load(path)
    if experiment.fabric.kind in ("nccl", "real_nccl"):
        return
    fabric = play(experiment.fabric, seed=experiment.seed, channels=experiment.actions.channels)
    assert len(fabric.nbytes) >= 2
    assert len(fabric.time_us) == 1 + len(experiment.fabric.events)
    assert all(mask[1:].any() for mask in fabric.valid.values()), "a key without anything to learn"


@pytest.mark.parametrize("path", [*SHIPPED, ROOT / "dynamiccl_ray" / "data" / "demo-nccl.yaml"], ids=lambda p: p.stem)
def test_what_a_run_wrote_down_is_read_again_wherever_it_is(path: Path, tmp_path: Path) -> None:
    """Also where the policy that it began with is not."""
    experiment = load(path)
    there = experiment.model_copy(update={"policy": Path("/nowhere/policy.pt")})
    (tmp_path / "experiment.json").write_text(there.model_dump_json())
    assert recorded(tmp_path / "experiment.json") == experiment.model_copy(update={"policy": None})
    described = plan_of(experiment, "run")
    assert described.topology or described.cluster
    for broken in ("[]", "{", '{"fabric": 1}', '{"fabric": {"kind": "nccl"}}'):
        (tmp_path / "experiment.json").write_text(broken)
        with pytest.raises(ConfigError, match="not the experiment of a run"):
            recorded(tmp_path / "experiment.json")


def test_the_default_policy_ships_and_fits_the_network(tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / "experiments" / "online" / "nccl.yaml").read_text())
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(raw | {"policy": "default"}))
    experiment = load(tmp_path / "x.yaml")
    assert experiment.policy == DEFAULT_POLICY
    assert policy.load(DEFAULT_POLICY).hidden > 0
    assert DEFAULT_POLICY.stat().st_size < 4 << 20
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(raw | {"policy": "nowhere.pt"}))
    with pytest.raises(ConfigError, match=r"nowhere\.pt is no file"):
        load(tmp_path / "x.yaml")


GALLERY = sorted(
    path for kind in ("online", "curricula", "sweeps") for path in (ROOT / "experiments" / kind).glob("*.yaml")
)


@pytest.mark.parametrize("path", GALLERY, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_file_of_the_gallery_says_what_it_shows_and_loads(path: Path) -> None:
    schema, about, *more = path.read_text().splitlines()
    kind = {"online": "experiment", "curricula": "curriculum", "sweeps": "sweep"}[path.parent.name]
    assert schema == f"# yaml-language-server: $schema=../../dynamiccl_ray/data/schema/{kind}.json"
    assert about.startswith("# ")
    header = " ".join([about, *itertools.takewhile(lambda line: line.startswith("#"), more)])
    assert "Expect: " in header
    assert re.search(r"second|minute|until you end it", header), "how long it takes"
    {"online": load, "curricula": load_curriculum, "sweeps": load_sweep}[path.parent.name](path)


def test_observing_on_measured_times_changes_nothing(tmp_path: Path) -> None:
    """What its header says."""
    summary = run_online(load(ROOT / "experiments" / "online" / "p5en-observe.yaml"), tmp_path, serial=True)
    assert summary["switches"] == 0
    assert summary["collectives"] > 1000
    assert all(path.stat().st_size for path in (tmp_path / "job").glob("log.*"))
    assert all(read_log(path)["own"].all() for path in (tmp_path / "job").glob("log.*"))
