"""How far a prior is to be believed: as far as it was right about what has been measured.

A prior says what to expect of every action before anything is measured: a model of the cluster
(``fabric.pricing.expected``), or what earlier runs measured (``agent/earlier.py``). It may be of another cluster, or of
this one when nothing else ran on it. So its error is estimated as the job goes on, for each communicator and each
prior, by what it said of the pairs that were tried.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from dynamiccl_ray.arrays import Float32, Int64
from dynamiccl_ray.knobs import OWN_PAIR

# Standard deviation of log time ratios around what a described cluster's model says of them, before anything is known
# of how right it is; the same of what earlier runs measured; and what either counts for, in pairs that were tried.
ERROR: Final = 0.15
# Repeats of the shipped p5en tables differ by 0.6 %, runs at different times by 5 % (data/measured/README.md): in
# between, for what the whole run has in common is in NCCL's own time, too.
EARLIER_ERROR: Final = 0.03
_FREEDOM: Final = 4.0


def error_of(
    prior: Float32,
    ratio: Float32,
    samples: Float32,
    noise: Float32,
    group: Int64,
    start: float = ERROR,
    own: Float32 | None = None,
) -> Float32:
    """(B,) standard deviation of what a prior says of the keys: the same for all of a communicator.

    ``prior`` and ``ratio`` (B, N_PAIRS, N) have what was expected and mean log time ratios as measured, ``samples`` of
    the same shape how many; ``noise`` (B,) is one time's, ``group`` (B,) numbers the communicators. Of each pair the
    mean squared error counts once, whatever was measured of it: sizes and channel counts of one pair are wrong alike.
    ``start`` is the error before anything is measured. ``own`` (B,) is how often NCCL's own choice was measured, to
    which ratios are; it counts as known where that is not given, which is near enough for an error like a model's.
    """
    known = np.isfinite(prior) & (samples > 0)
    known[:, OWN_PAIR] = False
    if not known.any():
        return np.full(len(prior), start, np.float32)
    of_one = (noise**2)[:, None, None]
    doubt = of_one / np.maximum(samples, 1e-9)
    if own is not None:
        doubt = doubt + of_one / np.maximum(own, 1)[:, None, None]
    # What is measured badly says little of the prior.
    weight = np.where(known, start**2 / (start**2 + doubt), 0.0)
    square = np.where(known, np.maximum((np.where(known, prior, 0.0) - ratio) ** 2 - doubt, 0.0), 0.0)
    groups, of = np.unique(group, return_inverse=True)
    shape = (len(groups), prior.shape[1])
    cell = (of[:, None] * shape[1] + np.arange(shape[1])).ravel()
    mass, error = (
        np.bincount(cell, x.sum(-1).ravel(), math.prod(shape)).reshape(shape) for x in (weight, weight * square)
    )
    counts = np.minimum(mass, 1.0)
    variance = _FREEDOM * start**2 + (counts * error / np.maximum(mass, 1e-9)).sum(-1)
    return np.asarray(np.sqrt(variance / (_FREEDOM + counts.sum(-1)))[of], np.float32)
