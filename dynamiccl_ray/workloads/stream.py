"""One iteration of a workload as the calls of one rank, with the compute between them.

Sizes: tensor parallelism moves micro-batch x sequence x hidden elements twice per block and pass (Shoeybi et al. 2019,
arXiv:1909.08053); a pipeline sends as much between stages; ZeRO-3 gathers a block's parameters before each pass and
scatters its gradients after the backward (Rajbhandari et al. 2020, arXiv:1910.02054); experts get and return as many
rows as each token has experts (Lepikhin et al. 2021, arXiv:2006.16668); DLRM exchanges one vector per table and sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.workloads.calls import CALL, Operation, PipelineRole, Stream, StreamCommunicator
from dynamiccl_ray.workloads.gradients import messages, overlaps
from dynamiccl_ray.workloads.pipeline import order
from dynamiccl_ray.workloads.segments import Segment, stage_segments
from dynamiccl_ray.workloads.sync import Pattern
from dynamiccl_ray.workloads.workload import Workload


@dataclass
class _Rank:
    """Where a rank stands, and the communicators that it has met."""

    workload: Workload
    rank: int
    known: dict[StreamCommunicator, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        d = self.workload.degrees
        self.tp = self.rank % d.tp
        self.dp = self.rank // d.tp % d.dp
        self.pp = self.rank // (d.tp * d.dp)

    def at(self, *, tp: int | None = None, dp: int | None = None, pp: int | None = None) -> int:
        """The rank that differs from this one in the given coordinates."""
        d = self.workload.degrees
        tp, dp, pp = (own if new is None else new for own, new in ((self.tp, tp), (self.dp, dp), (self.pp, pp)))
        return (pp * d.dp + dp) * d.tp + tp

    def communicator(self, role: str, ranks: list[int]) -> int:
        """Its index in the stream."""
        return self.known.setdefault(StreamCommunicator(role=role, ranks=tuple(ranks)), len(self.known))

    def over_tp(self) -> int:
        return self.communicator("tp", [self.at(tp=i) for i in range(self.workload.degrees.tp)])

    def over_replicas(self) -> int:
        """All that hold the same parameters: under Chimera also those of the opposite pipeline."""
        d = self.workload.degrees
        stages = {self.pp, d.pp - 1 - self.pp} if self.workload.opposite_pipelines else {self.pp}
        return self.communicator("dp", [self.at(dp=i, pp=p) for p in sorted(stages) for i in range(d.dp)])

    def over_dp(self, role: str = "dp", *, start: int = 0, count: int | None = None, step: int = 1) -> int:
        """Data-parallel ranks start, start + step, ..., ``count`` of them; all by default."""
        count = self.workload.degrees.dp if count is None else count
        return self.communicator(role, [self.at(dp=start + i * step) for i in range(count)])


def iteration(workload: Workload, *, rank: int = 0, step: int = 0) -> Stream:
    """The calls that ``rank`` makes in step ``step``. Raises ValueError for a rank that does not exist."""
    d = workload.degrees
    if not 0 <= rank < d.ranks:
        raise ValueError(f"rank = {rank}: the workload has ranks 0 to {d.ranks - 1}")
    place = _Rank(workload, rank)
    passes = order(workload.pipeline.schedule, d.pp, workload.micro_batches, chunks=workload.pipeline.chunks)[place.pp]
    last_backward = {p.stage: i for i, p in enumerate(passes) if p.backward}
    n_stages = d.pp * workload.pipeline.chunks
    templates: dict[tuple[int, int, bool, bool], tuple[npt.NDArray[Any], float]] = {}
    parts: list[npt.NDArray[Any]] = []
    carried_us = 0.0
    for index, this in enumerate(passes):
        final = last_backward[this.stage] == index
        # Chimera's second pipeline runs the other way, so the neighbours of a stage depend on the micro-batch.
        up = workload.pipeline.schedule == "chimera" and this.micro_batch % 2 == 1
        key = (this.stage, up, this.backward, final)
        if key not in templates:
            calls, tail_us = _pass(place, this.stage, n_stages, up=up, backward=this.backward)
            if final:
                calls, tail_us = _with_gradients(place, this.stage, n_stages, step, calls, tail_us)
            templates[key] = calls, tail_us
        calls, tail_us = templates[key]
        if len(calls):
            calls = calls.copy()
            calls["gap_us"][0] += carried_us
            parts.append(calls)
            carried_us = tail_us
        else:
            carried_us += tail_us
    return Stream(
        communicators=tuple(place.known),
        calls=np.concatenate(parts) if parts else np.empty(0, dtype=CALL),
        tail_us=carried_us,
    )


def _pass(place: _Rank, stage: int, n_stages: int, *, up: bool, backward: bool) -> tuple[npt.NDArray[Any], float]:
    """The calls of one forward or backward through a stage, and the compute after the last of them."""
    w, d = place.workload, place.workload.degrees
    net = w.network_model
    inside = PipelineRole.INTRA_STAGE if d.pp > 1 else PipelineRole.NONE
    rows: list[tuple[Any, ...]] = []
    gap_us = 0.0

    def call(
        communicator: int, operation: Operation, nbytes: float, *, role: int = inside, hides: bool = False
    ) -> None:
        nonlocal gap_us
        critical = operation not in (Operation.REDUCE_SCATTER, Operation.SEND) or not hides
        rows.append((communicator, operation, nbytes, nbytes, gap_us, role, hides, critical))
        gap_us = 0.0

    def neighbour(towards: int, operation: Operation) -> None:
        peer = place.at(pp=(place.pp + (-towards if up else towards)) % d.pp)
        pair = place.communicator("pp", sorted((place.rank, peer)))
        receives = operation is Operation.RECEIVE
        role = PipelineRole.ACTIVATION_RECEIVE if receives else PipelineRole.ACTIVATION_SEND
        call(pair, operation, rows_bytes / (d.tp if w.sequence_parallel else 1), role=role, hides=not receives)

    rows_bytes = float(w.batch * w.sequence_length * net.hidden * w.dtype_bytes)
    before, after = (1, -1) if backward else (-1, 1)
    if 0 <= stage + before < n_stages and d.pp > 1:
        neighbour(before, Operation.RECEIVE)
    segments = stage_segments(w, stage, n_stages)
    for segment in reversed(segments) if backward else segments:
        gathers = d.fsdp and d.dp > 1 and segment.sharded_bytes > 0
        if gathers:
            call(place.over_dp(), Operation.ALL_GATHER, segment.sharded_bytes, hides=True)
        points = _points(place, segment, rows_bytes)
        compute_us = segment.forward_us * (2 if backward else 1)
        for operations in points:
            gap_us += compute_us / len(points)
            for communicator, operation, nbytes in operations:
                call(communicator, operation, nbytes)
        if not points:
            gap_us += compute_us
        if gathers and backward:
            call(place.over_dp(), Operation.REDUCE_SCATTER, segment.sharded_bytes, hides=True)
    if 0 <= stage + after < n_stages and d.pp > 1:
        neighbour(after, Operation.SEND)
    return np.array(rows, dtype=CALL), gap_us


def _points(place: _Rank, segment: Segment, rows_bytes: float) -> list[list[tuple[int, Operation, float]]]:
    """Where a segment's compute waits for others, in order; the compute is spread evenly before them."""
    w, d = place.workload, place.workload.degrees
    net = w.network_model
    found: list[list[tuple[int, Operation, float]]] = []
    if net.tables and segment.exchanges_tables and d.dp > 1:
        nbytes = float(w.batch * net.tables * net.hidden * w.dtype_bytes)
        found.append([(place.over_dp("ep"), Operation.ALL_TO_ALL, nbytes)])
    if not segment.is_block:
        return found
    reduce: list[tuple[int, Operation, float]] = []
    if d.tp > 1:
        tp = place.over_tp()
        reduce = (
            [(tp, Operation.REDUCE_SCATTER, rows_bytes), (tp, Operation.ALL_GATHER, rows_bytes)]
            if w.sequence_parallel
            else [(tp, Operation.ALL_REDUCE, rows_bytes)]
        )
        found.append(reduce)
    if d.ep > 1:
        group = place.over_dp("ep", start=place.dp // d.ep * d.ep, count=d.ep)
        found += [[(group, Operation.ALL_TO_ALL, rows_bytes * net.active_experts)]] * 2
    if reduce:
        found.append(reduce)
    return found


def _with_gradients(
    place: _Rank, stage: int, n_stages: int, step: int, calls: npt.NDArray[Any], tail_us: float
) -> tuple[npt.NDArray[Any], float]:
    """Weaves the data-parallel exchange into the calls of a stage's last backward, by the time each may start."""
    w, d = place.workload, place.workload.degrees
    starts = np.cumsum(calls["gap_us"])
    end_us = float(starts[-1] if len(starts) else 0.0) + tail_us
    segments = stage_segments(w, stage, n_stages)[::-1]
    done_us = np.cumsum([2 * s.forward_us for s in segments])
    tensors = np.concatenate([s.tensors[::-1] for s in segments])
    owner = np.repeat(np.arange(len(segments)), [len(s.tensors) for s in segments])
    expert = np.array([w.network_model.tensors[i].expert for i in tensors], dtype=np.int64)
    table = tensors < w.network_model.tables
    exchanges: list[tuple[npt.NDArray[np.bool_], list[tuple[int, Operation]]]] = []
    if not d.fsdp and (d.dp > 1 or w.opposite_pipelines):
        everywhere = ~table & ((expert < 0) | (d.ep == 1))
        exchanges += [(everywhere, _partners(place, pattern)) for pattern in w.sync.patterns(step)]
    if d.ep > 1 and d.dp > d.ep:
        held = expert // (w.network_model.experts // d.ep) == place.dp % d.ep
        replicas = place.over_dp("expert-dp", start=place.dp % d.ep, count=d.dp // d.ep, step=d.ep)
        exchanges.append(((expert >= 0) & held, [(replicas, Operation.ALL_REDUCE)]))
    inside = PipelineRole.INTRA_STAGE if d.pp > 1 else PipelineRole.NONE
    communicators = tuple(place.known)
    added = []
    for chosen, partners in exchanges:
        if not chosen.any():
            continue
        found = messages(w, tensors[chosen], done_us[owner[chosen]], owner[chosen] == len(segments) - 1)
        for communicator, operation in partners:
            block = np.zeros(len(found.ready_us), dtype=CALL)
            block["communicator"], block["operation"] = communicator, operation
            if w.compression.method == "top-k" and operation is Operation.ALL_REDUCE:
                # Each rank's largest entries are others, so they cannot be added on the way: all are gathered.
                block["operation"] = Operation.ALL_GATHER
                gathered = len(communicators[communicator].ranks)
            else:
                gathered = 1
            block["nominal_bytes"] = found.nominal_bytes / d.tp
            block["effective_bytes"] = found.effective_bytes * gathered / d.tp
            block["pipeline_role"], block["overlaps"], block["critical"] = inside, overlaps(w), found.critical
            block["gap_us"] = found.ready_us  # turned into gaps below
            added.append(block)
    if not added:
        return calls, tail_us
    timed = calls.copy()
    timed["gap_us"] = starts
    both = np.concatenate([timed, *added])
    both = both[np.argsort(both["gap_us"], kind="stable")]
    end_us = max(end_us, float(both["gap_us"][-1]))
    tail_us = end_us - float(both["gap_us"][-1])
    both["gap_us"] = np.diff(both["gap_us"], prepend=0.0)
    return both, tail_us


def _partners(place: _Rank, pattern: Pattern) -> list[tuple[int, Operation]]:
    """With whom every message of the exchange goes, and how."""
    w, n = place.workload, place.workload.degrees.dp
    if pattern == "server" or (pattern == "all" and w.gradients.architecture == "parameter-server"):
        servers = place.communicator("server", [place.rank])
        return [(servers, Operation.PUSH), (servers, Operation.PULL)]
    if pattern == "node":
        size = w.replicas_per_node
        first = place.dp // size * size
        return [(place.over_dp("node", start=first, count=min(size, n - first)), Operation.ALL_REDUCE)]
    if pattern == "neighbours":
        peers = sorted({place.at(dp=(place.dp + side) % n) for side in (-1, 1)})
        pairs = [place.communicator("dp", sorted((place.rank, peer))) for peer in peers]
        return [(pair, operation) for pair in pairs for operation in (Operation.SEND, Operation.RECEIVE)]
    return [(place.over_replicas(), Operation.ALL_REDUCE)]
