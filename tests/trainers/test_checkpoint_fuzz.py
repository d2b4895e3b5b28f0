"""Checkpoints and policies with any damage: read, or refused with an error of the project's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from fuzzing import JSON_JUNK, cuts, damaged, edited, edits, ends_well, often, overwritten, search
from hypothesis import strategies as st

from dynamiccl_ray.agent import policy
from dynamiccl_ray.trainers.common import checkpoint
from dynamiccl_ray.trainers.online.run import read_checkpoint

STATE = {"learner": {"weights": np.arange(6, dtype=np.float32), "steps": 7}, "coordinator": b"\x00\xff" * 20}
Read = Callable[[Path], object]


def _written(directory: Path) -> tuple[Path, bytes]:
    path = directory / "checkpoint.pt"
    checkpoint.write(path, STATE)
    return path, path.read_bytes()


def _policy(directory: Path) -> tuple[Path, bytes]:
    path = directory / "policy.pt"
    policy.save(policy.PolicyNetwork(4, 1), path)
    return path, path.read_bytes()


def _search(path: Path, raw: bytes, read: Read, examples: int) -> None:
    def holds(given: tuple[bool, list[tuple[float, int, bytes]]]) -> None:
        longer, done = given
        path.write_bytes((damaged if longer else overwritten)(raw, done))
        ends_well(lambda: read(path))

    search(examples, st.tuples(st.booleans(), cuts()), holds)


@often(200, 20_000)
def test_a_damaged_checkpoint(tmp_path: Path, examples: int) -> None:
    _search(*_written(tmp_path), lambda path: read_checkpoint(path.parent), examples)


@often(200, 20_000)
def test_a_damaged_policy(tmp_path: Path, examples: int) -> None:
    _search(*_policy(tmp_path), policy.load, examples)


@often(100, 10_000)
def test_a_checkpoint_of_something_else(tmp_path: Path, examples: int) -> None:
    plain = {"learner": {"steps": 7, "weights": [1.0, 2.0]}, "coordinator": [1, 2]}

    def holds(done: list[tuple[int, str, object]]) -> None:
        torch.save(edited(plain, done), tmp_path / "checkpoint.pt")
        ends_well(lambda: read_checkpoint(tmp_path))

    search(examples, edits(JSON_JUNK), holds)


@often(100, 10_000)
def test_a_policy_of_something_else(tmp_path: Path, examples: int) -> None:
    net = policy.PolicyNetwork(4, 1)
    plain = {"hidden": net.hidden, "experts": net.experts, "weights": {"a": [1.0]}}

    def holds(done: list[tuple[int, str, object]]) -> None:
        torch.save(edited(plain, done), tmp_path / "policy.pt")
        ends_well(lambda: policy.load(tmp_path / "policy.pt"))

    search(examples, edits(JSON_JUNK), holds)
