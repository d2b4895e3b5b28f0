"""How a YAML is read: sizes with units, what the command line says instead, paths beside the file, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.config.fabrics import EmulatedFabric, MeasuredFabric
from dynamiccl_ray.errors import ConfigError, nearest
from dynamiccl_ray.fabric.clusters import MEASURED
from dynamiccl_ray.fabric.presets import DIRECTORY
from dynamiccl_ray.settings import Section, read_yaml
from dynamiccl_ray.sizes import Bytes, BytesOrNone

MEASUREMENTS = MEASURED / "aws_p5en_allreduce_2to128nodes.csv"


class Sized(Section):
    """Sizes, as any YAML may have them."""

    size: Bytes
    chunk: BytesOrNone = 0


def _read(directory: Path, text: str, *overrides: str) -> Sized:
    (directory / "x.yaml").write_text(text)
    return read_yaml(directory / "x.yaml", Sized, "file", overrides)


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("4096", 4096),
        ("4KiB", 4096),
        ("4 KiB", 4096),
        ("64MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("1GB", 10**9),
        ("0.5MB", 500_000),
        ("2kB", 2000),
        ("12B", 12),
        ("1TiB", 1 << 40),
        ("'4096'", 4096),
        ("2.5e7", 25_000_000),
        ("1e3MB", 10**9),
    ],
)
def test_a_size_has_a_unit_or_is_in_bytes(tmp_path: Path, written: str, nbytes: int) -> None:
    assert _read(tmp_path, f"size: {written}").size == nbytes


@pytest.mark.parametrize("written", ["4Gb", "4gb", "4K", "4 bytes", "KiB", "0B", "-4KiB", "0.3B", "2TiB", "1e999", "0"])
def test_what_is_no_size_is_refused(tmp_path: Path, written: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:1: size = "):
        _read(tmp_path, f"size: {written}")
    assert _read(tmp_path, "size: 1\nchunk: 0B").chunk == 0


def test_an_override_is_used_as_if_it_stood_there(tmp_path: Path) -> None:
    assert _read(tmp_path, "size: 4KiB", "size=8KiB", "chunk=16KiB", "size=2KiB") == Sized(size=2048, chunk=16384)
    (tmp_path / "x.yaml").write_text("name: x\nfabric: {kind: measured}\nstop: {rounds: 1}\n")
    set_ = load(
        tmp_path / "x.yaml", ["ppo.lr=3e-4", "actions.channels=[0, 8]", "control.trigger={arl0: 5e5}", "seed=7"]
    )
    assert (set_.ppo.lr, set_.actions.channels, set_.control.trigger.arl0, set_.seed) == (3e-4, (0, 8), 5e5, 7)
    assert set_.ppo.epochs == 6, "what is not named stays"


def test_an_item_of_a_list_is_named_by_its_index(tmp_path: Path) -> None:
    curriculum = load_curriculum(
        DIRECTORY.parent / "curricula" / "default.yaml", ["stages.1.promote=0.5", "stages.2.places.0.nodes=[4]"]
    )
    assert [stage.promote for stage in curriculum.stages] == [0.9, 0.5, 0.95]
    assert curriculum.stages[2].places[0].nodes == (4,)


def test_an_override_of_one_alias_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "name: x\nheld_out: [{cluster: cloud-tcp, nodes: [2]}]\n"
        "stages:\n- &a {name: a, places: [{cluster: dgx-v100, nodes: [1]}]}\n- *a\n"
    )
    stages = load_curriculum(tmp_path / "x.yaml", ["stages.0.places.0.nodes.0=2"]).stages
    assert [stage.places[0].nodes for stage in stages] == [(2,), (1,)]


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "m.csv").write_bytes(MEASUREMENTS.read_bytes())
    (tmp_path / "a" / "mine.yaml").write_text((DIRECTORY / "dgx-v100.yaml").read_text().replace("dgx-v100", "mine"))
    (tmp_path / "a" / "m.yaml").write_text("name: x\nfabric: {kind: measured, files: [m.csv]}\nstop: {rounds: 1}\n")
    monkeypatch.chdir(tmp_path)
    measured = load(Path("a/m.yaml")).fabric
    assert isinstance(measured, MeasuredFabric)
    assert measured.files == (tmp_path / "a" / "m.csv",)
    calls = "collectives: [{collective: all_reduce, sizes_bytes: [4KiB]}]"
    for given, name in (("mine.yaml", "mine"), ("dgx-v100", "dgx-v100"), (DIRECTORY / "dgx-v100.yaml", "dgx-v100")):
        (tmp_path / "a" / "e.yaml").write_text(
            f"name: x\nfabric: {{kind: emulated, cluster: {given}, {calls}}}\nstop: {{rounds: 1}}\n"
        )
        emulated = load(Path("a/e.yaml")).fabric
        assert isinstance(emulated, EmulatedFabric)
        assert emulated.cluster.name == name
        (tmp_path / "a" / "c.yaml").write_text(
            "name: x\nheld_out: [{cluster: cloud-tcp, nodes: [2]}]\n"
            f"stages: [{{name: a, places: [{{cluster: {given}, nodes: [1]}}]}}]\n"
        )
        assert load_curriculum(Path("a/c.yaml")).stages[0].places[0].cluster.name == name


def test_a_merge_key_is_no_key_twice(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "name: x\nheld_out: [{cluster: cloud-tcp, nodes: [2]}]\n"
        "stages:\n- &a {name: a, places: [{cluster: dgx-v100, nodes: [1]}]}\n- <<: *a\n  name: b\n  promot: 1\n"
    )
    with pytest.raises(
        ConfigError, match=r"x\.yaml:7: unknown key 'stages\.1\.promot' \(value 1\); did you mean 'promote'"
    ):
        load_curriculum(tmp_path / "x.yaml")
    stages = load_curriculum(
        tmp_path / "x.yaml", ["stages.1={name: b, places: [{cluster: dgx-v100, nodes: [1]}]}"]
    ).stages
    assert [stage.name for stage in stages] == ["a", "b"]


def test_the_nearest_name_is_near() -> None:
    assert nearest("Measurd", ["measured", "emulated"]) == "; did you mean 'measured'?"
    assert nearest("zebra", ["measured", "emulated"]) == ""
