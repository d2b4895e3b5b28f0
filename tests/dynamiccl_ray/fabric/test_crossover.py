"""The crossover map and its command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dynamiccl_ray.cli.app import app
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.crossover import SIZES, crossover, draw_crossover, node_counts
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.fabric.presets import find_cluster
from dynamiccl_ray.knobs import CHANNEL_VALUES, OWN_PAIR, Collective

CLUSTER = find_cluster("dgx-h100-ndr")


def test_the_map_holds_the_best_of_what_can_be_asked_for() -> None:
    found = crossover(CLUSTER, [1, 4], Collective.ALL_REDUCE)
    for i, nodes in enumerate((1, 4)):
        times = Physics(CLUSTER, nodes).time_us(Collective.ALL_REDUCE, SIZES)
        columns = [CHANNEL_VALUES.index(c) for c in found.best_channels[i].tolist()]
        assert np.array_equal(found.best_us[i], times[np.arange(len(SIZES)), found.best_pair[i], columns])
        assert np.array_equal(found.best_us[i], np.nanmin(times[:, 1:], (1, 2)))
        assert np.array_equal(found.nccl_us[i], times[:, OWN_PAIR, 0])
        assert np.array_equal(found.nccl_us[i], times[np.arange(len(SIZES)), found.nccl_pair[i], 0])
    assert (found.ratio >= 1).all()
    assert len(found.rows()) == 2 * len(SIZES)


def test_nodes_are_powers_of_two_that_make_a_communicator() -> None:
    assert node_counts(CLUSTER, 9) == [1, 2, 4, 8]
    assert node_counts(find_cluster("hammingmesh"), 4) == [2, 4]
    assert node_counts(CLUSTER.model_copy(update={"inter": None}), 8) == [1]
    for cluster, most in ((CLUSTER, 0), (find_cluster("hammingmesh"), 1)):
        with pytest.raises(ValueError, match="needs at least"):
            node_counts(cluster, most)


@pytest.mark.parametrize("name", ["dgx-h100-ndr-sharp", "hammingmesh"])
def test_the_picture_is_one(name: str) -> None:
    cluster = find_cluster(name)
    assert draw_crossover(crossover(cluster, node_counts(cluster, 8), Collective.ALL_GATHER)).startswith(b"\x89PNG")


def test_the_command_speaks_json_and_writes_the_map(tmp_path: Path) -> None:
    out = tmp_path / "map.png"
    done = CliRunner().invoke(app, ["fabric", "show", "l40s-pcie", "--nodes", "2", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    cells = json.loads(done.stdout)["cells"]
    assert len(cells) == 2 * len(SIZES)
    assert {"nodes", "bytes", "best", "channels", "best_us", "nccl", "nccl_us", "ratio"} == cells[0].keys()
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no cluster 'nowhere'"),
        (["l40s-pcie", "--collective", "gossip"], "--collective is 'gossip'; it must be one of broadcast"),
        (["l40s-pcie", "--nodes", "0"], "fabric show: nodes is 0"),
        (["l40s-pcie", "--nodes", "1", "--out", "/nowhere/x.png"], "cannot write it"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["fabric", "show", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
