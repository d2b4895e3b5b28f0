"""Episodes of earlier runs, read for training: Parquet alone, and every value of it checked.

A file may come from anybody. What is read of a run is bounded, and so is every number that enters a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dynamiccl_ray.agent.observation import SIZE, part
from dynamiccl_ray.agent.policy import ACTION_HEADS
from dynamiccl_ray.arrays import Bool, Float32, Int64
from dynamiccl_ray.errors import DAMAGED, ConfigError, reason, short
from dynamiccl_ray.trainers.online.recorder import EPISODE_SCHEMA, LAYOUT, distinct, part_files

MOST_NUMBERS: Final = 1 << 26
"""Observed, of one run: of a longer one the last 45,000 decisions."""
MOST_PADDED: Final = 1 << 29
"""Of all runs, once episodes are padded to the longest: 2 GiB."""
_MOST_OBSERVED: Final = 4.0
_MOST_REWARD: Final = 1e3
# Less likely than anything that is ever drawn; the ratio of two probabilities stays a number.
_LEAST_LOG_PROB: Final = -50.0
_HEADS: Final = ("pair", "channels", "chunk")
_COLUMNS: Final = ("observation", *_HEADS, "log_prob", "reward")


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """E episodes, 0 behind the end of each up to the longest, T."""

    observations: Float32
    """(E, T + 1, SIZE)"""
    actions: Int64
    """(E, T, 3)"""
    log_probs: Float32
    """(E, T) of the actions, under the policy that drew them."""
    rewards: Float32
    """(E, T)"""
    valid: Bool
    """(E, T) whether there was a decision."""

    def __len__(self) -> int:
        """Decisions."""
        return int(self.valid.sum())


_Columns = dict[str, npt.NDArray[Any]]


def read_recorded(directories: Sequence[Path]) -> Recorded:
    """All that runs have learned from that wrote to these directories. Raises ConfigError for one that is no run's, is
    damaged, or was written by another version, and where none has learned anything."""
    parts: list[_Columns] = []
    length = 0
    for directory in distinct(directories):
        parts += _run(directory)
        length = _longest(parts)
    if not parts:
        raise ConfigError(
            f"{', '.join(map(str, directories))}: no episode in it: the policy learned nothing there; name a run that "
            "has come to the end of a learning phase, in the mode active"
        )
    padded = [_padded(of, length) for of in parts]
    return Recorded(**{name: np.concatenate([of[name] for of in padded]) for name in padded[0]})


def _longest(parts: Sequence[_Columns]) -> int:
    """Decisions of the longest episode. Raises ConfigError where all are too many."""
    length = max((int(of["decisions"].max()) for of in parts), default=0)
    episodes = sum(len(of["decisions"]) for of in parts)
    if episodes * (length + 1) * SIZE > MOST_PADDED:
        most = MOST_PADDED // (length + 1) // SIZE
        raise ConfigError(
            f"{episodes} episodes or more of up to {length} decisions are too many to train on at once, at most {most} "
            "of that length; name fewer runs"
        )
    return length


def _run(directory: Path) -> Iterator[_Columns]:
    """Its files that have episodes, checked; as many of the last ones as are read."""
    try:
        files = part_files(directory, "episodes.parquet")
    except OSError as e:
        table = short(str(directory / "episodes.parquet"))
        raise ConfigError(f"{table}: cannot be read: {e.strerror}; leave that run out") from None
    numbers = 0
    kept: list[_Columns] = []
    for path in reversed(files):
        try:
            of = _read(path)
        except DAMAGED as e:
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(f"{path}: damaged: {reason(e)}; leave that run out") from None
        numbers += len(of["observation"])
        if numbers > MOST_NUMBERS and kept:
            break
        kept.append(of)
    yield from (of for of in kept[::-1] if len(of["decisions"]))


def _read(path: Path) -> _Columns:
    if not path.is_file():
        raise ValueError("it is no file")
    file = pq.ParquetFile(path)
    schema = file.schema_arrow
    found = (schema.metadata or {}).get(b"layout", b"none").decode(errors="replace")
    if found != LAYOUT:
        raise ConfigError(
            f"{path}: recorded by another version of DynamICCL-Ray: its layout is {short(found)!r}, and {LAYOUT!r} is "
            "read; leave that run out, or run it again"
        )
    if not schema.equals(EPISODE_SCHEMA):
        raise ValueError("its columns are others")
    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    values = sum(group.column(n).num_values for group in groups for n in range(group.num_columns))
    if values > 2 * MOST_NUMBERS:
        raise ValueError(f"it holds {values} values, more than a run writes to a file")
    return _checked(file.read(columns=list(_COLUMNS)))


def _checked(table: pa.Table) -> _Columns:
    """Columns of a file: ``decisions`` (E,) of each episode, and the values of all of them in a row. ValueError for
    what no run writes."""
    lists = {name: table[name].combine_chunks() for name in _COLUMNS}
    lengths, columns = {}, {}
    for name, of in lists.items():
        # Of no rows pyarrow makes another array.
        of = pa.concat_arrays(of.chunks) if isinstance(of, pa.ChunkedArray) else of
        flat = of.flatten()
        if of.null_count or flat.null_count:
            raise ValueError(f"{name} has gaps")
        lengths[name] = of.value_lengths().to_numpy()
        columns[name] = flat.to_numpy()
    decisions = lengths["reward"].astype(np.int64)
    wanted = {name: (decisions + 1) * SIZE if name == "observation" else decisions for name in lengths}
    if wrong := [name for name in lengths if not np.array_equal(lengths[name], wanted[name])]:
        raise ValueError(f"{wrong[0]} is not as long as there are decisions")
    if not decisions.all():
        raise ValueError("an episode has no decision")
    ranges = {
        "observation": (-_MOST_OBSERVED, _MOST_OBSERVED),
        **{name: (0, count - 1) for name, count in zip(_HEADS, ACTION_HEADS, strict=True)},
        "log_prob": (_LEAST_LOG_PROB, 1e-3),
        "reward": (-_MOST_REWARD, _MOST_REWARD),
    }
    for name, (least, most) in ranges.items():
        outside = columns[name][~((columns[name] >= least) & (columns[name] <= most))]
        if len(outside):
            raise ValueError(f"{name} is {outside[0]:g}, of {least:g} to {most:g}")
    last = np.cumsum(decisions + 1) - 1
    before = np.delete(columns["observation"].reshape(-1, SIZE), last, axis=0)
    if (heat := part(before, "heat").min(initial=0)) < 0:
        raise ValueError(f"heat is {heat:g}, of at least 0")
    pair, channels, chunk = (columns[name] for name in _HEADS)
    of_pair = np.arange(len(pair)), pair
    may = part(before, "pairs")[of_pair][:, 0] > 0
    may &= part(before, "valid_channels")[(*of_pair, channels)] > 0
    may &= part(before, "valid_chunks")[(*of_pair, chunk)] > 0
    if not may.all():
        raise ValueError("an action was drawn that was ruled out")
    return {"decisions": decisions, **columns}


def _padded(of: _Columns, length: int) -> dict[str, Any]:
    decisions = of["decisions"]
    seen = np.arange(length + 1) <= decisions[:, None]
    observations = np.zeros((*seen.shape, SIZE), np.float32)
    observations[seen] = of["observation"].reshape(-1, SIZE)
    valid = seen[:, 1:]
    out: dict[str, Any] = {"observations": observations, "valid": valid}
    actions = np.zeros((*valid.shape, len(_HEADS)), np.int64)
    actions[valid] = np.stack([of[name] for name in _HEADS], -1)
    for name, column in (("log_probs", "log_prob"), ("rewards", "reward")):
        out[name] = np.zeros(valid.shape, np.float32)
        out[name][valid] = of[column]
    return {**out, "actions": actions}
