"""A job that is played on somebody's logs of nccl-tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rigged_rows import write_rows

from dynamiccl_ray.calibration.cells import cells
from dynamiccl_ray.calibration.samples import read_library
from dynamiccl_ray.config.experiment import Online, load
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.clusters import MEASURED, p5en_all_reduce
from dynamiccl_ray.knobs import OWN_PAIR, pair_name
from dynamiccl_ray.plugin_bridge.played import PlayedFabric, play
from dynamiccl_ray.trainers.online.run import plan_of

LOGS = Path(__file__).parents[2] / "data" / "p5en_logs"


def experiment(directory: Path, **fabric: Any) -> Online:
    about = {"kind": "measured", "path": "logs", "processes": {"nodes": 1, "ranks_per_node": 2}, **fabric}
    text = yaml.safe_dump({"name": "mine", "fabric": about, "stop": {"rounds": 1}})
    (directory / "mine.yaml").write_text(text)
    return load(directory / "mine.yaml")


def played(directory: Path, **fabric: Any) -> PlayedFabric:
    of = experiment(directory, **fabric).fabric
    assert of.kind == "measured"
    return play(of, seed=0)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "logs").symlink_to(LOGS)
    return tmp_path


def test_what_is_played_takes_as_long_as_the_logs_say(mine: Path) -> None:
    fabric = played(mine)
    (machine,) = read_library(LOGS).machines
    assert fabric.nbytes.tolist() == [cell.nbytes for cell in cells(machine)]
    for at, cell in enumerate(cells(machine)):
        measured = {"nccl": cell.own_us, **cell.forced_us}
        times = {pair_name(pair): fabric.time_us[0, at, pair, 0] for pair in range(fabric.time_us.shape[2])}
        known = {name: time for name, time in times.items() if np.isfinite(time)}
        assert known == pytest.approx(measured)
    assert fabric.comm.size == 64
    assert fabric.cluster.name == "p5en_logs"


def test_congestion_is_priced_from_the_logs(mine: Path) -> None:
    event = {"at_collective": 100, "link_bandwidth": 0.25}
    time_us = played(mine, events=[event]).time_us
    assert time_us.shape[0] == 2
    assert time_us[1, -1, OWN_PAIR, 0] > 3 * time_us[0, -1, OWN_PAIR, 0]


def test_what_is_not_there_is_one_clear_error(mine: Path) -> None:
    for fabric, says in (
        ({"nodes": 4}, "fabric.nodes: all_reduce on 4 nodes of 8 GPUs was not measured in .*; it was on 8 nodes"),
        (
            {"gpus": 4, "nodes": 16},
            "no size of all_reduce on nodes of 4 GPUs .*; there are p5en_logs, all-reduce, 8x8 GPUs",
        ),
        ({"collective": "broadcast"}, "no size of broadcast"),
        ({"machine": "other"}, r"fabric.machine is 'other'; .* has p5en_logs"),
        ({"path": "nowhere"}, "nowhere is not a directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            played(mine, **fabric)
    for fabric, says in (
        ({"path": None, "machine": "mine"}, "machine is 'mine'; without a path to its measurements it must be p5en"),
        ({"path": None, "gpus": 4}, "collective and gpus are for your own machine"),
        ({"files": [str(LOGS / "default.log")]}, "give path, for a machine of your own, or files, for p5en, not both"),
    ):
        with pytest.raises(ConfigError, match=says):
            experiment(mine, **fabric)


def test_without_nccls_own_choice_nothing_is_played(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for log in LOGS.glob("*-*.log"):
        (tmp_path / "logs" / log.name).write_text(log.read_text())
    with pytest.raises(ConfigError, match=r"NCCL's own choice was not measured .*; add a log of nccl-tests without"):
        played(tmp_path)


def test_one_of_several_machines_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for gpu in ("H100", "A100"):
        write_rows(tmp_path / "logs" / f"{gpu}.csv", gpu=gpu)
    with pytest.raises(ConfigError, match="has the machines A100, H100; name one"):
        played(tmp_path, nodes=2)
    assert played(tmp_path, nodes=2, machine="H100").cluster.name == "H100"


@pytest.mark.parametrize("nodes", [8, 16])
def test_tables_that_belong_together_are_one_machine(tmp_path: Path, nodes: int) -> None:
    """NCCL's own choice was measured in one of the shipped tables, forced pairs in the others."""
    fabric = played(tmp_path, path=str(MEASURED), machine="aws_p5en_tuner_comparison_8_16nodes", nodes=nodes)
    assert len(fabric.nbytes) >= 30
    own = p5en_all_reduce(nodes).time_us(fabric.nbytes)[:, OWN_PAIR, 0]
    known = fabric.nbytes > 8192  # the cold start that is left out of the shipped surface
    np.testing.assert_allclose(fabric.time_us[0, known, OWN_PAIR, 0], own[known], rtol=1e-6)


def test_of_a_run_whose_logs_are_gone_the_rest_is_known(mine: Path) -> None:
    of = experiment(mine)
    assert plan_of(of, "run").cluster is not None
    (mine / "logs").unlink()
    assert plan_of(of, "run").cluster is None
