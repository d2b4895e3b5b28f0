"""What is known of each key of one communicator, from measurements that were reduced over all ranks.

The coordinator owns the only copy; runners see it as part of each epoch's context. Nothing in it depends on a single
rank's view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS, Action
from dynamiccl_ray.evidence import Lending, combine, noise_of, stale, worse_than_own
from dynamiccl_ray.keys import key_parts
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR
from dynamiccl_ray.observation import KeyView
from dynamiccl_ray.trigger import Cusum

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One epoch of one communicator: collectives that every rank reported, times of the slowest rank."""

    key: Ints
    """(N,) key of each collective, in the order of dseq."""
    nbytes: Ints
    """(N,)"""
    dseq: Ints
    """(N,)"""
    time_us: Doubles
    """(N,) maximum over ranks."""
    skew: Doubles
    """(N,) log of that maximum over the median rank."""
    pair: Ints
    """(N,) what NCCL used; ``OWN_PAIR`` where it does not say."""
    channels: Ints
    """(N,) that NCCL used, the most of any rank; 0 where it does not say."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Drift found on one key."""

    key: int
    dseq: int
    """Collective whose sample crossed the threshold."""


# Of a KeyBook: a new key gets a row of zeros.
_GROWING: Final = (
    *("_sum", "samples", "_chunk_sum", "chunk_samples", "_baseline_sum", "baseline_n", "_square", "_freedom"),
    *("cost", "last_time", "idle", "skew", "total"),
)


