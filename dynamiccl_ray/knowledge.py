"""What has been measured of many independent keys at once: the vectorised counterpart of ``KeyBook`` for training.

Every array has one row per stream, a stream being one key of one scenario. Times are logs of microseconds.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dynamiccl_ray.actions import N_CHANNELS, N_CHUNKS
from dynamiccl_ray.evidence import Lending, combine, stale
from dynamiccl_ray.knobs import N_PAIRS, OWN_PAIR
from dynamiccl_ray.observation import Floats, KeyView

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class Keys:
    """What never changes of a set of streams; B of them."""

    def __init__(self, *, group: Int64, collective: Int64, nbytes: Int64, cost: Floats, valid: Bool) -> None:
        """``group`` numbers the communicators of the streams, which stand next to each other; ``cost`` is
        (B, N_PAIRS), ``valid`` (B, N_PAIRS, N_CHANNELS, N_CHUNKS).
        """
        self.lending: Final = Lending(group, collective, nbytes)
        self.collective: Final = collective
        self.nbytes: Final = nbytes
        self.cost: Final = cost
        self.channels: Final[Bool] = np.asarray(valid.any(-1))
        # Which chunks fit depends on the protocol alone, so channels and chunks can be masked apart.
        self.chunks: Final[Bool] = np.asarray(valid.any(2))

    def __len__(self) -> int:
        return len(self.nbytes)


class Knowledge:
    """Evidence on each stream, as its policy is shown it."""

    def __init__(self, keys: Keys) -> None:
        self.keys: Final = keys
        n = len(keys)
        self.baseline = np.zeros(n, np.float32)
        self.noise = np.full(n, 0.02, np.float32)
        """(B,) standard deviation of one log time, as far as it is known: the owner sets it."""
        self._sum = np.zeros((n, N_PAIRS, N_CHANNELS), np.float32)
        self._samples = np.zeros((n, N_PAIRS, N_CHANNELS), np.float32)
        self._chunk_sum = np.zeros((n, N_PAIRS, N_CHUNKS), np.float32)
        self._chunk_samples = np.zeros((n, N_PAIRS, N_CHUNKS), np.float32)
        self._last, self._fastest = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self._last_pair = np.full(n, -1)
        self._cusum, self._heat = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self._rows: Final = np.arange(n)

    def begin(self, rows: Bool, baseline: Floats, samples: int) -> None:
        """Forgets the streams of a mask (B,); all that is known is NCCL's own time (B,), of so many collectives."""
        for evidence in (self._sum, self._samples, self._chunk_sum, self._chunk_samples):
            evidence[rows] = 0
        self._last_pair[rows] = -1
        self._cusum[rows] = self._heat[rows] = 0
        self._settle(rows, baseline, samples)

    def shift(self, rows: Bool, baseline: Floats, samples: int, heat: float) -> None:
        """The network of these streams has changed, and NCCL's own choice has been measured anew.

        Old evidence is kept relative to the baseline, as a hint that one collective outweighs; see ``KeyBook.shift``.
        """
        moved = (baseline - self.baseline)[rows, None, None]
        for total, samples_of in ((self._sum, self._samples), (self._chunk_sum, self._chunk_samples)):
            kept = stale(samples_of[rows], self.noise[rows])
            total[rows] = kept * (total[rows] / np.maximum(samples_of[rows], 1e-9) + moved)
            samples_of[rows] = kept
            total[rows, OWN_PAIR, 0] = samples_of[rows, OWN_PAIR, 0] = 0
        self._cusum[rows], self._heat[rows] = 1.0, heat
        self._settle(rows, baseline, samples)

    def _settle(self, rows: Bool, baseline: Floats, samples: int) -> None:
        self.baseline[rows] = baseline[rows]
        for total, samples_of in ((self._sum, self._samples), (self._chunk_sum, self._chunk_samples)):
            total[rows, OWN_PAIR, 0] += samples * baseline[rows]
            samples_of[rows, OWN_PAIR, 0] += samples
        self._last[rows] = self._fastest[rows] = baseline[rows]

    def record(self, actions: Int64, log_time: Floats, samples: int | Floats, cooling: float) -> None:
        """One epoch of every stream: mean log time (B,) of so many collectives, or (B,), under actions (B, 3)."""
        pair, channels, chunk = actions.T
        self._sum[self._rows, pair, channels] += samples * log_time
        self._samples[self._rows, pair, channels] += samples
        self._chunk_sum[self._rows, pair, chunk] += samples * log_time
        self._chunk_samples[self._rows, pair, chunk] += samples
        self._last = log_time
        self._fastest = np.minimum(self._fastest, log_time)
        self._last_pair = pair.copy()
        self._cusum[:] = 0
        self._heat *= cooling

    def known(self, pair: Int64, channels: Int64) -> Bool:
        """(B,) whether (pair, channels) has been measured."""
        return np.asarray(self._samples[self._rows, pair, channels] > 0)

    def view(self) -> KeyView:
        """All streams as the policy sees keys."""
        n = len(self.keys)
        total = np.concatenate([self._sum, self._chunk_sum], -1)
        samples = np.concatenate([self._samples, self._chunk_samples], -1)
        time, sure = combine(total - samples * self.baseline[:, None, None], samples, self.noise, self.keys.lending)
        zero = np.zeros(n, np.float32)
        return KeyView(
            collective=self.keys.collective,
            nbytes=self.keys.nbytes,
            pipelined=np.zeros(n, np.bool_),
            last_time=self._last - self.baseline,
            idle_epochs=zero,
            last_pair=self._last_pair,
            cost=self.keys.cost,
            evidence=self._ratio(self._sum, self._samples),
            samples=self._samples,
            channels=(time[..., :N_CHANNELS], sure[..., :N_CHANNELS]),
            chunks=(time[..., N_CHANNELS:], sure[..., N_CHANNELS:]),
            noise=self.noise,
            excess=self.keys.lending.excess(self.baseline),
            cusum=self._cusum,
            congestion=self._last - self._fastest,
            skew=zero,
            heat=self._heat,
            valid_channels=self.keys.channels,
            valid_chunks=self.keys.chunks,
        )

    def _ratio(self, total: Floats, samples: Floats) -> Floats:
        mean = total / np.maximum(samples, 1e-9)
        return np.where(samples > 0, mean - self.baseline[:, None, None], np.float32(0))
