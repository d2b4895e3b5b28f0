"""Experience on disk: every collective that was reduced over ranks, every epoch's reward, every decision and every
episode that the policy learned from, one Parquet row each.

A table is a directory of closed files, which Parquet's readers take for one: whatever happens to the run, all of them
can be read.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, action_of, action_parts
from dynamiccl_ray.actors.episodes import Experience
from dynamiccl_ray.actors.status import WHY, Epoch
from dynamiccl_ray.agent.observation import SIZE
from dynamiccl_ray.agent.reward import PRIMARY, TERMS, means
from dynamiccl_ray.control.loop import Phase
from dynamiccl_ray.errors import ConfigError
from dynamiccl_ray.knobs import N_PAIRS
from dynamiccl_ray.trainers.online.ending import Disk

SCHEMA = pa.schema(
    [
        ("run", pa.dictionary(pa.int8(), pa.string())),
        ("seed", pa.int32()),
        ("comm", pa.uint64()),
        ("epoch", pa.int32()),
        ("phase", pa.dictionary(pa.int8(), pa.string())),
        ("version", pa.int32()),
        ("key", pa.int16()),
        ("bytes", pa.int64()),
        ("dseq", pa.int64()),
        ("time_us", pa.float64()),
        ("skew", pa.float32()),
        ("pair", pa.int8()),
        ("channels", pa.int8()),
        ("chunk", pa.int8()),
        ("aggregate", pa.bool_()),
    ]
)
REWARD_SCHEMA = pa.schema(
    [
        ("run", pa.dictionary(pa.int8(), pa.string())),
        ("seed", pa.int32()),
        ("comm", pa.uint64()),
        ("epoch", pa.int32()),
        ("phase", pa.dictionary(pa.int8(), pa.string())),
        ("took_s", pa.float32()),
        ("keys", pa.int32()),
        ("reward", pa.float64()),
        *((name, pa.float64()) for name in TERMS),
    ]
)
"""Means over the keys whose decision came to its end; null for a term that is off or has no source."""
DECISION_SCHEMA = pa.schema(
    [
        ("run", pa.dictionary(pa.int8(), pa.string())),
        ("unix_s", pa.float64()),
        ("comm", pa.uint64()),
        ("ranks", pa.int32()),
        ("nodes", pa.int32()),
        ("name", pa.string()),
        ("epoch", pa.int32()),
        ("version", pa.int32()),
        ("key", pa.int16()),
        ("phase", pa.dictionary(pa.int8(), pa.string())),
        ("why", pa.dictionary(pa.int8(), pa.string())),
        ("action", pa.string()),
        ("samples", pa.int32()),
        ("expected_us", pa.float64()),
        ("got_us", pa.float64()),
        ("own_us", pa.float64()),
    ]
)
"""One row for every decision that came to its end: see ``status.DECISION_DTYPE``; null for what was not known."""
# The first number goes up whenever what is observed, drawn or rewarded comes to mean something else.
LAYOUT = f"1: {SIZE} numbers observed, {N_PAIRS} pairs, {N_CHANNELS} channel counts, {N_CHUNKS} chunks"
EPISODE_SCHEMA = pa.schema(
    [
        ("run", pa.dictionary(pa.int8(), pa.string())),
        ("comm", pa.uint64()),
        ("key", pa.int16()),
        ("ordinal", pa.int32()),
        ("observation", pa.list_(pa.float32())),
        ("pair", pa.list_(pa.int8())),
        ("channels", pa.list_(pa.int8())),
        ("chunk", pa.list_(pa.int8())),
        ("log_prob", pa.list_(pa.float32())),
        ("reward", pa.list_(pa.float32())),
    ],
    metadata={"layout": LAYOUT},
)
"""One row for every episode that the policy learned from: see ``episodes.Experience``. Lists are of T decisions; the
observations before each and after the last are one list, of (T + 1) * SIZE."""
PHASES = [phase.name.lower() for phase in Phase]
_ROWS = 1 << 16
_MOST_BYTES = 1 << 26
"""Of episodes that wait for a file."""
_PART_S = 10.0
"""A run that is killed loses no more than that."""
_PART = re.compile(r"part-(\d{6,9})\.parquet")


class Parts:
    """One table, a file at a time. What was there before is removed, unless it ``goes_on``."""

    def __init__(self, directory: Path, schema: pa.Schema, disk: Disk, *, goes_on: bool = False) -> None:
        self._directory, self._schema, self._disk = directory, schema, disk
        directory.mkdir(exist_ok=True)
        self._number = 0
        for path in directory.iterdir():
            if goes_on and (part := _PART.fullmatch(path.name)):
                self._number = max(self._number, 1 + int(part[1]))
            else:
                path.unlink()
        self.unwritten = 0
        """Rows for which there was no room."""

    def write(self, table: pa.Table) -> None:
        """Whole or not at all."""
        # Readers pass over what begins with a dot.
        unfinished = self._directory / ".unfinished"

        def write() -> None:
            pq.write_table(table, unfinished, compression="zstd")
            unfinished.replace(self._directory / f"part-{self._number:06}.parquet")

        if self._disk.write(self._directory.name, write):
            self._number += 1
        else:
            self.unwritten += len(table)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def close(self) -> None:
        """A table without rows is one, too."""
        if self._number == 0:
            self.write(self._schema.empty_table())


class Recorder:
    """Writes ``samples.parquet``, ``rewards.parquet``, ``decisions.parquet`` and ``episodes.parquet`` as a run goes,
    behind what an earlier one wrote there where it ``goes_on``."""

    def __init__(
        self, directory: Path, run: str, seed: int, disk: Disk | None = None, *, goes_on: bool = False
    ) -> None:
        disk = disk or Disk()
        self._samples = Parts(directory / "samples.parquet", SCHEMA, disk, goes_on=goes_on)
        self._rewards = Parts(directory / "rewards.parquet", REWARD_SCHEMA, disk, goes_on=goes_on)
        self._decisions = Parts(directory / "decisions.parquet", DECISION_SCHEMA, disk, goes_on=goes_on)
        self._episodes = Parts(directory / "episodes.parquet", EPISODE_SCHEMA, disk, goes_on=goes_on)
        self._learned: list[pa.RecordBatch] = []
        self._epochs: list[dict[str, Any]] = []
        self._decided: list[pa.RecordBatch] = []
        self._run, self._seed = run, seed
        self._pending: list[pa.RecordBatch] = []
        self._rows, self._flushed = 0, time.monotonic()

    @property
    def unwritten(self) -> int:
        """Samples for which there was no room on the disk."""
        return self._samples.unwritten

    def add(self, epoch: Epoch) -> None:
        """One communicator's part of a closed epoch, as the coordinator's observer is told."""
        samples = epoch.samples
        pair, channels, chunk = action_parts(samples["action"])
        n = len(samples)
        if np.isfinite(epoch.terms[PRIMARY]).any():
            self._epochs.append(self._reward(epoch))
        if len(epoch.decisions):
            self._decided.append(self._audit(epoch))
        if n == 0:
            return
        phases = pa.DictionaryArray.from_arrays(samples["phase"].astype(np.int8), PHASES)
        self._pending.append(
            pa.record_batch(
                [
                    pa.DictionaryArray.from_arrays(np.zeros(n, np.int8), [self._run]),
                    np.full(n, self._seed, np.int32),
                    np.full(n, epoch.comm, np.uint64),
                    np.full(n, epoch.number, np.int32),
                    phases,
                    np.full(n, epoch.version, np.int32),
                    samples["key"].astype(np.int16),
                    samples["bytes"].astype(np.int64),
                    samples["dseq"].astype(np.int64),
                    samples["time_us"],
                    samples["skew"].astype(np.float32),
                    pair.astype(np.int8),
                    channels.astype(np.int8),
                    chunk.astype(np.int8),
                    samples["aggregate"].astype(np.bool_),
                ],
                schema=SCHEMA,
            )
        )
        self._rows += n
        if self._rows >= _ROWS or time.monotonic() - self._flushed >= _PART_S:
            self._flush()

    def learned(self, episodes: Sequence[Experience]) -> None:
        """Those that a round brought to their end, and that the policy has learned from."""
        if episodes:
            self._learned.append(self._experience(episodes))
            if sum(batch.nbytes for batch in self._learned) >= _MOST_BYTES:
                self._flush()

    def _experience(self, episodes: Sequence[Experience]) -> pa.RecordBatch:
        decisions = np.array([len(of.rewards) for of in episodes])

        def lists(lengths: npt.NDArray[Any], values: npt.NDArray[Any]) -> pa.ListArray:
            return pa.ListArray.from_arrays(np.append(0, np.cumsum(lengths)).astype(np.int32), values)

        heads = np.concatenate([of.heads for of in episodes]).astype(np.int8)
        columns = [
            pa.DictionaryArray.from_arrays(np.zeros(len(episodes), np.int8), [self._run]),
            np.array([of.comm for of in episodes], np.uint64),
            np.array([of.key for of in episodes], np.int16),
            np.array([of.ordinal for of in episodes], np.int32),
            lists((decisions + 1) * SIZE, np.concatenate([of.observations.ravel() for of in episodes])),
            *(lists(decisions, np.ascontiguousarray(head)) for head in heads.T),
            lists(decisions, np.concatenate([of.log_probs for of in episodes])),
            lists(decisions, np.concatenate([of.rewards for of in episodes])),
        ]
        return pa.record_batch(columns, schema=EPISODE_SCHEMA)

    def _reward(self, epoch: Epoch) -> dict[str, Any]:
        parts = means(epoch.terms)
        ran = int(np.isfinite(epoch.terms[PRIMARY]).sum())
        return {
            "run": self._run,
            "seed": self._seed,
            "comm": epoch.comm,
            "epoch": epoch.number,
            "phase": epoch.phase.name.lower(),
            "took_s": epoch.took_s,
            "keys": ran,
            "reward": sum(parts.values()),
            **parts,
        }

    def _audit(self, epoch: Epoch) -> pa.RecordBatch:
        of = epoch.decisions
        n = len(of)
        names = {flat: action_of(flat).name for flat in np.unique(of["action"]).tolist()}
        times = [pa.array(of[name], from_pandas=True) for name in ("expected_us", "got_us", "own_us")]
        columns = [
            pa.DictionaryArray.from_arrays(np.zeros(n, np.int8), [self._run]),
            np.full(n, time.time()),
            np.full(n, epoch.comm, np.uint64),
            np.full(n, epoch.ranks, np.int32),
            np.full(n, epoch.nodes, np.int32),
            [epoch.name] * n,
            np.full(n, epoch.number, np.int32),
            np.full(n, epoch.version, np.int32),
            of["key"].astype(np.int16),
            pa.DictionaryArray.from_arrays(of["phase"].astype(np.int8), PHASES),
            pa.DictionaryArray.from_arrays(of["why"].astype(np.int8), [*WHY]),
            [names[flat] for flat in of["action"].tolist()],
            of["samples"],
            *times,
        ]
        return pa.record_batch(columns, schema=DECISION_SCHEMA)

    def _flush(self) -> None:
        if self._rows:
            self._samples.write(pa.Table.from_batches(self._pending, SCHEMA))
        if self._epochs:
            self._rewards.write(pa.Table.from_pylist(self._epochs, REWARD_SCHEMA))
        if self._decided:
            self._decisions.write(pa.Table.from_batches(self._decided, DECISION_SCHEMA))
        if self._learned:
            self._episodes.write(pa.Table.from_batches(self._learned, EPISODE_SCHEMA))
        self._pending, self._decided, self._rows, self._epochs, self._learned = [], [], 0, [], []
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._flush()
        self._samples.close()
        self._rewards.close()
        self._decisions.close()
        self._episodes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def distinct(directories: Sequence[Path]) -> list[Path]:
    """In their order, without what is another name of one of them."""
    return [*{os.path.realpath(directory): directory for directory in directories}.values()]


def part_files(directory: Path, name: str) -> list[Path]:
    """Of the table ``name`` of a run, in the order in which they were written. Raises ConfigError for what is no run's
    directory, or has recorded nothing yet, and OSError for one that cannot be read."""
    table = directory / name
    try:
        files = [path for path in table.iterdir() if path.match("part-*.parquet")]
    except FileNotFoundError:
        raise ConfigError(
            f"{directory}: no {name} in it; name the directory of a run of `dynamiccl online` (--out, runs/NAME-TIME "
            "by default)"
        ) from None
    if not files:
        raise ConfigError(f"{directory}: {name} is empty: that run has recorded nothing yet; leave it out")
    return sorted(files, key=lambda path: (len(path.name), path.name))


def read_samples(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """Columns of a run's ``samples.parquet`` as arrays; strings as objects."""
    return _read(directory / "samples.parquet")


def read_rewards(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """Columns of a run's ``rewards.parquet``, NaN for a term that is off or has no source."""
    return _read(directory / "rewards.parquet")


def read_decisions(directory: Path) -> dict[str, npt.NDArray[Any]]:
    """Columns of a run's ``decisions.parquet``, NaN for what was not known."""
    return _read(directory / "decisions.parquet")


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}
