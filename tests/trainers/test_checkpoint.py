"""Checkpoints: what was written is read, and a stranger's file can do nothing."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamiccl_ray.agent import policy
from dynamiccl_ray.errors import ConfigError, RunError
from dynamiccl_ray.trainers.common import checkpoint
from dynamiccl_ray.trainers.online.explain import explain_run
from dynamiccl_ray.trainers.online.run import read_checkpoint


def test_what_was_written_is_read(tmp_path: Path) -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    state = {"net": {"w": weights, "steps": 7, 3: None}, "history": [{"a": np.float64(0.5)}], "raw": b"\x00\xff"}
    path = tmp_path / "checkpoint.pt"
    checkpoint.write(path, state)
    read = checkpoint.read(path)
    assert read["net"]["w"].dtype == np.float32
    assert read["net"]["w"].tolist() == weights.tolist()
    assert (read["net"]["steps"], read["net"][3], read["history"]) == (7, None, [{"a": 0.5}])
    assert read["raw"].tobytes() == b"\x00\xff"
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_what_could_be_run_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="holds no PosixPath"):
        checkpoint.write(tmp_path / "checkpoint.pt", {"path": tmp_path})


class _Opened:
    def __reduce__(self) -> object:
        return (Path.touch, (Path("opened"),))


@pytest.mark.parametrize(
    "write", [lambda p: p.write_bytes(pickle.dumps(_Opened())), lambda p: torch.save(_Opened(), p)]
)
def test_a_strangers_file_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "checkpoint.pt")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="not a checkpoint of this version") as refused:
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="holds no policy of this version") as refused_policy:
        policy.load(tmp_path / "checkpoint.pt")
    assert not Path("opened").exists()
    for said in (str(refused.value), str(refused_policy.value)):
        assert "\n" not in said
        assert "weights_only" not in said, "PyTorch advises to read it without the restriction"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_damage_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="not a checkpoint"):
        read_checkpoint(tmp_path)


def test_another_kind_of_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "checkpoint.pt", {"curriculum": {}, "learner": {}})
    with pytest.raises(ConfigError, match="not a checkpoint of `dynamiccl online`"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="not a run to resume from"):
        read_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [None, b"{", b"{}", b"\xff"])
def test_what_is_to_be_explained_must_be_a_run(tmp_path: Path, content: bytes | None) -> None:
    checkpoint.write(tmp_path / "checkpoint.pt", {"learner": {}, "coordinator": b"x"})
    if content is not None:
        (tmp_path / "experiment.json").write_bytes(content)
    with pytest.raises(ConfigError, match="not the experiment of a run"):
        explain_run(tmp_path)


def test_a_checkpoint_whose_parts_are_others_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "checkpoint.pt", {"learner": {}, "coordinator": "text"})
    with pytest.raises(ConfigError, match="its parts are others"):
        read_checkpoint(tmp_path)


def test_an_empty_file_is_said_to_end(tmp_path: Path) -> None:
    (tmp_path / "policy.pt").touch()
    with pytest.raises(ConfigError, match="holds no policy of this version: EOFError; train one"):
        policy.load(tmp_path / "policy.pt")


def test_a_policy_whose_weights_are_no_numbers_is_refused(tmp_path: Path) -> None:
    net = policy.PolicyNetwork(4)
    with torch.no_grad():
        net.pair_names[3] = torch.nan
    policy.save(net, tmp_path / "policy.pt")
    with pytest.raises(ConfigError, match="holds no policy of this version: a weight is not a number"):
        policy.load(tmp_path / "policy.pt")


def test_a_policy_stays_where_there_is_no_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, net = tmp_path / "policy.pt", policy.PolicyNetwork(4)
    policy.save(net, path)
    before = path.read_bytes()

    def no_room(_: object, to: Path) -> None:
        to.write_bytes(before[:100])
        raise RuntimeError("PytorchStreamWriter failed writing file data")

    monkeypatch.setattr(torch, "save", no_room)
    with pytest.raises(RunError, match=r"policy\.pt: cannot be written: PytorchStreamWriter failed"):
        policy.save(net, path)
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (before, [path])


def test_a_policy_of_any_size_is_not_made_room_for(tmp_path: Path) -> None:
    torch.save({"hidden": 10**9, "experts": 4, "weights": {}}, tmp_path / "policy.pt")
    with pytest.raises(ConfigError, match="hidden is 1000000000, of 1 to 4096"):
        policy.load(tmp_path / "policy.pt")
