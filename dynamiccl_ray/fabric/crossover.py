"""Where the best configuration changes: a map of the best pair and of NCCL's over sizes and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from dynamiccl_ray.fabric.cluster_config import Cluster
from dynamiccl_ray.fabric.physics import Physics
from dynamiccl_ray.figures import pair_colour, png
from dynamiccl_ray.keys import bytes_name
from dynamiccl_ray.knobs import CHANNEL_VALUES, N_PROTOCOLS, OWN_PAIR, Collective, pair_name

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

SIZES: Final = 1 << np.arange(10, 31)
"""1 KiB to 1 GiB, in bytes."""
# Ratios beyond this look alike.
_MOST_RATIO: Final = 4.0


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """N node counts, S sizes; pairs and channels as the action heads count them, times in us."""

    cluster: str
    collective: Collective
    nodes: Int64
    """(N,)"""
    sizes: Int64
    """(S,) bytes, as NCCL counts them."""
    best_pair: Int64
    """(N, S), as are the following."""
    best_channels: Int64
    """0: as many as NCCL gives the pair."""
    best_us: Float64
    nccl_pair: Int64
    nccl_us: Float64

    @property
    def ratio(self) -> Float64:
        """(N, S) NCCL's time over the best."""
        return np.asarray(self.nccl_us / self.best_us)

    def rows(self) -> list[dict[str, Any]]:
        """One for each cell, sizes within nodes."""
        return [
            {
                "nodes": int(self.nodes[i]),
                "bytes": int(self.sizes[j]),
                "best": pair_name(int(self.best_pair[i, j])),
                "channels": int(self.best_channels[i, j]),
                "best_us": float(self.best_us[i, j]),
                "nccl": pair_name(int(self.nccl_pair[i, j])),
                "nccl_us": float(self.nccl_us[i, j]),
                "ratio": float(self.ratio[i, j]),
            }
            for i, j in np.ndindex(self.best_us.shape)
        ]


def node_counts(cluster: Cluster, most: int) -> list[int]:
    """Powers of two up to ``most`` that make a communicator. Raises ValueError where there is none."""
    counts = [1 << k for k in range(max(most, 0).bit_length()) if cluster.gpus_per_node << k > 1]
    if not counts:
        raise ValueError(f"nodes is {most}; cluster {cluster.name} needs at least {1 + (cluster.gpus_per_node < 2)}")
    return counts if cluster.inter is not None else counts[:1]


def crossover(
    cluster: Cluster, nodes: Sequence[int], collective: Collective, sizes: NDArray[np.integer[Any]] = SIZES
) -> Crossover:
    """Best and NCCL's own configuration of an idle cluster, of all pairs and channel counts that NCCL would grant.

    Raises ValueError for a number of nodes that the cluster does not have, or a size below 1.
    """
    cells = []
    for count in nodes:
        physics = Physics(cluster, count)
        times = physics.time_us(collective, sizes)
        flat = times[:, OWN_PAIR + 1 :].reshape(len(sizes), -1)
        best = np.nanargmin(flat, -1)
        pair, channels = np.divmod(best, len(CHANNEL_VALUES))
        choice = physics.belief.choose(collective, sizes)
        own = OWN_PAIR + 1 + N_PROTOCOLS * choice.algorithm + choice.protocol
        least, own_us = flat[np.arange(len(sizes)), best], times[:, OWN_PAIR, 0]
        # Where it was measured, NCCL's own choice may be faster than every pair that was.
        pair = np.where(own_us < least, OWN_PAIR, pair + OWN_PAIR + 1)
        values = np.where(own_us < least, 0, np.array(CHANNEL_VALUES)[channels])
        cells.append((pair, values, np.minimum(own_us, least), own, own_us))
    pair, channels, best_us, nccl, nccl_us = (np.stack(column) for column in zip(*cells, strict=True))
    return Crossover(
        cluster=cluster.name,
        collective=collective,
        nodes=np.array(nodes, np.int64),
        sizes=np.asarray(sizes, np.int64),
        best_pair=pair,
        best_channels=channels,
        best_us=best_us,
        nccl_pair=nccl,
        nccl_us=nccl_us,
    )


def draw_crossover(found: Crossover) -> bytes:
    """PNG of three maps over sizes and nodes: the best pair and its channels, NCCL's pair, and what NCCL loses."""
    height = 1.5 + 0.33 * len(found.nodes)
    figure = Figure(figsize=(12, 3 * height + 0.9), layout="constrained")
    what = found.collective.name.lower().replace("_", "-")
    figure.suptitle(f"{what} on {found.cluster}, as modelled")
    best, own, loss = figure.subplots(3, 1)
    _pairs(best, found, found.best_pair)
    best.set_title("Best pair; number: channels, where the best count is not NCCL's own")
    for (i, j), count in np.ndenumerate(found.best_channels):
        if count:
            _write(best, i, j, str(count), to_rgb(pair_colour(pair_name(int(found.best_pair[i, j])))))
    _pairs(own, found, found.nccl_pair)
    own.set_title("What NCCL chooses")
    image = loss.imshow(found.ratio, cmap="cividis_r", norm=LogNorm(1, _MOST_RATIO), aspect="auto", origin="lower")
    loss.set_title("NCCL's time over the best")
    for (i, j), ratio in np.ndenumerate(found.ratio):
        if ratio >= 1.05:
            _write(loss, i, j, f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}", image.cmap(image.norm(ratio))[:3])
    bar = figure.colorbar(image, ax=loss, label="ratio", extend="max", ticks=[1, 1.2, 1.5, 2, 3, 4], format="%g")
    bar.ax.yaxis.set_minor_locator(NullLocator())
    for axes in (best, own, loss):
        _label(axes, found)
    pairs = np.union1d(found.best_pair, found.nccl_pair)
    handles = [Patch(color=pair_colour(pair_name(p)), label=pair_name(p)) for p in pairs.tolist()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), frameon=False)
    return png(figure)


def _pairs(axes: Axes, found: Crossover, pairs: Int64) -> None:
    colours = np.array([[pair_colour(pair_name(p)) for p in row] for row in pairs.tolist()])
    axes.imshow(colours, aspect="auto", origin="lower")


def _write(axes: Axes, row: int, column: int, text: str, background: Any) -> None:
    dark = np.dot(background, [0.299, 0.587, 0.114]) < 0.55
    axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _label(axes: Axes, found: Crossover) -> None:
    ticks = range(0, len(found.sizes), 2)
    axes.set_xticks(ticks, [bytes_name(int(found.sizes[i])) for i in ticks])
    axes.set_yticks(range(len(found.nodes)), [str(n) for n in found.nodes])
    axes.set_xlabel("size (bytes, as NCCL counts them)")
    axes.set_ylabel("nodes")
