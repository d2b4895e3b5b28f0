"""What goes over the wire: sizes by formula, gaps that add up to the compute, exchanges when they are due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import Collective
from dynamiccl_ray.workloads.calls import Operation, PipelineRole, Stream
from dynamiccl_ray.workloads.compression import Compression
from dynamiccl_ray.workloads.stream import iteration
from dynamiccl_ray.workloads.sync import Sync
from dynamiccl_ray.workloads.workload import Workload, load_workload

PRESETS = sorted((Path(__file__).parents[3] / "experiments" / "workloads").glob("*.yaml"))


def _workload(**changes: Any) -> Workload:
    raw: dict[str, Any] = {"name": "x", "model": "GPT-2", "batch": 2, "sequence_length": 1024, "gpu_tflops": 100}
    return Workload.model_validate(raw | changes)


def _sizes(stream: Stream, role: str, operation: Operation) -> np.ndarray:
    """Effective bytes."""
    roles = np.array([c.role for c in stream.communicators])
    chosen = (roles[stream.calls["communicator"]] == role) & (stream.calls["operation"] == operation)
    return stream.calls["effective_bytes"][chosen]


def _compute_us(stream: Stream) -> float:
    return float(stream.calls["gap_us"].sum()) + stream.tail_us


def test_collectives_have_the_tuners_numbers() -> None:
    for collective in Collective:
        assert Operation[collective.name] == collective


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_load_and_run(path: Path) -> None:
    workload = load_workload(path)
    assert workload.name == path.stem
    for rank in {0, workload.degrees.ranks // 2, workload.degrees.ranks - 1}:
        stream = iteration(workload, rank=rank, step=workload.sync.tau - 1)
        assert len(stream.calls)
        assert (stream.calls["gap_us"] >= -1e-6).all()
        assert (stream.calls["effective_bytes"] > 0).all()
        assert all(rank in c.ranks for c in stream.communicators)


def test_presets_cover_every_parallelism() -> None:
    assert {load_workload(p).parallelism for p in PRESETS} >= {"dp", "tp", "fsdp", "3d", "moe"}


def _preset(name: str) -> Stream:
    return iteration(load_workload(next(p for p in PRESETS if p.stem == name)))


def test_sizes_are_in_the_usual_ranges() -> None:
    for name in ("resnet50-dp", "bert-large-dp", "llama3-70b-3d"):
        assert 1e8 <= _sizes(_preset(name), "dp", Operation.ALL_REDUCE).sum() <= 1e10
    for stream in (_preset("phi2-tp"), _preset("llama3-70b-3d")):
        for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER):
            sizes = _sizes(stream, "tp", operation)
            assert ((sizes >= 1e6) & (sizes <= 1e8)).all()
    sends = _sizes(_preset("llama3-70b-3d"), "pp", Operation.SEND)
    assert len(sends) > 10
    assert (sends <= 1e8).all()
    for operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER):
        assert 1e7 <= np.median(_sizes(_preset("llama3-8b-fsdp"), "dp", operation)) <= 1e9


class TestDataParallel:
    def test_every_gradient_is_reduced_once_whatever_the_schedule(self) -> None:
        for schedule in ("bsp", "wfbp", "fused", "partitioned"):
            workload = _workload(degrees={"dp": 4}, gradients={"schedule": schedule})
            sizes = _sizes(iteration(workload), "dp", Operation.ALL_REDUCE)
            assert sizes.sum() == pytest.approx(2 * workload.network_model.parameters)
            expected = {"bsp": 1, "wfbp": len(workload.network_model.tensors)}.get(schedule)
            assert expected is None or len(sizes) == expected
        assert sizes.max() <= 4e6

    def test_the_compute_is_the_models_and_does_not_depend_on_the_schedule(self) -> None:
        flops = 3 * 2 * _workload().network_model.forward_flops(1024).sum()
        for schedule in ("bsp", "wfbp", "fused"):
            stream = iteration(_workload(degrees={"dp": 4}, gradients={"schedule": schedule}))
            assert _compute_us(stream) == pytest.approx(flops / 100e6)

    def test_messages_start_when_their_gradients_are_ready(self) -> None:
        calls = iteration(_workload(degrees={"dp": 2}, gradients={"schedule": "wfbp"})).calls
        forward_and_more = _compute_us(iteration(_workload())) / 3
        assert calls["gap_us"][0] > forward_and_more
        assert (calls["gap_us"] > 0).sum() > 10
        assert calls["overlaps"].all()
        assert calls["critical"].sum() == 2  # the embeddings, which the next forward needs first
        assert not iteration(_workload(degrees={"dp": 2}, gradients={"schedule": "bsp"})).calls["overlaps"].any()

    def test_micro_batches_are_accumulated(self) -> None:
        one, four = (iteration(_workload(degrees={"dp": 2}, micro_batches=m)) for m in (1, 4))
        assert len(one.calls) == len(four.calls)
        assert _compute_us(four) == pytest.approx(4 * _compute_us(one))

    def test_a_server_is_pushed_to_and_pulled_from(self) -> None:
        stream = iteration(_workload(degrees={"dp": 2}, gradients={"architecture": "parameter-server"}))
        assert _sizes(stream, "server", Operation.PUSH).sum() == _sizes(stream, "server", Operation.PULL).sum()


class TestModelParallel:
    def test_tensor_parallel_all_reduces_twice_a_block_and_pass(self) -> None:
        sizes = _sizes(iteration(_workload(degrees={"tp": 2})), "tp", Operation.ALL_REDUCE)
        assert len(sizes) == 4 * 12
        assert (sizes == 2 * 1024 * 768 * 2).all()
        split = iteration(_workload(degrees={"tp": 2}, sequence_parallel=True))
        assert len(_sizes(split, "tp", Operation.REDUCE_SCATTER)) == 4 * 12
        assert len(_sizes(split, "tp", Operation.ALL_GATHER)) == 4 * 12

    def test_a_pipeline_sends_activations_forth_and_gradients_back(self) -> None:
        workload = _workload(degrees={"pp": 4}, micro_batches=8)
        counts = []
        for rank in range(4):
            calls = iteration(workload, rank=rank).calls
            assert (calls["nominal_bytes"] == 2 * 1024 * 768 * 2).all()
            roles = [(calls["pipeline_role"] == r).sum() for r in (2, 3)]
            assert roles[0] == roles[1]
            counts.append(int(roles[0]))
        assert counts == [8, 16, 16, 8]

    def test_stages_share_out_the_gradients(self) -> None:
        workload = _workload(degrees={"dp": 2, "pp": 3, "tp": 2}, micro_batches=3)
        total = sum(_sizes(iteration(workload, rank=r), "dp", Operation.ALL_REDUCE).sum() for r in (0, 4, 8))
        assert total == pytest.approx(workload.network_model.parameters)  # 2 bytes over tp = 2
        assert (iteration(workload).calls["pipeline_role"] != PipelineRole.NONE).all()

    def test_chimera_reduces_over_both_directions(self) -> None:
        workload = _workload(degrees={"pp": 4, "dp": 2}, micro_batches=4, pipeline={"schedule": "chimera"})
        stream = iteration(workload, rank=2)
        assert (0, 1, 6, 7) not in [c.ranks for c in stream.communicators]
        assert (2, 3, 4, 5) in [c.ranks for c in stream.communicators]

    def test_zero_3_gathers_twice_and_scatters_once(self) -> None:
        stream = iteration(_workload(degrees={"dp": 8, "fsdp": True}))
        parameters = 2 * _workload().network_model.parameters
        assert _sizes(stream, "dp", Operation.ALL_GATHER).sum() == pytest.approx(2 * parameters)
        assert _sizes(stream, "dp", Operation.REDUCE_SCATTER).sum() == pytest.approx(parameters)

    def test_experts_are_exchanged_and_reduced_over_their_replicas(self) -> None:
        workload = _workload(model="Mixtral-8x7B", degrees={"dp": 8, "ep": 4}, sequence_length=512)
        stream = iteration(workload, rank=5)
        sizes = _sizes(stream, "ep", Operation.ALL_TO_ALL)
        assert len(sizes) == 4 * 32
        assert (sizes == 2 * 512 * 4096 * 2 * 2).all()
        groups = {c.role: c.ranks for c in stream.communicators}
        assert groups["ep"] == (4, 5, 6, 7)
        assert groups["expert-dp"] == (1, 5)
        experts = 32 * 8 * 3 * 4096 * 14336
        assert _sizes(stream, "expert-dp", Operation.ALL_REDUCE).sum() == pytest.approx(2 * experts / 4)
        dense = workload.network_model.parameters - experts
        assert _sizes(stream, "dp", Operation.ALL_REDUCE).sum() == pytest.approx(2 * dense)

    def test_a_recommender_exchanges_rows_and_never_reduces_its_tables(self) -> None:
        stream = _preset("dlrm")
        assert (_sizes(stream, "ep", Operation.ALL_TO_ALL) == 4096 * 26 * 128 * 2).all()
        assert _sizes(stream, "dp", Operation.ALL_REDUCE).sum() < 1e7


class TestSync:
    def test_local_sgd_exchanges_every_tau_steps(self) -> None:
        workload = _workload(degrees={"dp": 4}, sync={"mode": "local-sgd", "tau": 3})
        assert [len(iteration(workload, step=s).calls) > 0 for s in range(6)] == [False, False, True] * 2
        assert not iteration(workload, step=2).calls["overlaps"].any()

    def test_hybrid_stays_in_the_node_in_between(self) -> None:
        workload = _workload(degrees={"dp": 8}, gpus_per_node=4, sync={"mode": "hybrid", "tau": 2})
        first, second = (iteration(workload, rank=5, step=s) for s in (0, 1))
        assert [c.ranks for c in first.communicators] == [(4, 5, 6, 7)]
        assert {c.role for c in second.communicators} == {"node", "dp"}

    def test_gossip_talks_to_two_neighbours(self) -> None:
        stream = iteration(_workload(degrees={"dp": 5}, sync={"mode": "decentralized"}))
        assert {c.ranks for c in stream.communicators} == {(0, 1), (0, 4)}
        assert set(stream.calls["operation"]) == {Operation.SEND, Operation.RECEIVE}

    def test_stale_parameters_are_exchanged_every_step(self) -> None:
        assert [Sync(mode="ssp", tau=4).patterns(s) for s in range(2)] == [("server",)] * 2


@pytest.mark.parametrize(
    ("compression", "expected"),
    [
        ({"method": "none"}, [4e6, 4e3]),
        ({"method": "quantised", "bits": 8}, [1e6 + 4, 1e3 + 4]),
        ({"method": "top-k", "density": 0.01}, [8e4, 80]),
        ({"method": "top-k", "density": 0.9}, [4e6, 4e3]),  # indices would make it longer
        ({"method": "random-k", "density": 0.01}, [4e4 + 8, 48]),
        ({"method": "sign"}, [125e3 + 4, 129]),
        ({"method": "low-rank", "rank": 4}, [4 * 2000 * 4, 4e3]),
        ({"method": "combined", "ratio": 117}, [4e6 / 117, 4e3 / 117]),
    ],
)
def test_effective_bytes(compression: dict[str, Any], expected: list[float]) -> None:
    found = Compression.model_validate(compression).effective_bytes(((1000, 1000), (1000,)))
    assert found == pytest.approx(expected)


def test_compressed_gradients_shrink_and_keep_their_nominal_size() -> None:
    workload = _workload(degrees={"dp": 4}, compression={"method": "combined", "ratio": 117})
    calls = iteration(workload).calls
    assert calls["nominal_bytes"].sum() == pytest.approx(117 * calls["effective_bytes"].sum())
    sparse = iteration(_workload(degrees={"dp": 4}, compression={"method": "top-k", "density": 0.001})).calls
    assert set(sparse["operation"]) == {Operation.ALL_GATHER}
    assert sparse["effective_bytes"].sum() == pytest.approx(4 * 3 * 1e-3 * sparse["nominal_bytes"].sum(), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "AlexNet"}, "there are ResNet-50"),
        ({"model": "ResNet-50", "sequence_length": 1, "degrees": {"tp": 2}}, "no blocks"),
        ({"model": "ResNet-50"}, "takes no sequences"),
        ({"degrees": {"pp": 13}}, "exceeds the 12 blocks"),
        ({"degrees": {"dp": 2, "ep": 2}}, "does not divide the 0 experts"),
        ({"sync": {"mode": "asp"}}, "needs gradients.architecture = parameter-server"),
        ({"sync": {"mode": "hybrid", "tau": 2}, "gradients": {"architecture": "parameter-server"}}, "= all-reduce"),
        ({"sync": {"mode": "bsp", "tau": 2}}, "has no tau"),
        ({"degrees": {"dp": 2, "fsdp": True}, "sync": {"mode": "local-sgd", "tau": 2}}, "fsdp shards"),
        ({"compression": {"method": "sign", "bits": 2}}, "takes no rate, found"),
        ({"compression": {"method": "sign"}}, "needs dp above 1"),
        ({"degrees": {"pp": 4}, "micro_batches": 6, "pipeline": {"schedule": "chimera"}}, "multiple of them"),
        ({"speed": 1}, "Extra inputs"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        _workload(**changes)


def test_a_bad_yaml_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("{name: x, model: GPT-2, batch: 0, gpu_tflops: 1}")
    with pytest.raises(ConfigError, match=r"w.yaml:1: batch = 0"):
        load_workload(path)
    with pytest.raises(ValueError, match="rank = 1: the workload has ranks 0 to 0"):
        iteration(_workload(), rank=1)
