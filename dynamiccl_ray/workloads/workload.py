"""The workload YAML: a model, how it is spread over GPUs, and how the replicas exchange gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dynamiccl_ray.settings import MOST, Count, Positive, Section, read_yaml
from dynamiccl_ray.sizes import MOST_BYTES, Bytes
from dynamiccl_ray.workloads.compression import Compression
from dynamiccl_ray.workloads.layers import Model
from dynamiccl_ray.workloads.models import MODEL_NAMES, model
from dynamiccl_ray.workloads.pipeline import PipelineSchedule, order
from dynamiccl_ray.workloads.sync import Sync

Parallelism = Literal["dp", "tp", "pp", "fsdp", "3d", "moe"]
GradientSchedule = Literal["bsp", "wfbp", "fused", "partitioned"]


class Degrees(Section):
    """Ranks are numbered with tp fastest, then dp, then pp, as Megatron-LM does."""

    dp: Count = 1
    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    """Expert parallelism: groups of that many data-parallel ranks share out the experts."""
    fsdp: bool = False
    """Parameters are sharded over dp (ZeRO-3): gathered before each pass, gradients reduced and scattered."""

    @property
    def ranks(self) -> int:
        """World size."""
        return self.dp * self.tp * self.pp


class Pipeline(Section):
    """How micro-batches go through the stages; used where pp is above 1."""

    schedule: PipelineSchedule = "1f1b"
    chunks: Count = 1
    """Stages of the model per rank: 2 or more for interleaved, otherwise 1."""


class Gradients(Section):
    """What becomes one message of the data-parallel exchange."""

    schedule: GradientSchedule = "fused"
    """bsp: all gradients, after the backward. wfbp: each tensor when it is ready. fused: buckets of ``bucket_bytes``
    when they are full. partitioned: pieces of ``partition_bytes``, the first layers' with priority."""
    bucket_bytes: Bytes = 25 * 2**20
    """PyTorch DDP's default bucket."""
    partition_bytes: Bytes = 4_000_000
    """ByteScheduler's default piece."""
    architecture: Literal["all-reduce", "parameter-server"] = "all-reduce"

    @property
    def smallest(self) -> int:
        """Bytes that most messages have at least, where the schedule cuts gradients into pieces."""
        return self.partition_bytes if self.schedule == "partitioned" else MOST_BYTES


class Workload(Section):
    """One training job."""

    name: Annotated[str, Field(min_length=1)]
    model: str
    degrees: Degrees = Degrees()
    gpus_per_node: Count = 8
    batch: Count
    """Samples, or sequences of a language model, per micro-batch and data-parallel rank."""
    micro_batches: Count = 1
    sequence_length: Count = 1
    """Tokens; 1 for models of images or clicks."""
    dtype_bytes: Annotated[int, Field(ge=1, le=8)] = 2
    """Of parameters, activations and gradients on the wire."""
    gpu_tflops: Positive
    """What a GPU achieves on this model, which sets the gaps between calls."""
    sequence_parallel: bool = False
    """Tensor parallelism with reduce-scatter and all-gather in place of all-reduce (Korthikanti et al. 2022)."""
    gradients: Gradients = Gradients()
    pipeline: Pipeline = Pipeline()
    sync: Sync = Sync()
    compression: Compression = Compression()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.model not in MODEL_NAMES:
            raise ValueError(f"model = {self.model!r}; there are {', '.join(MODEL_NAMES)}")
        net, d = self.network_model, self.degrees
        if d.ranks > MOST:
            raise ValueError(f"degrees: dp x tp x pp = {d.ranks} ranks; {MOST} at most")
        if d.pp * self.micro_batches > MOST:
            raise ValueError(f"pp x micro_batches = {d.pp * self.micro_batches}; {MOST} at most")
        if net.parameters * self.dtype_bytes > MOST * self.gradients.smallest:
            raise ValueError(f"gradients: {self.gradients.smallest} bytes a message make more than {MOST} messages")
        if net.blocks == 0 and (d.tp > 1 or d.pp > 1):
            raise ValueError(f"model = {self.model!r} has no blocks to split: tp and pp must be 1")
        if d.pp * self.pipeline.chunks > max(net.blocks, 1):
            raise ValueError(f"pp x chunks = {d.pp * self.pipeline.chunks} exceeds the {net.blocks} blocks")
        if d.ep > 1 and (net.experts % d.ep or not net.experts):
            raise ValueError(f"ep = {d.ep} does not divide the {net.experts} experts of {self.model}")
        if d.dp % d.ep:
            raise ValueError(f"ep = {d.ep} does not divide dp = {d.dp}")
        if net.unit == "sample" and self.sequence_length != 1:
            raise ValueError(f"sequence_length = {self.sequence_length}: {self.model} takes no sequences; use 1")
        if d.fsdp and d.ep > 1:
            raise ValueError("fsdp and ep together are not modelled: choose one")
        if d.fsdp and (self.sync.mode != "bsp" or self.gradients.architecture != "all-reduce"):
            raise ValueError("fsdp shards the parameters, so it needs sync mode bsp and the all-reduce architecture")
        if self.compression.method != "none" and (d.fsdp or d.dp == 1):
            raise ValueError("compression applies to data-parallel gradients: it needs dp above 1 and no fsdp")
        if self.sync.mode in ("ssp", "asp", "fedavg") and self.gradients.architecture != "parameter-server":
            raise ValueError(f"sync mode {self.sync.mode!r} needs gradients.architecture = parameter-server")
        if self.sync.mode in ("local-sgd", "decentralized", "hybrid") and self.gradients.architecture != "all-reduce":
            raise ValueError(f"sync mode {self.sync.mode!r} needs gradients.architecture = all-reduce")
        if self.sync.mode == "hybrid" and self.replicas_per_node < 2:
            raise ValueError("sync mode 'hybrid' needs two replicas or more in a node")
        if self.opposite_pipelines and (d.fsdp or d.ep > 1 or self.sync.mode != "bsp"):
            raise ValueError(
                "chimera holds every stage twice, which is modelled with sync mode bsp, no fsdp and ep = 1"
            )
        order(self.pipeline.schedule, d.pp, self.micro_batches, chunks=self.pipeline.chunks)
        return self

    @property
    def network_model(self) -> Model:
        """The model by formula."""
        return model(self.model)

    @property
    def opposite_pipelines(self) -> bool:
        """Whether each stage is held twice, once per direction."""
        return self.pipeline.schedule == "chimera" and self.degrees.pp > 1

    @property
    def replicas_per_node(self) -> int:
        """Data-parallel ranks of one group that lie in a node."""
        return max(min(self.gpus_per_node // self.degrees.tp, self.degrees.dp), 1)

    @property
    def parallelism(self) -> Parallelism:
        """The kind that decides the sizes on the wire: moe, 3d, fsdp, pp, tp or dp, the first that applies."""
        d = self.degrees
        kinds: tuple[tuple[bool, Parallelism], ...] = (
            (d.ep > 1, "moe"),
            (sum(k > 1 for k in (d.dp, d.tp, d.pp)) > 1 and d.pp > 1, "3d"),
            (d.fsdp, "fsdp"),
            (d.pp > 1, "pp"),
            (d.tp > 1, "tp"),
        )
        return next((kind for applies, kind in kinds if applies), "dp")


def load_workload(path: Path, overrides: Sequence[str] = ()) -> Workload:
    """Reads a workload YAML, with ``overrides`` as in ``read_yaml``. Raises ConfigError."""
    return read_yaml(path, Workload, "workload", overrides)
