"""What all figures share: their style, the colours of pairs, and how they become files."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import as_file, files
from typing import Final

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

ALGORITHM_COLOURS: Final = {
    "nccl": "#bdbdbd",
    "ring": "#D55E00",
    "tree": "#009E73",
    "collnet_direct": "#8c6d31",
    "collnet_chain": "#c9b458",
    "nvls": "#56B4E9",
    "nvls_tree": "#AA4499",
    "pat": "#4B4BA8",
}
_SHADES: Final = {"ll": 0.55, "ll128": 0.0, "simple": -0.4}


@contextmanager
def style() -> Iterator[None]:
    """The look of everything that is drawn inside."""
    with as_file(files("dynamiccl_ray") / "templates" / "figures.mplstyle") as path:
        settings = matplotlib.rc_params_from_file(path, use_default_template=False)
    with matplotlib.rc_context(settings):
        yield


def png(figure: Figure) -> bytes:
    """The file, without the library's name and address in it."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def inlined(figures: Mapping[str, bytes]) -> dict[str, str]:
    """PNGs in base64, for data URLs."""
    return {name: base64.b64encode(data).decode("ascii") for name, data in figures.items()}


def pair_colour(pair: str) -> tuple[float, float, float]:
    """The colour of ``ring/ll128`` and its like."""
    algorithm, _, protocol = pair.partition("/")
    colour, shade = np.array(to_rgb(ALGORITHM_COLOURS[algorithm])), _SHADES.get(protocol, 0.0)
    mixed = colour + (1 - colour) * shade if shade > 0 else colour * (1 + shade)
    return float(mixed[0]), float(mixed[1]), float(mixed[2])
