"""What happens to a fabric on its own: flows that come and go, shifts, slow ranks, loss, failures, other jobs.

This is what an experiment says; ``dynamiccl_ray.fabric.load_streams`` plays it. Time is counted in collectives of a
stream. All processes are off by default and independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dynamiccl_ray.settings import Count, NotNegative, Positive, Section

Float64 = NDArray[np.float64]

Length = Annotated[float, Field(ge=2, allow_inf_nan=False)]
ShareOfLink = Annotated[float, Field(gt=0, le=1)]


class Spells(Section):
    """Something that comes and goes: a Markov chain of two states, whose stays are geometric."""

    mean_gap: Length | None = None
    """Collectives from its end to its next start, on average; without it, it never comes."""
    mean_length: Length = 1000.0
    """Collectives that it lasts, on average."""


class Flows(Spells):
    """Traffic of others over the same links; each flow comes and goes on its own."""

    count: Count = 8
    share: ShareOfLink = 0.2
    """Of the link, that one flow takes where it can; what is left is shared fairly."""
    queueing: NotNegative = 0.1
    """Wait for one packet ahead, as a share of a hop's latency. A link in use by rho has rho / (1 - rho) of them."""


class OtherJob(Section):
    """A training job next to this one: bursts at every step of its own."""

    period: Length | None = None
    """Collectives from burst to burst; without it there is no such job."""
    duty: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Of the period, that a burst lasts."""
    share: ShareOfLink = 0.5
    """Of the network, that it takes where it can."""


class Shifts(Section):
    """Lasting changes of the network's bandwidth: another route, another neighbour."""

    mean_gap: Length | None = None
    least: ShareOfLink = 0.3
    """The new bandwidth is log-uniform from this share of the link as built to all of it."""


class SlowRanks(Spells):
    """One rank, any of them, takes longer for its own work."""

    most: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    """How much longer is uniform from 1 to this."""


class Degraded(Spells):
    """A cable or a transceiver that trains at a lower speed."""

    bandwidth: ShareOfLink = 0.5


class Lossy(Spells):
    """A link that drops packets."""

    loss: Annotated[float, Field(gt=0, lt=1)] = 1e-3


class Failures(Spells):
    """One network device of a node is down, and its traffic takes the others."""


class Tail(Section):
    """Rare collectives that take much longer, on top of log-normal noise."""

    probability: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    index: Positive = 2.0
    """Of the Pareto factor: 1 in x^index of the rare ones takes more than x times as long."""


class Bursts(Spells):
    """All times are longer for a while, whatever is chosen."""

    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.3


class Wander(Section):
    """What noise has in common with the noise before it, and with that of other keys. None of it says anything about
    actions."""

    correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of a key's log noise with that of its collective before: an autoregression of order 1 of the same deviation."""
    slow: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the collectives that take ``slow_factor`` times as long: noise with two modes."""
    slow_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.2
    bursts: Bursts = Bursts()
    """Of all keys at once."""
    drift: NotNegative = 0.0
    """Standard deviation, over 1,000 steps, of a random walk of the log times of all keys."""


class Dynamics(Section):
    """All that may happen to one fabric."""

    network_flows: Flows = Flows()
    node_flows: Flows = Flows()
    """The same on the links inside the nodes."""
    other_job: OtherJob = OtherJob()
    shifts: Shifts = Shifts()
    slow_ranks: SlowRanks = SlowRanks()
    degraded: Degraded = Degraded()
    lossy: Lossy = Lossy()
    failures: Failures = Failures()
    tail: Tail = Tail()

    @property
    def still(self) -> bool:
        """Nothing ever happens."""
        comes = (self.network_flows, self.node_flows, self.shifts, self.slow_ranks, self.degraded, self.lossy)
        gaps = [process.mean_gap for process in (*comes, self.failures)]
        return gaps == [None] * len(gaps) and self.other_job.period is None and self.tail.probability == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Noise:
    """What has been drawn, whatever varies by it."""

    normal: Float64
    """(steps, keys) of unit deviation: log-normal noise, before its own deviation is known."""
    shared: Float64
    """(steps, 1) of the logs of all keys."""
    stretched: Float64
    """(steps, keys) factors whatever the deviation is."""

    def at(self, step: int) -> Noise:
        """Of one step, without that axis."""
        return Noise(normal=self.normal[step], shared=self.shared[step], stretched=self.stretched[step])

    def factors(self, sigma: float | Float64) -> Float64:
        """(steps, keys) on times whose logs have these deviations, that broadcast to it."""
        return np.asarray(np.exp(sigma * self.normal + self.shared) * self.stretched)


def noise(rng: np.random.Generator, shape: tuple[int, int], tail: Tail, wander: Wander | None = None) -> Noise:
    """Of (steps, keys): log-normal with a Pareto tail, and what they have in common.

    The median of the factors is 1 where nothing wanders: only draws above it are ever stretched, so it stays where it
    is.
    """
    normal = rng.standard_normal(shape)
    rare = (rng.random(shape) < 2 * tail.probability) & (normal > 0)
    stretched = np.where(rare, (1 - rng.random(shape)) ** (-1 / tail.index), 1.0)
    if wander is None:
        return Noise(normal=normal, shared=np.zeros((shape[0], 1)), stretched=stretched)
    normal = _autoregression(normal, wander.correlation)
    shared = np.cumsum(rng.standard_normal(shape[0])) * wander.drift / np.sqrt(1000)
    shared += np.log(wander.bursts.factor) * _spells(rng, shape[0], wander.bursts)
    slow = np.where(rng.random(shape) < wander.slow, wander.slow_factor, 1.0)
    return Noise(normal=normal, shared=shared[:, None], stretched=slow * stretched)


def _autoregression(normal: Float64, phi: float) -> Float64:
    """(steps, keys) of unit variance, from independent ones."""
    from scipy.signal import lfilter  # a fifth of what a process that plays a job imports, and few need it

    first, rest = normal[:1], np.sqrt(1 - phi**2) * normal[1:]
    return np.asarray(lfilter([1.0], [1.0, -phi], np.concatenate([first, rest]), axis=0))


def _spells(rng: np.random.Generator, steps: int, of: Spells) -> Float64:
    """(steps,) 1 while one is on; it is off at first."""
    out = np.zeros(steps)
    at = 0
    while of.mean_gap is not None and at < steps:
        at += int(rng.geometric(1 / of.mean_gap))
        length = int(rng.geometric(1 / of.mean_length))
        out[at : at + length] = 1
        at += length
    return out
