"""YAML files of any content: each loader succeeds, or says in a few lines what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import cuts, damaged, edited, edits, ends_well, often, search
from hypothesis import strategies as st

from dynamiccl_ray.calibration.calibrated import read_parameters
from dynamiccl_ray.config.curriculum import load_curriculum
from dynamiccl_ray.config.experiment import load
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.fabric.cluster_config import load_cluster
from dynamiccl_ray.settings import MOST_BRACKETS, MOST_BYTES, MOST_VALUES
from dynamiccl_ray.workloads.network import load_networks
from dynamiccl_ray.workloads.workload import load_workload

ROOT = Path(__file__).parents[1]
SHIPPED: list[tuple[Callable[[Path], object], str]] = [
    (load, "experiments/online/*.yaml"),
    (load, "dynamiccl_ray/data/demo*.yaml"),
    (load_curriculum, "experiments/curricula/*.yaml"),
    (load_cluster, "experiments/clusters/*.yaml"),
    (load_workload, "experiments/workloads/*.yaml"),
    (load_networks, "dynamiccl_ray/data/networks.yaml"),
]
FILES = [(loader, path) for loader, pattern in SHIPPED for path in sorted(ROOT.glob(pattern))]
LOADERS = (load, load_curriculum, load_cluster, load_workload, load_networks, read_parameters)
DIFFERENT = st.sampled_from(FILES)


def _read(directory: Path, loader: Callable[[Path], object], content: bytes) -> None:
    path = directory / "given.yaml"
    path.write_bytes(content)
    ends_well(lambda: loader(path))


@often(150, 20_000)
def test_any_bytes(tmp_path: Path, examples: int) -> None:
    content = st.binary(max_size=200) | st.text(alphabet="ab:-*&<{}[]!|>'\"#%@?,\n 019.~", max_size=200).map(str.encode)
    search(examples, st.tuples(st.sampled_from(LOADERS), content), lambda given: _read(tmp_path, given[0], given[1]))


@often(120, 20_000)
def test_values_of_another_kind(tmp_path: Path, examples: int) -> None:
    def holds(given: Any) -> None:
        (loader, path), done = given
        document = edited(yaml.safe_load(path.read_text()), done)
        _read(tmp_path, loader, yaml.safe_dump(document, allow_unicode=True).encode())

    search(examples, st.tuples(DIFFERENT, edits()), holds)


@often(120, 20_000)
def test_damaged_text(tmp_path: Path, examples: int) -> None:
    search(
        examples,
        st.tuples(DIFFERENT, cuts()),
        lambda given: _read(tmp_path, given[0][0], damaged(given[0][1].read_bytes(), given[1])),
    )


# ---- what was found ----


def _levels(merged: bool) -> str:
    """Eight levels of ten aliases each."""
    lines = ["a: &a {x: 1}" if merged else "a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefg", "bcdefgh", strict=True):
        aliases = ", ".join([f"*{before}"] * 10)
        lines.append(f"{name}: &{name} " + (f"{{<<: [{aliases}], {name}1: 1}}" if merged else f"[{aliases}]"))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_levels(False), f"more than {MOST_VALUES} values"),
        (_levels(True), f"more than {MOST_VALUES} values"),
        ("name: &a [*a]", f"more than {MOST_VALUES} values"),
        ("name: " + "[" * 20_000, "nested too deeply"),
        ("name: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        (b"name: \xff\xfe", "not UTF-8: invalid start byte at byte 6"),
        ("name: 2001-99-99", "not YAML: month must be in 1..12"),
        ("seed: " + "9" * 5000, "not YAML: Exceeds the limit"),
        ("name: a\0b", "not YAML: unacceptable character"),
        ("# " + "a" * MOST_BYTES, f"a file of settings may have {MOST_BYTES}"),
        ("name: x\nfabric: {kind: nccl}\npolicy: " + "a" * 5000, "policy = 'aaa"),
        ("name: x\nfabric: {kind: real_nccl, nccl: " + "a" * 5000 + "}", "nccl = 'aaa"),
        ("\n".join(f"unknown{i}: 1" for i in range(1000)), "and 999 more"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_what_ended_otherwise(tmp_path: Path, content: str | bytes, said: str) -> None:
    """By a traceback, after seconds, or with a message of gigabytes."""
    path = tmp_path / "given.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as found:
        load(path)
    assert said in str(found.value)
    assert len(str(found.value)) < 5000


def test_brackets_are_not_read_further_than_settings_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three thousand took seconds: the scanner's work grows with the square of those that are open."""
    opened = []
    scanned = yaml.SafeLoader.fetch_flow_collection_start
    monkeypatch.setattr(
        yaml.SafeLoader, "fetch_flow_collection_start", lambda *given: (opened.append(1), scanned(*given))
    )
    path = tmp_path / "given.yaml"
    path.write_text("name: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(path)
    assert len(opened) == MOST_BRACKETS
    path.write_text("name: " + "[" * MOST_BRACKETS + "]" * MOST_BRACKETS)
    with pytest.raises(ConfigError, match="name = "):
        load(path)
