"""Parquet of every measured collective of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dynamiccl_ray.baselines.run import Trace
from dynamiccl_ray.evaluation.measures import Procedure

_TEXT: Final = pa.dictionary(pa.int32(), pa.string())
_SCHEMA: Final = pa.schema(
    [
        ("split", _TEXT),
        ("method", _TEXT),
        ("cluster", _TEXT),
        ("scenario", pa.int16()),
        ("nodes", pa.int32()),
        ("seed", pa.int32()),
        ("step", pa.int32()),
        ("collective", pa.int8()),
        ("bytes", pa.int64()),
        ("action", pa.int16()),
        ("time_us", pa.float32()),
        ("default_us", pa.float32()),
        ("oracle_us", pa.float32()),
    ]
)

_TIMES: Final = [name for name in _SCHEMA.names if name.endswith("_us")]
_CODED: Final = [name for name in _SCHEMA.names if name not in _TIMES]


class SampleFile:
    """One row for each collective that counts; a context manager that closes the file."""

    def __init__(self, path: Path, procedure: Procedure) -> None:
        self._writer: Final = pq.ParquetWriter(
            path, _SCHEMA, compression="zstd", use_dictionary=_CODED, use_byte_stream_split=_TIMES
        )
        self._steps: Final = np.arange(procedure.learn + procedure.warmup, procedure.steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._writer.close()

    def write(self, split: str, runs: Mapping[str, Sequence[Sequence[Trace]]]) -> None:
        """``runs`` has, by method, the traces of each scenario."""
        for method, scenarios in runs.items():
            columns = [self._columns(i, t) for i, traces in enumerate(scenarios) for t in traces]
            table = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
            rows = len(table["step"])
            texts = {"split": [split] * rows, "method": [method] * rows, "cluster": table.pop("cluster")}
            encoded = {name: pa.array(text).dictionary_encode() for name, text in texts.items()}
            self._writer.write_table(pa.table({**encoded, **table}, schema=_SCHEMA))

    def _columns(self, index: int, trace: Trace) -> dict[str, Any]:
        of, steps = trace.scenario, self._steps
        shape = (len(steps), len(of.nbytes))
        constants = {"scenario": index, "nodes": of.nodes, "seed": trace.seed}
        per_key = {"collective": of.collective, "bytes": of.nbytes}
        sampled = {name: getattr(trace, f"{name}_us")[steps] for name in ("time", "default", "oracle")}
        return {
            "cluster": np.full(steps.size * shape[1], of.cluster),
            **{name: np.full(steps.size * shape[1], value) for name, value in constants.items()},
            "step": np.repeat(steps, shape[1]),
            **{name: np.tile(value, steps.size) for name, value in per_key.items()},
            "action": trace.actions[steps].ravel(),
            **{f"{name}_us": us.astype(np.float32).ravel() for name, us in sampled.items()},
        }
