"""Rank processes: real PyTorch collectives (gloo, on the CPU) against the references, failures, and environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.cases import Case
from benchmarks.gpu.plan import slots
from benchmarks.gpu.ranks import RankError, Ranks, environment
from dynamiccl_ray.knobs import Collective

SIZE = 2


def start(directory: Path, timeout_s: float = 60.0) -> Ranks:
    environments = [environment(os.environ, rank, one_gpu=False, nccl=(2, 28), plugin={}) for rank in range(SIZE)]
    return Ranks(environments, devices=[None] * SIZE, directory=directory, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with start(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def test_another_implementation_agrees_with_every_reference(ranks: Ranks) -> None:
    cases = [case for slot in slots((256, 4096, 65536), SIZE) for case in slot]
    assert ranks.call("check", cases=cases) == [[None] * len(cases)] * SIZE


def test_groups_times_and_what_a_process_holds(ranks: Ranks) -> None:
    one = Case(collective=Collective.ALL_REDUCE, count=1024)
    rooted = Case(collective=Collective.REDUCE, count=64, root=1)
    assert ranks.call("group", name="part", members=[1]) == [False, True]
    assert ranks.call("check", cases=[one], group="part") == [[None], [None]]
    ranks.call("ungroup", name="part")
    ranks.call("group", name="both", members=[0, 1])
    calls = [("world", one), ("both", rooted), ("both", one)] * 3
    assert ranks.call("interleave", calls=calls) == [[None] * 9] * SIZE
    ranks.call("ungroup", name="both")
    for times in ranks.call("time", case=one, warmup=1, measured=3):
        assert len(times) == 3
        assert min(times) > 0
    for figures in ranks.call("throughput", case=one, blocks=2):
        assert [len(figures[what]) for what in ("host_us", "gpu_us")] == [2, 2]
    for samples in ranks.call("cycles", case=one, times=2):
        assert [sample["wrong"] for sample in samples] == [None, None]
        assert samples[0]["anonymous_bytes"] > 1 << 20
    assert all(seconds > 0 for seconds in ranks.call("loop", cases=[one, rooted], times=2))


def test_a_rank_that_fails_says_how(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"check: rank 0: (.|\n)*float7"):
        ranks.call("check", cases=[Case(collective=Collective.ALL_REDUCE, count=8, dtype="float7")])


def _only_rank_0(case: Case) -> list[dict[str, Any]]:
    return [{"cases": [case]}, {"cases": []}]


def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    alone = Case(collective=Collective.ALL_REDUCE, count=8)
    with (
        pytest.raises(RankError, match=r"ranks \[0\] of 2 did not answer within 1 s(.|\n)*buffers.py"),
        start(tmp_path) as ranks,
    ):
        ranks.call_each("check", _only_rank_0(alone), timeout_s=1.0)
    assert all(not Path(f"/proc/{pid}").exists() for pid in ranks.pids)


def test_a_rank_that_dies_is_noticed(tmp_path: Path) -> None:
    ranks = start(tmp_path)
    os.kill(ranks.pids[1], 9)
    with pytest.raises(RankError, match=r"rank 1: the process ended with -9"), ranks:
        ranks.call("usage")
    assert all(not Path(f"/proc/{pid}").exists() for pid in ranks.pids)


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    environments = [environment(os.environ, rank, one_gpu=False, nccl=(2, 28), plugin={}) for rank in range(SIZE)]
    with pytest.raises(RankError, match=r"start: rank 0: (.|\n)*set_device"):
        Ranks(environments, devices=[63, 63], directory=tmp_path, timeout_s=30)


def test_several_ranks_on_one_gpu_look_like_several_hosts() -> None:
    base = {
        "PATH": "/bin",
        "NCCL_ALGO": "Ring",
        "NCCL_TUNER_PLUGIN": "other",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/x",
    }
    plugin = {"NCCL_TUNER_PLUGIN": "ours", "DYNAMICCL_JOB_ID": "j"}
    envs = [environment(base, rank, one_gpu=True, nccl=(2, 30, 7), plugin=plugin) for rank in range(2)]
    assert envs[0]["NCCL_HOSTID"] != envs[1]["NCCL_HOSTID"]
    for env in envs:
        assert (env["NCCL_P2P_DISABLE"], env["NCCL_SHM_DISABLE"]) == ("1", "1")
        assert (env["NCCL_NET"], env["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
        assert env["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert (env["NCCL_TUNER_PLUGIN"], env["DYNAMICCL_JOB_ID"], env["NCCL_DEBUG"]) == ("ours", "j", "INFO")
        assert env["PYTHONPATH"].endswith(":/x")
        assert not {"NCCL_ALGO", "TORCH_NCCL_BLOCKING_WAIT"} & env.keys()
    older = environment(base, 0, one_gpu=True, nccl=(2, 29, 7), plugin={})
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in older
    several = environment(base, 0, one_gpu=False, nccl=(2, 30, 7), plugin={})
    assert not {"NCCL_HOSTID", "NCCL_P2P_DISABLE", "NCCL_NET", "NCCL_MULTI_RANK_GPU_ENABLE"} & several.keys()