class KeyBook:
    """Statistics of a growing set of keys; row i of every array is key ``keys[i]``.

    ``valid`` maps a key to the (N_PAIRS, N_CHANNELS) actions that the experiment allows, or gives one mask for all.
    """

    def __init__(
        self,
        *,
        arl0: float,
        guardrail_margin: float,
        guardrail_samples: int,
        valid: dict[int, npt.NDArray[np.bool_]] | npt.NDArray[np.bool_],
        valid_chunks: npt.NDArray[np.bool_],
    ) -> None:
        self.keys = np.zeros(0, np.int64)
        self.nbytes = np.zeros(0, np.int64)
        self._allowed = valid
        self._chunks = valid_chunks
        self._guardrail = (guardrail_margin, guardrail_samples)
        self.cusum = Cusum(arl0)
        shape = (0, N_PAIRS, N_CHANNELS)
        self._sum, self.samples = np.zeros(shape), np.zeros(shape)
        self._chunk_sum, self.chunk_samples = (np.zeros((0, N_PAIRS, N_CHUNKS)) for _ in range(2))
        self._valid = np.zeros(shape, np.bool_)
        self._baseline_sum, self.baseline_n = np.zeros(0), np.zeros(0)
        # Squared deviations within epochs, and their degrees of freedom: the noise without what the actions differ by.
        self._square, self._freedom = np.zeros(0), np.zeros(0)
        self._lending = Lending([], [], [])
        self.cost = np.zeros((0, N_PAIRS))
        self.last_time, self.idle, self.skew = np.zeros(0), np.zeros(0), np.zeros(0)
        self._fastest = np.full(0, np.inf)
        self.total = np.zeros(0, np.int64)
        # What was kept at a shift until the baseline is measured anew.
        self._old_baseline: Doubles | None = None
        self._stale, self._stale_chunks = self.samples, self.chunk_samples
        self._watched: dict[int, Action] = {}

    # -- keys --

    def row(self, key: int) -> int:
        """The row of a key; a new key gets one."""
        found = np.flatnonzero(self.keys == key)
        if len(found):
            return int(found[0])
        collective_bytes = key_parts(key)[2]
        self.keys = np.append(self.keys, key)
        self.nbytes = np.append(self.nbytes, collective_bytes)
        self._lending = Lending(np.zeros(len(self.keys)), [key_parts(int(k))[0] for k in self.keys], self.nbytes)
        for name in _GROWING:
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((1, *old.shape[1:]), old.dtype)]))
        allowed = self._allowed
        if isinstance(allowed, dict):
            allowed = allowed.get(key, np.zeros((N_PAIRS, N_CHANNELS), np.bool_))
        mask = allowed.copy()
        # Leaving NCCL alone is always possible.
        mask[OWN_PAIR, 0] = True
        self._fastest = np.append(self._fastest, np.inf)
        self._valid = np.concatenate([self._valid, mask[None]])
        self.cusum.grow(len(self.keys))
        return len(self.keys) - 1

    def offer(self, key: int, cost_us: npt.NDArray[np.float32]) -> None:
        """NCCL's own cost table (7, 3) for a key, as one rank saw it: what it marks -1 is not available."""
        row = self.row(key)
        flat = cost_us.astype(np.float64).reshape(-1)
        available = flat >= 0
        self._valid[row, 1:][~available] = False
        if available.any():
            cheapest = max(flat[available].min(), 1e-9)
            self.cost[row, 1:] = np.where(available, np.log(np.maximum(flat, 1e-9) / cheapest), 0.0)

    def refuse(self, key: int, pair: int) -> None:
        """NCCL did not take a pair that we asked for: never ask again."""
        if pair != OWN_PAIR:
            self._valid[self.row(key), pair] = False

    # -- measurements --

    def add(self, samples: Samples, actions: dict[int, Action], *, watch: bool) -> list[Alarm]:
        """Books one epoch under the actions that were in force; with ``watch``, looks for drift."""
        alarms = []
        self.idle += 1
        log_time = np.log(samples.time_us)
        for key in np.unique(samples.key):
            row = self.row(int(key))
            mine = samples.key == key
            x = log_time[mine]
            action = actions.get(int(key), Action())
            cell = (row, action.pair, action.channels)
            self._sum[cell] += x.sum()
            self.samples[cell] += len(x)
            self._chunk_sum[row, action.pair, action.chunk] += x.sum()
            self.chunk_samples[row, action.pair, action.chunk] += len(x)
            self._square[row] += ((x - x.mean()) ** 2).sum()
            self._freedom[row] += len(x) - 1
            if action == Action():
                self._baseline_sum[row] += x.sum()
                self.baseline_n[row] += len(x)
            self.nbytes[row] = samples.nbytes[mine][0]
            self.last_time[row] = x.mean()
            self._fastest[row] = min(self._fastest[row], self.last_time[row])
            self.skew[row] = samples.skew[mine].mean()
            self.idle[row] = 0
            self.total[row] += len(x)
            if watch:
                if self._watched.get(int(key)) != action:
                    # Another action has another time: that is no drift.
                    self.cusum.reset(row)
                    self._watched[int(key)] = action
                at = self.cusum.update(row, x)
                if at is not None:
                    alarms.append(Alarm(key=int(key), dseq=int(samples.dseq[mine][at])))
        return alarms

    def shift(self) -> None:
        """The network has changed: keep old evidence as a hint that one epoch outweighs, forget the baseline."""
        # Old times are kept relative to the old baseline, and become relative to the new one in settle().
        self._old_baseline = self.baseline.copy()
        self._fastest[:] = np.inf
        noise = self.noise
        kept, kept_chunks = stale(self.samples, noise), stale(self.chunk_samples, noise)
        self._sum *= kept / np.maximum(self.samples, 1e-9)
        self._chunk_sum *= kept_chunks / np.maximum(self.chunk_samples, 1e-9)
        self.samples, self.chunk_samples = kept, kept_chunks
        for evidence in (self._sum, self.samples, self._chunk_sum, self.chunk_samples):
            evidence[:, OWN_PAIR, 0] = 0
        self._stale, self._stale_chunks = kept.copy(), kept_chunks.copy()
        self._baseline_sum[:] = 0
        self.baseline_n[:] = 0
        self.cusum.reset()

    def settle(self) -> None:
        """After the baseline has been measured anew: express what was kept against it."""
        old = self._old_baseline
        if old is None:
            return
        # Keys that came after the shift kept nothing.
        moved = (self.baseline[: len(old)] - old)[:, None, None]
        self._sum[: len(old)] += self._stale[: len(old)] * moved
        self._chunk_sum[: len(old)] += self._stale_chunks[: len(old)] * moved
        self._old_baseline = None

    # -- answers --

    @property
    def baseline(self) -> Doubles:
        """(K,) mean log time in us of NCCL's own choice; the last known time where none was measured."""
        return np.where(self.baseline_n > 0, self._baseline_sum / np.maximum(1, self.baseline_n), self.last_time)

    @property
    def noise(self) -> npt.NDArray[np.float32]:
        """(K,) standard deviation of the log of one time."""
        return noise_of(self._square, self._freedom)

    def log_ratio(self) -> Doubles:
        """(K, N_PAIRS, N_CHANNELS) mean log time of each action over the baseline; 0 where never measured."""
        return self._ratio(self._sum, self.samples)

    def _ratio(self, total: Doubles, samples: Doubles) -> Doubles:
        mean = total / np.maximum(samples, 1e-9)
        return np.where(samples > 0, mean - self.baseline[:, None, None], 0.0)

    def ruled_out(self) -> npt.NDArray[np.bool_]:
        """(K, N_PAIRS, N_CHANNELS) actions that the guardrail forbids: worse than NCCL's own with confidence."""
        margin, least = self._guardrail
        worse = worse_than_own(self.log_ratio(), self.samples, self.noise, margin=margin, least=least)
        return worse & (self.baseline_n > 0)[:, None, None]

    @property
    def congestion(self) -> Doubles:
        """(K,) log of the last time over the least since the last shift."""
        return np.where(np.isfinite(self._fastest), self.last_time - self._fastest, 0.0)

    def log_speedup(self, samples: Samples) -> Doubles:
        """(K,) log(baseline / time) of this epoch's mean; NaN for keys that did not run."""
        out = np.full(len(self.keys), np.nan)
        ran = np.isin(self.keys, samples.key)
        out[ran] = (self.baseline - self.last_time)[ran]
        return out

    def view(self, actions: dict[int, Action], heat: float) -> KeyView:
        """What the policy is shown."""
        collective, pipelined, _ = (
            zip(*(key_parts(int(k)) for k in self.keys), strict=True) if len(self.keys) else ((), (), ())
        )
        valid = self._valid & ~self.ruled_out()
        chunks = np.broadcast_to(self._chunks, (len(self.keys), N_PAIRS, N_CHUNKS)).copy()
        chunks[:, OWN_PAIR] = False
        chunks[:, :, 0] = True
        total = np.concatenate([self._sum, self._chunk_sum], -1)
        samples = np.concatenate([self.samples, self.chunk_samples], -1)
        ratio = (total - samples * self.baseline[:, None, None]).astype(np.float32)
        time, sure = combine(ratio, samples.astype(np.float32), self.noise, self._lending)
        return KeyView(
            collective=np.asarray(collective, np.int64),
            nbytes=self.nbytes.copy(),
            pipelined=np.asarray(pipelined, np.bool_),
            last_time=(self.last_time - self.baseline).astype(np.float32),
            idle_epochs=self.idle.astype(np.float32),
            last_pair=np.array([actions[int(k)].pair if int(k) in actions else -1 for k in self.keys], np.int64),
            cost=self.cost.astype(np.float32),
            evidence=self.log_ratio().astype(np.float32),
            samples=self.samples.astype(np.float32),
            channels=(time[..., :N_CHANNELS], sure[..., :N_CHANNELS]),
            chunks=(time[..., N_CHANNELS:], sure[..., N_CHANNELS:]),
            noise=self.noise,
            excess=self._lending.excess(self.baseline.astype(np.float32)),
            cusum=self.cusum.score.astype(np.float32),
            congestion=self.congestion.astype(np.float32),
            skew=self.skew.astype(np.float32),
            heat=heat,
            valid_channels=valid,
            valid_chunks=chunks,
        )

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {k: v for k, v in self.__dict__.items() if k != "cusum"} | {"cusum": self.cusum.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.cusum.restore(state["cusum"])
        self.__dict__.update({k: v for k, v in state.items() if k != "cusum"})
