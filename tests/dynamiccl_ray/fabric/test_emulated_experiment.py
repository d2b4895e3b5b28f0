"""The emulated fabric of an experiment: its cluster, its events, and how it is laid out to be played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dynamiccl_ray.config.experiment import Online, load
from dynamiccl_ray.config.fabrics import EmulatedFabric, LoadEvent
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.cluster_config import load_cluster
from dynamiccl_ray.fabric.load import Load
from dynamiccl_ray.knobs import CHANNEL_VALUES
from dynamiccl_ray.plugin_bridge.played import play

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
FILES = [EXPERIMENTS / "clusters" / f"{name}.yaml" for name in ("dgx-h100-ndr", "cloud-tcp")]


def _experiment(cluster: Any, **fabric: Any) -> dict[str, Any]:
    calls = [{"collective": "all_reduce", "sizes_bytes": [4096, 1 << 20]}]
    return {
        "name": "test",
        "fabric": {"kind": "emulated", "cluster": cluster, "nodes": 2, "collectives": calls, **fabric},
        "stop": {"rounds": 1},
    }


def _refused(tmp_path: Path, experiment: dict[str, Any]) -> str:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_cluster_is_found_beside_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(FILES[0].read_text())
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(_experiment("mine.yaml")))
    experiment = load(tmp_path / "experiment.yaml")
    assert isinstance(experiment.fabric, EmulatedFabric)
    assert experiment.fabric.cluster == load_cluster(FILES[0])
    # A finished run carries its cluster with it.
    assert Online.model_validate_json(experiment.model_dump_json()) == experiment


def test_a_wrong_cluster_is_one_clear_error(tmp_path: Path) -> None:
    message = _refused(tmp_path, _experiment("nowhere.yaml"))
    assert f"{tmp_path / 'nowhere.yaml'}: cannot read the cluster: No such file or directory" in message
    raw = yaml.safe_load(FILES[0].read_text())
    raw["inter"]["nic_gbps"] = 3
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    message = _refused(tmp_path, _experiment("mine.yaml"))
    assert f"{tmp_path / 'mine.yaml'}:" in message
    assert "unknown key 'inter.nic_gbps' (value 3); did you mean 'nic_gb_per_s'?" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collectives": [{"collective": "all_reduce", "sizes_bytes": [4096, 4100]}]}, "all_reduce/4KiB"),
        ({"collectives": []}, "give exactly one of collectives and trace"),
        ({"events": [{"at_collective": 5, "swap_nodes": 4}]}, "unknown key 'fabric.events.0.swap_nodes'"),
        ({"events": [{"inter_bandwidth": 0.5}]}, "exactly one of at_collective and exploit_rounds"),
        ({"events": [{"at_collective": 5, "straggler": 0.5}]}, "greater than or equal to 1"),
        ({"events": [{"at_collective": 5, "loss": 1}]}, "less than 1"),
        ({"dynamics": {"lossy": {"mean_gap": 100}}}, "unknown key 'fabric.dynamics'"),
        ({"processes": {"nodes": 2, "ranks_per_node": 9}}, "2 nodes x 8 GPUs"),
    ],
)
def test_a_wrong_fabric_is_one_clear_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in _refused(tmp_path, _experiment(str(FILES[0]), **changes))


def test_nodes_need_a_network(tmp_path: Path) -> None:
    raw = yaml.safe_load(FILES[-1].read_text())
    del raw["inter"]
    assert "has no network (inter), so nodes must be 1, not 2" in _refused(tmp_path, _experiment(raw))


def test_a_played_model_has_a_phase_per_load_and_only_channels_that_may_be_asked_for() -> None:
    fabric = load(EXPERIMENTS / "online" / "emulated-dgx-h100.yaml").fabric
    assert isinstance(fabric, EmulatedFabric)
    played = play(fabric, seed=0, channels=(0, 8, 16))
    assert played.time_us.shape[:2] == (2, 9)
    asked = np.isfinite(played.time_us).any((0, 1, 2))
    assert [c for c, a in zip(CHANNEL_VALUES, asked, strict=True) if a] == [0, 8, 16]
    assert played.cluster == fabric.cluster
    assert np.isnan(played.vendor_us).all()
    idle, busy = played.time_us
    assert np.array_equal(np.isfinite(idle), np.isfinite(busy))
    assert (busy >= idle)[np.isfinite(idle)].all()


def test_an_event_sets_the_load_and_says_so_in_words() -> None:
    event = LoadEvent(at_collective=1, inter_bandwidth=0.3, inter_latency=1.5, straggler=2, loss=0.001)
    assert vars(event.load) == vars(Load(inter_bandwidth=0.3, inter_latency=1.5, straggler=2.0, loss=0.001))
    assert event.name == "network at 30%, network latency x1.5, straggler x2, 0.10% loss"
    assert LoadEvent(at_collective=1).name == "idle"
